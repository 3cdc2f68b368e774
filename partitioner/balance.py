"""Where is the model cut into stages, and which option does every block take? Numbers in, numbers out.

A chain of blocks i = 0 … n-1 with options o of c_io seconds (one micro-batch, forward and backward), p_io persistent bytes, s_io bytes per
micro-batch in flight and t_io transient bytes; stages k = 0 … S-1 with f_k micro-batches in flight, on devices d(k) of C_d bytes; a cut before
block i costs e_i seconds on both sides and g_i bytes per micro-batch in flight behind it (e_0 = g_0 = e_n = 0).
Choose cuts 0 = x_0 < x_1 < … < x_S = n and one option per block, i in k meaning x_k <= i < x_{k+1}:

    minimise    max_k T_k,  then  sum_k T_k^2                                                         (_Search)
    where       T_k = e_{x_k} + e_{x_{k+1}} + sum_{i in k} c_i                                        (_Search, balance_device.py)
    subject to  sum_{k on d} [ f_k g_{x_k} + sum_{i in k} (p_i + f_k s_i) ] + max_{i on d} t_i <= C_d (balance_device.py)

Where every device has one stage, the search is exact. cost_k(a, b), the least T_k of a stage that holds blocks a … b-1, is a knapsack. All are
bounded from below at once (balance_bounds.py). Then, again and again:

    reach_k(b) = min_a max(reach_{k-1}(a), low_k(a, b))         a dynamic programme; reach_S(n) bounds the bottleneck     (_bottleneck)
    the cuts of least squares among those within that bottleneck                                                         (_evenest)
    the true cost of these cuts' stages, slowest first, replaces their bounds                                            (_Search.run)

until the cuts are as good as the bound. Each round makes a bound true, so it ends; equal ranges of equal blocks become true together.

Where devices have several stages, their capacity couples stages that are far apart. The bound is that of stages that each have the device to
themselves. Cuts are sought so, and with even shares of the capacity; the options of a device are then chosen exactly, over all its stages
together. So that answer is feasible and its gap proven, but better cuts may exist.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from partitioner.balance_bounds import Table, least_bytes, lower_bounds
from partitioner.balance_device import Fit, Load, fastest
from partitioner.balance_problem import Option, Problem, device_bytes, ranges, stage_seconds
from partitioner.errors import InfeasibleError
from partitioner.passes.integer_program import EXACT
from partitioner.quantities import format_bytes

__all__ = ["Balanced", "Option", "Problem", "balance"]

SAME = 1e-9  # relative difference of seconds below which two are equal


@dataclass(frozen=True)
class Balanced:
    """cuts[k-1]: the first block of stage k >= 1; options[i]: the option of block i; seconds[k]; bytes[k]: the peak of the device of stage k.

    bottleneck: the largest of the seconds; bound: no cuts and options that fit have a smaller one; gap = 1 - bound / bottleneck.
    """

    cuts: tuple[int, ...]
    options: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    bottleneck: float
    bound: float
    gap: float


def balance(problem: Problem, *, gap: float = 1e-3) -> Balanced:
    """The cuts and options with the least bottleneck, to within a relative `gap`; see above for where that is promised. Deterministic.

    Raises InfeasibleError where there are fewer blocks than stages, or nothing fits (where devices have several stages: nothing was found).
    """
    blocks, stages = len(problem.blocks), len(problem.in_flight)
    if blocks < stages:
        raise InfeasibleError(f"{blocks} blocks cannot be cut into {stages} stages, each needs one; take at most {blocks} stages, or finer blocks")
    search = _Search(problem, problem.capacity_bytes, gap)
    found = [search.run()]
    if problem.capacity_bytes and len(set(problem.devices)) < stages:
        found.append(_Search(problem, _shares(problem), gap).run())
        found = [_together(problem, answer[0], gap) for answer in found if answer]
    answers = [_balanced(problem, *answer, search.bound) for answer in found if answer]
    if not answers:
        raise InfeasibleError(_why(problem))
    return min(answers, key=lambda answer: (answer.bottleneck, sum(s * s for s in answer.seconds)))


Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""Cuts and options."""


