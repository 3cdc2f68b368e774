"""Sizes that an op makes: how a dim of a result follows from the dims of the arguments when these change.

    slice     x[:, 1:]            n -> n - 1
    pad, cat  joined lengths      n, m -> n + m
    conv      (n + 2 pad - dilation (kernel - 1) - 1) // stride + 1
    split, unbind, stack          a fixed number of tensors: the dim that is taken apart or made cannot change

Labels that an op's results share with its arguments need no entry here. What is neither here nor told by the op's own arguments (`arange(6)`) is
`Unknown`: sizes it depends on then stay as captured.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import sympy
from torch import fx
from torch._ops import OpOverload

from partitioner.passes.annotate_formula import FloorDiv, Least
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.registry import words

Read = Callable[[fx.Node, int], sympy.Expr]
"""The size of a dim of a tensor node."""
Size = Callable[[dict[str, Any], fx.Node, int, int, Read], sympy.Expr | None]
"""(arguments by name, op, result, dim of the result, read) -> its size; None where the op's own arguments say it as a number."""


class Unknown(Exception):
    """How a size follows from others cannot be told."""


SIZES: dict[str, Size] = {}


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in words(text))


PIECES = _names(
    "split split_copy unsafe_split split_with_sizes split_with_sizes_copy unsafe_split_with_sizes chunk unsafe_chunk tensor_split "
    "unbind unbind_copy hsplit vsplit dsplit glu"
)
JOINS = _names("cat concat concatenate hstack vstack row_stack stack")
SIZED = _names("arange zeros ones full empty rand randn randint new_zeros new_ones new_full new_empty eye linspace expand")
"""Ops that take the size of their result as an argument."""
_INDEXING = _names("index _unsafe_index")
_SAME_VALUES = _names("unsqueeze expand view reshape _unsafe_view to _to_copy clone contiguous alias detach squeeze lift_fresh_copy")


def kind(node: fx.Node) -> str:
    """The op's name without its overload."""
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""


def arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, defaults included."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update({argument.name: value for argument, value in zip(schema, node.args, strict=False)})
    return {**given, **node.kwargs}


def counts(node: fx.Node, rule: OpDims) -> set[str]:
    """Labels that stand for a number of tensors, or that the op takes apart at fixed places."""
    name = kind(node)
    inside = {label for dims in rule.inputs if dims is not None for dim in dims for label in dim}
    outside = {label for dims in rule.outputs if dims is not None for dim in dims for label in dim}
    if name in PIECES:
        return inside - outside
    if name in JOINS and (name == "aten::stack" or not _unequal(node)):
        return outside - inside
    return set()


def made(rule: OpDims) -> Iterator[tuple[int, int, str]]:
    """(result, dim, label) of every dim of a result that is one label which no argument has."""
    inside = {label for dims in rule.inputs if dims is not None for dim in dims for label in dim}
    for result, dims in enumerate(rule.outputs):
        for position, dim in enumerate(dims or ()):
            for label in dim:
                if label not in inside:
                    yield result, position, label


def vanished(rule: OpDims) -> set[str]:
    """Whole labels of the arguments that no result has."""
    inside = {label for dims in rule.inputs if dims is not None for dim in dims for label in dim if label in rule.whole}
    return inside - {label for dims in rule.outputs if dims is not None for dim in dims for label in dim}


def made_size(node: fx.Node, rule: OpDims, result: int, dim: int, read: Read) -> sympy.Expr | None:
    """The size of a made dim; None where it is a number among the op's arguments. Raises Unknown."""
    name = kind(node)
    function = SIZES.get(name)
    if function is not None:
        return function(arguments(node), node, result, dim, read)
    if name in PIECES or not vanished(rule):
        return None
    raise Unknown(f"{node.target} makes it in a way that is not known")


