"""Gradients on their way from a block's backward to the user's `.grad`.

    accumulate     whole gradients of a unit, summed over micro-batches as they come
    reduce         takes them: sums over the ranks, all-reduce (plain parameters) or reduce-scatter (cut ones), issued and not awaited
    tie            sums what a unit's reductions gave over other stages that hold the parameter
    finish         awaits all; hands over what each parameter got

A reduce-scatter keeps whole gradients alive until it is done. So that they do not pile up over the units, a `reduce` that scatters first awaits the
scatters before it: at most one unit's are under way, while the next unit's backward computes.

    backward 3 | REDUCE 3 ──────┐        | backward 1
               | backward 2 ────┴ awaited by REDUCE 2
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.errors import ProgramError
from partitioner.runtime.shards import Layout, Piece, Shared, local_shape
from partitioner.runtime.wire import Handle, all_reduce, reduce_scatter


@dataclass
class Pending:
    """A reduction under way: its result is added to `results[key]` once it is there."""

    handle: Handle
    key: str
    result: Tensor
    results: dict[str, Tensor]


class Reducer:
    """Gradients of all units of one rank. Results are keyed by parameter, or by shared buffer.

    scattering: the reduce-scatters under way, which reducers of several batches have in common.
    """

    def __init__(self, layouts: dict[int, Layout], rank: int, group: dist.ProcessGroup | None, scattering: list[Pending] | None = None) -> None:
        self.layouts = layouts
        self.rank = rank
        self.group = group
        self.gradients: dict[str, Tensor] = {}
        self._results: dict[str, Tensor] = {}
        self._arrived: set[str] = set()
        self._scattering: list[Pending] = [] if scattering is None else scattering
        self._summing: list[Pending] = []
        self._tying: list[Handle] = []

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add a whole gradient. The first one of a parameter is kept as it is, so it must own its storage.

        Scatters under way are awaited: they had the time of a block's backward, and hold whole gradients until then.
        """
        self._settle(self._scattering)
        if name in self.gradients:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name] = gradient.contiguous()

    def reduce(self, number: int) -> None:
        """Sum what a unit has accumulated; every rank calls it with gradients of the same parameters."""
        layout = self.layouts[number]
        arrived = {name for name in layout.pieces if name in self.gradients}
        if not arrived:
            return
        self._arrived |= arrived
        text = f"the gradients of unit {number}"
        if any(piece.name in arrived for piece in layout.plain):
            self._sum(layout, arrived, text)
        if any(piece.name in arrived for group in (layout.scattered.alone, *(s.pieces for s in layout.scattered.shared)) for piece in group):
            self._scatter(layout, arrived, text)

    def tie(self, number: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Sum a unit's gradient over the stages of `group`; zeros stand for one that this stage has not. The unit is one trainable parameter."""
        self._settle(self._scattering)
        self._settle(self._summing)
        layout = self.layouts[number]
        for together in (layout.scattered, layout.summed):
            keys = [(piece.name, piece.size, piece.dtype) for piece in together.alone]
            keys += [
                (_key(layout, together is layout.scattered, index), shared.segment, shared.dtype) for index, shared in enumerate(together.shared)
            ]
            for key, size, dtype in keys:
                if key not in self._results:
                    self._results[key] = torch.zeros(size, dtype=dtype, device=device)
                self._arrived.update(layout.pieces)
                self._tying.append(all_reduce(self._results[key], group, f"the gradients of unit {number} over the stages"))

    def finish(self) -> dict[str, Tensor]:
        """Await everything; parameter name -> its gradient: this rank's rows of a cut parameter, whole of a plain one."""
        self._settle(self._scattering)
        self._settle(self._summing)
        while self._tying:
            self._tying.pop(0).wait()
        if self.gradients:
            names = ", ".join(repr(name) for name in list(self.gradients)[:3])
            self.gradients.clear()
            raise ProgramError(f"gradients of {names} were accumulated after the last REDUCE of their unit; the program must reduce them")
        found = {}
        for layout in self.layouts.values():
            for together, view in ((layout.scattered, self._local), (layout.summed, _whole)):
                for piece in together.alone:
                    if piece.name in self._arrived:
                        found[piece.name] = view(piece, self._results[piece.name])
                for index, shared in enumerate(together.shared):
                    key = _key(layout, together is layout.scattered, index)
                    for piece in shared.pieces:
                        if piece.name in self._arrived:
                            found[piece.name] = view(piece, self._results[key].narrow(0, piece.offset, piece.size))
        self._results.clear()
        self._arrived.clear()
        return found

    def _local(self, piece: Piece, result: Tensor) -> Tensor:
        shape = local_shape(piece.shape, self._ranks, self.rank)
        return result.narrow(0, 0, shape[0] * piece.row).view(shape)

    @property
    def _ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def _sum(self, layout: Layout, arrived: set[str], text: str) -> None:
        for piece in layout.summed.alone:
            if piece.name in arrived:
                gradient = self.gradients.pop(piece.name)
                if self.group is None:
                    _add(self._results, piece.name, gradient)
                else:
                    self._summing.append(Pending(all_reduce(gradient, self.group, text), piece.name, gradient, self._results))
        for index, shared in enumerate(layout.summed.shared):
            if self.group is not None and any(piece.name in arrived for piece in shared.pieces):
                buffer = self._fill(shared, 1, shared.segment, _copy)
                self._summing.append(Pending(all_reduce(buffer, self.group, text), _key(layout, False, index), buffer, self._results))

    def _scatter(self, layout: Layout, arrived: set[str], text: str) -> None:
        assert self.group is not None
        self._settle(self._scattering)
        ranks = layout.ranks
        for piece in layout.scattered.alone:
            if piece.name in arrived:
                whole = _padded(self.gradients.pop(piece.name).view(-1), ranks * piece.size)
                mine = whole.new_empty(piece.size)
                self._scattering.append(Pending(reduce_scatter(mine, whole, self.group, text), piece.name, mine, self._results))
                del whole
        for index, shared in enumerate(layout.scattered.shared):
            if any(piece.name in arrived for piece in shared.pieces):
                buffer = self._fill(shared, ranks, ranks * shared.segment, _cut)
                mine = buffer.new_empty(shared.segment)
                handle = reduce_scatter(mine, buffer, self.group, text)
                self._scattering.append(Pending(handle, _key(layout, True, index), mine, self._results))
                del buffer

    def _fill(self, shared: Shared, ranks: int, elements: int, put: Callable[[Piece, Tensor, Tensor], object]) -> Tensor:
        """Copy small gradients into one buffer and give them up; zeros stand for a gradient that did not come, and for padding."""
        device = next(self.gradients[piece.name].device for piece in shared.pieces if piece.name in self.gradients)
        buffer = torch.zeros(elements, dtype=shared.dtype, device=device)
        rows = buffer.view(ranks, shared.segment)
        for piece in shared.pieces:
            gradient = self.gradients.pop(piece.name, None)
            if gradient is not None:
                put(piece, gradient, rows)
        return buffer

    def _settle(self, pending: list[Pending]) -> None:
        while pending:
            item = pending.pop(0)
            item.handle.wait()
            _add(item.results, item.key, item.result)


def _add(results: dict[str, Tensor], key: str, result: Tensor) -> None:
    if key in results:
        results[key].add_(result)
    else:
        results[key] = result


def _key(layout: Layout, scattered: bool, index: int) -> str:
    return f"{layout.unit.number} {'scattered' if scattered else 'summed'} {index}"


def _whole(piece: Piece, result: Tensor) -> Tensor:
    return result.view(piece.shape)


def _padded(gradient: Tensor, elements: int) -> Tensor:
    """The flat gradient, followed by zeros up to `elements`; itself where it is as long."""
    if gradient.numel() == elements:
        return gradient
    whole = gradient.new_empty(elements)
    whole.narrow(0, 0, gradient.numel()).copy_(gradient)
    whole.narrow(0, gradient.numel(), elements - gradient.numel()).zero_()
    return whole


def _copy(piece: Piece, gradient: Tensor, rows: Tensor) -> None:
    """Write a whole gradient into its place."""
    rows[0].narrow(0, piece.offset, piece.size).copy_(gradient.view(-1))


def _cut(piece: Piece, gradient: Tensor, rows: Tensor) -> None:
    """Write each rank's rows of a gradient into that rank's segment."""
    flat = gradient.view(-1)
    full, rest = divmod(flat.numel(), piece.size)
    slot = rows.narrow(1, piece.offset, piece.size)
    slot[:full].copy_(flat[: full * piece.size].view(full, piece.size))
    if rest:
        slot[full, :rest].copy_(flat[full * piece.size :])
