"""The parameters of one unit on one rank: where their bytes lie, and how whole ones are made from the ranks' pieces.

    zero1, zero2   wholes and joined buffers persist; a piece is a view of this rank's place in them, so a refresh gathers in place
    zero3          pieces persist; `gather` makes wholes and joined buffers, `free` drops them

Which parameters are gathered alone and which share a buffer is the layout's business (see shards.py).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.errors import ProgramError
from partitioner.runtime.shards import Layout, Piece, local_shape
from partitioner.runtime.wire import Handle, all_gather


class UnitBuffers:
    """Buffers of one unit whose parameters are cut over the ranks.

    pieces[name]: this rank's piece, 1-d [piece.size] with its padding; wholes[name]: the whole parameter in its shape, where it is there.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        self.group = group
        self.persists = layout.unit.shard != "zero3"
        self.pieces: dict[str, Tensor] = {}
        self.wholes: dict[str, Tensor] = {}
        self.stale = False
        self.gathered = self.persists
        self._handles: list[Handle] = []
        self._segments: list[Tensor] = []
        self._alone: dict[str, Tensor] = {}
        self._joined: list[Tensor] = []
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []
        self._allocate()

    def put(self, name: str, value: Tensor) -> None:
        """Take over the values of a whole parameter, the same on every rank."""
        self.wait()
        if name in self.wholes:
            self.wholes[name].copy_(value)
        shape = local_shape(value.shape, self.layout.ranks, self.rank)
        mine = self.local(name)
        if mine.numel():
            start = self.rank * (self.layout.pieces[name].size // self.layout.pieces[name].row)
            mine.copy_(value.narrow(0, start, shape[0]))

    def local(self, name: str) -> Tensor:
        """This rank's rows of a parameter, [local rows, …], a view of its piece."""
        piece = self.layout.pieces[name]
        shape = local_shape(piece.shape, self.layout.ranks, self.rank)
        return self.pieces[name].narrow(0, 0, shape[0] * piece.row).view(shape)

    def refresh(self) -> None:
        """Issue the all-gather of what the optimizer changed; nothing to do where nothing did."""
        if self.persists and self.stale:
            self.wait()
            self._issue()
            self.stale = False

    def gather(self) -> None:
        """Issue the all-gather of the pieces; nothing to do where the wholes are there."""
        if not self.gathered:
            self._make_wholes()
            self._issue()
            self.gathered = True

    def free(self) -> None:
        """Drop what `gather` made."""
        if self.persists or not self.gathered:
            return
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        self._copies.clear()
        self._joined.clear()
        self._alone.clear()
        self.wholes.clear()
        self.gathered = False

    def whole(self, name: str) -> Tensor:
        """The whole parameter; awaits a gather or refresh under way."""
        unit = self.layout.unit
        if not self.gathered:
            raise ProgramError(
                f"parameter {name!r} of unit {unit.number} is read but not gathered: the program needs GATHER unit {unit.number} before this read, "
                f"and no FREE unit {unit.number} between them"
            )
        if self.stale:
            raise ProgramError(
                f"parameter {name!r} of unit {unit.number} is read after optimizer.step changed it, but not refreshed: the program needs "
                f"REFRESH unit {unit.number} before this read"
            )
        if self._handles:
            self.wait()
        return self.wholes[name]

    def wait(self) -> None:
        """Await what is under way and copy shared buffers out."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        for wholes, joined in self._copies:
            torch._foreach_copy_(wholes, joined)

    def _allocate(self) -> None:
        layout = self.layout
        if self.persists:
            self._make_wholes()
            for piece in layout.gathered.alone:
                self.pieces[piece.name] = self._alone[piece.name].narrow(0, self.rank * piece.size, piece.size)
            self._segments = [
                joined.narrow(0, self.rank * shared.segment, shared.segment)
                for shared, joined in zip(layout.gathered.shared, self._joined, strict=True)
            ]
        else:
            for piece in layout.gathered.alone:
                self.pieces[piece.name] = torch.zeros(piece.size, dtype=piece.dtype, device=self.device)
            self._segments = [torch.zeros(shared.segment, dtype=shared.dtype, device=self.device) for shared in layout.gathered.shared]
        for shared, segment in zip(layout.gathered.shared, self._segments, strict=True):
            for piece in shared.pieces:
                self.pieces[piece.name] = segment.narrow(0, piece.offset, piece.size)

    def _make_wholes(self) -> None:
        # Zeros where they persist, so that padding is never read uninitialised; what a gather writes needs no filling.
        make, ranks = torch.zeros if self.persists else torch.empty, self.layout.ranks
        for piece in self.layout.gathered.alone:
            self._alone[piece.name] = make(ranks * piece.size, dtype=piece.dtype, device=self.device)
            self.wholes[piece.name] = self._alone[piece.name].narrow(0, 0, piece.numel).view(piece.shape)
        for shared in self.layout.gathered.shared:
            joined = make(ranks * shared.segment, dtype=shared.dtype, device=self.device)
            wholes = make(shared.wholes, dtype=shared.dtype, device=self.device)
            rows = joined.view(ranks, shared.segment)
            outs, parts = [], []
            for piece in shared.pieces:
                out = wholes.narrow(0, piece.whole_offset, ranks * piece.size)
                self.wholes[piece.name] = out.narrow(0, 0, piece.numel).view(piece.shape)
                outs.append(out.view(ranks, piece.size))
                parts.append(rows.narrow(1, piece.offset, piece.size))
            self._joined.append(joined)
            self._copies.append((outs, parts))

    def _issue(self) -> None:
        text = f"the parameters of unit {self.layout.unit.number}"
        for piece in self.layout.gathered.alone:
            self._handles.append(all_gather(self._alone[piece.name], self.pieces[piece.name], self.group, text))
        for joined, segment in zip(self._joined, self._segments, strict=True):
            self._handles.append(all_gather(joined, segment, self.group, text))


def join(piece: Piece, mine: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """A whole parameter, with storage of its own and no padding, from the ranks' pieces [piece.size]; every rank calls it."""
    whole = mine.new_empty(ranks * piece.size)
    all_gather(whole, mine, group, f"parameter {piece.name!r}").wait()
    result = whole.narrow(0, 0, piece.numel).view(piece.shape)
    return result if whole.numel() == piece.numel else result.clone()
