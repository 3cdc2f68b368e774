"""The exact Pareto frontier of what a block saves for its backward: bytes held against seconds of recomputation.

Values v with inputs I(v), seconds c_v and storage k(v); storages k of b_k bytes (remat_problem.py). What is free is left out below. Decide

    x_k in {0, 1}   storage k is saved
    r_v in [0, 1]   value v is recomputed in backward
    f_v in [0, 1]   late value v (only backward's formulas use it) is made in forward, because it or something made from it is saved

    minimise    sum_v c_v r_v + sum_{v late} c_v (f_v - 1)                                              (_seconds)
    subject to  x_k(v) + r_v >= 1                for every v that backward reads                         (_add_needed)
                x_k(u) + r_u >= r_v              for every v and u in I(v)                               (_add_recomputing)
                r_v = 0                          where v cannot be recomputed, x_k(v) = 0 where v has no storage (_add_variables)
                f_v >= x_k(v), f_u >= f_v        for late v and late u in I(v)                           (_add_late)
                sum_k b_k x_k <= bytes                                                                   (_at_most)

With x given, r and f are least solutions of difference constraints, hence whole numbers: only x needs branching. Where a late v matters at all
f_v + r_v >= 1 (it is made at least once, in forward or in backward), so the objective counts what is computed more often than once.

A point of the frontier for at most B bytes: minimise the seconds under sum_k b_k x_k <= B, then the bytes among those (`_Search.point`). The
frontier is found from its two ends inwards. Two neighbouring points enclose a box of (bytes, seconds) in which every missing point lies; the
query B = (bytes of the right end) - 1 either finds the right end's neighbour or proves the box empty. With a limit the largest box is halved in
bytes first, so the points spread evenly; each is on the exact frontier all the same (box method of Hamacher, Pedersen and Ruzika, 2007).

Seconds are rounded to whole ticks, a power of two of at most 1e-8 of what recomputing everything takes; bytes are exact integers.
"""

import math
from dataclasses import dataclass

from partitioner.passes.integer_program import IntegerProgram
from partitioner.passes.remat_encode import encode
from partitioner.passes.remat_presolve import reduce
from partitioner.passes.remat_problem import Point, RematProblem, Value, price

__all__ = ["Point", "RematProblem", "Value", "encode", "frontier", "price"]

TICKS = 10**8  # at least so many, and fewer than twice as many, in the sum of all seconds
SIZE = 1e4  # what totals are scaled to


def frontier(problem: RematProblem, limit: int | None = None) -> tuple[Point, ...]:
    """All Pareto-optimal points by ascending saved bytes: from whole-block checkpoint to no recomputation.

    With `limit` (2 or more) at most that many of them, both ends included, spread by halving the largest gap; each is still optimal.
    Raises ValueError where backward needs a value that can be neither saved nor recomputed.
    """
    if limit is not None and limit < 2:
        raise ValueError(f"limit is {limit}, but a frontier has two ends; give 2 or more, or None for every point")
    search = _Search(problem)
    right = search.point(None)
    left = search.least_bytes()
    found = {end.bytes: end for end in (left, right)}
    boxes = [_Box(left, right, halve=limit is not None)]
    while boxes and (limit is None or len(found) < limit):
        boxes.sort(key=lambda box: (box.area(left, right), box.right.bytes))
        box = boxes.pop()
        if box.right.bytes - box.above <= 1 or box.left.ticks - box.right.ticks <= 1:
            continue
        query = (box.above + box.right.bytes) // 2 if box.halve else box.right.bytes - 1
        new = search.point(query)
        if new.bytes > box.above and new.ticks < box.left.ticks:
            found[new.bytes] = new
            boxes.append(_Box(box.left, new, halve=box.halve, above=box.above))
            boxes.append(_Box(new, box.right, halve=box.halve, above=query))
        elif box.halve:
            boxes.append(_Box(box.left, box.right, halve=False, above=query))
    return _strictly_better([found[size].point for size in sorted(found)])


def _strictly_better(points: list[Point]) -> tuple[Point, ...]:
    """Without points that were faster by rounding to ticks alone."""
    kept: list[Point] = []
    for point in points:
        if not kept or point.recompute_seconds < kept[-1].recompute_seconds:
            kept.append(point)
    return tuple(kept)


def _tick(total: float) -> float:
    """The tick for a sum of seconds: a power of two, so that seconds that are whole numbers stay exact."""
    return 2.0 ** math.floor(math.log2(total / TICKS)) if total > 0 else 1.0


@dataclass(frozen=True)
class _Found:
    """A point with its exact coordinates, the ticks up to the constant of `_seconds`."""

    point: Point
    bytes: int
    ticks: int


class _Box:
    """Between two neighbours: missing points have more than `above` bytes, fewer than the right end's, and ticks strictly between the ends'."""

    def __init__(self, left: _Found, right: _Found, *, halve: bool, above: int | None = None) -> None:
        self.left, self.right, self.halve = left, right, halve
        self.above = left.bytes if above is None else above

    def area(self, first: _Found, last: _Found) -> float:
        wide = (self.right.bytes - self.above) / max(1, last.bytes - first.bytes)
        return wide * (self.left.ticks - self.right.ticks) / max(1, first.ticks - last.ticks)


