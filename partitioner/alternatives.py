"""What else could have been done: the usual ways to train, lowered and simulated as the plan itself was.

    one device → DDP → ZeRO-1 → ZeRO-2 → ZeRO-3, each without and with full checkpointing, and in the fewest micro-batches that make it fit

Every block takes the same decision in each of them, where the plan decides block by block. Then, where memory binds: what more of it would buy.
All of it is made on demand, from what planning has prepared already; only the one device is prepared anew, and of a pipeline also all devices
without stages.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal

from partitioner.constraints import Constraints
from partitioner.errors import InfeasibleError
from partitioner.options import SHARDS, Options
from partitioner.plan import Alternative, Explanation, MoreMemory, Shard
from partitioner.prepare import Prepared, most_micro_batches
from partitioner.progress import tell
from partitioner.runtime.program import Program
from partitioner.runtime.simulator import Simulation
from partitioner.solver import solve
from partitioner.trial import Task, Verdict

CHECKPOINTS: tuple[Literal["none", "full"], ...] = ("none", "full")
_GAINS = 0.99  # a doubling of the micro-batches that leaves more than this share of the peak is the last one tried
_WORTH = 0.995  # more memory that leaves more than this share of the step is not worth a line
_MORE = (1.125, 1.5)  # shares of the memory there is
_SOLVER_SECONDS, _SOLVER_GAP, _CORRECTIONS = 1.0, 1e-2, 2


@dataclass(frozen=True)
class Alternatives:
    """Explains one verdict. `again(ranks, in_time)` prepares the same capture for another number of ranks, or for micro-batches, without stages."""

    task: Task
    verdict: Verdict
    again: Callable[[int, bool], Prepared]

    @cached_property
    def _fresh(self) -> dict[tuple[int, bool], Prepared]:
        return {}

    @property
    def _devices(self) -> int:
        return self.task.ranks * self.task.stages

    @cached_property
    def explanation(self) -> Explanation:
        fullest = max(self.verdict.trials, key=lambda trial: trial.simulation.peak_bytes)
        slowest = max(self.verdict.trials, key=lambda trial: trial.simulation.step_seconds)
        busy = {"compute": 0.0, "communication": 0.0}
        for stream, _, start, end in slowest.simulation.events:
            busy["compute" if stream == "compute" else "communication"] += end - start
        return Explanation(
            alternatives=tuple(self._all()),
            more_memory=tuple(self._more_memory()),
            compute_seconds=busy["compute"],
            communication_seconds=busy["communication"],
            peak_at=_in_words(fullest.simulation.peak_at, fullest.program),
        )

    def plain(self, ranks: int) -> Simulation:
        """The fullest of so many ranks that shard and recompute nothing, in one micro-batch."""
        trials = _uniform(self._for(ranks), "none", "none", 1).trials
        return max((trial.simulation for trial in trials), key=lambda simulation: simulation.peak_bytes)

    def _for(self, ranks: int) -> Task:
        """The question for `ranks` ranks without stages, answered from what this verdict was made of wherever that will do."""
        made, planned = self.verdict.prepared, self.verdict.choice.micro_batches
        staged = self.task.stages > 1

        def prepared(micro_batches: int) -> Prepared:
            in_time = micro_batches > 1
            if not staged and ranks == self.task.ranks and (ranks > 1 or in_time == (planned > 1)):
                return made
            if (ranks, in_time) not in self._fresh:
                self._fresh[ranks, in_time] = self.again(ranks, in_time)
            return self._fresh[ranks, in_time]

        return replace(self.task, ranks=ranks, stages=1, prepared=prepared)

    def _all(self) -> Iterator[Alternative]:
        for ranks in dict.fromkeys((1, self._devices)):
            task = self._for(ranks)
            for shard in SHARDS if ranks > 1 else SHARDS[:1]:
                for checkpoint in CHECKPOINTS:
                    tell("explaining")
                    yield from self._ways(task, shard, checkpoint)

    def _ways(self, task: Task, shard: Shard, checkpoint: Literal["none", "full"]) -> Iterator[Alternative]:
        """In one micro-batch (or as many as were asked for), and in the fewest that make it fit where that does not."""
        asked = self.task.constraints.micro_batches if self.task.stages == 1 else None  # of a pipeline they fill it
        alone = task.ranks < self._devices
        count = 1 if alone or asked is None else asked
        verdict = _uniform(task, shard, checkpoint, count)
        yield _alternative(task, shard, checkpoint, verdict)
        if alone or asked is not None:
            return
        before = inf
        while task.capacity_bytes < verdict.peak_bytes < before * _GAINS and 2 * count <= most_micro_batches(task.prepared(2), task.ranks):
            count, before = 2 * count, verdict.peak_bytes
            verdict = _uniform(task, shard, checkpoint, count)
            if verdict.peak_bytes <= task.capacity_bytes:
                yield _alternative(task, shard, checkpoint, verdict)

    def _more_memory(self) -> Iterator[MoreMemory]:
        """By rising memory, each a faster step than the one before. Of a pipeline the same stages without a limit."""
        asked, planned = self.task.constraints.micro_batches, self.verdict.choice.micro_batches
        staged = self.task.stages > 1
        task = self._for(self.task.ranks)
        if staged:  # a plan that was read pins no schedule, but options depend on it
            task = replace(self.task, constraints=replace(self.task.constraints, schedule=self.verdict.choice.pipeline.schedule))
        counts = dict.fromkeys((planned, planned if asked else max(1, planned // 2)))
        models = [Options(task, count) for count in counts] if not staged else []
        top = Options(task, planned if staged else asked or 1)
        unlimited = top.verdict(top.quickest, self.verdict.choice.pipeline) if staged else top.verdict(top.quickest)
        best = self.verdict.step_seconds
        if unlimited.peak_bytes <= task.capacity_bytes or unlimited.step_seconds > best * _WORTH:
            return
        for share in _MORE:
            capacity = int(task.capacity_bytes * share)
            if capacity >= unlimited.peak_bytes:
                break
            found = [verdict for model in models for verdict in _within(model, capacity)]
            quickest = min(found, key=lambda verdict: verdict.step_seconds, default=None)
            if quickest is not None and quickest.step_seconds <= best * _WORTH:
                best = quickest.step_seconds
                yield MoreMemory(memory_bytes=quickest.peak_bytes, step_seconds=best, micro_batches=quickest.choice.micro_batches)
        if unlimited.step_seconds <= best * _WORTH:
            count = unlimited.choice.micro_batches
            yield MoreMemory(memory_bytes=unlimited.peak_bytes, step_seconds=unlimited.step_seconds, micro_batches=count)


def _uniform(task: Task, shard: Shard, checkpoint: Literal["none", "full"], micro_batches: int) -> Verdict:
    """Every block alike. What these constraints leave open is keeping gathered parameters; the first option of a block does not."""
    options = Options(replace(task, constraints=Constraints(shard=shard, checkpoint=checkpoint)), micro_batches)
    return options.verdict(tuple((0,) for _ in options.options))


def _alternative(task: Task, shard: Shard, checkpoint: Literal["none", "full"], verdict: Verdict) -> Alternative:
    return Alternative(
        ranks=task.ranks,
        shard=shard,
        checkpoint=checkpoint,
        micro_batches=verdict.choice.micro_batches,
        step_seconds=verdict.step_seconds,
        peak_bytes=verdict.peak_bytes,
    )


def _within(model: Options, capacity: int) -> Iterator[Verdict]:
    """What the solver finds for this capacity, as far as it fits when simulated. A rough search: it may miss what planning would find."""
    problem, off = model.problem(None), 0
    for _ in range(_CORRECTIONS):
        try:
            solution = solve(replace(problem, capacity_bytes=capacity + off), seconds=_SOLVER_SECONDS, gap=_SOLVER_GAP)
        except InfeasibleError:
            return
        verdict = model.verdict(solution.choices)
        if verdict.peak_bytes <= capacity:
            yield verdict
        off = solution.peak_bytes - verdict.peak_bytes


def _in_words(instruction: str, program: Program) -> str:
    """`BACKWARD block 3 mb 1 on compute` as `backward of layers.2, micro-batch 2 of 4`."""
    found = re.match(r"(\w+)(?: block (\d+))?(?: unit (\d+))?(?: mb (-?\d+))?", instruction)
    if found is None or instruction == "optimizer.step":
        return instruction
    words = found[1].lower()
    if found[2] is not None:
        words += " of " + next((call.label or "the model" for call in program.calls if call.number == int(found[2])), f"block {found[2]}")
    if found[3] is not None:
        words += " of " + next((unit.parameters[0] for unit in program.units if unit.number == int(found[3])), f"unit {found[3]}")
    if found[4] is not None and len(program.rows) > 1:
        mb, count = int(found[4]), len(program.rows)
        words += f", micro-batch {mb % count + 1} of {count}" + (" of the batch before" if mb < 0 else "")
    return words
