"""From decisions to one program per rank. Every rank runs the same functions; programs differ in rank, rows and starts alone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor.placement_types import Partial

from partitioner.asynchronous import check_asynchronous
from partitioner.order import EACH_MICRO_BATCH, Order, Stage, arrange
from partitioner.passes import block as blocks
from partitioner.passes.block import Block, BlockFunction, Footprint, Port
from partitioner.passes.collectives import spread
from partitioner.passes.dims import Cut
from partitioner.pipeline import Message, Pipeline, Routes
from partitioner.prepare import AXIS, Prepared
from partitioner.runtime.program import (
    Call,
    Event,
    Function,
    Halves,
    Instruction,
    Mode,
    Program,
    Ref,
    Replay,
    Shard,
    Slice,
    Unit,
    Wire,
    draws_by_key,
    stashed,
)

Communication = Callable[[str, int, Unit | None], float]
"""Seconds of an instruction that communicates, by its name ("REDUCE zero2" and the like), bytes, and unit where it is a unit's."""


@dataclass(frozen=True)
class Decision:
    """What was chosen for one block: the saved set of its class, and whether its unit stays gathered from forward to backward."""

    saved: frozenset[str]
    keep_gathered: bool = False


@dataclass(frozen=True)
class Choice:
    """All decisions of one capture. `decisions[i]` is of block i; units say which parameters lie where."""

    decisions: tuple[Decision, ...]
    units: tuple[Unit, ...]
    micro_batches: int = 1
    pipeline: Pipeline = field(default_factory=lambda: Pipeline.none(0))  # of no blocks: all on one stage


def units_of(blocks: Sequence[Block], shards: Sequence[Shard], parameters: Sequence[str], pipeline: Pipeline | None = None) -> tuple[Unit, ...]:
    """One unit per block that is the first to read some parameter, sharded as its block; what no block reads stays whole, last.

    A parameter that blocks of several stages read is a unit of its own, which those stages hold.
    """
    holders = {} if pipeline is None else pipeline.holders(blocks)
    seen: set[str] = set()
    units: list[Unit] = []
    for block, shard in zip(blocks, shards, strict=True):
        own = tuple(dict.fromkeys(port.name for port in block.reads if port.kind == "parameter" and port.name not in seen))
        seen.update(own)
        alone = tuple(name for name in own if len(holders.get(name, ())) < 2)
        if alone:
            units.append(Unit(len(units), shard, alone, (0,) if pipeline is None else (pipeline.stage(block.index),)))
        for name in own:
            if name not in alone:
                units.append(Unit(len(units), shard, (name,), tuple(sorted(holders[name]))))
    rest = tuple(name for name in parameters if name not in seen)
    if rest:
        units.append(Unit(len(units), "none", rest))
    return tuple(units)


