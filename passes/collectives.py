"""Differentiable collectives that live inside block functions, as opaque ops named by axis, and their one gradient rule.

Gradient placements follow from forward placements, everywhere, without exception:

    forward Replicate  <->  gradient Partial      forward Shard  <->  gradient Shard      forward Partial  <->  gradient Replicate

    all_reduce  Partial -> Replicate   backward: all_reduce      (gradient Partial -> Replicate)
    all_gather  Shard   -> Replicate   backward: reduce_scatter  (gradient Partial -> Shard)
    shard       Replicate -> Shard     backward: zero-pad        (gradient Shard -> Partial, no communication)
    share       Replicate -> Partial   backward: times share     (gradient Replicate -> Partial, no communication)

Two ops more, for statistics of a micro-batch (`defer.py`); a sum over the batch is divided by the count of the whole batch everywhere:

    own_mean    what the micro-batch gives to a mean over the batch -> its own mean: times `part`, by which its rows are fewer than the batch's
    addend      the mean of a micro-batch -> what it adds to the mean over the batch: divided by `part`; the epilogue sees the sum over micro-batches

A cut dim is described by (dim, outer, inner): its global size is outer * total * inner, its local size outer * rows * inner, where `total`
counts the rows of the global batch and `rows` those of this rank and micro-batch, spread as evenly as possible.
`bind` tells which process group an axis name means; unbound axes have one rank and every collective is the identity.
"""

from collections.abc import Callable
from functools import cache
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.errors import PeerError

_groups: dict[str, dist.ProcessGroup] = {}
_functional = torch.ops._c10d_functional


def bind(axis: str, group: dist.ProcessGroup | None) -> None:
    """Let `axis` mean `group` in this process; None unbinds it."""
    if group is None:
        _groups.pop(axis, None)
    else:
        _groups[axis] = group


def spread(total: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous pieces of `total` rows, as even as possible, larger ones first."""
    small, larger = divmod(total, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def _arrived(what: str, axis: str, start: Callable[[], Tensor]) -> Tensor:
    """The result of a collective. Raises PeerError where a peer is missing."""
    try:
        return _functional.wait_tensor(start())  # type: ignore[no-any-return]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerError(f"the {what} over {axis} within a block ({error})") from error


def _sum(x: Tensor, axis: str) -> Tensor:
    group = _groups.get(axis)
    if group is None or group.size() == 1:
        return x.clone()
    return _arrived("all-reduce", axis, lambda: _functional.all_reduce(x.contiguous(), "sum", group.group_name))


@torch.library.custom_op("partitioner::all_reduce", mutates_args=())
def all_reduce(x: Tensor, axis: str) -> Tensor:
    """Sum a Partial over the axis."""
    return _sum(x, axis)


@all_reduce.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


all_reduce.register_autograd(
    lambda ctx, grad: (all_reduce(grad, ctx.axis), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "axis", inputs[1]),
)


def _as_rows(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """View the cut dim as (outer, rows, inner) and move rows to the front."""
    shape = x.shape
    rows = shape[dim] // (outer * inner) if outer * inner else 0
    return x.reshape(*shape[:dim], outer, rows, inner, *shape[dim + 1 :]).movedim(dim + 1, 0)


def _from_rows(x: Tensor, dim: int) -> Tensor:
    """Inverse of `_as_rows`."""
    x = x.movedim(0, dim + 1)
    shape = x.shape
    return x.reshape(*shape[:dim], shape[dim] * shape[dim + 1] * shape[dim + 2], *shape[dim + 3 :]).contiguous()


@torch.library.custom_op("partitioner::all_gather", mutates_args=())
def all_gather(x: Tensor, axis: str, dim: int, outer: int, inner: int, total: int) -> Tensor:
    """Join the shards of a cut dim; ranks may hold unequal numbers of rows, none included."""
    group = _groups.get(axis)
    if group is None or group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    counts, most = spread(total, group.size()), ceil(total / group.size())
    rows = _as_rows(x, dim, outer, inner).contiguous()
    if rows.shape[0] < most:
        rows = torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])
    joined = _arrived("all-gather", axis, lambda: _functional.all_gather_into_tensor(rows, group.size(), group.group_name))
    joined = torch.cat([joined[k * most : k * most + count] for k, count in enumerate(counts)])
    return _from_rows(joined, dim)


@all_gather.register_fake
def _(x: Tensor, axis: str, dim: int, outer: int, inner: int, total: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], outer * total * inner, *x.shape[dim + 1 :])


@torch.library.custom_op("partitioner::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, axis: str, dim: int, outer: int, inner: int, total: int, rows: int) -> Tensor:
    """Sum a Partial over the axis and keep this rank's `rows` rows of the cut dim."""
    group = _groups.get(axis)
    if group is None or group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    counts, most = spread(total, group.size()), ceil(total / group.size())
    whole = _as_rows(x, dim, outer, inner)
    pieces = []
    for piece, count in zip(whole.split_with_sizes(counts), counts, strict=True):
        pieces.append(piece)
        if count < most:
            pieces.append(piece.new_zeros(most - count, *piece.shape[1:]))
    padded = torch.cat(pieces)
    mine = _arrived("reduce-scatter", axis, lambda: _functional.reduce_scatter_tensor(padded, "sum", group.size(), group.group_name))
    return _from_rows(mine[:rows], dim)


@reduce_scatter.register_fake
def _(x: Tensor, axis: str, dim: int, outer: int, inner: int, total: int, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], outer * rows * inner, *x.shape[dim + 1 :])


