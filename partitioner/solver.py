"""Which option does every block take? Numbers in, numbers out: the solver knows no model, no op and no cluster.

A chain of blocks comes as runs r = 1 … of N_r consecutive equal blocks, each block with the same options o. Per block and step an option has
seconds c_o (compute) and d_o (communication), and bytes: p_o held over the whole step (parameters, gradients, optimizer state), s_o held from
the block's forward to its backward, and the peaks f_o and b_o that its forward and its backward reach above what is held while they run.
With one chosen option per block i (in forward order, over all runs), base bytes B and capacity C:

    minimise    T = sum_i c_i + sum_i d_i                     communication after compute               (_add_seconds)
         or     T = max(sum_i c_i, sum_i d_i)                 communication beside compute: `overlap`   (_add_seconds)
    subject to  B + P + sum_{j<i}  s_j + f_i  <= C            forward of every block i                  (_add_segment)
                B + P + sum_{j<=i} s_j + b_i  <= C            backward of every block i                 (_add_segment)
                P = sum_i p_i                                                                           (_add_persistent)

One order serves both constraints. Let t_o = max(f_o, s_o + b_o) and q_o = t_o - s_o = max(f_o - s_o, b_o) >= 0. The two constraints of block i
together are sum_{j<=i} s_j + q_i <= C - B - P: jobs of length s_j on one machine, each followed by a tail q_j, finished by C - B - P. Inside a
run the blocks may change places freely, and the best order is by descending tail (Jackson 1955). Proof by exchange: let block i stand before
its neighbour k with q_i < q_k, and S be saved before both. The larger of the pair's two left sides is at least S + s_i + s_k + q_k. After
the exchange the two are S + s_k + q_k, which is at most that, and S + s_k + s_i + q_i, which is less; nobody else's left side changes. So
sorting never raises the peak. (Descending f_o or b_o alone would be wrong: a forward peak counts less what the block leaves behind.)

So a run needs only counts. Over its options in descending q, with n_o = how many blocks take o and u_o = whether any does, the last block of
each option binds, and A_r the bytes saved by all earlier runs:

    sum_o n_o = N_r,   n_o <= N_r u_o                                                                   (_add_segment)
    B + P + A_r + sum_{o'<=o} n_o' s_o' + q_min + (q_o - q_min) u_o  <=  Z <= C      for every o         (_add_segment)
    B + P + A_r + sum_o n_o t_o / N_r  <=  Z                                         (_add_segment; implied for whole n, tighter for fractions)
    A_{r+1} = A_r + sum_o n_o s_o                                                                       (_add_segment)

Where u_o = 0 the second line asks for no more than the line of a used option does, for every tail is at least q_min. The programme's size does
not depend on N_r. An option that is nowhere worse in (c + d, or c and d; p; s; t) replaces the other in place without raising any left side,
so dominated options are removed first (undominated). Kinds of blocks that take turns are first counted as one run, a relaxation (solver_segments.py).

T is minimised first, then the peak Z among the answers whose T is within 1e-9 of the least. The counts are checked in exact integers.
"""

from dataclasses import dataclass
from math import fsum, isfinite

from partitioner.errors import InfeasibleError
from partitioner.passes.integer_program import EXACT
from partitioner.solver_memory import Breakdown, breakdown, describe_bytes
from partitioner.solver_problem import Choices, Option, Problem, Run
from partitioner.solver_program import CountProgram
from partitioner.solver_segments import Segment, mixed, neighbours

__all__ = ["Breakdown", "Option", "Problem", "Run", "Solution", "breakdown", "least_memory", "seconds_of", "solve"]

SAME = 1e-9  # relative difference of seconds below which two answers are equally fast
CLOSE = 1e-5  # see solve
FEW = 12  # segments that are searched apart at once
CORRECTIONS = 8


@dataclass(frozen=True)
class Solution:
    """`choices[r][k]` is the index of the option that the k-th block of run r takes, in forward order.

    seconds is the objective, bound_seconds a proven lower bound of it over all choices, gap = 1 - bound_seconds / seconds.
    peak_bytes is the peak by the model above, base_bytes included; `memory` says where it is reached and of what it is made.
    """

    choices: Choices
    seconds: float
    peak_bytes: int
    bound_seconds: float
    gap: float
    memory: Breakdown


def seconds_of(problem: Problem, choices: Choices) -> float:
    """The objective T of `choices`."""
    taken = [problem.runs[r].options[o] for r, indices in enumerate(choices) for o in indices]
    compute = fsum(option.compute_seconds for option in taken)
    communication = fsum(option.communication_seconds for option in taken)
    return max(compute, communication) if problem.overlap else compute + communication


def solve(problem: Problem, *, seconds: float = 20.0, gap: float = EXACT) -> Solution:
    """The fastest choices that fit, ties broken towards the lower peak; deterministic unless the search is cut off.

    With a relative `gap` the search ends within it of its bound. After `seconds` of search the best answer so far is returned: it fits, and its
    `gap` says what is proven. Where kinds of blocks take turns along a long chain, an answer within CLOSE of its bound is taken without further
    search. Raises InfeasibleError where nothing fits, ValueError where the problem's numbers make no sense.
    """
    _check(problem)
    apart, together = neighbours(problem), mixed(problem)
    if apart == together or len(apart) <= FEW:
        search = _Search(problem, apart, seconds, gap)
    else:
        search = _Search(problem, together, seconds, gap)
        if not search.within(max(CLOSE, gap)):
            search = _Search(problem, apart, seconds, gap, search)
    if search.choices is None:
        least = least_memory(problem, seconds=seconds, gap=gap)
        if not _fits(problem, least.choices):
            raise InfeasibleError(_why(problem, least.memory))
        return _solution(problem, least.choices, min(search.bound, least.bound_seconds))
    return _solution(problem, search.choices, search.bound)


