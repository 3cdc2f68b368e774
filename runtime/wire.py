"""The three collectives that units use, issued at once and awaited later, the same on NCCL and gloo.

    all_gather      whole[ranks * n] = the ranks' pieces[n], in rank order; piece may lie in whole, at its own place
    reduce_scatter  piece[n] = this rank's part of the sum of the ranks' wholes[ranks * n]; whole is scratch afterwards
    all_reduce      in place

All tensors are 1-d and contiguous. Sums, never averages. A peer that died or does not arrive becomes a PeerError (`watch.py`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime import watch

# Their names changed in torch 2.13; the old ones warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SETTLE_SECONDS = 0.2


_watcher: Callable[[Any], None] | None = None


@contextmanager
def watching(watcher: Callable[[Any], None]) -> Iterator[None]:
    """Tell `watcher` the Work of every collective that this process issues meanwhile."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


class Handle:
    """A collective under way; it holds its tensors until `wait`, which leaves the result in place and keeps nothing."""

    def __init__(
        self,
        issue: Callable[[], Any],
        tensors: tuple[Tensor, ...],
        group: dist.ProcessGroup,
        what: str,
        after: Callable[[], object] | None = None,
        listed: bool = True,
    ) -> None:
        """listed: whether who watches collectives is told of it."""
        self._group, self._what = group, what
        self._tensors = tensors
        self._counts = [_holders(tensor) for tensor in tensors]
        self._after = after
        self._work = guarded(issue, group, what)
        if _watcher is not None and listed:
            _watcher(self._work)

    def wait(self) -> None:
        """Await the result (on CUDA: let the current stream await it)."""
        if self._work is None:
            return
        guarded(self._work.wait, self._group, self._what)
        self._work = None
        if self._tensors[0].device.type == "cpu":
            self._settle()
        if self._after is not None:
            self._after()
        self._tensors, self._after = (), None

    def _settle(self) -> None:
        # gloo's worker thread drops its references a moment after it reports completion. Were it the last to hold one, the memory would be given
        # back at an uncertain time, as late as that thread next gets the interpreter lock.
        end = time.monotonic() + _SETTLE_SECONDS
        for tensor, count in zip(self._tensors, self._counts, strict=True):
            while _holders(tensor) > count and time.monotonic() < end:
                time.sleep(0)


def guarded(call: Callable[[], Any], group: dist.ProcessGroup | None, what: str) -> Any:
    """`call`, which talks to the ranks of `group`; its failure is a PeerError that says who is missing."""
    watched = watch.of(group)
    if watched is not None:
        watched.place.line += 1  # a peer that is not here yet is one behind
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise watch.failure(watched, what, error) from error


def _holders(tensor: Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def all_gather(whole: Tensor, piece: Tensor, group: dist.ProcessGroup, what: str) -> Handle:
    """whole [ranks * n], piece [n]."""
    return Handle(lambda: _all_gather(whole, piece, group=group, async_op=True), (whole, piece), group, f"the all-gather of {what}")


def all_reduce(whole: Tensor, group: dist.ProcessGroup, what: str) -> Handle:
    """In place, any shape."""
    return Handle(lambda: dist.all_reduce(whole, group=group, async_op=True), (whole,), group, f"the all-reduce of {what}")


def reduce_scatter(piece: Tensor, whole: Tensor, group: dist.ProcessGroup, what: str) -> Handle:
    """piece [n], whole [ranks * n]."""
    text = f"the reduce-scatter of {what}"
    if whole.device.type == "cpu":
        # gloo's own takes two to three times as long as its all-reduce in place, of which a part is then taken.
        start = dist.get_rank(group) * piece.numel()
        return Handle(
            lambda: dist.all_reduce(whole, group=group, async_op=True),
            (whole,),
            group,
            text,
            lambda: piece.copy_(whole.narrow(0, start, piece.numel())),
        )
    return Handle(lambda: _reduce_scatter(piece, whole, group=group, async_op=True), (piece, whole), group, text)


def bits(tensor: Tensor) -> Tensor:
    """The tensor as a backend can carry it: complex numbers as pairs, booleans as bytes."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
