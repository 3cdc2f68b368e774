"""The integer programme of solver.py: scaled numbers in, counts out, counts back to an order of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, inf

from partitioner.passes.integer_program import EXACT, IntegerProgram, Outcome
from partitioner.solver_problem import Choices, Option, Problem
from partitioner.solver_segments import Segment, arrange

SIZE = 1e4  # what the largest sums are scaled to


@dataclass(frozen=True)
class Fastest:
    """Choices (None where the search found none) and a proven lower bound of the seconds of any."""

    choices: Choices | None
    bound: float


class CountProgram:
    """Variables: n (counts), u (uses), A (saved by earlier segments), P (persistent), Z (peak), T (seconds); see solver.py for the rows."""

    def __init__(self, problem: Problem, segments: Sequence[Segment], *, capacity: bool = True) -> None:
        self._problem, self._segments = problem, segments
        self._program = IntegerProgram()
        self._capacity = problem.capacity_bytes if capacity else None
        self._choose_units()
        variable = self._program.variable
        self._persistent, self._peak, self._seconds = variable(), variable(), variable()
        self._counts = [[{o: variable(0, kind.count, integer=True) for o in kind.kept} for kind in segment] for segment in segments]
        saved = variable(0.0, 0.0)
        for segment, counts in zip(segments, self._counts, strict=True):
            saved = self._add_segment(segment, counts, saved)
        self._add_persistent()
        self._add_seconds()
        self._peak_row = self._program.row({self._peak: 1.0}, upper=self._scaled_capacity())
        self._seconds_row = self._program.row({self._seconds: 1.0})

    def fastest(self, limit: float, gap: float = EXACT) -> Fastest:
        """Minimise T, to within a relative `gap`."""
        self._program.bound_row(self._seconds_row)
        outcome = self._program.minimise({self._seconds: 1.0}, seconds=limit, gap=gap)
        return Fastest(self._decode(outcome), outcome.bound / self._per_second)

    def lightest(self, at_most_seconds: float | None, limit: float, gap: float = EXACT) -> Choices | None:
        """Minimise Z among the choices that take no longer than `at_most_seconds`."""
        self._program.bound_row(self._seconds_row, upper=inf if at_most_seconds is None else at_most_seconds * self._per_second)
        return self._decode(self._program.minimise({self._peak: 1.0}, seconds=limit, gap=gap))

    def limit(self, capacity: int) -> None:
        """Set the capacity, in bytes."""
        self._capacity = capacity
        self._program.bound_row(self._peak_row, upper=self._scaled_capacity())

    def tighten(self, excess: int) -> None:
        """Lower the capacity by `excess` bytes."""
        if self._capacity is None:
            raise ValueError("there is no capacity to lower")
        self.limit(self._capacity - excess)

    def _choose_units(self) -> None:
        """Units in which the largest sums are about SIZE: seconds by the fastest total, bytes by the room there is."""
        kinds = [(kind.count, [kind.options[o] for o in kind.kept]) for segment in self._segments for kind in segment]
        times = [(count, [o.compute_seconds + o.communication_seconds for o in options]) for count, options in kinds]
        least, most = sum(count * min(t) for count, t in times), sum(count * max(t) for count, t in times)
        self._per_second = SIZE / (max(least, most / SIZE) or 1.0)
        sizes = [size for _, options in kinds for o in options for size in (o.persistent_bytes, o.saved_bytes, o.peak_bytes)]
        self._grain = reduce(gcd, sizes, 0) or 1
        largest = max((o.peak_bytes for _, options in kinds for o in options), default=0)
        for count, options in kinds:
            largest += count * (max(o.persistent_bytes for o in options) + max(o.saved_bytes for o in options))
        room = largest if self._capacity is None else max(self._capacity - self._problem.base_bytes, 0)
        self._per_byte = SIZE / (max(min(room, largest), largest // 1000) or 1)

    def _scaled_capacity(self) -> float:
        """Room above base, rounded down to the grain: every sum of bytes is a multiple of it, so a quarter of it as slack admits nothing."""
        if self._capacity is None:
            return inf
        room = self._capacity - self._problem.base_bytes
        return (room // self._grain + 0.25) * self._grain * self._per_byte

    def _add_segment(self, segment: Segment, counts: list[dict[int, int]], before: int) -> int:
        """The rows of one segment; returns the variable of what it and all before it save."""
        program, scale = self._program, self._per_byte
        for kind, numbers in zip(segment, counts, strict=True):
            program.row({n: 1.0 for n in numbers.values()}, lower=kind.count, upper=kind.count)
        takes: list[tuple[Option, int, int]] = [
            (kind.options[o], n, kind.count) for kind, numbers in zip(segment, counts, strict=True) for o, n in numbers.items()
        ]
        takes.sort(key=lambda take: -take[0].tail_bytes)
        total = sum(kind.count for kind in segment)
        held = {self._persistent: 1.0, before: 1.0, self._peak: -1.0}
        program.row({**held, **{n: option.peak_bytes * scale / total for option, n, _ in takes}}, upper=0.0)
        if total > 1:
            least = takes[-1][0].tail_bytes
            prefix: dict[int, float] = {}
            for option, n, count in takes:
                prefix[n] = option.saved_bytes * scale
                row, extra = {**held, **prefix}, option.tail_bytes - least
                if extra and count > 1:
                    used = program.binary()
                    program.row({n: 1.0, used: -float(count)}, upper=0.0)
                    row[used] = extra * scale
                elif extra:
                    row[n] += extra * scale
                program.row(row, upper=-least * scale)
        after = program.variable()
        program.row({after: -1.0, before: 1.0, **{n: option.saved_bytes * scale for option, n, _ in takes}}, lower=0.0, upper=0.0)
        return after

    def _taken(self) -> list[tuple[int, Option]]:
        """Every count's variable and what it counts."""
        found = []
        for segment, counts in zip(self._segments, self._counts, strict=True):
            for kind, numbers in zip(segment, counts, strict=True):
                found += [(n, kind.options[o]) for o, n in numbers.items()]
        return found

    def _add_persistent(self) -> None:
        row = {n: option.persistent_bytes * self._per_byte for n, option in self._taken()}
        self._program.row({self._persistent: -1.0, **row}, lower=0.0, upper=0.0)

    def _add_seconds(self) -> None:
        compute = {n: option.compute_seconds * self._per_second for n, option in self._taken()}
        communication = {n: option.communication_seconds * self._per_second for n, option in self._taken()}
        if self._problem.overlap:
            self._program.row({self._seconds: -1.0, **compute}, upper=0.0)
            self._program.row({self._seconds: -1.0, **communication}, upper=0.0)
        else:
            self._program.row({self._seconds: -1.0, **{n: compute[n] + communication[n] for n in compute}}, upper=0.0)

    def _decode(self, outcome: Outcome) -> Choices | None:
        """Counts to blocks."""
        values = outcome.values
        if values is None:
            return None
        counts = [[[round(values[n]) for n in numbers.values()] for numbers in of_kinds] for of_kinds in self._counts]
        return arrange(self._problem, self._segments, counts)
