"""Draws a step of a pipeline as a Gantt chart: a lane for every stage, in it the turns with the numbers of their micro-batches, and bubbles between.

stage 0   ▒0▒1▒2▒3▒        ▓0▓ ▓1▓ …      forward ▒ and backward ▓; what lies bare is a bubble
          ╵ ╵ ╵ ╵                          thin below: messages that leave, gathers, reductions
stage 1      ▒0▒▓0▓▒1▒▓1▓ …
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partitioner.draw_axis import axis
from partitioner.draw_canvas import COLORS, INK, PAPER, QUIET, Canvas, fitted, legend_width, text_width
from partitioner.errors import PlanError
from partitioner.plan import Plan
from partitioner.quantities import format_seconds
from partitioner.runtime.simulator import OPTIMIZER
from partitioner.runtime.timeline import Timeline, instruction_of
from partitioner.schedules import ASYNCHRONOUS
from partitioner.wording import counted, percent

WIDTH, ROW, THIN, GAP, MARGIN, SIDE, HEAD = 860.0, 20.0, 3.0, 7.0, 20.0, 130.0, 24.0
SEEN, BORDERED = 0.4, 3.0
"""Points: the least width of a turn and of a gap within it, and the narrowest turn with a border."""

_TURNS = {"FORWARD": "forward", "PROLOGUE": "forward", "BACKWARD": "backward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "gradients"}
_THIN = {"send": "saved values", "gather": "gathered parameters", "reduce": "gradients", "copy": "temporaries"}
_LATER = {"forward": "#b5d8dd", "backward": "#77a9b1", "gradients": "#d297a6"}
"""Colours of a stage's second run of blocks, and of further ones."""

_BUBBLE = "#eef0f3"
_DARK = ("backward", "gradients")  # kinds whose turns take light text


@dataclass(frozen=True)
class Turn:
    """A run of a lane: its kind, its micro-batch, which of the stage's runs of blocks, and when."""

    kind: str
    mb: int | None
    turn: int
    start: float
    end: float


def turns(plan: Plan, timeline: Timeline, least: float) -> list[Turn]:
    """Blocks that run one after the other for one micro-batch as one; a gap of `least` seconds parts them."""
    found: list[Turn] = []
    for stream, text, start, end in sorted(timeline.events, key=lambda event: event[2]):
        if stream != "compute":
            continue
        instruction = instruction_of(text)
        kind = "optimizer state" if instruction.op == OPTIMIZER else _TURNS.get(instruction.op, "temporaries")
        block = instruction.block
        turn = plan.blocks[block].stage // plan.stages if block is not None and block < len(plan.blocks) else 0
        last = found[-1] if found else None
        if last is not None and (last.kind, last.mb, last.turn) == (kind, instruction.mb, turn) and start - last.end <= least:
            found[-1] = Turn(kind, last.mb, turn, last.start, end)
        else:
            found.append(Turn(kind, instruction.mb, turn, start, end))
    return found


def pipeline_canvas(plan: Plan, simulated: Sequence[Timeline], measured: Sequence[Timeline] = ()) -> Canvas:
    """The simulated step, and below it, on the same axis, what was measured of it."""
    groups = [("simulated" if measured else "", _lanes(simulated)), *([("measured", _lanes(measured))] if measured else [])]
    total = max(timeline.step_seconds for _, lanes in groups for _, timeline in lanes)
    if total <= 0:
        raise PlanError("nothing in this plan takes time, so there is no timeline to draw; plan for a cluster with speeds")
    legend = _legend(plan, [timeline for _, lanes in groups for _, timeline in lanes])
    left = MARGIN + max(text_width(name, 8.5) for _, lanes in groups for name, _ in lanes) + 10
    width = left + max(WIDTH + SIDE, legend_width(legend)) + MARGIN
    top = MARGIN + 58
    bottom = top + sum((HEAD if head else 6) + sum(_height(timeline) for _, timeline in lanes) for head, lanes in groups)
    canvas = Canvas(width, bottom + 40)
    title = f"{plan.model}: {format_seconds(plan.predicted.step_seconds)} a step"
    canvas.text(MARGIN, MARGIN + 12, fitted(title, width - 2 * MARGIN, 13, True), 13, bold=True)
    canvas.text(MARGIN, MARGIN + 28, fitted(_about(plan, simulated), width - 2 * MARGIN, 8.5), 8.5, QUIET)
    axis(canvas, left, top - 6, total, WIDTH, top, bottom + 4)
    scale, y = WIDTH / total, top
    for head, lanes in groups:
        longest = max(timeline.step_seconds for _, timeline in lanes)
        if head:
            canvas.text(MARGIN, y + 16, head, 9, bold=True)
            canvas.text(left + WIDTH + 12, y + 16, f"step {format_seconds(longest)}", 8, QUIET)
        y += HEAD if head else 6
        for name, timeline in lanes:
            canvas.text(left - 8, y + ROW / 2 + 3, name, 8.5, INK, "end")
            _lane(canvas, plan, timeline, left, y, scale, longest)
            y += _height(timeline)
    canvas.legend(left, bottom + 22, legend)
    return canvas


