"""What a unit's storage weighs and when, told without a process: the ghost of units.py and reductions.py, step by step and to the byte.

    ghosts = UnitBytes.of(units, shapes, ranks=64, rank=0)       # unit number -> UnitBytes
    sum(ghost.persistent() for ghost in ghosts.values())
    ghosts[3].events("GATHER")                                   # [("make", "3 whole layers.3.weight", 4096), …]

Keys name storages and are unique over all units, because the events of one unit may drop storages of another: a gradient that arrives awaits the
scatters under way, and only then their whole gradients go. A gradient belongs to the caller until "ACCUMULATE:<name>:first" makes it the unit's:
nothing is allocated then, so the caller's claim on that storage should end before the event is applied; a ":next" gradient is the caller's to drop.
The results of a step, `.grad`, stay until someone drops them. Instances remember where in a step they are: make new ones for every simulated step.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import torch

from partitioner.errors import ProgramError
from partitioner.runtime.program import Unit
from partitioner.runtime.shards import Layout, Piece, Shapes, Shared, Together, lay_out, local_shape

Event = tuple[str, str, int]
"""("make" | "drop", key, bytes)"""


@dataclass
class Flight:
    """Reductions under way, over all units: the storages that go when scatters, or sums, are awaited. made: how many keys there are."""

    scatters: list[Event] = field(default_factory=list)
    sums: list[Event] = field(default_factory=list)
    made: int = 0

    def land(self) -> list[Event]:
        """Await the scatters."""
        drops, self.scatters = self.scatters, []
        return drops

    def end(self) -> list[Event]:
        """Await everything."""
        drops, self.sums = self.land() + self.sums, []
        return drops


class UnitBytes:
    """One unit's bytes. Padding makes them the same on every rank; only `local_shapes` depends on `rank`."""

    def __init__(self, unit: Unit, shapes: Shapes, ranks: int, rank: int, flight: Flight | None = None) -> None:
        self.unit = unit
        self.ranks = ranks
        self.rank = rank
        self.layout: Layout = lay_out(unit, shapes, ranks)
        self._flight = flight or Flight()
        self._gathered = False
        self._arrived: dict[str, str] = {}  # parameter -> key of its whole gradient
        self._results: set[str] = set()

    @classmethod
    def of(cls, units: Sequence[Unit], shapes: Shapes, ranks: int, rank: int) -> "dict[int, UnitBytes]":
        """The bytes of all units of a program, which await each other's scatters."""
        flight = Flight()
        return {unit.number: cls(unit, shapes, ranks, rank, flight) for unit in units}

    def following(self) -> "UnitBytes":
        """The same unit for the next batch, which begins while this one's gradients are not complete; what persists is not counted again."""
        other = copy(self)
        other._arrived, other._results = {}, set()
        return other

    def persistent(self) -> int:
        """Bytes between steps, without gradients and optimizer state."""
        whole = sum(_bytes(piece, piece.numel) for piece in self.layout.plain)
        if self.unit.shard == "zero3":
            together = self.layout.gathered
            pieces = sum(_bytes(piece, piece.size) for piece in together.alone)
            return whole + pieces + sum(shared.segment * shared.dtype.itemsize for shared in together.shared)
        return whole + sum(count for _, _, count in self._wholes())

    def gradient_bytes(self) -> int:
        """Bytes of `.grad` after a step in which every trainable parameter got one."""
        return sum(count for _, count in self._result_sizes(self.layout.scattered) + self._result_sizes(self.layout.summed))

    def local_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of what an optimizer steps on, on this rank."""
        return list(self.local_pieces().values())

    def local_pieces(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The same by parameter."""
        result: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for piece in self.layout.pieces.values():
            if piece.trainable:
                plain = any(piece.name == other.name for other in self.layout.plain)
                result[piece.name] = piece.shape if plain else local_shape(piece.shape, self.ranks, self.rank), piece.dtype
        return result

    def events(self, op: str) -> list[Event]:
        """What the store allocates and frees at REFRESH, GATHER, FREE, ACCUMULATE:<name>:first, …:next, REDUCE, REDUCE:last, TIE or FINISH."""
        if op.startswith("ACCUMULATE:"):
            name, _, turn = op.removeprefix("ACCUMULATE:").rpartition(":")
            return self._accumulate(name, turn)
        match op:
            case "REFRESH":
                return []  # in place
            case "GATHER":
                if self.unit.shard != "zero3" or self._gathered:
                    return []
                self._gathered = True
                return self._wholes()
            case "FREE":
                if not self._gathered:
                    return []
                self._gathered = False
                return [("drop", key, count) for _, key, count in self._wholes()]
            case "REDUCE" | "REDUCE:last":
                return self._reduce()
            case "TIE":
                return [*self._flight.end(), *self._tie()]
            case "FINISH":
                self._arrived.clear()
                self._results.clear()
                return self._flight.end()
        raise ProgramError(f"{op!r} is nothing that happens to a unit")

    def _accumulate(self, name: str, turn: str) -> list[Event]:
        if name not in self.layout.pieces or turn not in ("first", "next"):
            raise ProgramError(f"a gradient {turn!r} of {name!r} cannot arrive at unit {self.unit.number} of {list(self.layout.pieces)[:3]} …")
        landed = self._flight.land()
        if name in self._arrived:
            return landed
        self._arrived[name] = f"{self.unit.number} gradient {name} {self._next()}"
        return [("make", self._arrived[name], _bytes(self.layout.pieces[name], self.layout.pieces[name].numel)), *landed]

    def _reduce(self) -> list[Event]:
        events: list[Event] = []
        layout, arrived = self.layout, self._arrived
        self._arrived = {}
        for piece in layout.summed.alone:
            if piece.name in arrived:
                events += self._result(piece.name, _bytes(piece, piece.numel), kept=arrived[piece.name])
        for index, shared in enumerate(layout.summed.shared):
            if members := [piece for piece in shared.pieces if piece.name in arrived]:
                count = shared.segment * shared.dtype.itemsize
                key = f"{self.unit.number} sum {index} {self._next()}"
                events += [("make", key, count), *_give_up(members, arrived), *self._result(f"summed {index}", count, kept=key)]
        if any(piece.name in arrived for piece in _members(layout.scattered)):
            events += self._flight.land()
        for piece in layout.scattered.alone:
            if piece.name in arrived:
                key, whole = arrived[piece.name], _bytes(piece, self.ranks * piece.size)
                if self.ranks * piece.size != piece.numel:
                    key = f"{self.unit.number} padded {piece.name} {self._next()}"
                    events += [("make", key, whole), *_give_up([piece], arrived)]
                events += self._scatter(piece.name, _bytes(piece, piece.size), ("drop", key, whole))
        for index, shared in enumerate(layout.scattered.shared):
            if members := [piece for piece in shared.pieces if piece.name in arrived]:
                key, whole = f"{self.unit.number} joined gradients {index} {self._next()}", self.ranks * shared.segment * shared.dtype.itemsize
                events += [("make", key, whole), *_give_up(members, arrived)]
                events += self._scatter(f"scattered {index}", shared.segment * shared.dtype.itemsize, ("drop", key, whole))
        return events

    def _tie(self) -> list[Event]:
        """Zeros where this stage has no gradient of its own."""
        events: list[Event] = []
        for together, cut in ((self.layout.scattered, True), (self.layout.summed, False)):
            sizes = [(piece.name, _bytes(piece, piece.size)) for piece in together.alone]
            sizes += [(f"{'scattered' if cut else 'summed'} {index}", _segment(shared)) for index, shared in enumerate(together.shared)]
            for what, count in sizes:
                if what not in self._results:
                    self._results.add(what)
                    events.append(("make", f"{self.unit.number} tied {what} {self._next()}", count))
        return events

    def _scatter(self, what: str, count: int, whole: Event) -> list[Event]:
        """Make the scattered piece; when it is awaited the whole goes, and the piece too if it is added to an earlier one."""
        key = f"{self.unit.number} piece {what} {self._next()}"
        self._flight.scatters.append(whole)
        if what in self._results:
            self._flight.scatters.append(("drop", key, count))
        self._results.add(what)
        return [("make", key, count)]

    def _result(self, what: str, count: int, kept: str) -> list[Event]:
        """A sum in place becomes the result, or is added to an earlier one: at FINISH, or at once where one rank has nothing to await."""
        added = [("drop", kept, count)] if what in self._results else []
        self._results.add(what)
        if self.ranks == 1:
            return added
        self._flight.sums += added
        return []

    def _wholes(self) -> list[Event]:
        number, ranks = self.unit.number, self.ranks
        events: list[Event] = [("make", f"{number} whole {piece.name}", _bytes(piece, ranks * piece.size)) for piece in self.layout.gathered.alone]
        for index, shared in enumerate(self.layout.gathered.shared):
            events.append(("make", f"{number} joined {index}", ranks * shared.segment * shared.dtype.itemsize))
            events.append(("make", f"{number} wholes {index}", shared.wholes * shared.dtype.itemsize))
        return events

    def _result_sizes(self, together: Together) -> list[tuple[str, int]]:
        sizes = [(piece.name, _bytes(piece, piece.size)) for piece in together.alone]
        return sizes + [(f"shared {index}", _segment(shared)) for index, shared in enumerate(together.shared)]

    def _next(self) -> int:
        self._flight.made += 1
        return self._flight.made


def _give_up(pieces: Sequence[Piece], keys: dict[str, str]) -> list[Event]:
    return [("drop", keys[piece.name], _bytes(piece, piece.numel)) for piece in pieces]


def _bytes(piece: Piece, elements: int) -> int:
    return elements * piece.dtype.itemsize


def _segment(shared: Shared) -> int:
    return shared.segment * shared.dtype.itemsize


def _members(together: Together) -> list[Piece]:
    return [*together.alone, *(piece for shared in together.shared for piece in shared.pieces)]