def lower(
    prepared: Prepared,
    choice: Choice,
    *,
    mode: Mode,
    grad: bool,
    ranks: int,
    only: Sequence[int],
    parameter_bytes: Mapping[str, int],
    communication: Communication,
    accumulation: Callable[[float], float],
    prefetch: bool,
) -> tuple[Program, ...]:
    """The programs of the ranks `only` of every stage, stage by stage. `parameter_bytes`: whole bytes of each parameter; communication: seconds,
    see there; accumulation(bytes): seconds of adding so many bytes of gradients to those of earlier micro-batches.
    """
    chain = prepared.blocks.blocks
    pipeline = choice.pipeline if choice.pipeline.chunks else Pipeline.none(len(chain))
    halves = grad and pipeline.halves
    asynchronous = mode == "step" and pipeline.asynchronous
    if asynchronous:
        check_asynchronous(prepared, choice)
    functions: dict[str, Function] = {}
    made: dict[str, BlockFunction] = {}
    calls: list[Call] = []
    for block, decision in zip(chain, choice.decisions, strict=True):
        function = prepared.function(block.cls, decision.saved, halves)
        if function.name not in functions:
            functions[function.name], made[function.name] = _function(function), function
        calls.append(Call(block.index, function.name, block.label, _refs(block.reads), block.writes))
    unit_of = {name: unit for unit in choice.units for name in unit.parameters}
    unit_numbered = {unit.number: unit for unit in choice.units}
    kept = frozenset(
        unit_of[port.name].number
        for block, decision in zip(chain, choice.decisions, strict=True)
        if decision.keep_gathered and mode == "step"  # between a forward and its backward another forward may come
        for port in block.reads
        if port.kind == "parameter"
    )
    summed = {call.number: _summed(call, functions[call.function], unit_of, parameter_bytes, ranks) for call in calls}
    once: dict[str, Call] = {}
    for label, part in (("prologue", prepared.prologue), ("epilogue", prepared.epilogue)):
        if part is not None:
            functions[part.function.name], made[part.function.name] = _function(part.function), part.function
            once[label] = Call(len(chain) + len(once), part.function.name, label, _refs(part.reads), part.writes)
    loss, outputs, placements, buffers, totals = _results(prepared)
    results = {ref.name for ref in (*(ref for ref, _ in outputs), *(ref for _, ref in buffers)) if ref.kind == "value"}
    results |= {loss, *totals} if loss else {*totals}
    wires = _wires(prepared) if pipeline.stages > 1 else {}
    most = _rows(prepared.total, 0, ranks, choice.micro_batches)[0]
    drawing = draws_by_key((*calls, *once.values()))

    def quicker(call: Call) -> bool:
        """Whether it takes longer to send what a block writes than what it reads, and to run it."""
        if results.intersection(call.writes):
            return False
        seconds = prepared.price(made[call.function], False, most[0])
        gone, come = call.writes, (ref.name for ref in call.reads if ref.kind == "value")
        sending = [sum(communication("SEND", wires[name].bytes(most[0]), None) for name in names) for names in (gone, come)]
        return seconds + sending[1] < sending[0]

    routes = Routes.of(calls, functions, pipeline, loss, quicker)
    sent = routes.sent(pipeline, calls, choice.micro_batches, not grad) if pipeline.stages > 1 else {}
    given = {call.reads[index].name for call in calls for index in functions[call.function].gradients if call.reads[index].kind == "parameter"}

    tied = frozenset(unit.number for unit in choice.units if len(unit.stages) > 1 and grad and unit.parameters[0] in given)

    def weigh(message: Message) -> int:
        wire = wires[message.name]
        return wire.whole_bytes(most[message.mb]) if message.gradient else wire.bytes(most[message.mb])

    programs = []
    for stage, rank in ((stage, rank) for stage in range(pipeline.stages) for rank in only):
        rows, starts, whole_rows, whole_start = _rows(prepared.total, rank, ranks, choice.micro_batches)
        own = [call for call in calls if routes.runs(pipeline, call.number, stage)]
        held = tuple(unit for unit in choice.units if stage in unit.stages)
        copied = stashed(own, functions, held) if asynchronous and pipeline.owed(stage) else {}
        sizes = {number: sum(parameter_bytes[name] for name in names) for number, names in copied.items()}
        copying = 2 / 3  # a copy reads once where an addition reads twice

        def seconds(op: str, call: Call, mb: int, rows: tuple[int, ...] = rows) -> float:
            if op == "BACKWARD_INPUT":
                return prepared.price_half(made[call.function], False, rows[mb])
            summing = accumulation(summed[call.number]) if op != "FORWARD" and mb else 0.0
            if op == "BACKWARD_WEIGHT":
                return prepared.price_half(made[call.function], True, rows[mb]) + summing
            return prepared.price(made[call.function], op == "BACKWARD", rows[mb]) + summing

        order = Order(
            calls=calls,
            functions=functions,
            units=held,
            kept=kept,
            micro_batches=choice.micro_batches,
            prefetch=prefetch,
            bytes_of={unit.number: sum(parameter_bytes[name] for name in unit.parameters) for unit in held},
            held=frozenset(results),
            joined=mode == "step",
            price=seconds,
            communication=lambda op, size, number: communication(op, size, None if number is None else unit_numbered[number]),
            stage=Stage(pipeline, stage, routes, sent, weigh, tied) if pipeline.stages > 1 else None,
            stash={number: (size, accumulation(copying * size)) for number, size in sizes.items()},
        )
        ahead, after = arrange(order, backward=grad)
        start = [Instruction("PROLOGUE", block=once["prologue"].number)] if "prologue" in once else []
        commit = [Instruction("EPILOGUE", block=once["epilogue"].number)] if "epilogue" in once else []
        commit += [Instruction("COMMIT")] if buffers else []
        if mode == "step":
            ahead += [*after, Instruction("LOSS", stream="reduce", bytes=4), *commit]
            after = []
        else:
            ahead += [*commit, Instruction("OUTPUT", stream="gather")]
        here = [*own, *once.values()]
        programs.append(
            Program(
                mode=mode,
                training=prepared.graph.training,
                rank=rank,
                ranks=ranks,
                axis=AXIS,
                instructions=tuple(start + ahead),
                calls=tuple(here),
                functions=functions if pipeline.stages == 1 else {call.function: functions[call.function] for call in here},
                units=held,
                inputs=prepared.slices,
                total=prepared.total,
                rows=rows,
                starts=starts,
                whole_rows=whole_rows,
                whole_start=whole_start,
                share=1.0 / (ranks * choice.micro_batches),
                parts=_parts(prepared.total, ranks, choice.micro_batches),
                keyed=ranks * pipeline.stages > 1,
                constants=dict(prepared.graph.constants),
                literals=dict(prepared.graph.literals),
                loss=loss,
                outputs=outputs,
                output_placements=placements,
                out_spec=prepared.graph.out_spec,
                buffers=buffers,
                after=tuple(after),
                stage=stage,
                stages=pipeline.stages,
                chunked=pipeline.count > pipeline.stages,
                wires={name: wires[name] for name in sorted({*routes.readers, *results})} if pipeline.stages > 1 else {},
                homes={name: routes.home[name] for name in sorted(results)} if pipeline.stages > 1 else {},
                asynchronous=asynchronous,
                others_draw=drawing,
            )
        )
    return tuple(programs)