class _Search:
    """The best choices found (None: none) and the proven bound, over given segments; may go on from an earlier search."""

    def __init__(self, problem: Problem, segments: tuple[Segment, ...], seconds: float, gap: float, before: "_Search | None" = None) -> None:
        self._problem = problem
        self.choices: Choices | None = before.choices if before else None
        self.bound: float = before.bound if before else 0.0
        program = CountProgram(problem, segments)
        found = program.fastest(seconds, gap)
        self.bound = max(self.bound, found.bound)
        for _ in range(CORRECTIONS):  # beyond the limit by rounding, or because kinds in turn cannot stand as the counts assume: ask for less
            if found.choices is None or _fits(problem, found.choices):
                break
            program.tighten(breakdown(problem, found.choices).peak_bytes - (problem.capacity_bytes or 0))
            found = program.fastest(seconds, gap)
        self._offer(found.choices)
        if self.choices is not None:
            self._offer(program.lightest(seconds_of(problem, self.choices) * (1 + SAME), seconds / 4, gap))

    def within(self, gap: float) -> bool:
        return self.choices is not None and self.bound >= seconds_of(self._problem, self.choices) * (1 - gap)

    def _offer(self, choices: Choices | None) -> None:
        """Take what fits and is faster, or as fast and lower, by exact numbers."""
        if choices is None or not _fits(self._problem, choices):
            return
        if self.choices is None:
            self.choices = choices
            return
        new, old = seconds_of(self._problem, choices), seconds_of(self._problem, self.choices)
        lower = breakdown(self._problem, choices).peak_bytes < breakdown(self._problem, self.choices).peak_bytes
        if new < old * (1 - SAME) or (new <= old * (1 + 2 * SAME) and lower):
            self.choices = choices


def least_memory(problem: Problem, *, seconds: float = 20.0, gap: float = EXACT) -> Solution:
    """The choices with the least peak, whatever the capacity; among them the fastest. bound_seconds is that of choices with this peak."""
    _check(problem)
    program = CountProgram(problem, neighbours(problem), capacity=False)
    choices = program.lightest(None, seconds, gap)
    if choices is None:
        raise ArithmeticError("the search found no choices although there is no limit")
    peak = breakdown(problem, choices).peak_bytes
    program.limit(peak)
    faster = program.fastest(seconds / 4, gap)
    if faster.choices is not None and breakdown(problem, faster.choices).peak_bytes <= peak:
        choices = faster.choices
    return _solution(problem, choices, min(faster.bound, seconds_of(problem, choices)))


def _solution(problem: Problem, choices: Choices, bound: float) -> Solution:
    seconds, memory = seconds_of(problem, choices), breakdown(problem, choices)
    bound = min(max(bound, 0.0), seconds)
    gap = 1 - bound / seconds if seconds > 0 else 0.0
    return Solution(choices, seconds, memory.peak_bytes, bound, gap, memory)


def _fits(problem: Problem, choices: Choices) -> bool:
    return problem.capacity_bytes is None or breakdown(problem, choices).peak_bytes <= problem.capacity_bytes


def _check(problem: Problem) -> None:
    for r, run in enumerate(problem.runs):
        if run.count < 0:
            raise ValueError(f"run {r} has {run.count} blocks; a run has none or more")
        if run.count and not run.options:
            raise ValueError(f"run {r} has {run.count} blocks but no option to choose from; give every block at least one")
        for option in run.options:
            numbers = (option.compute_seconds, option.communication_seconds, *option.all_bytes)
            if not all(isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"option {option.key!r} of run {r} has a negative or non-finite number: {option}")
    if problem.base_bytes < 0:
        raise ValueError(f"base_bytes is {problem.base_bytes}; bytes are never negative")


def _why(problem: Problem, memory: Breakdown) -> str:
    """Which limit, by how much, of what it is made, and three ways out, the one against the largest part first."""
    capacity = problem.capacity_bytes or 0
    ways = [
        "spread parameters, gradients and optimizer state over more ranks, or use an optimizer with less state",
        "take a smaller batch or more micro-batches, so that fewer rows are in memory at once",
    ]
    if memory.saved_bytes + memory.transient_bytes > memory.persistent_bytes:
        ways.reverse()
    ways.append(f"allow {describe_bytes(memory.peak_bytes)} a device or more")
    return (
        f"no plan fits into {describe_bytes(capacity)} of memory a device: the least that any choice reaches is {describe_bytes(memory.peak_bytes)}, "
        f"{describe_bytes(memory.peak_bytes - capacity)} too much, {memory.where()}. It is made of {memory.parts()}. "
        f"Ways out: (1) {ways[0]}; (2) {ways[1]}; (3) {ways[2]}."
    )
