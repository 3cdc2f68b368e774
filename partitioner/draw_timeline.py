"""Draws the streams of a step over time: what runs beside what, and what waits.

An instruction wide enough to be seen is a box of its own, with a label where one fits. Narrower ones are drawn together, as columns as high as
the share of the time that they take: a hundred layers stay a picture.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partitioner.draw_axis import axis
from partitioner.draw_canvas import COLORS, FORMATS, INK, PAPER, QUIET, Box, Canvas, ending, fitted, legend_width, text_width
from partitioner.draw_pipeline import pipeline_canvas
from partitioner.errors import PlanError
from partitioner.plan import Plan
from partitioner.quantities import format_seconds
from partitioner.runtime.program import Instruction
from partitioner.runtime.simulator import OPTIMIZER
from partitioner.runtime.timeline import Timeline, instruction_of, save_trace
from partitioner.wording import percent

WIDTH, ROW, GAP, HEAD, MARGIN, SIDE = 760.0, 22.0, 5.0, 26.0, 20.0, 150.0
SEEN, BORDERED, COLUMN = 0.8, 4.0, 3.0
"""Points: the narrowest instruction with a box of its own, the narrowest with a border, and a column of those that have none."""

_KINDS = {
    "FORWARD": "forward",
    "PROLOGUE": "forward",
    "BACKWARD": "backward",
    "GATHER": "gathered parameters",
    "REFRESH": "gathered parameters",
    "OUTPUT": "gathered parameters",
    "REDUCE": "gradients",
    "LOSS": "gradients",
    "EPILOGUE": "inputs, buffers and constants",
    "COMMIT": "inputs, buffers and constants",
    OPTIMIZER: "optimizer state",
}
_LEGEND = (
    ("F forward", COLORS["forward"]),
    ("B backward", COLORS["backward"]),
    ("G gather of parameters", COLORS["gathered parameters"]),
    ("R reduction of gradients", COLORS["gradients"]),
    ("optimizer.step", COLORS["optimizer state"]),
)
_LIGHT = ("forward", "gathered parameters", "optimizer state")  # kinds whose boxes take dark text


def draw_timeline(plan: Plan, path: str | Path, measured: Sequence[Timeline] = ()) -> Path:
    """Write .svg, .pdf or .png, or a Chrome trace as .json."""
    if ending(Path(path), (*FORMATS, "json")) == "json":
        return save_trace(path, [*simulated(plan), *measured])
    return timeline_canvas(plan, measured).save(path)


def simulated(plan: Plan) -> list[Timeline]:
    """The simulated step of every rank that was simulated: all of a few, of many the first and the last."""
    lowered: Any = plan._bound("draw_timeline")
    return [Timeline.of(program, simulation) for program, simulation in zip(lowered.programs, lowered.simulations, strict=True)]


def timeline_canvas(plan: Plan, measured: Sequence[Timeline] = ()) -> Canvas:
    played = simulated(plan)
    if plan.stages > 1:
        return pipeline_canvas(plan, played, measured)
    shown = [*_alike(played, "simulated" if measured else ""), *_alike(measured, "measured")]
    total = max(timeline.step_seconds for _, timeline in shown)
    if total <= 0:
        raise PlanError("nothing in this plan takes time, so there is no timeline to draw; plan for a cluster with speeds")
    names = max(text_width(name, 9, True) for name, _ in shown)
    left = MARGIN + max(names, 50) + 12
    heights = [HEAD + (ROW + GAP) * len(timeline.busy) + 8 for _, timeline in shown]
    top = MARGIN + 46
    bottom = top + sum(heights) + 8
    width = left + max(WIDTH + SIDE, legend_width(_LEGEND)) + MARGIN
    canvas = Canvas(width, bottom + 36)
    micro = "1 micro-batch" if plan.micro_batches == 1 else f"{plan.micro_batches} micro-batches"
    canvas.text(
        MARGIN,
        MARGIN + 12,
        fitted(f"{plan.model}: {format_seconds(plan.predicted.step_seconds)} a step", width - 2 * MARGIN, 13, True),
        13,
        bold=True,
    )
    some = "" if len(played) == plan.ranks else ", the first and the last of which stand for all"
    canvas.text(MARGIN, MARGIN + 28, fitted(f"{plan.ranks:,} ranks of {plan.cluster.name}{some}; {micro}", width - 2 * MARGIN, 8.5), 8.5, QUIET)
    axis(canvas, left, top, total, WIDTH, top + 6, bottom - 12)
    scale, y = WIDTH / total, top
    for (name, timeline), height in zip(shown, heights, strict=True):
        canvas.text(MARGIN, y + 21, name, 9, bold=True)
        canvas.text(left + WIDTH + 12, y + 21, f"step {format_seconds(timeline.step_seconds)}", 8, QUIET)
        _micro_batches(canvas, timeline, left, y + 21, scale)
        at = y + HEAD
        for stream, seconds in timeline.busy.items():
            canvas.text(left - 8, at + ROW / 2 + 3, stream, 8, QUIET, "end")
            _stream(canvas, timeline, stream, (left, at, WIDTH, ROW), scale)
            canvas.text(left + WIDTH + 12, at + ROW / 2 + 3, f"busy {percent(seconds / timeline.step_seconds)}, {format_seconds(seconds)}", 8, INK)
            at += ROW + GAP
        y += height
    canvas.legend(left, bottom + 12, _LEGEND)
    return canvas


def _alike(timelines: Sequence[Timeline], how: str) -> list[tuple[str, Timeline]]:
    """One of each group of ranks that do the same at the same time, with the numbers of all of them."""
    groups: dict[object, list[Timeline]] = defaultdict(list)
    for timeline in timelines:
        groups[timeline.step_seconds, timeline.events].append(timeline)
    found = []
    for group in groups.values():
        numbers = ", ".join(str(timeline.rank) for timeline in group)
        found.append((f"rank{'s' * (len(group) > 1)} {numbers}" + (f", {how}" if how else ""), group[0]))
    return found


def _micro_batches(canvas: Canvas, timeline: Timeline, left: float, y: float, scale: float) -> None:
    """Over the streams, from where to where each micro-batch is computed, if there are several and the names fit."""
    spans: dict[int, tuple[float, float]] = {}
    for stream, text, start, end in timeline.events:
        mb = instruction_of(text).mb if stream == "compute" else None
        if mb is not None:
            spans[mb] = (min(start, spans.get(mb, (start, end))[0]), max(end, spans.get(mb, (start, end))[1]))
    names = {mb: f"mb {mb}" for mb in spans}
    if len(spans) < 2 or any(text_width(names[mb], 7) + 6 > (end - start) * scale for mb, (start, end) in spans.items()):
        return
    for mb, (start, end) in spans.items():
        a, b = left + start * scale + 1, left + end * scale - 1
        canvas.line([(a, y + 3), (a, y + 1), (b, y + 1), (b, y + 3)], QUIET, 0.6)
        canvas.text((a + b) / 2, y - 2, names[mb], 7, QUIET, "middle")


def _stream(canvas: Canvas, timeline: Timeline, stream: str, row: Box, scale: float) -> None:
    left, top, _, height = row
    canvas.boxes([row], "#f4f5f7")
    wide: dict[str, list[Box]] = defaultdict(list)
    labels: list[tuple[Box, Instruction, str]] = []
    columns: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for name, text, start, end in timeline.events:
        if name != stream:
            continue
        instruction = instruction_of(text)
        kind, x, across = _KINDS[instruction.op], start * scale, (end - start) * scale
        if across >= SEEN:
            box = (left + x, top, across, height)
            wide[kind].append(box)
            labels.append((box, instruction, kind))
        else:
            _share(columns[kind], x, x + across)
    several = any(instruction.mb for _, instruction, _ in labels)
    base: dict[int, float] = defaultdict(float)
    for kind, shares in columns.items():
        bars = []
        for column, points in sorted(shares.items()):
            tall = min(height * points / COLUMN, height - base[column])
            base[column] += tall
            bars.append((left + column * COLUMN, top + height - base[column], COLUMN, tall))
        canvas.boxes(bars, COLORS[kind])
    for kind, boxes in wide.items():
        canvas.boxes([box for box in boxes if box[2] < BORDERED], COLORS[kind])
        canvas.boxes([box for box in boxes if box[2] >= BORDERED], COLORS[kind], PAPER)
    for (x, y, across, tall), instruction, kind in labels:
        label = next((label for label in _labels(instruction, timeline.labels, several) if text_width(label, 7) <= across - 4), None)
        if label is not None:
            canvas.text(x + across / 2, y + tall / 2 + 2.5, label, 7, INK if kind in _LIGHT else PAPER, "middle")


def _share(columns: dict[int, float], start: float, end: float) -> None:
    """Spread the points from start to end over columns."""
    column = int(start / COLUMN)
    while start < end:
        edge = min(end, (column + 1) * COLUMN)
        columns[column] += edge - start
        start, column = edge, column + 1


def _labels(instruction: Instruction, labels: Mapping[int, str], several: bool) -> list[str]:
    """Ways to name an instruction, the longest first."""
    if instruction.op == OPTIMIZER:
        return [OPTIMIZER]
    number = instruction.block if instruction.block is not None else instruction.unit
    mb = "" if instruction.mb is None or not several else f" mb {instruction.mb}"
    short = instruction.op if number is None else f"{'G' if instruction.stream == 'gather' else instruction.op[0]}{number}"
    label = None if instruction.block is None else labels.get(instruction.block)
    names = [] if label is None else [f"{short} {label}{mb}", f"{short} {label}"]
    return list(dict.fromkeys([*names, f"{short}{mb}", short]))
