"""Ops that cut a dim into pieces or join pieces: split, chunk, select, slice, cat, stack, pad, flip, roll.

Equal pieces are a major factor: cat of two [8, 4] along dim 0 is (p!, b), so b may be cut: each shard joins its own rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.registry import decomposer, rule

aten = torch.ops.aten


def _replaced(dims: Sequence[Dim], at: int, dim: Dim) -> list[Dim]:
    return [dim if position == at else old for position, old in enumerate(dims)]


def _split(call: Call, dim_name: str, equal_may_be_cut: bool) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    at = call.dim(dim_name, len(shape))
    mine = labels.of(shape, whole=(at,))
    sizes = [spec.shape[at] if spec is not None else 0 for spec in call.outputs]
    if len(sizes) == 1:
        if equal_may_be_cut:
            labels.whole.difference_update(mine[at])
        return describe_by(call, labels, {"self": mine}, [mine], linear=("self",))
    if equal_may_be_cut and len(set(sizes)) == 1 and sizes[0] > 1:
        piece = labels.new(sizes[0])
        mine = _replaced(mine, at, (*labels.new(len(sizes), whole=True), *piece))
        outputs = [_replaced(mine, at, piece) for _ in sizes]
    else:
        outputs = [_replaced(mine, at, labels.new(size, whole=True)) for size in sizes]
    return describe_by(call, labels, {"self": mine}, outputs, linear=("self",))


@rule("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes", "split.sizes", "chunk", "unsafe_chunk", "tensor_split.sections")
def equal_pieces(call: Call) -> OpDims | None:
    return _split(call, "dim", True)


@rule("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor", "tensor_split.indices")
def pieces(call: Call) -> OpDims | None:
    """Whole: the number of pieces would follow from the size of the shard. The decomposition fixes it."""
    return _split(call, "dim", False)


@rule("hsplit", "vsplit", "dsplit")
def named_split(call: Call) -> OpDims | None:
    axis = {"aten::hsplit": 1, "aten::vsplit": 0, "aten::dsplit": 2}[str(call.target._schema.name)]
    call.values["dim"] = 0 if len(call.shape("self")) == 1 else axis
    return _split(call, "dim", False)


@decomposer("split.Tensor", "unsafe_split.Tensor")
def split_with_sizes(call: Call) -> Callable[..., Any] | None:
    at = call.dim("dim", len(call.shape("self")))
    sizes = [spec.shape[at] for spec in call.outputs if spec is not None]
    return lambda self, split_size, dim=0: aten.split_with_sizes.default(self, sizes, dim)


@rule("unbind", "unbind_copy")
def unbind(call: Call) -> OpDims | None:
    labels = Labels()
    at = call.dim("dim", len(call.shape("self")))
    mine = labels.of(call.shape("self"), whole=(at,))
    out = [dim for position, dim in enumerate(mine) if position != at]
    return describe_by(call, labels, {"self": mine}, [out] * len(call.outputs), linear=("self",))


@rule("select.int", "select_copy.int")
def select(call: Call) -> OpDims | None:
    labels = Labels()
    at = call.dim("dim", len(call.shape("self")))
    mine = labels.of(call.shape("self"), whole=(at,))
    return describe_by(call, labels, {"self": mine}, [[dim for position, dim in enumerate(mine) if position != at]], linear=("self",))


@rule("slice.Tensor", "slice_copy.Tensor", "narrow", "narrow_copy")
def slice_(call: Call) -> OpDims | None:
    """The full range keeps its label (sizes.py keeps its end open); a part of it is whole."""
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    full = call.out.shape == shape and call.get("step", 1) == 1
    mine = labels.of(shape, whole=() if full else (at,))
    out = mine if full else _replaced(mine, at, labels.new(call.out.shape[at], whole=True))
    inputs = {place.name: mine if place.name == "self" else [] for place in call.places}
    return describe_by(call, labels, inputs, [out], linear=("self",))


@rule("select_scatter", "slice_scatter")
def scatter_slice(call: Call) -> OpDims | None:
    """The functional form of x[..., a:b] = src."""
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    mine = labels.of(shape, whole=(at,))
    part = [dim for position, dim in enumerate(mine) if position != at]
    if str(call.target._schema.name) == "aten::slice_scatter":
        part.insert(at, labels.new(call.shape("src")[at], whole=True))
    part = [() if size == 1 else dim for size, dim in zip(call.shape("src"), part, strict=True)]
    return describe_by(call, labels, {"self": mine, "src": part}, [mine], linear=("self", "src"))


@rule("diagonal_scatter")
def diagonal_scatter(call: Call) -> OpDims | None:
    labels = Labels()
    rank = len(call.shape("self"))
    first, second = call.dim("dim1", rank), call.dim("dim2", rank)
    mine = labels.of(call.shape("self"), whole=(first, second))
    part = [dim for position, dim in enumerate(mine) if position not in (first, second)]
    part.append(labels.new(call.shape("src")[-1], whole=True))
    return describe_by(call, labels, {"self": mine, "src": part}, [mine], linear=("self", "src"))


@rule("cat", "concat.default", "concatenate.default", "hstack", "vstack", "row_stack")
def cat(call: Call) -> OpDims | None:
    specs = call.specs("tensors")
    name, rank = str(call.target._schema.name), len(call.out.shape)
    legacy = [spec.shape == (0,) and rank != 1 for spec in specs]  # cat skips tensors of shape [0]
    if any(len(spec.shape) != rank for spec, skip in zip(specs, legacy, strict=True) if not skip):
        return None
    stacked = {"aten::hstack": min(rank - 1, 1), "aten::vstack": 0, "aten::row_stack": 0}
    at = stacked[name] if name in stacked else call.dim("dim", rank)
    labels = Labels()
    sizes = [0 if skip else spec.shape[at] for spec, skip in zip(specs, legacy, strict=True)]
    out = labels.of(call.out.shape, whole=(at,))
    if len(set(sizes)) == 1:
        piece = labels.new(sizes[0])
        out[at] = (*labels.new(len(sizes), whole=True), *piece)
        listed = [_replaced(out, at, piece) for _ in specs]
    else:
        listed = [labels.of((0,)) if skip else _replaced(out, at, labels.new(size, whole=True)) for size, skip in zip(sizes, legacy, strict=True)]
    return describe_by(call, labels, {}, [out], linear=("tensors",), listed={"tensors": listed})


@rule("stack")
def stack(call: Call) -> OpDims | None:
    labels = Labels()
    specs = call.specs("tensors")
    mine = labels.of(specs[0].shape)
    at = call.dim("dim", len(mine) + 1)
    out = [*mine[:at], labels.new(len(specs), whole=True), *mine[at:]]
    return describe_by(call, labels, {}, [out], linear=("tensors",), listed={"tensors": [mine] * len(specs)})


@rule("constant_pad_nd pad _pad_circular reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d")
def pad(call: Call) -> OpDims | None:
    """Pairs (before, after) from the last dim backwards; dims that nothing is added to or taken from stay free."""
    labels = Labels()
    shape = call.shape("self")
    amounts = call["pad"] if "pad" in call.values else call["padding"]
    touched = [len(shape) - 1 - position // 2 for position, amount in enumerate(amounts) if amount != 0]
    mine = labels.of(shape, whole=touched)
    out = [labels.new(size, whole=True) if position in touched else mine[position] for position, size in enumerate(call.out.shape)]
    constant = call.get("mode", "constant") == "constant" and (call.get("value") or 0) != 0
    return describe_by(call, labels, {"self": mine}, [out], linear=() if constant else ("self",))


@rule("flip", "fliplr", "flipud", "roll")
def reordered(call: Call) -> OpDims | None:
    labels = Labels()
    rank = len(call.shape("self"))
    fixed = {"aten::fliplr": (1,), "aten::flipud": (0,)}.get(str(call.target._schema.name))
    mine = labels.of(call.shape("self"), whole=call.dims("dims", rank) if fixed is None else fixed)
    return describe_by(call, labels, {"self": mine}, [mine], linear=("self",))


@rule("diff")
def diff(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    mine = labels.of(shape, whole=(at,))
    inputs = {"self": mine}
    for name in ("prepend", "append"):
        if call.is_tensor(name):
            inputs[name] = _replaced(mine, at, labels.new(call.shape(name)[at], whole=True))
    out = _replaced(mine, at, labels.new(call.out.shape[at], whole=True))
    return describe_by(call, labels, inputs, [out], linear=tuple(inputs) if call.out.dtype.is_floating_point else ())


@rule("glu")
def glu(call: Call) -> OpDims | None:
    """Half the dim gates the other half: (p!, c) -> c."""
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    mine = labels.of(shape)
    piece = labels.new(shape[at] // 2)
    out = _replaced(mine, at, piece)
    return describe_by(call, labels, {"self": _replaced(mine, at, (*labels.new(2, whole=True), *piece))}, [out])
