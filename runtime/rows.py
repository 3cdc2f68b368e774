"""A global batch that comes in parts: each rank brings some of its rows, and gets the rows that its program computes.

    brought   rank 0: 2 rows | rank 1: 5 rows       the global batch is the ranks' rows, one rank's after the other's
    wanted    rank 0: 4 rows | rank 1: 3 rows       as even as possible, as every program cuts it; rows move where the two differ

`RowSampler` deals the rows of a dataset so that nothing has to move.
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from partitioner.errors import InputError, RankError
from partitioner.runtime.inputs import from_rows_first, join, rows_first, spread
from partitioner.runtime.program import Slice
from partitioner.runtime.together import Peers
from partitioner.runtime.wire import guarded


def rows_in(leaves: Mapping[str, Any], cuts: Mapping[str, Slice]) -> int:
    """Rows of the batch that these leaves hold. Raises InputError where they do not agree, or where no input has a batch dim."""
    found: dict[str, int] = {}
    for path, cut in cuts.items():
        leaf = leaves.get(path)
        if cut.dim is None or not isinstance(leaf, Tensor):
            continue
        if leaf.dim() <= cut.dim or leaf.shape[cut.dim] % (cut.outer * cut.inner):
            raise InputError(
                f"{path} has shape {tuple(leaf.shape)}, but its dim {cut.dim} should have {cut.outer * cut.inner} entries a row of the batch"
            )
        found[path] = leaf.shape[cut.dim] // (cut.outer * cut.inner)
    if not found:
        raise InputError("no input has a batch dim that the plan cuts, so there are no rows to bring: pass the whole inputs to train_step")
    if len(set(found.values())) > 1:
        raise InputError("the inputs hold different numbers of rows: " + ", ".join(f"{path} {rows}" for path, rows in found.items()))
    return next(iter(found.values()))


def exchange(rows: int | None, peers: Peers, device: torch.device) -> list[int]:
    """How many rows each rank brings. None: this rank has failed to tell; then RankError is raised on all ranks."""
    counts = torch.zeros(peers.ranks, dtype=torch.int64, device=device)
    counts[peers.rank] = -1 if rows is None else rows
    if peers.group is not None:
        guarded(lambda: dist.all_reduce(counts, group=peers.group), peers.group, "the counts of rows")
    found: list[int] = counts.tolist()
    if min(found) < 0:
        raise RankError(f"rank {found.index(-1)} has refused the inputs it was given; its error says why")
    return found


def whole(leaves: Mapping[str, Any], cuts: Mapping[str, Slice], total: int) -> dict[str, Any]:
    """The leaves of the global batch, without values."""
    described: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            shape, cut = list(leaf.shape), cuts.get(path)
            if cut is not None and cut.dim is not None:
                shape[cut.dim] = cut.outer * total * cut.inner
            leaf = torch.empty(shape, dtype=leaf.dtype, device="meta")
        described[path] = leaf
    return described


def hand_over(leaf: Tensor, cut: Slice, counts: Sequence[int], all_of_it: bool, peers: Peers) -> Tensor:
    """From the rows that this rank brings to its even share, or to the whole leaf. Collective, where there is anything to do."""
    if cut.dim is None or peers.group is None:
        return leaf
    total, rank = sum(counts), peers.rank
    wanted = spread(total, peers.ranks)
    if list(counts) != wanted:
        rows = rows_first(leaf, cut, counts[rank]).contiguous()
        moved = rows.new_empty(wanted[rank], *rows.shape[1:])
        width = rows[:1].numel() * rows.element_size() if rows.shape[0] else moved[:1].numel() * rows.element_size()
        if width:
            sends = [part * width for part in _overlaps(counts, wanted, rank)]
            receives = [part * width for part in _overlaps(wanted, counts, rank)]
            given, got = (tensor.view(-1).view(torch.uint8) for tensor in (rows, moved))  # as bytes: backends send fewer dtypes than torch has
            guarded(lambda: dist.all_to_all_single(got, given, receives, sends, group=peers.group), peers.group, f"the rows of {cut.name}")
        leaf = from_rows_first(moved, cut, wanted[rank])
    return join([leaf], cut, [wanted[rank]], total, peers.ranks, peers.group) if all_of_it else leaf


def _overlaps(mine: Sequence[int], theirs: Sequence[int], rank: int) -> list[int]:
    """Of the rows that `rank` holds as `mine` spreads them: how many each rank holds as `theirs` spreads them."""
    first = sum(mine[:rank])
    last, at, parts = first + mine[rank], 0, []
    for count in theirs:
        parts.append(max(0, min(last, at + count) - max(first, at)))
        at += count
    return parts


class RowSampler(Sampler[list[int]]):
    """This rank's rows of every global batch, for `DataLoader(dataset, batch_sampler=…)`; all ranks have as many batches.

    Each row comes once an epoch. The global batches are those of one process in the same order; only where the last one would have fewer rows
    than there are ranks, the one before gives it some. With shuffle the order is another one each epoch, the same on all ranks: call
    set_epoch(epoch) before each.
    """

    def __init__(self, rows: int, batch_rows: int, rank: int, ranks: int, shuffle: bool, seed: int) -> None:
        self.rows, self.batch_rows, self.rank, self.ranks, self.shuffle, self.seed = rows, batch_rows, rank, ranks, shuffle, seed
        self.epoch = 0

    @classmethod
    def of(cls, dataset: Any, batch_rows: int, rank: int, ranks: int, shuffle: bool, seed: int) -> "RowSampler":
        """Raises InputError for a dataset without a length, and for batches that not every rank gets a row of."""
        if not isinstance(dataset, Sized):
            raise InputError(f"the dataset is a {type(dataset).__name__} without a length, whose rows cannot be dealt; pass one with __len__")
        if min(len(dataset), batch_rows) < ranks:
            raise InputError(
                f"{len(dataset)} rows in batches of {batch_rows} leave some of {ranks} ranks without a row; give batches of {ranks} rows at least"
            )
        return cls(len(dataset), batch_rows, rank, ranks, shuffle, seed)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sizes(self) -> list[int]:
        """Rows of each global batch."""
        full, rest = divmod(self.rows, self.batch_rows)
        sizes = [self.batch_rows] * full + [rest] * (rest > 0)
        if sizes[-1] < self.ranks:
            both = sizes.pop() + sizes.pop()
            sizes += [both - self.ranks, self.ranks] if both >= 2 * self.ranks else [both]
        return sizes

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(self.rows)
        if self.shuffle:
            order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        at = 0
        for size in self.sizes():
            shares = spread(size, self.ranks)
            start = at + sum(shares[: self.rank])
            yield list(order[start : start + shares[self.rank]])
            at += size
