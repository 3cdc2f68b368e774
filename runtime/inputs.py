"""Cutting input leaves by rows, and joining output leaves again.

A cut dim has global size outer * total * inner and local size outer * rows * inner (see `program.Slice`):

    dim:  | outer 0: row 0, row 1, … total-1 | outer 1: row 0, … |        each row is `inner` entries

Leaves are contiguous, and so is what is cut from them: where the rows of a rank lie together (nothing but sizes of 1 stands outside of them) the
slice is a view, otherwise it is a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.errors import InputError
from partitioner.runtime.program import Slice
from partitioner.runtime.wire import all_gather


def spread(total: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous pieces of `total` rows, as even as possible, larger ones first."""
    small, larger = divmod(total, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def narrow(leaf: Tensor, cut: Slice, start: int, rows: int, total: int | None) -> Tensor:
    """Rows start … start + rows of a leaf; the leaf itself where nothing is cut. Raises InputError for a leaf of another size."""
    if cut.dim is None or total is None:
        return leaf
    if leaf.dim() <= cut.dim or leaf.shape[cut.dim] != cut.outer * total * cut.inner:
        raise InputError(
            f"{cut.name} has shape {tuple(leaf.shape)}, but dim {cut.dim} should have {cut.outer * total * cut.inner} entries "
            f"for a batch of {total} rows; pass inputs of one batch together"
        )
    if rows == total:
        return leaf
    if cut.outer == 1:
        return leaf.narrow(cut.dim, start * cut.inner, rows * cut.inner).contiguous()
    shape, dim = leaf.shape, cut.dim
    split = leaf.reshape(*shape[:dim], cut.outer, total, cut.inner, *shape[dim + 1 :])
    return split.narrow(dim + 1, start, rows).reshape(*shape[:dim], cut.outer * rows * cut.inner, *shape[dim + 1 :]).contiguous()


def narrow_copies(cut: Slice, rows: int, total: int | None) -> bool:
    """Whether `narrow` has to copy (a contiguous leaf)."""
    return cut.dim is not None and total is not None and cut.before * cut.outer > 1 and 0 < rows < total


def join(pieces: Sequence[Tensor], cut: Slice, rows: Sequence[int], total: int, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """The whole leaf from this rank's pieces (one per micro-batch, `rows[mb]` rows each). Collective: all ranks take part.

    Ranks hold `spread(total, ranks)` rows in rank order; shorter ones pad, for gloo and NCCL gather equal sizes only.
    """
    if cut.dim is None:
        raise InputError(f"output {cut.name} is a shard but names no dim; a sharded output needs Slice.dim")
    first = [rows_first(piece, cut, count) for piece, count in zip(pieces, rows, strict=True)]
    mine = first[0] if len(first) == 1 else torch.cat(first)
    if group is not None and ranks > 1 and total:
        counts = spread(total, ranks)
        most = counts[0]
        if mine.shape[0] < most:
            mine = torch.cat([mine, mine.new_zeros(most - mine.shape[0], *mine.shape[1:])])
        everyone = mine.new_empty(ranks * most, *mine.shape[1:])
        # As bytes: backends gather fewer dtypes than torch has.
        if mine.numel():
            all_gather(everyone.view(-1).view(torch.uint8), mine.contiguous().view(-1).view(torch.uint8), group, f"output {cut.name}").wait()
        mine = torch.cat([everyone[rank * most : rank * most + count] for rank, count in enumerate(counts)])
    return from_rows_first(mine, cut, total)


def rows_first(piece: Tensor, cut: Slice, rows: int) -> Tensor:
    """A leaf of so many rows as [rows, …]."""
    dim = cut.dim or 0
    shape = piece.shape
    return piece.reshape(*shape[:dim], cut.outer, rows, cut.inner, *shape[dim + 1 :]).movedim(dim + 1, 0)


def from_rows_first(rows: Tensor, cut: Slice, count: int) -> Tensor:
    """Inverse of `rows_first`."""
    dim = cut.dim or 0
    moved = rows.movedim(0, dim + 1)
    shape = moved.shape
    return moved.reshape(*shape[:dim], cut.outer * count * cut.inner, *shape[dim + 3 :]).contiguous()


def row_sums(leaves: Mapping[str, Any]) -> dict[str, str]:
    """path -> the sums of a tensor's rows to six digits: whether two ranks hold the same values, whatever kernel summed."""
    found = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            sums = real.flatten(1).sum(1, dtype=torch.float64) if real.dim() > 1 else real.double().flatten()
            found[path] = " ".join(f"{value:.6g}" for value in sums.tolist())
    return found


@dataclass(frozen=True)
class Expected:
    """The leaves a model was planned for: path -> dtype of a tensor, or the literal. Raises InputError where a call differs; shapes may."""

    leaves: Mapping[str, Any]

    @classmethod
    def of(cls, leaves: Mapping[str, Any]) -> "Expected":
        return cls({path: leaf.dtype if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()})

    def check(self, leaves: Mapping[str, Any]) -> None:
        for path in self.leaves:
            if path not in leaves:
                if inside := [each for each in leaves if each.startswith((f"{path}[", f"{path}."))]:
                    raise InputError(f"{path} is a container of {', '.join(inside[:4])}, but was one value when this model was planned; pass that")
                raise InputError(f"{path} is missing; this model was planned with it: pass {', '.join(self.leaves)}")
        for path, leaf in leaves.items():
            if path not in self.leaves:
                raise InputError(f"{path} was not there when this model was planned; pass only {', '.join(self.leaves)}, or plan with it")
            planned = self.leaves[path]
            if isinstance(leaf, Tensor):
                if leaf.requires_grad:
                    raise InputError(f"{path} requires a gradient, and gradients of inputs are not computed; pass {path}.detach()")
                if not isinstance(planned, torch.dtype):
                    raise InputError(f"{path} is a tensor, but was {planned!r} when this model was planned, and is fixed since; pass {planned!r}")
                if leaf.dtype != planned:
                    raise InputError(f"{path} has dtype {leaf.dtype}, but the model was planned for {planned}; pass {path}.to({planned})")
            elif isinstance(planned, torch.dtype):
                raise InputError(f"{path} is {leaf!r}, but was a tensor of {planned} when this model was planned; pass a tensor")
            elif type(leaf) is not type(planned) or (leaf != planned and leaf == leaf):
                raise InputError(f"{path} is {leaf!r}, but was {planned!r} when this model was planned, and is fixed since; plan again for {leaf!r}")
