"""How the parameters of a unit lie in memory: arithmetic alone, shared by the store that allocates and the bytes that predict it.

A parameter of n rows (its dim 0) over r ranks is cut as torch.chunk cuts: chunk = ceil(n / r) rows each, the last ranks fewer or none.

    rank 0 | rank 1 | rank 2 | rank 3          5 rows over 4 ranks: 2, 2, 1, 0
    a a b b   c c . .   . . . .   …            joined pieces of equal size are the whole parameter, with all the padding at the end

So a gather of equal pieces writes the whole parameter in place, evenly cut or not, and nothing is copied out. Parameters of at most SMALL_BYTES
would pay more for the latency of a collective of their own than for two copies: those of one dtype share one.

    segment of rank 0          segment of rank 1
    | bias | norm |            | bias | norm |       joined [ranks, segment] -> copied out into wholes: | bias bias | norm norm |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partitioner.errors import ProgramError
from partitioner.runtime.program import Unit

SMALL_BYTES = 1 << 16
"""Measured with gloo on loopback: a collective costs about as much as copying 0.3 MB; NCCL's launch is cheaper and its copies are too."""

ALIGN = 16
"""Elements to which members of a shared buffer are aligned, so that vectorised kernels take them as they take tensors of their own."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]
"""Parameter name -> (shape, dtype, trainable)."""


def chunk_rows(rows: int, ranks: int) -> int:
    """Rows of a full piece."""
    return -(-rows // ranks)


def local_rows(rows: int, ranks: int, rank: int) -> int:
    """Rows that `rank` holds."""
    chunk = chunk_rows(rows, ranks)
    return min(chunk, max(0, rows - rank * chunk))


def local_shape(shape: Sequence[int], ranks: int, rank: int) -> tuple[int, ...]:
    """Shape of this rank's shard of a parameter; a parameter without rows to cut stays whole."""
    if ranks == 1 or not is_cut(shape):
        return tuple(shape)
    return (local_rows(shape[0], ranks, rank), *shape[1:])


def is_cut(shape: Sequence[int]) -> bool:
    """Whether a parameter has rows to cut: 0-dim and empty ones stay whole on every rank."""
    return prod(shape) > 0 and len(shape) > 0


def align(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


@dataclass(frozen=True)
class Piece:
    """One parameter. `size`: elements of a rank's piece, padding included (of a parameter that is not cut: all).

    For one that shares a buffer: `offset`, where it starts in its rank's segment, and `whole_offset`, where it starts among the wholes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    size: int
    offset: int = 0
    whole_offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one row."""
        return prod(self.shape[1:])


@dataclass(frozen=True)
class Shared:
    """Small parameters of one dtype that communicate together: `segment` elements of a rank, `wholes` elements of all whole ones."""

    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    segment: int
    wholes: int


@dataclass(frozen=True)
class Together:
    """Parameters that take part in one kind of communication of a unit: large ones alone, small ones in shared buffers."""

    alone: tuple[Piece, ...] = ()
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A unit's parameters by what happens to them. `pieces` lists all; a piece in `gathered` and `scattered` has the offsets of that use.

    plain: whole on every rank, not cut; in zero1 and zero2 the frozen ones too, which have no gradient and no optimizer state to cut.
    gathered: refreshed or gathered. scattered: gradients reduce-scattered. summed: gradients all-reduced (or on one rank, taken as they are).
    """

    unit: Unit
    ranks: int
    pieces: dict[str, Piece]
    plain: tuple[Piece, ...]
    gathered: Together
    scattered: Together
    summed: Together


def _together(pieces: Iterable[Piece], ranks: int) -> Together:
    """Let small parameters of one dtype share buffers, two at least."""
    alone: list[Piece] = []
    small: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        if piece.numel * piece.dtype.itemsize <= SMALL_BYTES and ranks > 1:
            small.setdefault(piece.dtype, []).append(piece)
        else:
            alone.append(piece)
    shared = []
    for dtype, members in small.items():
        if len(members) == 1:
            alone += members
            continue
        placed, offset, whole = [], 0, 0
        for piece in members:
            placed.append(Piece(piece.name, piece.shape, dtype, piece.trainable, piece.size, offset, whole))
            offset += align(piece.size)
            whole += align(piece.size * ranks)
        shared.append(Shared(dtype, tuple(placed), offset, whole))
    return Together(tuple(alone), tuple(shared))


def lay_out(unit: Unit, shapes: Shapes, ranks: int) -> Layout:
    """The layout of `unit` over `ranks`. Raises ProgramError for a parameter that `shapes` does not have."""
    pieces: dict[str, Piece] = {}
    plain: list[Piece] = []
    cut: list[Piece] = []
    for name in unit.parameters:
        if name not in shapes:
            raise ProgramError(f"unit {unit.number} holds parameter {name!r}, which the model does not have; the program belongs to another model")
        shape, dtype, trainable = shapes[name]
        whole = ranks == 1 or unit.shard == "none" or not is_cut(shape) or (unit.shard != "zero3" and not trainable)
        size = prod(shape) if whole else chunk_rows(shape[0], ranks) * prod(shape[1:])
        pieces[name] = Piece(name, tuple(shape), dtype, trainable, size)
        (plain if whole else cut).append(pieces[name])
    return Layout(
        unit,
        ranks,
        pieces,
        tuple(plain),
        _together(cut, ranks),
        _together((piece for piece in cut if piece.trainable), ranks),
        _together((piece for piece in plain if piece.trainable), ranks),
    )


def local(tensor: Tensor) -> Tensor:
    """The tensor that this rank really holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
