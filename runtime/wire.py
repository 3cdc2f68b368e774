"""The three collectives that units use, issued at once and awaited later, the same on NCCL and gloo.

    all_gather      whole[ranks * n] = the ranks' pieces[n], in rank order; piece may lie in whole, at its own place
    reduce_scatter  piece[n] = this rank's part of the sum of the ranks' wholes[ranks * n]; whole is scratch afterwards
    all_reduce      in place

All tensors are 1-d and contiguous. Sums, never averages. A peer that died or does not arrive becomes a PeerError (`watch.py`).
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from partitioner.runtime import watch

# Their names changed in torch 2.13; the old ones warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SETTLE_LOOKS = 1000
_BETWEEN_LOOKS = 0.0002  # seconds


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
    """A collective under way; it holds what its tensors hold until `wait`, which leaves the result in place and keeps nothing."""

    def __init__(
        self,
        issue: Callable[..., Any],
        tensors: tuple[Tensor, ...],
        group: dist.ProcessGroup,
        what: str,
        after: Callable[[], object] | None = None,
        listed: bool = True,
    ) -> None:
        """issue: starts it, given a view of each tensor. listed: whether who watches collectives is told of it."""
        self._group, self._what = group, what
        self._views = [_view(tensor) for tensor in tensors]
        self._alone = self._references()
        self._after = after
        self._work = guarded(lambda: issue(*self._views), group, what)
        if _watcher is not None and listed:
            _watcher(self._work)

    def wait(self) -> None:
        """Await the result (on CUDA: let the current stream await it)."""
        if self._work is None:
            return
        guarded(self._work.wait, self._group, self._what)
        self._work = None
        if self._views[0].device.type == "cpu":
            self._settle()
        self._views.clear()
        if self._after is not None:
            self._after()
        self._after = None

    def _references(self) -> list[int]:
        # Of the tensor in C++; of its wrapper, which the tensor's second reference holds and lets go of after it is no longer counted itself; and of
        # the storage, which tensors made inside the backend share.
        return [
            view._use_count() + sys.getrefcount(view) + torch._C._storage_Use_Count(view.untyped_storage()._cdata)  # type: ignore[attr-defined]
            for view in self._views
        ]

    def _settle(self) -> None:
        # gloo's worker thread drops its references a moment after it reports completion. Were it the last to hold one, the memory would be given
        # back at an uncertain time, as late as that thread next gets the interpreter lock. The views are known to nobody else. Looks are counted,
        # not seconds: of a process that is halted for a while no thread goes on.
        looks = 0
        while looks < _SETTLE_LOOKS and self._references() != self._alone:
            time.sleep(0 if looks < 10 else _BETWEEN_LOOKS)
            looks += 1


def _view(tensor: Tensor) -> Tensor:
    """The tensor's memory for a collective; on the CPU with a storage of its own, so that who holds it can be told from who holds the tensor."""
    tensor = tensor.detach()
    return from_dlpack(tensor) if tensor.device.type == "cpu" else tensor  # on CUDA the allocator must know the storage again


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


def all_gather(whole: Tensor, piece: Tensor, group: dist.ProcessGroup, what: str) -> Handle:
    """whole [ranks * n], piece [n]."""
    return Handle(partial(_all_gather, group=group, async_op=True), (whole, piece), group, f"the all-gather of {what}")


def all_reduce(whole: Tensor, group: dist.ProcessGroup, what: str) -> Handle:
    """In place, any shape."""
    return Handle(partial(dist.all_reduce, group=group, async_op=True), (whole,), group, f"the all-reduce of {what}")


def reduce_scatter(piece: Tensor, whole: Tensor, group: dist.ProcessGroup, what: str) -> Handle:
    """piece [n], whole [ranks * n]."""
    text = f"the reduce-scatter of {what}"
    if whole.device.type == "cpu":
        # gloo's own takes two to three times as long as its all-reduce in place, of which a part is then taken.
        start = dist.get_rank(group) * piece.numel()
        return Handle(
            partial(dist.all_reduce, group=group, async_op=True),
            (whole,),
            group,
            text,
            lambda: piece.copy_(whole.narrow(0, start, piece.numel())),
        )
    return Handle(partial(_reduce_scatter, group=group, async_op=True), (piece, whole), group, text)


def bits(tensor: Tensor) -> Tensor:
    """The tensor as a backend can carry it: complex numbers as pairs, booleans as bytes."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