def _wires(prepared: Prepared) -> dict[str, Wire]:
    """What the values look like that blocks write."""
    found = {}
    for block in prepared.blocks.blocks:
        for at, name in enumerate(block.writes):
            node = prepared.joint(block.cls).results[at]
            val, sizes = node.meta["val"], tuple((size.fixed, size.per_row) for size in node.meta["sizes"])
            expanded = tuple(dim for dim, step in enumerate(val.stride()) if step == 0 and val.shape[dim] > 1)
            found[name] = Wire(name, sizes, val.dtype, expanded)
    return found


def _summed(call: Call, function: Function, unit_of: Mapping[str, Unit], parameter_bytes: Mapping[str, int], ranks: int) -> float:
    """Bytes of parameter gradients that a backward adds to those of earlier micro-batches: whole ones, or this rank's shards."""
    names = [call.reads[index].name for index in function.gradients if call.reads[index].kind == "parameter"]
    return sum(parameter_bytes[name] / (ranks if unit_of[name].shard in EACH_MICRO_BATCH else 1) for name in names)


def _refs(ports: Sequence[Port]) -> tuple[Ref, ...]:
    return tuple(Ref(str(port.kind), port.name) for port in ports)


def _rows(total: int | None, rank: int, ranks: int, micro_batches: int) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """This rank's rows and first rows per micro-batch, and of its whole share. Without a batch to cut every rank has all of it."""
    if total is None:
        return (0,) * micro_batches, (0,) * micro_batches, 0, 0
    counts = spread(total, ranks)
    first, mine = sum(counts[:rank]), counts[rank]
    rows = spread(mine, micro_batches)
    starts, at = [], first
    for count in rows:
        starts.append(at)
        at += count
    return tuple(rows), tuple(starts), mine, first


def _parts(total: int | None, ranks: int, micro_batches: int) -> tuple[float, ...]:
    """By how much the rows of each micro-batch, on all ranks together, are fewer than those of the batch."""
    if total is None:
        return (1.0,) * micro_batches
    rows = Counter(spread(total, ranks))
    together = [sum(times * spread(mine, micro_batches)[mb] for mine, times in rows.items()) for mb in range(micro_batches)]
    return tuple(total / count for count in together)


def _results(
    prepared: Prepared,
) -> tuple[str | None, tuple[tuple[Ref, Slice], ...], tuple[str, ...], tuple[tuple[str, Ref], ...], tuple[str, ...]]:
    """The value of the loss; the outputs and where they lie; the new buffers; the values whose totals the epilogue reads."""
    loss: str | None = None
    outputs: list[tuple[Ref, Slice]] = []
    placements: list[str] = []
    buffers: list[tuple[str, Ref]] = []
    totals: list[str] = []
    for described, port, where in zip(prepared.placed.graph.outputs, prepared.blocks.results, prepared.placed.outputs, strict=True):
        ref = Ref(str(port.kind), port.name)
        if described.kind == "loss":
            loss = port.name
        elif described.kind == "buffer":
            buffers.append((described.name, ref))
        elif described.kind == "total":
            totals.append(port.name)
        else:
            cut = Slice(described.name, where.dim, where.outer, where.inner) if isinstance(where, Cut) else Slice(described.name)
            outputs.append((ref, cut))
            placements.append("shard" if isinstance(where, Cut) else "partial" if isinstance(where, Partial) else "replicate")
    buffers += [(name, Ref("epilogue", name)) for name in (prepared.epilogue.writes if prepared.epilogue else ())]
    return loss, tuple(outputs), tuple(placements), tuple(buffers), tuple(totals)


def _function(function: BlockFunction) -> Function:
    backward, halves = function.backward_footprint, function.halves
    return Function(
        name=function.name,
        source=function.source,
        forward=function.forward,
        backward=function.backward,
        writes=function.writes,
        saved=tuple((saved.kind, saved.index) for saved in function.saved),
        tangents=function.tangents,
        gradients=function.gradients,
        forward_replay=_replay(function.forward_footprint),
        backward_replay=None if backward is None else _replay(backward),
        halves=None if halves is None else _halves(halves),
    )


def _halves(halves: blocks.Halves) -> Halves:
    weight = halves.weight_footprint
    return Halves(
        input=halves.backward_input,
        weight=halves.backward_weight,
        values=halves.values,
        parameters=halves.parameters,
        handed=halves.handed,
        carried=halves.carried,
        input_replay=_replay(halves.input_footprint),
        weight_replay=None if weight is None else _replay(weight),
    )


def _replay(footprint: Footprint) -> Replay:
    events = tuple(Event(kind == "make", storage, size.fixed if size else 0, size.per_row if size else 0) for kind, storage, size in footprint.events)
    return Replay(footprint.arguments, events, footprint.results)
