"""Shapes and strides at block borders, so that any two blocks fit together.

A value that crosses a border is contiguous, or expanded (a stride of 0) where the graph says so; parameters, buffers and constants lie as the user
made them.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.errors import CaptureError

_CROSSING = ("value", "input", "prologue", "total")


def is_expanded(val: Tensor) -> bool:
    """Whether several elements share one place in memory."""
    return any(step == 0 and size > 1 for size, step in zip(val.shape, val.stride(), strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch computes them (a size of 0 counts as 1)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(stride))


def stretch(shape: Sequence[int], stride: Sequence[int], dim: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride when `dim` gets another size: the strides of the dims outside of it grow in proportion, 0 stays 0."""
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
    outside = set(order[: order.index(dim)])
    before = max(shape[dim], 1)
    return (
        tuple(size if d == dim else s for d, s in enumerate(shape)),
        tuple(step // before * max(size, 1) if d in outside else step for d, step in enumerate(stride)),
    )


def of_read(node: fx.Node, rows: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a block's read at so many rows.

    meta["val"] holds the global shape, meta["cut"] (dim, outer, inner) where the rows are cut, meta["kind"] the kind of the port.
    """
    val, cut = node.meta["val"], node.meta.get("cut")
    shape, stride = tuple(int(s) for s in val.shape), tuple(int(s) for s in val.stride())
    if cut is not None:
        if rows is None:
            raise CaptureError(f"the read {node.name} is cut over the batch, but its block does not take `rows`")
        shape, stride = stretch(shape, stride, cut.dim, cut.outer * rows * cut.inner)
    if node.meta.get("kind", "value") in _CROSSING and not is_expanded(val):
        stride = contiguous(shape)
    return shape, stride


def at_rows(node: fx.Node, rows: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a tensor of a joint graph at another row count (None: at its own), by meta["sizes"]."""
    val = node.meta["val"]
    shape, stride = tuple(int(s) for s in val.shape), tuple(int(s) for s in val.stride())
    for dim, size in enumerate(node.meta.get("sizes", ())):
        if size.per_row and rows is not None:
            shape, stride = stretch(shape, stride, dim, size.at(rows))
    return shape, stride


def value_at(node: fx.Node, rows: int) -> Any:
    """What meta["val"] of a node of a joint graph is at another row count, tensors on meta; of several results, unpicked ones as they are."""
    val = node.meta.get("val")
    if isinstance(val, Tensor) and any(size.per_row for size in node.meta.get("sizes", ())):
        return torch.empty_strided(*at_rows(node, rows), dtype=val.dtype, device="meta")
    if isinstance(val, tuple | list):
        picked = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return tuple(value_at(picked[index], rows) if index in picked else one for index, one in enumerate(val))
    return val
