"""What each pipeline stage of a plan holds and does, from the plan alone: so that a plan file tells it too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partitioner.asynchronous import RULE
from partitioner.plan import BlockPlan, Plan, RankPrediction
from partitioner.quantities import format_bytes
from partitioner.schedules import ASYNCHRONOUS, chunks_of, stage_of
from partitioner.wording import counted, listed, percent, span

_MOST_CHUNKS = 3


@dataclass(frozen=True)
class StageFacts:
    """One stage: its runs of blocks (first label, last label, count), several where interleaved, and its fullest rank.

    busy, bubble: of the step the share in which its busiest rank computes, and in which that waits for other stages.
    """

    number: int
    runs: tuple[tuple[str, str, int], ...]
    parameter_bytes: int
    peak_bytes: int
    busy: float
    bubble: float

    @property
    def blocks(self) -> int:
        return sum(count for _, _, count in self.runs)


def interleaves(plan: Plan) -> bool:
    """Whether a stage has several runs of blocks."""
    return chunks_of(plan.schedule, plan.stages) > plan.stages


def place_of(plan: Plan, block: BlockPlan, chunk: bool) -> str:
    """`stage 1`, or with the number of the run of blocks `stage 1, chunk 3`."""
    return f"stage {stage_of(plan.schedule, block.stage, plan.stages)}" + (f", chunk {block.stage}" if chunk else "")


def stage_facts(plan: Plan) -> tuple[StageFacts, ...]:
    """Of every stage, in order; of a plan without a pipeline the one."""
    chunks: list[list[BlockPlan]] = [[] for _ in range(chunks_of(plan.schedule, plan.stages))]
    for block in plan.blocks:
        chunks[block.stage].append(block)
    runs: list[list[tuple[str, str, int]]] = [[] for _ in range(plan.stages)]
    for chunk, blocks in enumerate(chunks):
        if blocks:
            runs[stage_of(plan.schedule, chunk, plan.stages)].append((blocks[0].label, blocks[-1].label, len(blocks)))
    ranks = _ranks(plan)
    step = plan.predicted.step_seconds
    found = []
    for stage in range(plan.stages):
        fullest = max(ranks[stage], key=lambda run: run.peak_bytes)
        busiest = max(ranks[stage], key=lambda run: run.compute_seconds)
        waits = busiest.bubble_seconds + max(0.0, step - busiest.step_seconds)
        shares = (busiest.compute_seconds / step, waits / step) if step > 0 else (0.0, 0.0)
        found.append(StageFacts(stage, tuple(runs[stage]), fullest.breakdown.get("parameters", 0), fullest.peak_bytes, *shares))
    return tuple(found)


def _ranks(plan: Plan) -> Mapping[int, list[RankPrediction]]:
    """Stage -> the different ranks of it; ranks are counted stage by stage."""
    each, at = plan.ranks // plan.stages, 0
    found: dict[int, list[RankPrediction]] = {stage: [] for stage in range(plan.stages)}
    for run in plan.predicted.runs:
        for stage in range(at // each, (at + run.ranks - 1) // each + 1):
            found[stage].append(run)
        at += run.ranks
    return found


def stage_lines(plan: Plan, most: int, width: int) -> list[str]:
    """A line of at most `width` columns for each stage, of at most so many stages; none for a plan without a pipeline."""
    if plan.stages == 1:
        return []
    found = stage_facts(plan)
    shown = found if len(found) <= most else (*found[: most - 1], found[-1])
    rows = [
        [
            str(facts.number),
            listed([span(first, last, count) for first, last, count in facts.runs], _MOST_CHUNKS),
            counted(facts.blocks, "block"),
            f"parameters {format_bytes(facts.parameter_bytes)}",
            f"peak {format_bytes(facts.peak_bytes)}",
            f"busy {percent(facts.busy)}",
            f"bubble {percent(facts.bubble)}",
        ]
        for facts in shown
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    widths[1] = min(widths[1], width - sum(widths) + widths[1] - 2 * 7)
    lines = []
    for row in rows:
        cells = [text if len(text) <= width else text[: width - 1] + "…" for text, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip())
    if len(shown) < len(found):
        lines.insert(-1, f"  … {counted(len(found) - len(shown), 'more stage')}")
    about = [f"  asynchronous: {RULE}"] if plan.schedule in ASYNCHRONOUS else []
    return [f"stages: {plan.stages}, {plan.schedule}, {counted(plan.micro_batches, 'micro-batch', 'es')}", *about, *lines]


def stage_data(plan: Plan) -> list[dict[str, Any]]:
    """The same for scripts."""
    return [
        {
            "stage": facts.number,
            "blocks": [{"first": first, "last": last, "count": count} for first, last, count in facts.runs],
            "parameter_bytes": facts.parameter_bytes,
            "peak_bytes": facts.peak_bytes,
            "busy": facts.busy,
            "bubble": facts.bubble,
        }
        for facts in stage_facts(plan)
    ]
