"""Decide a pipeline: where the model is cut into stages, which schedule orders them, in how many micro-batches, and what every block takes.

For every schedule and number of micro-batches that are legal, the blocks' options (options.py) become those of one micro-batch, a cut costs the
bytes that cross it, and `balance` gives the cuts and options with the least bottleneck. The best few by the schedule's makespan are lowered, and all
stages are simulated together. Where a stage's simulated peak differs from the balancer's model, the capacity given to that is moved by the
difference, as in planner.py; the quickest simulated step whose peaks fit is taken. No plan takes less than its micro-batches take in the slowest
stage of the best cuts: the bound.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import inf

from partitioner.asynchronous import refusal
from partitioner.balance import Balanced, Option, Problem, balance
from partitioner.errors import InfeasibleError
from partitioner.options import GAP, Options
from partitioner.pipeline import Pipeline
from partitioner.prepare import check_micro_batches, most_micro_batches
from partitioner.progress import tell
from partitioner.quantities import format_bytes
from partitioner.runtime.clock import Hang
from partitioner.schedules import ASYNCHRONOUS, NAMES, Name, Order, chunks_of, in_flight, makespan, repeated, schedule, stage_of
from partitioner.trial import Task, Verdict, communication
from partitioner.wording import counted

_CORRECTIONS = 4
_SIMULATED = 4  # candidates that fit and are simulated, the best by estimate first
_TRUST = 0.8  # an estimate, which knows no exposed communication, is not this far above the simulated step
_MOST_MICRO_BATCHES = 8  # per stage: the bubble is a tenth of the step then, and launches begin to count


def decide_stages(task: Task) -> Verdict:
    """The fastest pipeline of `task.stages` stages whose simulated peaks fit. Raises InfeasibleError where none does."""
    found, refused = _candidates(task)
    best: Verdict | None = None
    simulated = 0
    for stages in sorted(found, key=lambda stages: stages.estimate):
        if best is not None and (simulated >= _SIMULATED or stages.estimate * _TRUST >= best.step_seconds):
            break
        tell(f"fitting {stages.name}, {counted(stages.count, 'micro-batch', 'es')}, to memory")
        try:
            verdict = stages.fit()
        except InfeasibleError as error:
            refused = error
            continue
        except Hang as hang:
            refused = InfeasibleError(f"{stages.name} does not suit this model: {hang}; pin another schedule")
            continue
        simulated += 1
        if best is None or verdict.step_seconds < best.step_seconds:
            best = verdict
    if best is None:
        assert refused is not None
        raise refused
    return replace(best, bound_seconds=min(best.step_seconds, *(stages.bound for stages in found)))


def _candidates(task: Task) -> tuple[list["_Stages"], InfeasibleError | None]:
    """Every schedule in every number of micro-batches, or why there is none."""
    found: list[_Stages] = []
    refused: InfeasibleError | None = None
    for count in _micro_batches(task):
        model = Options(task, count)
        for name in [task.constraints.schedule] if task.constraints.schedule else NAMES:
            if why := refusal(name, task.stages, count, None):
                refused = refused or InfeasibleError(why)
                continue
            chunks = chunks_of(name, task.stages)
            if chunks > len(model.blocks):
                each, blocks = chunks // task.stages, len(model.blocks)
                need, other = f"{task.stages} stages need one each", ""
                if each > 1:
                    need, other = f"{name} gives each of {task.stages} stages {each} runs of blocks", ", or schedule 1f1b"
                why = f"the model is cut into {blocks} blocks, but {need}; use {blocks // each} stages or fewer{other}"
                refused = refused or InfeasibleError(why)
                continue
            tell(f"balancing {counted(task.stages, 'stage')} for {name}, {counted(count, 'micro-batch', 'es')}")
            found.append(_Stages(task, model, name))
    return found, refused


def _micro_batches(task: Task) -> Iterator[int]:
    pinned = task.constraints.micro_batches
    if pinned is not None:
        check_micro_batches(task.prepared(pinned), task.ranks, pinned)
        yield pinned
        return
    most, count = min(most_micro_batches(task.prepared(2), task.ranks), _MOST_MICRO_BATCHES * task.stages), 1
    while count < most:
        yield count
        count *= 2
    yield most


class _Stages:
    """One schedule and number of micro-batches."""

    def __init__(self, task: Task, model: Options, name: Name) -> None:
        self.task, self.model, self.name = task, model, name
        self.count = model.micro_batches
        self.chunks = chunks_of(name, task.stages)
        self.device = tuple(stage_of(name, chunk, task.stages) for chunk in range(self.chunks))
        self.crossing = self._crossing()
        self.free = balance(self.problem(None), gap=GAP)

    def _crossing(self) -> list[int]:
        """Bytes of a micro-batch's values that cross a cut before each block: made before it, read at it or behind."""
        model, last = self.model, dict[str, int]()
        for block in model.blocks:
            for port in block.reads:
                if port.kind == "value":
                    last[port.name] = block.index
        live = [0] * (len(model.blocks) + 1)
        for block in model.blocks:
            for at, name in enumerate(block.writes):
                size = model.written(block, at)
                for cut in range(block.index + 1, last.get(name, -1) + 1):
                    live[cut] += size
        return live[: len(model.blocks)]

    def problem(self, capacity: tuple[int, ...] | None) -> Problem:
        """The balancer's question; capacity None: memory does not limit."""
        overlap = self.task.cluster.overlap
        made: dict[int, tuple[Option, ...]] = {}
        for options in self.model.options:
            if id(options) not in made:
                made[id(options)] = tuple(
                    Option(
                        (o.compute_seconds + (0.0 if overlap else o.communication_seconds)) / self.count,
                        o.persistent_bytes,
                        o.saved_bytes,
                        max(o.forward_bytes - o.saved_bytes, o.backward_bytes),
                    )
                    for o, *_ in options
                )
        seconds = communication(self.task.cluster, self.task.ranks, self.task.shapes)
        # the values, and their gradients back
        sending = tuple(0.0 if overlap or not size else 2 * seconds("SEND", size, None) for size in self.crossing)
        return Problem(
            blocks=tuple(made[id(options)] for options in self.model.options),
            in_flight=in_flight(self.name, self.task.stages, self.count),
            capacity_bytes=capacity or (),
            edge_seconds=sending,
            edge_bytes=tuple(self.crossing),
            device=self.device,
        )

    @cached_property
    def bound(self) -> float:
        """Seconds that a step of so many micro-batches takes at least, whatever memory there is."""
        even = sum(min(o.seconds for o in options) for options in self.problem(None).blocks) / self.task.stages
        slowest = self.free.bound * self.task.cluster.share if self.chunks == self.task.stages else 0.0
        return self.count * max(even, slowest)

    @cached_property
    def estimate(self) -> float:
        """Seconds of the schedule if memory does not limit: backward takes twice the time of forward, messages none."""
        part = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
        turns = schedule(self.name, self.task.stages, self.count)

        def lasts(turns: Order) -> float:
            return makespan(self.name, turns, lambda turn: part[turn.op] * self.free.seconds[turn.chunk])

        late = self.name in ASYNCHRONOUS
        alone = lasts(repeated(turns, self.count, 3)) - lasts(repeated(turns, self.count, 2)) if late else lasts(turns)
        return max(self.bound, alone * self.task.cluster.share)

    def fit(self) -> Verdict:
        """The quickest choice found whose simulated peaks fit, from what would be taken if memory did not limit."""
        limit = self.task.capacity_bytes
        answer, best, least = self.free, None, inf
        tried: set[tuple[int, ...]] = set()
        for _ in range(_CORRECTIONS):
            verdict = self.verdict(answer)
            least = min(least, verdict.peak_bytes)
            if verdict.peak_bytes <= limit and (best is None or verdict.step_seconds < best.step_seconds):
                best = verdict
            if best is verdict and answer is self.free:
                break
            peaks = [0] * self.task.stages
            for trial in verdict.trials:
                peaks[trial.program.stage] = max(peaks[trial.program.stage], trial.simulation.peak_bytes)
            modelled = dict(zip(self.device, answer.bytes, strict=True))
            capacity = tuple(max(0, limit + modelled[stage] - peak) for stage, peak in enumerate(peaks))
            if capacity in tried:
                break
            tried.add(capacity)
            try:
                answer = balance(self.problem(capacity), gap=GAP)
            except InfeasibleError:
                break
        if best is None:
            how = f"{self.name}, {counted(self.count, 'micro-batch', 'es')}"
            raise InfeasibleError(
                f"no pipeline of {counted(self.task.stages, 'stage')} found fits into {format_bytes(limit)} a device: the leanest tried ({how}) "
                f"takes {format_bytes(int(least))}, {format_bytes(int(least) - limit)} too much. "
                f"Ways out: (1) allow {format_bytes(int(least))} a device; "
                "(2) use more ranks or stages, or an optimizer with less state; (3) take a smaller batch, more micro-batches, or drop a constraint"
            )
        return best

    def verdict(self, answer: Balanced) -> Verdict:
        """What the balancer chose, lowered, and all stages simulated."""
        borders = (0, *answer.cuts, len(self.model.blocks))
        chunks = tuple(chunk for chunk in range(self.chunks) for _ in range(borders[chunk + 1] - borders[chunk]))
        return self.model.verdict((answer.options,), Pipeline(self.task.stages, chunks, self.name))
