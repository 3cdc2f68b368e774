"""Let an elementwise op write into the storage of an operand that dies with it, as autograd does when it accumulates gradients.

    mul_2 = aten_mul_Tensor(expand, mul_1)  # mul_1 is read here for the last time
    mul_2 = aten_mul__Tensor(mul_1, expand)

The bits are the same, one storage less is live. The storage must be the function's own and whole: not an argument's (others may hold it), not
returned, under no other live name, and laid out as the result would be. Scalars are left alone: some losses (mse_loss, smooth_l1_loss, …) leave their
sum in a storage as large as their input, which would be held for as long as the loss is.
"""

from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.block import Bytes
from partitioner.passes.layout import is_expanded
from partitioner.passes.liveness import schedule

_COMMUTATIVE = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor))


def reuse(graph: fx.Graph) -> fx.Graph:
    """A copy of a forward or backward graph in which such ops are in place; meta["storages"] tell of it."""
    written = _choose(graph)
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copied = env[node] = new.node_copy(node, env.__getitem__)
        if node in written:
            operand = written[node]
            others = [a for a in node.args if a is not operand]
            copied.target = _in_place(node.target)
            copied.args = tuple(env[a] if isinstance(a, fx.Node) else a for a in (operand, *others))
            copied.meta = {**node.meta, "storages": (("input", 0),)}
    return new


def _in_place(target: Any) -> Any:
    """The twin of an elementwise op that writes into its first argument; None where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, target._schema.name.split("::")[1] + "_", None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    if twin is None or [(a.name, str(a.type)) for a in twin._schema.arguments] != [(a.name, str(a.type)) for a in target._schema.arguments]:
        return None
    return twin


def _choose(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The ops that may be in place, and the operand each of them overwrites; follows the storages as liveness.footprint does."""
    lines = schedule(graph)
    storage: dict[fx.Node, int] = {n: at for at, n in enumerate(lines[0].bound) if n is not None}
    names = [1] * len(storage)
    size: dict[int, int] = {}  # bytes of the storages made here
    chosen: dict[fx.Node, fx.Node] = {}
    for name in lines[0].deleted:
        names[storage[name]] -= 1
    for line in lines[1:]:
        op = line.op
        assert op is not None
        dying = [n for n in line.deleted if n in storage and n not in line.bound]
        operand = next((n for n in _operands(op) if _may_take(op, n, dying, storage, names, size)), None)
        held: list[int | None] = []
        for index, place in enumerate(op.meta["storages"]):
            if isinstance(place, Bytes):
                if operand is not None:
                    chosen[op] = operand
                    held.append(storage[operand])
                    continue
                names.append(0)
                made = _result(op, index)
                size[len(names) - 1] = made.untyped_storage().nbytes() if made is not None else 0
                held.append(len(names) - 1)
            else:
                held.append(None if place is None else storage[op.all_input_nodes[place[1]]] if place[0] == "input" else held[place[1]])
        for bound, which in zip(line.bound, held, strict=True):
            if bound is not None and which is not None:
                storage[bound] = which
                names[which] += 1
        for name in line.deleted:
            if name in storage:
                names[storage[name]] -= 1
    return chosen


def _result(op: fx.Node, index: int) -> Tensor | None:
    val = op.meta["val"]
    found = val[index] if isinstance(val, tuple) else val
    return found if isinstance(found, Tensor) else None


def _operands(op: fx.Node) -> list[fx.Node]:
    if _in_place(op.target) is None or not isinstance(op.meta["val"], Tensor):
        return []
    commutes = op.target in _COMMUTATIVE and op.kwargs.get("alpha", 1) == 1 and len(op.args) == 2
    return [a for a in op.args[: 2 if commutes else 1] if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), Tensor)]


def _may_take(op: fx.Node, operand: fx.Node, dying: list[fx.Node], storage: dict[fx.Node, int], names: list[int], size: dict[int, int]) -> bool:
    which, out, val = storage[operand], op.meta["val"], operand.meta["val"]
    if operand not in dying or which not in size or names[which] != 1 or list(op.args).count(operand) != 1:
        return False
    same = out.shape == val.shape and out.stride() == val.stride() and out.dtype == val.dtype and out.device == val.device
    return same and val.dim() > 0 and not is_expanded(val) and val.numel() * val.itemsize == size[which]
