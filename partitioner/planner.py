"""Decide: options per block in numbers, the solver's choice, the exact simulation of what was chosen.

For every number of micro-batches that is legal, each block offers options: where its parameters lie (none, zero1, zero2, zero3), which saved
set of its class's frontier it keeps, and, for zero3, whether its gathered parameters are kept until backward. The solver's memory model is a
chain of sums; the simulator plays the lowered programs to the byte. Where they differ the capacity given to the solver is moved by the
difference, and the best choice whose *simulated* peak fits is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from partitioner.errors import InfeasibleError
from partitioner.options import GAP, Options
from partitioner.prepare import check_micro_batches, most_micro_batches
from partitioner.progress import tell
from partitioner.quantities import format_bytes
from partitioner.solver import Problem, breakdown, least_memory, solve
from partitioner.stages import decide_stages
from partitioner.trial import Task, Verdict
from partitioner.wording import counted

_CORRECTIONS = 5
_WORTH = 0.03  # a mesh that could save less of a step is not looked into; the bound counts it


def choose(task: Callable[[int], Task], stages: Sequence[int], quickest: bool) -> Verdict:
    """The quickest verdict that fits over meshes of so many `stages`, or the first; `task(n)` is the question for n.

    Gradients cannot come back through the outputs of a pipeline, so by itself it is the first: stages are taken where nothing fits without.
    A mesh is looked into where even shares of the model's work would make a step that is worth it.
    Raises the InfeasibleError of the first mesh where none fits.
    """
    best: Verdict | None = None
    bounds: list[float] = []
    refused: InfeasibleError | None = None
    for count in stages:
        asked = task(count)
        if best is not None and (least := Options(asked, 1).fastest / count) >= best.step_seconds * (1 - _WORTH):
            bounds.append(least)
            continue
        try:
            verdict = decide(asked)
        except InfeasibleError as error:
            refused = refused or error
            continue
        bounds.append(verdict.bound_seconds)
        if best is None or verdict.step_seconds < best.step_seconds:
            best = verdict
        if not quickest:
            break
    if best is None:
        assert refused is not None
        raise refused
    return replace(best, bound_seconds=min(*bounds, best.step_seconds))


def decide(task: Task) -> Verdict:
    """The fastest choice whose simulated peak fits. Raises InfeasibleError saying how much the leanest choice takes."""
    if task.stages > 1:
        return decide_stages(task)
    pinned = task.constraints.micro_batches
    if pinned is not None:
        check_micro_batches(task.prepared(pinned), task.ranks, pinned)
    best: Verdict | None = None
    leanest: Verdict | None = None
    bound, count = inf, pinned or 1
    while True:
        model = Options(task, count)
        if best is not None and model.fastest >= best.step_seconds:
            break  # more micro-batches cost more launches, and gather more often
        quickest = model.verdict(model.quickest)
        if quickest.peak_bytes <= task.capacity_bytes:
            bound = min(bound, model.fastest)
            if task.cluster.overlap:  # what is quickest block by block need not be where communication runs beside computation
                problem = model.problem(None)
                quickest = _improve(task, model, problem, quickest, breakdown(problem, model.quickest).peak_bytes - quickest.peak_bytes)
            best = quickest if best is None or quickest.step_seconds < best.step_seconds else best
            break  # memory does not bind: cutting the batch further in time gains nothing
        found, least = _fit(task, model)
        bound = min(bound, model.bound())
        leanest = least if leanest is None or least.peak_bytes < leanest.peak_bytes else leanest
        if found is not None and (best is None or found.step_seconds < best.step_seconds):
            best = found
        count *= 2
        if pinned is not None or count > most_micro_batches(task.prepared(count), task.ranks):
            break
    if best is None:
        assert leanest is not None
        raise InfeasibleError(_why(task, leanest))
    return replace(best, bound_seconds=min(bound, best.step_seconds))


def _fit(task: Task, model: Options) -> tuple[Verdict | None, Verdict]:
    """The best choice found whose simulated peak fits (None: none does), and the leanest one."""
    problem = model.problem(None)
    tell(f"seeking what needs the least memory, {counted(model.micro_batches, 'micro-batch', 'es')}")
    lean = least_memory(problem, gap=GAP)
    least = model.verdict(lean.choices)
    if least.peak_bytes > task.capacity_bytes:
        return None, least
    return _improve(task, model, problem, least, lean.peak_bytes - least.peak_bytes), least


def _improve(task: Task, model: Options, problem: Problem, best: Verdict, off: int) -> Verdict:
    """The best choice found whose simulated peak fits, as that of `best` does.

    The solver is given the capacity moved by what its model and the simulator differ: first by `off`, as at `best`, then as at its own answers.
    """
    tried: set[int] = set()
    for _ in range(_CORRECTIONS):
        capacity = task.capacity_bytes + off
        if capacity in tried:
            break
        tried.add(capacity)
        try:
            tell(f"solving, {counted(model.micro_batches, 'micro-batch', 'es')}", len(tried), _CORRECTIONS)
            solution = solve(replace(problem, capacity_bytes=capacity), gap=GAP)
        except InfeasibleError:
            break
        verdict = model.verdict(solution.choices)
        fits = verdict.peak_bytes <= task.capacity_bytes
        if fits and verdict.step_seconds < best.step_seconds:
            best = verdict
        if fits and solution.seconds <= model.fastest * (1 + GAP):
            break  # no other capacity gives a faster answer
        off = solution.peak_bytes - verdict.peak_bytes
    return best


def _why(task: Task, leanest: Verdict) -> str:
    """The limit, by how much it is passed, what of, and three ways out."""
    trial = max(leanest.trials, key=lambda trial: trial.simulation.peak_bytes)
    peak = trial.simulation.peak_bytes
    parts = [f"{format_bytes(size)} of {kind}" for kind, size in trial.simulation.peak.by_kind.items() if size]
    pinned = ", ".join(f"{key}={value}" for key, value in task.constraints.as_dict().items())
    return (
        f"no plan found fits into {format_bytes(task.capacity_bytes)} a device: the leanest takes {format_bytes(peak)}, "
        f"{format_bytes(peak - task.capacity_bytes)} too much, at {trial.simulation.peak_at}. It is made of {', '.join(parts)}, in "
        f"{leanest.choice.micro_batches} micro-batches{f' (pinned: {pinned})' if pinned else ''}. "
        f"Ways out: (1) allow {format_bytes(peak)} a device; (2) use more ranks, or an optimizer with less state; "
        "(3) take a smaller batch, or drop a constraint"
    )