def _keep_gather(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, ctx.axis, ctx.dim, ctx.outer, ctx.inner, ctx.total = inputs
    scale = ctx.outer * ctx.inner
    ctx.rows = x.shape[ctx.dim] // scale if scale else 0


all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, ctx.axis, ctx.dim, ctx.outer, ctx.inner, ctx.total, ctx.rows), None, None, None, None, None),
    setup_context=_keep_gather,
)


@torch.library.custom_op("partitioner::shard", mutates_args=())
def shard(x: Tensor, dim: int, outer: int, inner: int, start: int, rows: int) -> Tensor:
    """Keep rows start … start + rows of a replicated value's cut dim."""
    return _from_rows(_as_rows(x, dim, outer, inner).narrow(0, start, rows), dim).clone()


@shard.register_fake
def _(x: Tensor, dim: int, outer: int, inner: int, start: int, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], outer * rows * inner, *x.shape[dim + 1 :])


@torch.library.custom_op("partitioner::unshard", mutates_args=())
def unshard(x: Tensor, dim: int, outer: int, inner: int, start: int, total: int) -> Tensor:
    """Place this rank's rows among zeros: the gradient of `shard`, a Partial."""
    mine = _as_rows(x, dim, outer, inner)
    whole = mine.new_zeros(total, *mine.shape[1:])
    whole.narrow(0, start, mine.shape[0]).copy_(mine)
    return _from_rows(whole, dim)


@unshard.register_fake
def _(x: Tensor, dim: int, outer: int, inner: int, start: int, total: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], outer * total * inner, *x.shape[dim + 1 :])


def _keep_shard(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, ctx.dim, ctx.outer, ctx.inner, ctx.start, _ = inputs
    ctx.total = x.shape[ctx.dim] // (ctx.outer * ctx.inner)


shard.register_autograd(
    lambda ctx, grad: (unshard(grad, ctx.dim, ctx.outer, ctx.inner, ctx.start, ctx.total), None, None, None, None, None),
    setup_context=_keep_shard,
)


def _alike(x: Tensor, number: float) -> Tensor:
    return torch.empty_like(x)


def _linear(op: Any) -> None:
    """An op `x * number`: its gradient is the op itself with the same number."""
    op.register_fake(_alike)
    op.register_autograd(
        lambda ctx, grad: (op(grad, ctx.number), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "number", inputs[1]),
    )


@torch.library.custom_op("partitioner::share", mutates_args=())
def share(x: Tensor, share: float) -> Tensor:
    """This rank's and micro-batch's share of a replicated value, so that the shares sum to it."""
    return x * share


@torch.library.custom_op("partitioner::own_mean", mutates_args=())
def own_mean(x: Tensor, part: float) -> Tensor:
    """The mean over a micro-batch of all ranks, from its sum divided by the count of the whole batch."""
    return x * part


_linear(share)
_linear(own_mean)


@torch.library.custom_op("partitioner::addend", mutates_args=())
def addend(x: Tensor, part: float) -> Tensor:
    """What the mean over a micro-batch adds to the mean over the whole batch. No gradient passes."""
    return x / part


addend.register_fake(_alike)


@cache
def collective_ops() -> frozenset[object]:
    """The ops of this file that communicate."""
    ops = torch.ops.partitioner
    return frozenset((ops.all_reduce.default, ops.all_gather.default, ops.reduce_scatter.default))
