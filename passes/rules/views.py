"""Ops that rearrange dims without mixing their elements: view, permute, squeeze, expand, repeat, …

The new labels of a result (expand, repeat) are made by the op: cutting them costs nothing (see sizes.py for their size arguments).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.registry import decomposer, rule
from partitioner.passes.rules.reshaping import regroup

aten = torch.ops.aten


def _unary(call: Call, labels: Labels, mine: Sequence[Dim], out: Sequence[Dim], name: str = "self") -> OpDims | None:
    return describe_by(call, labels, {name: mine}, [out], linear=(name,))


@rule("view.default reshape _unsafe_view _reshape_copy view_copy.default flatten.using_ints unflatten.int ravel")
def view(call: Call) -> OpDims | None:
    labels = Labels()
    return _unary(call, labels, *regroup(labels, call.shape("self"), call.out.shape))


@rule("view_as", "reshape_as")
def view_as(call: Call) -> OpDims | None:
    labels = Labels()
    mine, out = regroup(labels, call.shape("self"), call.out.shape)
    return describe_by(call, labels, {"self": mine, "other": out}, [out], linear=("self",))


@rule("view.dtype")
def view_dtype(call: Call) -> OpDims | None:
    """Bits read as another dtype; the last dim changes when the sizes of the types differ."""
    labels = Labels()
    mine = labels.of(call.shape("self"))
    if call.out.shape == call.shape("self"):
        return describe_by(call, labels, {"self": mine}, [mine])
    labels.keep(mine[-1])
    return describe_by(call, labels, {"self": mine}, [[*mine[:-1], labels.new(call.out.shape[-1], whole=True)]])


def _swap(order: list[int], a: int, b: int) -> list[int]:
    if order:
        a, b = a % len(order), b % len(order)
        order[a], order[b] = order[b], order[a]
    return order


def _move(rank: int, source: Any, destination: Any) -> list[int]:
    sources = [source] if isinstance(source, int) else list(source)
    destinations = [destination] if isinstance(destination, int) else list(destination)
    sources, destinations = [d % rank for d in sources], [d % rank for d in destinations]
    rest = iter(d for d in range(rank) if d not in sources)
    return [sources[destinations.index(d)] if d in destinations else next(rest) for d in range(rank)]


@rule("permute permute_copy transpose.int transpose_copy.int swapaxes swapdims t t_copy numpy_T mT matrix_H mH adjoint movedim moveaxis")
def permute(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("self"))
    name = str(call.target._schema.name).removeprefix("aten::").removesuffix("_copy")
    order = list(range(len(mine)))
    if name == "permute":
        order = [d % len(mine) for d in call["dims"]]
    elif name in ("movedim", "moveaxis"):
        order = _move(len(mine), call["source"], call["destination"])
    elif name == "numpy_T":
        order.reverse()
    elif name in ("mT", "mH", "adjoint", "matrix_H"):
        order = _swap(order, -2, -1)
    elif name == "t":
        order = _swap(order, 0, 1) if len(mine) == 2 else order
    else:
        first, second = [value for key, value in call.values.items() if key != "self"][:2]
        order = _swap(order, first, second)
    return _unary(call, labels, mine, [mine[d] for d in order])


@rule("unsqueeze", "unsqueeze_copy")
def unsqueeze(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("self"))
    at = call.dim("dim", len(mine) + 1)
    return _unary(call, labels, mine, [*mine[:at], (), *mine[at:]])


def _squeezed(call: Call) -> list[int]:
    """The dims that squeeze removes here."""
    shape = call.shape("self")
    chosen = call.dims("dim", len(shape)) if "dim" in call.values and call["dim"] != () else () if "dim" in call.values else range(len(shape))
    return [dim for dim in chosen if dim < len(shape) and shape[dim] == 1]


@rule("squeeze", "squeeze_copy")
def squeeze(call: Call) -> OpDims | None:
    """A dim that squeeze may remove but has more than one element would vanish on a shard of one element: it is whole."""
    labels = Labels()
    shape = call.shape("self")
    gone = _squeezed(call)
    candidates = call.dims("dim", len(shape)) if "dim" in call.values and call["dim"] != () else () if "dim" in call.values else range(len(shape))
    mine = labels.of(shape, whole=[dim for dim in candidates if dim not in gone])
    return _unary(call, labels, mine, [dim for position, dim in enumerate(mine) if position not in gone])


@decomposer("squeeze")
def squeeze_only_ones(call: Call) -> Callable[..., Any] | None:
    """Name the dims of size 1 at the captured shapes, so that a shard of one row keeps its dim."""
    gone = _squeezed(call)
    return lambda self, dim=None: aten.squeeze.dims(self, gone) if gone else aten.alias.default(self)


@rule("expand", "expand_copy", "broadcast_to")
def expand(call: Call) -> OpDims | None:
    labels = Labels()
    shape, target = call.shape("self"), call.out.shape
    new = len(target) - len(shape)
    out = labels.of(target)
    mine = [() if size == 1 else dim for size, dim in zip(shape, out[new:], strict=True)]
    return _unary(call, labels, mine, out)


@rule("expand_as")
def expand_as(call: Call) -> OpDims | None:
    labels = Labels()
    out = labels.of(call.out.shape)
    shape = call.shape("self")
    mine = [() if size == 1 else dim for size, dim in zip(shape, out[len(out) - len(shape) :], strict=True)]
    return describe_by(call, labels, {"self": mine, "other": out}, [out], linear=("self",))


@rule("broadcast_tensors", "meshgrid")
def broadcast_tensors(call: Call) -> OpDims | None:
    """Every result has the whole broadcast shape; meshgrid is the same with one dim per (1-d) tensor, the first two swapped for "xy"."""
    labels = Labels()
    specs = call.specs("tensors")
    out = labels.of(call.out.shape)
    if str(call.target._schema.name) == "aten::meshgrid":
        axes = list(range(len(out)))
        if call.get("indexing", "ij") == "xy":
            _swap(axes, 0, 1)
        listed = [[out[axes[position]]] if spec.shape else [] for position, spec in enumerate(specs)]
    else:
        listed = [[() if size == 1 else dim for size, dim in zip(spec.shape, out[len(out) - len(spec.shape) :], strict=True)] for spec in specs]
    return describe_by(call, labels, {}, [out] * len(call.outputs), listed={"tensors": listed})


@rule("repeat", "tile")
def repeat(call: Call) -> OpDims | None:
    """A dim of size n repeated r times is (r, n). Copies of a dim of size 1, or of a new dim, may be cut; others are whole (see sizes.py)."""
    labels = Labels()
    shape = call.shape("self")
    rank = len(call.out.shape)
    shape = (1,) * (rank - len(shape)) + shape
    times = [after // before if before else 1 for after, before in zip(call.out.shape, shape, strict=True)]
    mine = labels.of(shape)
    out = [(*labels.new(count, whole=size != 1), *dim) for count, size, dim in zip(times, shape, mine, strict=True)]
    return _unary(call, labels, mine[rank - len(call.shape("self")) :], out)


@rule("repeat_interleave.self_int")
def repeat_interleave(call: Call) -> OpDims | None:
    """Every element r times in place: (n, r); without a dim of the flattened tensor."""
    labels = Labels()
    mine = labels.of(call.shape("self"))
    copies = labels.new(call["repeats"], whole=True)
    if call["dim"] is None:
        return _unary(call, labels, mine, [(*[label for dim in mine for label in dim], *copies)])
    at = call.dim("dim", len(mine))
    return _unary(call, labels, mine, [(*dim, *copies) if position == at else dim for position, dim in enumerate(mine)])


@rule("unfold", "unfold_copy")
def unfold(call: Call) -> OpDims | None:
    """Windows over one dim: [.., n, ..] -> [.., windows, .., size]."""
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dimension", len(shape))
    mine = labels.of(shape, whole=(at,))
    out = list(mine)
    if shape:
        out[at] = labels.new(call.out.shape[at], whole=True)
    return _unary(call, labels, mine, [*out, labels.new(call.out.shape[-1], whole=True)])


@rule("diagonal", "diagonal_copy")
def diagonal(call: Call) -> OpDims | None:
    labels = Labels()
    rank = len(call.shape("self"))
    first, second = call.dim("dim1", rank), call.dim("dim2", rank)
    mine = labels.of(call.shape("self"), whole=(first, second))
    rest = [dim for position, dim in enumerate(mine) if position not in (first, second)]
    return _unary(call, labels, mine, [*rest, labels.new(call.out.shape[-1], whole=True)])


@rule("diag_embed")
def diag_embed(call: Call) -> OpDims | None:
    labels = Labels()
    rank = len(call.out.shape)
    first, second = call.dim("dim1", rank), call.dim("dim2", rank)
    mine = labels.of(call.shape("self"), whole=(rank - 2,))
    rest = iter(mine[:-1])
    out = [labels.new(call.out.shape[d], whole=True) if d in (first, second) else next(rest) for d in range(rank)]
    return _unary(call, labels, mine, out)


@rule("diag", "trace", "block_diag", "rot90")
def corner(call: Call) -> OpDims | None:
    """Ops that read positions of every dim: nothing may be cut."""
    labels = Labels()
    listed = {"tensors": [labels.of(spec.shape, whole=True) for spec in call.specs("tensors")]} if "tensors" in call.values else None
    inputs = {} if listed else {"self": labels.of(call.shape("self"), whole=True)}
    return describe_by(call, labels, inputs, [labels.of(call.out.shape, whole=True)], listed=listed)


@rule("tril", "triu")
def triangle(call: Call) -> OpDims | None:
    labels = Labels()
    rank = len(call.shape("self"))
    mine = labels.of(call.shape("self"), whole=(rank - 2, rank - 1))
    return _unary(call, labels, mine, mine)
