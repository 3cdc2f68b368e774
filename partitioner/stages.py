"""Interim."""

from dataclasses import replace
from math import inf

from partitioner.errors import InfeasibleError
from partitioner.options import Options
from partitioner.pipeline import Pipeline
from partitioner.prepare import check_micro_batches, most_micro_batches
from partitioner.schedules import chunks_of
from partitioner.trial import Task, Verdict


def decide_stages(task: Task) -> Verdict:
    pinned = task.constraints.micro_batches
    most = most_micro_batches(task.prepared(2), task.ranks)
    if pinned is not None:
        check_micro_batches(task.prepared(pinned), task.ranks, pinned)
    best: Verdict | None = None
    for m in [pinned] if pinned else sorted({min(most, k) for k in (1, 2, 4, 8)}):
        model = Options(task, m)
        flat = [index for run in model.quickest for index in run]
        seconds = [options[index][0].compute_seconds for options, index in zip(model.options, flat, strict=True)]
        name = task.constraints.schedule or "1f1b"
        count = chunks_of(name, task.stages)
        if len(seconds) < count:
            raise InfeasibleError(f"the model is cut into {len(seconds)} blocks, but {count} stages need one each; use fewer stages")
        pipeline = Pipeline(task.stages, cuts(seconds, count), name)
        verdict = model.verdict(model.quickest, pipeline)
        if best is None or verdict.step_seconds < best.step_seconds:
            best = verdict
    assert best is not None
    return replace(best, bound_seconds=0.0)


def cuts(seconds: list[float], count: int) -> tuple[int, ...]:
    n = len(seconds)
    total = [0.0]
    for s in seconds:
        total.append(total[-1] + s)
    best = [[inf] * (n + 1) for _ in range(count + 1)]
    back = [[0] * (n + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for k in range(1, count + 1):
        for j in range(k, n + 1):
            for i in range(k - 1, j):
                c = max(best[k - 1][i], total[j] - total[i])
                if c < best[k][j]:
                    best[k][j], back[k][j] = c, i
    chunks = [0] * n
    j = n
    for k in range(count, 0, -1):
        i = back[k][j]
        for x in range(i, j):
            chunks[x] = k - 1
        j = i
    return tuple(chunks)