def demands(node: fx.Node, read: Read) -> Iterator[tuple[sympy.Expr, Literal["==", "<="], sympy.Expr, str]]:
    """(left, relation, right, why): what sizes must fulfil for the op to be possible. `{source}` in why stands for the tensor that is read."""
    name = kind(node)
    if name in ("aten::slice", "aten::slice_copy"):
        given, rank = arguments(node), len(_shape(node))
        dim = given["dim"] % rank
        start, end, n = given["start"] or 0, given["end"], _shape(given["self"])[dim]
        if not isinstance(start, int) or not isinstance(end, int) or start < 0 or end == sys.maxsize:
            return
        if 0 <= end <= n and given["step"] == 1:
            yield start + read(node, dim), "<=", read(given["self"], dim), "it is cut out of {source}"
        elif end > n:
            yield read(given["self"], dim), "<=", sympy.Integer(end), f"{node.target} cuts after {end} elements"
    elif name == "aten::embedding":
        given = arguments(node)
        found = _counted(given["indices"])
        if found is not None:
            yield read(found[0], 0) + found[1], "<=", read(given["weight"], 0), "positions are looked up in {source}"
    elif name in _INDEXING:
        for positions, source, dim in ranged(node):
            yield read(positions, 0), "==", read(source, dim), "positions 0, 1, … of all of it are read from {source}"


