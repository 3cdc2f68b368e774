"""The integer programme of solver.py: scaled numbers in, counts out, counts back to an order of blocks."""

from dataclasses import dataclass
from functools import reduce
from math import gcd, inf

from partitioner.passes.integer_program import IntegerProgram, Outcome
from partitioner.solver_problem import Choices, Problem, Run, undominated

SIZE = 1e4  # what the largest sums are scaled to


@dataclass(frozen=True)
class Fastest:
    """Choices (None where the search found none) and a proven lower bound of the seconds of any."""

    choices: Choices | None
    bound: float


class CountProgram:
    """Variables: n (counts), u (uses), A (saved by earlier runs), P (persistent), Z (peak), T (seconds); see solver.py for the rows."""

    def __init__(self, problem: Problem, *, capacity: bool = True) -> None:
        self._problem = problem
        self._program = IntegerProgram()
        self._kept = [undominated(run, problem.overlap) if run.count else [] for run in problem.runs]
        self._capacity = problem.capacity_bytes if capacity else None
        self._choose_units()
        variable = self._program.variable
        self._persistent, self._peak, self._seconds = variable(), variable(), variable()
        self._counts = [{o: variable(0, run.count, integer=True) for o in kept} for run, kept in zip(problem.runs, self._kept, strict=True)]
        saved = variable(0.0, 0.0)
        for run, counts in zip(problem.runs, self._counts, strict=True):
            if run.count:
                saved = self._add_run(run, counts, saved)
        self._add_persistent()
        self._add_seconds()
        self._peak_row = self._program.row({self._peak: 1.0}, upper=self._scaled_capacity())
        self._seconds_row = self._program.row({self._seconds: 1.0})

    def fastest(self, limit: float) -> Fastest:
        """Minimise T."""
        self._program.bound_row(self._seconds_row)
        outcome = self._program.minimise({self._seconds: 1.0}, seconds=limit)
        return Fastest(self._decode(outcome), outcome.bound / self._per_second)

    def lightest(self, at_most_seconds: float | None, limit: float) -> Choices | None:
        """Minimise Z among the choices that take no longer than `at_most_seconds`."""
        self._program.bound_row(self._seconds_row, upper=inf if at_most_seconds is None else at_most_seconds * self._per_second)
        return self._decode(self._program.minimise({self._peak: 1.0}, seconds=limit))

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
        runs = [(run.count, [run.options[o] for o in kept]) for run, kept in zip(self._problem.runs, self._kept, strict=True) if run.count]
        times = [(count, [o.compute_seconds + o.communication_seconds for o in options]) for count, options in runs]
        least, most = sum(count * min(t) for count, t in times), sum(count * max(t) for count, t in times)
        self._per_second = SIZE / (max(least, most / SIZE) or 1.0)
        sizes = [size for _, options in runs for o in options for size in (o.persistent_bytes, o.saved_bytes, o.peak_bytes)]
        self._grain = reduce(gcd, sizes, 0) or 1
        largest = max((o.peak_bytes for _, options in runs for o in options), default=0)
        for count, options in runs:
            largest += count * (max(o.persistent_bytes for o in options) + max(o.saved_bytes for o in options))
        room = largest if self._capacity is None else max(self._capacity - self._problem.base_bytes, 0)
        self._per_byte = SIZE / (max(min(room, largest), largest // 1000) or 1)

    def _scaled_capacity(self) -> float:
        """Room above base, rounded down to the grain: every sum of bytes is a multiple of it, so a quarter of it as slack admits nothing."""
        if self._capacity is None:
            return inf
        room = self._capacity - self._problem.base_bytes
        return (room // self._grain + 0.25) * self._grain * self._per_byte

    def _add_run(self, run: Run, counts: dict[int, int], before: int) -> int:
        """The rows of one run; returns the variable of what it and all before it save."""
        program, scale, options = self._program, self._per_byte, run.options
        program.row({n: 1.0 for n in counts.values()}, lower=run.count, upper=run.count)
        held = {self._persistent: 1.0, before: 1.0, self._peak: -1.0}
        program.row({**held, **{n: options[o].peak_bytes * scale / run.count for o, n in counts.items()}}, upper=0.0)
        if run.count > 1:
            least = min(options[o].tail_bytes for o in counts)
            prefix: dict[int, float] = {}
            for o, n in counts.items():
                prefix[n] = options[o].saved_bytes * scale
                row, extra = {**held, **prefix}, options[o].tail_bytes - least
                if extra:
                    used = program.binary()
                    program.row({n: 1.0, used: -float(run.count)}, upper=0.0)
                    row[used] = extra * scale
                program.row(row, upper=-least * scale)
        after = program.variable()
        program.row({after: -1.0, before: 1.0, **{n: options[o].saved_bytes * scale for o, n in counts.items()}}, lower=0.0, upper=0.0)
        return after

    def _add_persistent(self) -> None:
        row = {self._persistent: -1.0}
        for run, counts in zip(self._problem.runs, self._counts, strict=True):
            row.update({n: run.options[o].persistent_bytes * self._per_byte for o, n in counts.items()})
        self._program.row(row, lower=0.0, upper=0.0)

    def _add_seconds(self) -> None:
        compute, communication = {self._seconds: -1.0}, {self._seconds: -1.0}
        for run, counts in zip(self._problem.runs, self._counts, strict=True):
            for o, n in counts.items():
                compute[n] = run.options[o].compute_seconds * self._per_second
                communication[n] = run.options[o].communication_seconds * self._per_second
        if self._problem.overlap:
            self._program.row(compute, upper=0.0)
            self._program.row(communication, upper=0.0)
        else:
            both = {n: compute[n] + communication[n] for n in compute}
            both[self._seconds] = -1.0
            self._program.row(both, upper=0.0)

    def _decode(self, outcome: Outcome) -> Choices | None:
        """Counts to blocks: a run's options in descending tail."""
        if outcome.values is None:
            return None
        return tuple(tuple(o for o, n in counts.items() for _ in range(round(outcome.values[n]))) for counts in self._counts)