class _Search:
    """Cuts where every stage k has capacity[device of k] to itself; `bound` is proven, also when the search is over and found nothing."""

    def __init__(self, problem: Problem, capacity: tuple[int, ...], gap: float) -> None:
        self._problem, self._gap = problem, gap
        blocks = len(problem.blocks)
        kinds = {options: number for number, options in enumerate(dict.fromkeys(problem.blocks))}
        kind = np.array([kinds[options] for options in problem.blocks])
        cut_bytes = np.array([problem.cut_bytes(a) for a in range(blocks)], dtype=float)
        self._places = [(f, capacity[d] if capacity else None) for f, d in zip(problem.in_flight, problem.devices, strict=True)]
        self._low = {
            (f, size): lower_bounds(list(kinds), kind, f, None if size is None else size - f * cut_bytes) for f, size in dict.fromkeys(self._places)
        }
        cut_seconds = np.array([problem.cut_seconds(block) for block in range(blocks + 1)])
        self._cut_seconds = cut_seconds[:, None] + cut_seconds[None, :]
        self._alike = _alike(kind, cut_bytes)
        self._fits: dict[tuple[int, int | None, int, int], Fit] = {}
        self.bound = 0.0

    def run(self) -> Answer | None:
        slack = max(self._gap / 3, SAME)
        while True:
            costs = [self._low[place] + self._cut_seconds for place in self._places]
            self.bound = _bottleneck(costs)
            if self.bound == inf:
                return None
            limit = self.bound * (1 + slack)
            stages = _evenest(costs, limit)
            unknown = [(costs[k][a, b], k, a, b) for k, (a, b) in enumerate(stages) if (*self._places[k], a, b) not in self._fits]
            for _, k, a, b in sorted(unknown, reverse=True):
                self._learn(k, a, b)
                if self._low[self._places[k]][a, b] + self._cut_seconds[a, b] > limit:
                    break
            if not unknown:
                fits = [self._fits[*place, a, b] for place, (a, b) in zip(self._places, stages, strict=True)]
                return tuple(a for a, _ in stages[1:]), tuple(o for fit in fits if fit.options for o in fit.options[0])

    def _learn(self, k: int, a: int, b: int) -> None:
        """Put the truth in place of the bound, for this range and all that are alike."""
        in_flight, capacity = place = self._places[k]
        load = Load(self._problem.blocks[a:b], in_flight, 0.0, self._problem.cut_bytes(a))
        fit = fastest([load], capacity, self._gap / 3 or EXACT)
        for start in np.flatnonzero(self._alike[a] >= b - a).tolist():
            self._low[place][start, start + b - a] = fit.bound if fit.options else inf
            self._fits[*place, start, start + b - a] = fit


def _alike(kind: NDArray[np.intp], cut_bytes: NDArray[np.float64]) -> NDArray[np.intp]:
    """[a, c] -> for how many blocks the ranges that begin at a and at c are of equal blocks; 0 where the cuts before them differ."""
    blocks = len(kind)
    run = np.zeros((blocks + 1, blocks + 1), dtype=np.intp)
    for a in range(blocks - 1, -1, -1):
        run[a, :-1] = np.where(kind == kind[a], run[a + 1, 1:] + 1, 0)
    run = run[:-1, :-1]
    run[cut_bytes[:, None] != cut_bytes[None, :]] = 0
    return run


def _bottleneck(costs: list[Table]) -> float:
    """The least possible largest cost of stages 0, 1, … that cover the chain: costs[k][a, b] is that of stage k with blocks a … b-1."""
    reach = np.full(len(costs[0]), inf)
    reach[0] = 0.0
    for cost in costs:
        reach = np.maximum(reach[:, None], cost).min(axis=0)
    return float(reach[-1])


