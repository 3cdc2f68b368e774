"""What the drawings show of blocks and a plan does not hold: ops, which are kept and which run again, what is communicated and passed on."""

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx
from torch._ops import OpOverload

from partitioner.passes.block import Bytes
from partitioner.passes.collectives import collective_ops
from partitioner.passes.split import split
from partitioner.prepare import Prepared
from partitioner.quantities import format_bytes
from partitioner.runtime.program import Program, Replay

Names = tuple[str, ...]
_VIEWS = ("reshape", "contiguous", "flatten", "unflatten", "chunk")  # composite ops, which torch does not mark


@dataclass(frozen=True)
class Ops:
    """Ops of a block in the order in which they first stand, as `name` or `name ×3`; views left out.

    kept: those whose results are saved for backward, "input" being what the block reads. again: those that backward runs again.
    collectives: those inside the block that communicate, and the bytes of their results over all ranks.
    """

    all: Names
    kept: Names
    again: Names
    collectives: Names


def ops_of(prepared: Prepared, cls: str, saved: frozenset[str]) -> Ops:
    """What a block of this class does with this saved set."""
    block, joint = prepared.blocks.classes[cls], prepared.joint(cls)
    nodes = joint.nodes
    _, backward = split(joint, saved, prepared.free(cls), prepared.keep(cls))
    return Ops(
        all=_counted(_name(node) for node in block.module.graph.nodes if _computes(node)),
        kept=_counted("input" if nodes[name].op == "placeholder" else _name(nodes[name]) for name in nodes if name in saved),
        again=_counted(_name(nodes[name]) for name in (backward.recomputed if backward else ()) if _makes(nodes[name])),
        collectives=_counted(f"{_name(node)} {format_bytes(_size(node))}" for node in block.module.graph.nodes if node.target in collective_ops()),
    )


def value_bytes(program: Program) -> dict[str, int]:
    """Bytes of every value that blocks pass on: of one micro-batch, and of prologue values of this rank's whole share."""
    sizes: dict[str, int] = {}
    for call in sorted(program.calls, key=lambda call: call.label != "prologue"):
        function = program.functions[call.function]
        rows = program.whole_rows if call.label == "prologue" else program.rows[0]
        own = _made(function.forward_replay, rows)
        for name, storage in zip(call.writes, function.forward_replay.results, strict=False):
            sizes[name] = own[storage] if storage in own else sizes.get(call.reads[storage].name, 0)
    return sizes


def unit_traffic(program: Program) -> dict[int, dict[str, tuple[int, int]]]:
    """Per unit, per instruction that communicates (GATHER, REFRESH, REDUCE): how often a step, and bytes each time."""
    traffic: dict[int, dict[str, tuple[int, int]]] = {}
    for instruction in program.instructions:
        if instruction.unit is not None and instruction.op in ("GATHER", "REFRESH", "REDUCE"):
            times, _ = traffic.setdefault(instruction.unit, {}).get(instruction.op, (0, 0))
            traffic[instruction.unit][instruction.op] = (times + 1, instruction.bytes)
    return traffic


def sent_bytes(program: Program, blocks: Collection[int]) -> dict[int, int]:
    """Other stage -> bytes of the values that these blocks send there in forward, of the first micro-batch."""
    made = {name for number in blocks for name in program.call_of[number].writes}
    sent: dict[int, int] = {}
    for instruction in program.instructions:
        if instruction.op == "SEND" and not instruction.mb and instruction.value in made and instruction.stage is not None:
            sent[instruction.stage] = sent.get(instruction.stage, 0) + instruction.bytes
    return dict(sorted(sent.items()))


def _made(replay: Replay, rows: int) -> Mapping[int, int]:
    return {event.storage: event.fixed + event.per_row * rows for event in replay.events if event.make}


def _counted(names: Iterable[str]) -> Names:
    return tuple(name if count == 1 else f"{name} ×{count}" for name, count in Counter(names).items())


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


def _name(node: fx.Node) -> str:
    """The op as people say it; of one result of several, the op that gives it."""
    target, first = node.target, node.args[0] if node.args else None
    if target is operator.getitem and isinstance(first, fx.Node):
        return _name(first)
    name = target._schema.name.split("::")[1] if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
    return "attention" if "attention" in name else name.lstrip("_").removeprefix("native_")


def _computes(node: fx.Node) -> bool:
    """Whether an op of a forward graph does more than look at its input in another way."""
    target = node.target
    return node.op == "call_function" and isinstance(target, OpOverload) and not target.is_view and _name(node) not in _VIEWS


def _makes(node: fx.Node) -> bool:
    """Whether an op of a joint graph makes a storage."""
    return any(isinstance(place, Bytes) for place in node.meta.get("storages", ()))