def _about(plan: Plan, simulated: Sequence[Timeline]) -> str:
    each = plan.ranks // plan.stages
    some = "" if len(simulated) == plan.ranks else ", of each the first and the last"
    ranks = f" of {each:,} ranks{some}" if each > 1 else ""
    micro = counted(plan.micro_batches, "micro-batch", "es")
    late = ", below 0 of the batch before; each lane from its own start" if plan.schedule in ASYNCHRONOUS else ""
    return f"{plan.stages} stages{ranks} on {plan.cluster.name}; {plan.schedule}, {micro}; the numbers are those of micro-batches{late}"


def _lanes(timelines: Sequence[Timeline]) -> list[tuple[str, Timeline]]:
    """By stage; of ranks that do the same at the same time one."""
    groups: dict[object, list[Timeline]] = defaultdict(list)
    several = len({timeline.rank for timeline in timelines}) > 1
    for timeline in sorted(timelines, key=lambda timeline: (timeline.stage, timeline.rank)):
        groups[timeline.stage, timeline.step_seconds, timeline.events].append(timeline)
    found = []
    for group in groups.values():
        numbers = ", ".join(str(timeline.rank) for timeline in group)
        found.append((f"stage {group[0].stage}" + (f", rank{'s' * (len(group) > 1)} {numbers}" if several else ""), group[0]))
    return found


def _height(timeline: Timeline) -> float:
    return ROW + THIN * sum(stream in timeline.busy for stream in _THIN) + GAP


def _lane(canvas: Canvas, plan: Plan, timeline: Timeline, left: float, y: float, scale: float, step: float) -> None:
    canvas.boxes([(left, y, step * scale, ROW)], _BUBBLE)
    found = turns(plan, timeline, SEEN / scale)
    fills: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for turn in found:
        color = _LATER.get(turn.kind, COLORS[turn.kind]) if turn.turn else COLORS[turn.kind]
        fills[color].append((left + turn.start * scale, y, max(SEEN, (turn.end - turn.start) * scale), ROW))
    for color, boxes in fills.items():
        canvas.boxes([box for box in boxes if box[2] < BORDERED], color)
        canvas.boxes([box for box in boxes if box[2] >= BORDERED], color, PAPER)
    for turn in found:
        label = "" if turn.mb is None else str(turn.mb)
        if label and text_width(label, 7) + 2 <= (turn.end - turn.start) * scale:
            ink = PAPER if turn.kind in _DARK else INK
            canvas.text(left + (turn.start + turn.end) / 2 * scale, y + ROW / 2 + 2.5, label, 7, ink, "middle")
    below = y + ROW
    for stream in (stream for stream in _THIN if stream in timeline.busy):
        spans = [(start, end) for name, _, start, end in timeline.events if name == stream]
        ticks = [(left + start * scale, below + 0.5, max(SEEN, (end - start) * scale), THIN - 0.5) for start, end in spans]
        canvas.boxes(ticks, COLORS[_THIN[stream]])
        below += THIN
    waits = timeline.bubble_seconds + step - timeline.step_seconds
    shares = f"busy {percent(timeline.busy.get('compute', 0.0) / step)}, bubble {percent(waits / step)}"
    canvas.text(left + WIDTH + 12, y + ROW / 2 + 3, shares, 8, INK)


def _legend(plan: Plan, timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    ops = {instruction_of(text).op for timeline in timelines for _, text, _, _ in timeline.events}
    streams = {stream for timeline in timelines for stream in timeline.busy}
    names: Mapping[str, bool] = {
        "forward": True,
        "backward": True,
        "gradients of parameters": "BACKWARD_WEIGHT" in ops,
        "optimizer.step": OPTIMIZER in ops,
    }
    colors = dict(zip(names, ("forward", "backward", "gradients", "optimizer state"), strict=True))
    found = [(name, COLORS[colors[name]]) for name, there in names.items() if there]
    if any(block.stage >= plan.stages for block in plan.blocks):
        found.append(("lighter: a stage's second run of blocks", _LATER["forward"]))
    found.append(("bubble", _BUBBLE))
    thin = {"send": "message leaves", "gather": "gather of parameters", "reduce": "reduction of gradients"}
    return found + [(name, COLORS[_THIN[stream]]) for stream, name in thin.items() if stream in streams]
