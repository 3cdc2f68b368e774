"""The options of the blocks of one device whose stages are given: a small integer programme over counts, exact in bytes.

With n_ko blocks of kind k and option o in a stage (kinds of all the device's stages apart), u_ko whether any, T the seconds of its slowest stage:

    minimise    T + TIE * sum over stages of their seconds
    subject to  sum_o n_ko = N_k,  n_ko <= N_k u_ko
                T >= cut seconds + sum n_ko c_o                            for every stage
                transient_o u_ko <= Z                                      for every k, o
                sum_ko n_ko h_o + Z <= capacity - what cuts hold           h_o = persistent + in_flight * saved

One stage alone needs no T, so its seconds are minimised themselves. The counts are checked in exact integers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from partitioner.balance_problem import Option
from partitioner.passes.integer_program import EXACT, IntegerProgram, Outcome

SIZE = 1e4  # what seconds and bytes are scaled to
TIE = 1e-5
CORRECTIONS = 8
SECONDS = 10.0  # of search; then the best so far counts (usual: some hundredths)

Kind = tuple[Option, ...]


@dataclass(frozen=True)
class Load:
    """One stage: its blocks, its micro-batches in flight and what its cuts cost."""

    blocks: tuple[Kind, ...]
    in_flight: int
    cut_seconds: float = 0.0
    cut_bytes: int = 0


@dataclass(frozen=True)
class Fit:
    """Per stage and block the index of an option (None: nothing fits); `bound`: one stage alone takes no less (several: 0)."""

    options: tuple[tuple[int, ...], ...] | None
    seconds: float
    bound: float


def fastest(loads: Sequence[Load], capacity: int | None, gap: float = EXACT) -> Fit:
    """The options under which the slowest stage of this device takes least, its memory kept; to within a relative `gap`."""
    counts = [{kind: {min(range(len(kind)), key=lambda o: _leaner(kind[o], load)): n} for kind, n in Counter(load.blocks).items()} for load in loads]
    if capacity is None or _bytes(loads, counts) <= capacity:
        seconds = max(_seconds(load, count) for load, count in zip(loads, counts, strict=True))
        return Fit(_in_order(loads, counts), seconds, seconds)
    return _Programme(loads, capacity).solve(gap)


Counts = dict[Kind, dict[int, int]]


class _Programme:
    def __init__(self, loads: Sequence[Load], capacity: int) -> None:
        self._loads, self._capacity = loads, capacity
        self._room = capacity - sum(load.in_flight * load.cut_bytes for load in loads)
        quickest = max(load.cut_seconds + sum(min(option.seconds for option in kind) for kind in load.blocks) for load in loads)
        slowest = max(max(option.seconds for option in kind) for load in loads for kind in load.blocks)
        self._per_second = SIZE / (max(quickest, slowest / SIZE) or 1.0)
        self._per_byte = SIZE / max(self._room, 1)
        program = self._program = IntegerProgram()
        transient = program.variable()
        memory = {transient: 1.0}
        self._counts: list[dict[Kind, dict[int, int]]] = []
        stages = []
        for load in loads:
            seconds: dict[int, float] = {}
            numbers = {kind: self._add_kind(kind, n, transient, load.in_flight) for kind, n in Counter(load.blocks).items()}
            for kind, variables in numbers.items():
                for o, variable in variables.items():
                    seconds[variable] = kind[o].seconds * self._per_second
                    memory[variable] = kind[o].held(load.in_flight) * self._per_byte
            self._counts.append(numbers)
            stages.append(seconds)
        self._memory = program.row(memory, upper=self._room * self._per_byte)
        self._objective = stages[0]
        if len(loads) > 1:
            slowest_stage = program.variable()
            for load, seconds in zip(loads, stages, strict=True):
                program.row({slowest_stage: 1.0, **{v: -s for v, s in seconds.items()}}, lower=load.cut_seconds * self._per_second)
            self._objective = {slowest_stage: 1.0, **{v: TIE * s for seconds in stages for v, s in seconds.items()}}

    def _add_kind(self, kind: Kind, number: int, transient: int, in_flight: int) -> dict[int, int]:
        program = self._program
        fitting = [o for o, option in enumerate(kind) if option.transient_bytes + option.held(in_flight) <= self._room]
        variables = {o: program.variable(0.0, number, integer=True) for o in fitting}
        program.row(dict.fromkeys(variables.values(), 1.0), lower=number, upper=number)
        for o, variable in variables.items():
            used = variable
            if number > 1:
                used = program.binary()
                program.row({variable: 1.0, used: -number}, upper=0.0)
            program.row({transient: 1.0, used: -kind[o].transient_bytes * self._per_byte}, lower=0.0)
        return variables

    def solve(self, gap: float) -> Fit:
        nothing = Fit(None, inf, inf)
        if any(not variables for numbers in self._counts for variables in numbers.values()):
            return nothing
        room, bound = self._room, 0.0
        for _ in range(CORRECTIONS):  # beyond the limit by rounding: ask for less
            outcome = self._program.minimise(self._objective, seconds=SECONDS, gap=gap)
            bound = bound or self._bound(outcome)
            if outcome.values is None:
                break
            counts = [
                {kind: {o: n for o, v in variables.items() if (n := round(outcome.values[v]))} for kind, variables in numbers.items()}
                for numbers in self._counts
            ]
            excess = _bytes(self._loads, counts) - self._capacity
            if excess <= 0:
                seconds = max(_seconds(load, count) for load, count in zip(self._loads, counts, strict=True))
                return Fit(_in_order(self._loads, counts), seconds, min(bound, seconds))
            room -= excess
            self._program.bound_row(self._memory, upper=room * self._per_byte)
        return Fit(None, inf, bound)

    def _bound(self, outcome: Outcome) -> float:
        if len(self._loads) == 1:
            return outcome.bound / self._per_second + self._loads[0].cut_seconds
        return 0.0  # T is not minimised alone


def _leaner(option: Option, load: Load) -> tuple[float, int, int]:
    return option.seconds, option.held(load.in_flight), option.transient_bytes


def _seconds(load: Load, counts: Counts) -> float:
    return load.cut_seconds + sum(kind[o].seconds * n for kind, taken in counts.items() for o, n in taken.items())


def _bytes(loads: Sequence[Load], counts: Sequence[Counts]) -> int:
    held, transient = 0, 0
    for load, count in zip(loads, counts, strict=True):
        held += load.in_flight * load.cut_bytes
        for kind, taken in count.items():
            held += sum(kind[o].held(load.in_flight) * n for o, n in taken.items())
            transient = max(transient, *(kind[o].transient_bytes for o in taken))
    return held + transient


def _in_order(loads: Sequence[Load], counts: Sequence[Counts]) -> tuple[tuple[int, ...], ...]:
    """Equal blocks of a stage take their options by descending transient, so that the largest meet the fewest saved values."""
    found = []
    for load, count in zip(loads, counts, strict=True):
        rest = {
            kind: iter(sorted((o for o, n in taken.items() for _ in range(n)), key=lambda o: (-kind[o].transient_bytes, o)))
            for kind, taken in count.items()
        }
        found.append(tuple(next(rest[kind]) for kind in load.blocks))
    return tuple(found)