def _evenest(costs: list[Table], limit: float) -> list[tuple[int, int]]:
    """Per stage its first block and the one after its last: the least sum of squares where no cost is above `limit`."""
    reach = np.full(len(costs[0]), inf)
    reach[0] = 0.0
    before = []
    for cost in costs:
        total = reach[:, None] + np.where(cost <= limit, np.square(cost / (limit or 1.0)), inf)
        before.append(total.argmin(axis=0))
        reach = total.min(axis=0)
    ends = [len(reach) - 1]
    for starts in reversed(before):
        ends.append(int(starts[ends[-1]]))
    return list(zip(ends[:0:-1], ends[-2::-1], strict=True))


def _shares(problem: Problem) -> tuple[int, ...]:
    """The capacities divided by the stages that each device has."""
    return tuple(size // max(problem.devices.count(device), 1) for device, size in enumerate(problem.capacity_bytes))


def _together(problem: Problem, cuts: tuple[int, ...], gap: float) -> Answer | None:
    """These cuts, with the options chosen over all stages of each device together; None where they do not fit."""
    stages = ranges(problem, cuts)
    options = [0] * len(problem.blocks)
    for device in dict.fromkeys(problem.devices):
        own = [k for k, d in enumerate(problem.devices) if d == device]
        loads = [
            Load(problem.blocks[a:b], problem.in_flight[k], problem.cut_seconds(a) + problem.cut_seconds(b), problem.cut_bytes(a))
            for k in own
            for a, b in [stages[k]]
        ]
        fit = fastest(loads, problem.capacity_bytes[device], gap or EXACT)
        if fit.options is None:
            return None
        for k, taken in zip(own, fit.options, strict=True):
            options[slice(*stages[k])] = taken
    return cuts, tuple(options)


def _balanced(problem: Problem, cuts: tuple[int, ...], options: tuple[int, ...], bound: float) -> Balanced:
    seconds, peaks = stage_seconds(problem, cuts, options), device_bytes(problem, cuts, options)
    bottleneck = max(seconds)
    bound = min(bound, bottleneck)
    gap = 1 - bound / bottleneck if bottleneck else 0.0
    return Balanced(cuts, options, seconds, tuple(peaks[device] for device in problem.devices), bottleneck, bound, gap)


def _why(problem: Problem) -> str:
    """Of the cuts whose worst stage exceeds its memory least, that stage."""
    kinds = list(dict.fromkeys(problem.blocks))
    kind = np.array([kinds.index(options) for options in problem.blocks])
    cut_bytes = np.array([*(problem.cut_bytes(a) for a in range(len(kind))), 0], dtype=float)
    shares = _shares(problem)
    needs = [least_bytes(kinds, kind, f) + f * cut_bytes[:, None] for f in problem.in_flight]
    excess = [need - shares[device] for need, device in zip(needs, problem.devices, strict=True)]
    least = min(float(table[np.isfinite(table)].min()) for table in excess)
    worst = _bottleneck([table - least for table in excess])  # a cost is never negative
    stages = _evenest([table - least for table in excess], worst)
    k = max(range(len(stages)), key=lambda k: excess[k][stages[k]])
    (a, b), size = stages[k], shares[problem.devices[k]]
    exact = len(set(problem.devices)) == len(stages)
    fits, has = ("fits", "may hold") if exact else ("was found to fit", "has as its even share of a device")
    need = needs[k][a, b]
    return (
        f"no cut of {len(kind)} blocks into {len(stages)} stages {fits}: at best stage {k} (blocks {a} to {b - 1}) needs {format_bytes(need)} with "
        f"its leanest options and {problem.in_flight[k]} micro-batches in flight, and {has} {format_bytes(size)}: {format_bytes(need - size)} too "
        "much. Ways out: devices with more memory, more stages, smaller micro-batches, a schedule with fewer of them in flight, blocks that save less"
    )
