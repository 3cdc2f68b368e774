"""Blocks that the solver counts together.

A segment is a stretch of the chain; a kind in it are all its blocks with the same options. A segment of one kind is exact: its blocks stand next to
each other, and the order by descending tail is the best (solver.py). In a segment of several kinds (attention and mixture blocks in turn) the solver
counts as if all its blocks might change places. That only ever allows more, so what it finds is a lower bound; `arrange` then puts every
kind's options, by descending tail, on the places that the kind really has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.solver_problem import Choices, Option, Problem, Run, undominated


@dataclass(frozen=True)
class Kind:
    """`count` blocks with the same options, in the runs `runs`; `kept` are the undominated options by descending tail."""

    options: tuple[Option, ...]
    runs: tuple[int, ...]
    count: int
    kept: tuple[int, ...]


Segment = tuple[Kind, ...]


def neighbours(problem: Problem) -> tuple[Segment, ...]:
    """Segments of one kind each: adjacent runs with the same options are one."""
    groups: list[list[int]] = []
    for r, run in enumerate(problem.runs):
        if run.count == 0:
            continue
        if groups and problem.runs[groups[-1][-1]].options == run.options:
            groups[-1].append(r)
        else:
            groups.append([r])
    return _segments(problem, groups)


def mixed(problem: Problem) -> tuple[Segment, ...]:
    """The fewest segments such that no kind is in two: from the first block of a kind that comes again to its last, overlaps joined."""
    last = {run.options: r for r, run in enumerate(problem.runs) if run.count}
    groups: list[list[int]] = []
    end = -1
    for r, run in enumerate(problem.runs):
        if run.count == 0:
            continue
        if r > end:
            groups.append([])
        groups[-1].append(r)
        end = max(end, last[run.options])
    return _segments(problem, groups)


def arrange(problem: Problem, segments: Sequence[Segment], counts: Sequence[Sequence[Sequence[int]]]) -> Choices:
    """Per segment and kind, how many blocks take each kept option -> the option of every block."""
    choices: list[tuple[int, ...]] = [()] * len(problem.runs)
    for segment, of_kinds in zip(segments, counts, strict=True):
        for kind, numbers in zip(segment, of_kinds, strict=True):
            ordered = iter([o for o, number in zip(kind.kept, numbers, strict=True) for _ in range(number)])
            for r in kind.runs:
                choices[r] = tuple(next(ordered) for _ in range(problem.runs[r].count))
    return tuple(choices)


def _segments(problem: Problem, groups: list[list[int]]) -> tuple[Segment, ...]:
    kept: dict[tuple[Option, ...], tuple[int, ...]] = {}
    segments = []
    for group in groups:
        kinds: dict[tuple[Option, ...], list[int]] = {}
        for r in group:
            kinds.setdefault(problem.runs[r].options, []).append(r)
        segment = []
        for options, runs in kinds.items():
            if options not in kept:
                kept[options] = tuple(undominated(Run(1, options), problem.overlap))
            segment.append(Kind(options, tuple(runs), sum(problem.runs[r].count for r in runs), kept[options]))
        segments.append(tuple(segment))
    return tuple(segments)