class _Search:
    """The programme above over the reduced problem, and its queries."""

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        reduced = reduce(problem)
        self._items, self._needed = reduced.items, reduced.needed
        tick = _tick(sum(item.seconds for item in self._items.values()))
        self._ticks = {name: round(item.seconds / tick) for name, item in self._items.items()}
        self._late_ticks = {name: round(item.late_seconds / tick) for name, item in self._items.items()}
        self._per_tick = SIZE / max(1, sum(self._ticks.values()))
        storages = dict.fromkeys(item.storage for item in self._items.values() if item.storage is not None)
        self._bytes = {storage: problem.storage_bytes[storage] for storage in storages}
        self._per_byte = SIZE / max(1, sum(self._bytes.values()))
        self._program = IntegerProgram()
        self._add_variables()
        self._add_needed()
        self._add_recomputing()
        self._add_late()
        self._objective = self._seconds()
        self._size = {x: self._bytes[storage] * self._per_byte for storage, x in self._saved.items()}
        self._size_row = self._program.row(self._size)
        self._seconds_row = self._program.row(self._objective)

    def point(self, at_most: int | None) -> _Found:
        """The fewest ticks within `at_most` bytes (None: any), and the fewest bytes for these ticks."""
        first = self._at_most(at_most, None, self._objective)
        if first is None:
            raise ValueError(self._why_not())
        return self._at_most(at_most, first.ticks, self._size) or first

    def least_bytes(self) -> _Found:
        """The fewest bytes, and the fewest ticks for these bytes."""
        first = self._at_most(None, None, self._size)
        if first is None:
            raise ValueError(self._why_not())
        return self._at_most(first.bytes, None, self._objective) or first

    def _at_most(self, size: int | None, ticks: int | None, objective: dict[int, float]) -> _Found | None:
        """One query, None if it has no answer; a quarter byte or tick of slack on whole numbers admits nothing more and keeps clear of rounding."""
        asked = size
        if ticks is not None:
            self._program.bound_row(self._seconds_row, upper=(ticks + 0.25) * self._per_tick)
        else:
            self._program.bound_row(self._seconds_row)
        while True:
            if asked is not None:
                self._program.bound_row(self._size_row, upper=(asked + 0.25) * self._per_byte)
            else:
                self._program.bound_row(self._size_row)
            values = self._program.minimise(objective).values
            if values is None:
                return None
            found = self._decode({storage for storage, x in self._saved.items() if values[x] > 0.5})
            if size is None or asked is None or found.bytes <= size:
                return found
            asked -= max(1, found.bytes - size)

    def _decode(self, storages: set[str]) -> _Found:
        """Whole numbers again: what is reached from backward, its bytes and its ticks."""
        wanted, starts, again, early = set(self._needed), set[str](), set[str](), set[str]()
        for item in reversed(self._items.values()):
            if item.name not in wanted:
                continue
            if item.storage in storages:
                starts.add(item.name)
            else:
                again.add(item.name)
                wanted.update(item.inputs)
        kept = {storage for name in starts if (storage := self._items[name].storage) is not None}
        for item in reversed(self._items.values()):
            if item.late and (item.name in early or item.name in starts):
                early.add(item.name)
                early.update(name for name in item.inputs if self._items[name].late)
        ticks = sum(self._ticks[name] for name in again) + sum(self._late_ticks[name] for name in early)
        return _Found(price(self._problem, starts), sum(self._bytes[storage] for storage in kept), ticks)

    def _add_variables(self) -> None:
        self._saved = {storage: self._program.binary() for storage in self._bytes}
        self._again = {name: self._program.variable(0.0, float(item.recomputable)) for name, item in self._items.items()}
        self._early = {name: self._program.variable(0.0, 1.0) for name, item in self._items.items() if item.late}

    def _available(self, name: str) -> dict[int, float]:
        storage = self._items[name].storage
        row = {self._again[name]: 1.0}
        if storage is not None:
            row[self._saved[storage]] = 1.0
        return row

    def _add_needed(self) -> None:
        for name in sorted(self._needed):
            self._program.row(self._available(name), lower=1.0)

    def _add_recomputing(self) -> None:
        for name, item in self._items.items():
            for source in sorted(item.inputs) if item.recomputable else ():
                row = self._available(source)
                row[self._again[name]] = -1.0
                self._program.row(row, lower=0.0)

    def _add_late(self) -> None:
        for name, early in self._early.items():
            item = self._items[name]
            if item.storage is not None:
                self._program.row({early: 1.0, self._saved[item.storage]: -1.0}, lower=0.0)
            for source in sorted(item.inputs & self._early.keys()):
                self._program.row({self._early[source]: 1.0, early: -1.0}, lower=0.0)

    def _seconds(self) -> dict[int, float]:
        """The objective over r and f, scaled; it lacks the constant, the late work that is done once whatever is saved."""
        objective = {self._again[name]: ticks * self._per_tick for name, ticks in self._ticks.items()}
        objective.update({early: self._late_ticks[name] * self._per_tick for name, early in self._early.items()})
        return objective

    def _why_not(self) -> str:
        never = [name for name, item in self._items.items() if item.storage is None and not item.recomputable]
        return f"backward needs values that can neither be saved nor recomputed: they are made from {never}, no tensors and not to be made again"