def ranged(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """(arange, x, dim) where x[arange(n)] reads all n positions of a dim."""
    if kind(node) not in _INDEXING:
        return
    given = arguments(node)
    for dim, index in enumerate(given["indices"]):
        found = _counted(index)
        if found is not None and found[1] == 0 and _shape(found[0]) == _shape(given["self"])[dim : dim + 1]:
            yield found[0], given["self"], dim


def _counted(node: Any) -> tuple[fx.Node, int] | None:
    """The arange behind a tensor of positions, and what is added to it."""
    offset = 0
    while isinstance(node, fx.Node):
        name = kind(node)
        if name == "aten::arange":
            return node, offset
        if name == "aten::add" and isinstance(node.args[1], int):
            offset += node.args[1]
        elif name not in _SAME_VALUES:
            return None
        node = node.args[0]
    return None


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _unequal(node: fx.Node) -> bool:
    given = arguments(node)
    rank = len(_shape(node))
    at = _join_dim(kind(node), given, rank)
    return len({_shape(one)[at] for one in given["tensors"] if len(_shape(one)) == rank}) > 1


def _join_dim(name: str, given: dict[str, Any], rank: int) -> int:
    if "dim" in given:
        return int(given["dim"]) % rank
    return min(rank - 1, 1) if name == "aten::hstack" else 0


def _size(*names: str) -> Callable[[Size], Size]:
    def register(function: Size) -> Size:
        for name in names:
            SIZES[f"aten::{name}"] = function
        return function

    return register


@_size("slice", "slice_copy")
def _slice(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    start, end = given["start"] or 0, sys.maxsize if given["end"] is None else given["end"]
    if not isinstance(start, int) or not isinstance(end, int):
        raise Unknown("its ends are computed")
    n = read(given["self"], dim)
    low = start if start >= 0 else n + start
    high = n if end >= _shape(given["self"])[dim] else end if end >= 0 else n + end
    if isinstance(low, int) and isinstance(high, int):
        return None
    return ceiling(high - low, given["step"])


def ceiling(a: Any, b: int) -> Any:
    """a / b rounded up."""
    return FloorDiv(a + (b - 1), sympy.Integer(b))


@_size("cat", "concat", "concatenate", "hstack", "vstack", "row_stack")
def _cat(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    rank = len(_shape(node))
    if dim != _join_dim(kind(node), given, rank) or not _unequal(node):
        return None
    return sympy.Add(*[read(one, dim) for one in given["tensors"] if len(_shape(one)) == rank])


@_size("constant_pad_nd", "pad", "_pad_circular", *[f"{mode}_pad{n}d" for mode in ("reflection", "replication") for n in (1, 2, 3)])
def _pad(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    amounts = given["pad"] if "pad" in given else given["padding"]
    at = len(_shape(node)) - 1 - dim
    return read(given["self"], dim) + amounts[2 * at] + amounts[2 * at + 1]


@_size("diff")
def _diff(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    parts = [given[name] for name in ("self", "prepend", "append") if isinstance(given.get(name), fx.Node)]
    return sympy.Add(*[read(part, dim) for part in parts]) - given["n"]


@_size("unfold", "unfold_copy")
def _unfold(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    if dim == len(_shape(node)) - 1:
        return None
    return FloorDiv(read(given["self"], dim) - given["size"], sympy.Integer(given["step"])) + 1


@_size("diagonal", "diagonal_copy")
def _diagonal(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    rank = len(_shape(given["self"]))
    first, second = read(given["self"], given["dim1"] % rank), read(given["self"], given["dim2"] % rank)
    if first != second:
        raise Unknown("it is a diagonal of a matrix that is not square")
    return first - abs(given["offset"])


def _each(value: Any, spatial: int, position: int, default: int) -> int:
    """An argument of a convolution or pool for one of its positions."""
    entries = [value] if isinstance(value, int) else list(value if value is not None else ())
    return int(default if not entries else entries[0] if len(entries) == 1 else entries[position])


@_size(*[f"conv{n}d" for n in (1, 2, 3)], *[f"conv_transpose{n}d" for n in (1, 2, 3)], "convolution")
def _convolution(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    kernels = _shape(given["weight"])[2:]
    spatial = len(kernels)
    at = dim - (len(_shape(node)) - spatial)
    if at < 0:
        return None
    n = read(given["input"], dim)
    stride, dilation = (_each(given[name], spatial, at, 1) for name in ("stride", "dilation"))
    reach = dilation * (kernels[at] - 1)
    if isinstance(given["padding"], str):
        return n if given["padding"] == "same" else FloorDiv(n - reach - 1, sympy.Integer(stride)) + 1
    pad = _each(given["padding"], spatial, at, 0)
    if "transpose" in kind(node) or given.get("transposed"):
        return (n - 1) * stride - 2 * pad + reach + _each(given["output_padding"], spatial, at, 0) + 1
    return FloorDiv(n + 2 * pad - reach - 1, sympy.Integer(stride)) + 1


@_size(*[f"{name}_pool{n}d{suffix}" for n in (1, 2, 3) for name, suffix in (("max", ""), ("avg", ""), ("max", "_with_indices"))])
def _pool(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    spatial = int(next(letter for letter in kind(node) if letter.isdigit()))
    value = node.meta["val"][0] if isinstance(node.meta["val"], tuple) else node.meta["val"]
    at = dim - (value.dim() - spatial)
    if at < 0:
        return None
    kernel = _each(given["kernel_size"], spatial, at, 1)
    stride, pad = _each(given["stride"], spatial, at, kernel), _each(given["padding"], spatial, at, 0)
    last = read(given["self"], dim) + 2 * pad - _each(given.get("dilation"), spatial, at, 1) * (kernel - 1) - 1  # where the last window may start
    if not given["ceil_mode"]:
        return FloorDiv(last, sympy.Integer(stride)) + 1
    inside = read(given["self"], dim) + pad - 1  # and where it must, padding to the right apart
    return Least(ceiling(last, stride), FloorDiv(inside, sympy.Integer(stride))) + 1


_UPSAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")


@_size(*[f"upsample_{name}" for name in _UPSAMPLED], *[f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)])
def _upsample(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    """By a whole factor, or to a size among the arguments."""
    factors = given.get("scale_factors")
    if not factors:
        return None
    source = given["input"] if "input" in given else given["self"]
    factor = factors[dim - (len(_shape(node)) - len(factors))]
    if factor != int(factor):
        raise Unknown(f"it is resized by {factor}")
    return read(source, dim) * int(factor)


def _told(given: dict[str, Any], node: fx.Node, result: int, dim: int, read: Read) -> sympy.Expr | None:
    """A number among the op's arguments, whatever dims vanish."""
    return None


for _name in _names("topk histc multinomial quantile nanquantile narrow narrow_copy one_hot"):
    SIZES[_name] = _told
for _n in (1, 2, 3):
    for _adaptive in ("adaptive_avg_pool", "adaptive_max_pool", "_adaptive_avg_pool"):
        SIZES[f"aten::{_adaptive}{_n}d"] = _told
