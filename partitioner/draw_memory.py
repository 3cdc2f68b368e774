"""Draws the bytes of a step over time by kind, and the same peak beside that of plain training and of a run.

Everything shown is the simulator's: an instruction is a column from when it is issued until the next is, as high as the most that is held
meanwhile. `optimizer.step` stands at the end. Of a pipeline every stage has a picture of its own, one below the other on one scale.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partitioner.draw_axis import axis, nice
from partitioner.draw_canvas import COLORS, FORMATS, INK, QUIET, RULE, Canvas, ending, fitted, legend_width, text_width
from partitioner.plan import Plan
from partitioner.quantities import format_bytes
from partitioner.runtime.program import Program
from partitioner.runtime.simulator import OPTIMIZER, Moment, Simulation
from partitioner.runtime.text import parse_instruction

WIDTH, HEIGHT, MARGIN, SIDE, BAR = 700.0, 300.0, 20.0, 66.0, 16.0
KINDS = ("parameters", "optimizer state", "inputs, buffers and constants", "gradients", "gathered parameters", "saved values", "temporaries")
"""From the bottom up: what lasts, then what comes and goes."""

_LAST = 10.0  # points that `optimizer.step` takes at least
_COLUMN = 1.0


def draw_memory(plan: Plan, path: str | Path, measured: int | None = None) -> Path:
    """Write .svg, .pdf or .png. measured: peak bytes that the fullest rank was seen to use."""
    ending(Path(path), FORMATS)
    return memory_canvas(plan, measured).save(path)


def memory_canvas(plan: Plan, measured: int | None = None) -> Canvas:
    lowered: Any = plan._bound("draw_memory")
    shown = _fullest(lowered)
    program, simulation = max(shown, key=lambda pair: pair[1].peak_bytes)
    bars = _bars(plan, lowered, shown, measured)
    cap = plan.memory_bytes or plan.cluster.memory_bytes
    height = HEIGHT if len(shown) == 1 else HEIGHT / 2
    panel = height + 46 + (26 if len(shown) > 1 else 0)
    left, top = MARGIN + SIDE, MARGIN + 62
    below = top + panel * len(shown)
    names = [(kind, COLORS[kind]) for kind in KINDS]
    width = max(left + WIDTH + SIDE + MARGIN, left + legend_width(names) + MARGIN)
    canvas = Canvas(width, below + 34 + (BAR + 10) * len(bars) + 40)
    peak = simulation.peak
    canvas.text(MARGIN, MARGIN + 12, fitted(f"{plan.model}: {format_bytes(peak.peak_bytes)} at most", width - 2 * MARGIN, 13, True), 13, bold=True)
    canvas.text(MARGIN, MARGIN + 28, fitted(_about(plan, program, cap), width - 2 * MARGIN, 8.5), 8.5, QUIET)
    full = 1.08 * (cap if peak.peak_bytes <= cap < 2 * peak.peak_bytes else peak.peak_bytes)
    step = max(played.step_seconds for _, played in shown)
    for number, (of, played) in enumerate(shown):
        at = top + panel * number
        if len(shown) > 1:
            canvas.text(MARGIN, at - 8, f"stage {of.stage}", 9, bold=True)
        _over_time(canvas, played, of, cap, full, step, left, at, height)
    canvas.text(MARGIN, below + 8, "at the peak", 9, bold=True)
    _compared(canvas, bars, cap, below + 20, width)
    canvas.legend(MARGIN, below + 34 + (BAR + 10) * len(bars) + 14, names)
    return canvas


def _about(plan: Plan, program: Program, cap: int) -> str:
    micro = "1 micro-batch" if plan.micro_batches == 1 else f"{plan.micro_batches} micro-batches"
    rank = f"rank {program.rank} of {plan.ranks:,}, the fullest" if plan.stages == 1 else f"the fullest rank of each of {plan.stages} stages"
    return f"{rank}; {micro}; {format_bytes(cap)} {'allowed' if plan.memory_bytes else 'a device'}"


def _fullest(lowered: Any) -> list[tuple[Program, Simulation]]:
    """Of each stage the rank that holds the most."""
    found: dict[int, tuple[Program, Simulation]] = {}
    for program, simulation in zip(lowered.programs, lowered.simulations, strict=True):
        if program.stage not in found or found[program.stage][1].peak_bytes < simulation.peak_bytes:
            found[program.stage] = (program, simulation)
    return list(found.values())


def _over_time(
    canvas: Canvas, simulation: Simulation, program: Program, cap: int, full: float, seconds: float, left: float, top: float, height: float
) -> None:
    """full: bytes at the upper edge; seconds: of the whole axis."""
    peak = simulation.peak.peak_bytes
    bottom, right = top + height, left + WIDTH
    step = nice(full / (6 if height == HEIGHT else 3))
    for number in range(int(full / step) + 1):
        y = bottom - height * number * step / full
        canvas.line([(left, y), (right, y)], RULE, 0.6)
        canvas.text(left - 6, y + 2.5, format_bytes(number * step) if number else "0", 7.5, QUIET, "end")
    columns = _columns(simulation, seconds)
    below = [0] * len(columns)
    for kind in KINDS:
        above = [low + moment.by_kind[kind] for low, moment in zip(below, columns, strict=True)]
        if above != below:
            edge = _steps(above, left, bottom, height / full)
            canvas.polygon([*edge, *reversed(_steps(below, left, bottom, height / full))], COLORS[kind])
        below = above
    axis(canvas, left, bottom + 16, seconds, WIDTH - _LAST, bottom, bottom + 4)
    start = left + simulation.memory[-1].seconds * (WIDTH - _LAST) / seconds
    canvas.line([(start, bottom + 22), (start, bottom + 24), (right, bottom + 24), (right, bottom + 22)], QUIET, 0.6)
    canvas.text(right, bottom + 34, OPTIMIZER, 7.5, QUIET, "end")
    if cap <= full:
        y = bottom - height * cap / full
        canvas.line([(left, y), (right, y)], INK, 1.0, dashed=True)
        canvas.text(right + 6, y + 2.5, f"cap {format_bytes(cap)}", 7.5)
    x = left + _COLUMN * (0.5 + next(at for at, moment in enumerate(columns) if moment.peak_bytes == peak))
    y = bottom - height * peak / full
    text = f"peak {format_bytes(peak)} at {_place(simulation.peak, program)}"
    canvas.line([(x, top - 4), (x, y)], INK, 0.8)
    room = text_width(text, 8) / 2
    canvas.text(min(max(x, left + room), right - room), top - 8, text, 8, INK, "middle")


def _place(moment: Moment, program: Program) -> str:
    """The instruction of the peak, and which block it runs."""
    if moment.instruction in ("FINISH", OPTIMIZER):
        return moment.instruction
    instruction = parse_instruction(moment.instruction)
    number = instruction.unit if instruction.block is None else instruction.block
    words = [instruction.op, *([] if number is None else [f"{'unit' if instruction.block is None else 'block'} {number}"])]
    words += [] if instruction.mb is None else [f"mb {instruction.mb}"]
    label = "" if instruction.block is None else f" ({fitted(program.call_of[instruction.block].label, 200, 8)})"
    return " ".join(words) + label


def _columns(simulation: Simulation, seconds: float) -> list[Moment]:
    """The fullest moment of every column of a picture of so many seconds."""
    scale, count = (WIDTH - _LAST) / seconds if seconds else 0.0, int(WIDTH / _COLUMN)
    columns: list[Moment | None] = [None] * count
    for at, moment in enumerate(simulation.memory):
        last = at + 1 == len(simulation.memory)
        start = min(int(moment.seconds * scale / _COLUMN), count - 1)
        end = count if last else min(int(simulation.memory[at + 1].seconds * scale / _COLUMN) + 1, count)
        for column in range(start, max(end, start + 1)):
            held = columns[column]
            columns[column] = moment if held is None or held.peak_bytes < moment.peak_bytes else held
    return [moment for moment in columns if moment is not None]


def _steps(heights: Sequence[int], left: float, bottom: float, scale: float) -> list[tuple[float, float]]:
    """The outline of columns; equal neighbours are one step."""
    points: list[tuple[float, float]] = []
    for column, height in enumerate(heights):
        y = bottom - height * scale
        if points and points[-1][1] == y:
            points[-1] = (left + (column + 1) * _COLUMN, y)
        else:
            points += [(left + column * _COLUMN, y), (left + (column + 1) * _COLUMN, y)]
    return points


def _bars(plan: Plan, lowered: Any, shown: Sequence[tuple[Program, Simulation]], measured: int | None) -> list[tuple[str, dict[str, int], str]]:
    """(name, bytes by kind, remark): plain training in one process and in as many as the plan has, the plan stage by stage, and a run."""
    plain: Simulation = lowered.plain(1)
    bars = [("plain, one device", plain.peak.by_kind, "")]
    if plan.ranks > 1:
        bars.append((f"plain data parallel, {plan.ranks:,} ranks", lowered.plain(plan.ranks).peak.by_kind, ""))
    for program, simulation in shown:
        name = f"this plan, stage {program.stage}" if len(shown) > 1 else "this plan, predicted"
        bars.append((name, simulation.peak.by_kind, f"{100 * simulation.peak_bytes / plain.peak_bytes:.3g} % of one device"))
    peak = max(simulation.peak_bytes for _, simulation in shown)
    if measured is not None:
        bars.append(("this plan, measured", {"measured": measured}, f"{100 * (measured / peak - 1):+.3f} %"))
    return bars


def _compared(canvas: Canvas, bars: Sequence[tuple[str, dict[str, int], str]], cap: int, top: float, width: float) -> None:
    left = MARGIN + max(text_width(name, 8) for name, _, _ in bars) + 10
    room = max(text_width(_total(kinds, remark), 8) for _, kinds, remark in bars) + 12
    most = max(sum(kinds.values()) for _, kinds, _ in bars)
    scale = (width - MARGIN - room - left) / most
    for at, (name, kinds, remark) in enumerate(bars):
        y, x = top + (BAR + 10) * at, left
        canvas.text(left - 8, y + BAR / 2 + 3, name, 8, INK, "end")
        for kind in (*KINDS, "measured"):
            if kinds.get(kind):
                canvas.boxes([(x, y, kinds[kind] * scale, BAR)], COLORS.get(kind, INK))
                x += kinds[kind] * scale
        text = _total(kinds, remark)
        after = left + cap * scale if x <= left + cap * scale < x + 6 + text_width(text, 8) else x  # beside the line of the cap, not under it
        canvas.text(after + 6, y + BAR / 2 + 3, text, 8, QUIET)
    if cap <= most:
        canvas.line([(left + cap * scale, top - 6), (left + cap * scale, top + (BAR + 10) * len(bars) - 4)], INK, 1.0, dashed=True)
        canvas.text(left + cap * scale, top - 9, f"cap {format_bytes(cap)}", 7.5, INK, "middle")


def _total(kinds: dict[str, int], remark: str) -> str:
    return format_bytes(sum(kinds.values())) + (f", {remark}" if remark else "")
