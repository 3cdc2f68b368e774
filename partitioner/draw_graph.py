"""Draws the partitioned graph: blocks from top to bottom, folded where they repeat, and the values that pass between them.

×4   ┌──────────────┐
262  │ h.0 … 3      │ 262 kB ──┐      a value that skips boxes runs in a lane of its own, the shortest innermost
kB   └──────┬───────┘          │
            ▼ 262 kB           │
     ┌──────────────┐          │
     │ head         │◄─────────┘

Where a pipeline is cut a line runs across, with the stage that follows and what the one above sends.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.draw_canvas import COLORS, FORMATS, INK, PAPER, QUIET, RULE, Canvas, ending, fitted, legend_width, text_width, wrapped
from partitioner.draw_facts import Names
from partitioner.draw_model import Box, Picture, Wire, picture
from partitioner.plan import Plan
from partitioner.quantities import format_bytes

WIDTH, PAD, LINE, GAP, MARGIN, PORT, LANE = 330.0, 8.0, 11.5, 24.0, 20.0, 12.0, 9.0
CUT = 34.0
"""Points that a cut between stages takes above the box that follows it."""

SMALL = 7.5
_CHIPS = {"none": (PAPER, INK), "zero1": ("#e3e9f3", INK), "zero2": (COLORS["optimizer state"], INK), "zero3": (COLORS["parameters"], PAPER)}
_SHARDS = (
    ("none", "whole on every rank"),
    ("zero1", "optimizer state cut over dp"),
    ("zero2", "gradients as well"),
    ("zero3", "parameters as well"),
)
_LEGEND = (
    ("saved for backward", COLORS["saved values"]),
    ("run again in backward", COLORS["backward"]),
    ("parameters gathered", COLORS["gathered parameters"]),
    ("gradients reduced", COLORS["gradients"]),
    ("its ops", COLORS["temporaries"]),
)


@dataclass(frozen=True)
class Line:
    """A line of text in a box, behind a mark of some colour."""

    text: str
    mark: str | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Port:
    """Where a wire leaves a box (text: how much) or enters it (text: from where)."""

    wire: int
    text: str
    leaves: bool


def draw_graph(plan: Plan, path: str | Path) -> Path:
    """Write the picture; of a plan from a file the blocks and their decisions, without ops, traffic and wires."""
    ending(Path(path), FORMATS)
    return graph_canvas(plan).save(path)


def graph_canvas(plan: Plan) -> Canvas:
    lowered: Any = plan._lowered
    shown = picture(plan, lowered)
    most = max((box.saved.keepable_bytes for box in shown.boxes if box.saved), default=0)
    lines = [_lines(box) for box in shown.boxes]
    ports = [_ports(shown, at) for at in range(len(shown.boxes))]
    lanes = _lanes(shown.wires)
    left = MARGIN + max((text_width(text, SMALL) + 14 for fold in shown.folds for text in _turns(fold.count, fold.carried_bytes)), default=0)
    stub = max((text_width(port.text, SMALL) + 14 for some in ports for port in some), default=0)
    right = left + WIDTH + stub + LANE * (max(lanes.values(), default=-1) + 1)
    header = _header(plan, lowered is not None)
    width = max(right, left + legend_width(_LEGEND), left + _chips_width(), left + max(text_width(text, 8.5) for text in header[1:])) + MARGIN
    cuts = {chunk.first for chunk in shown.chunks}
    tops, heights, y = [], [], MARGIN + 30 + 13 * len(header[1:])
    for at, (box, some, about) in enumerate(zip(shown.boxes, ports, lines, strict=True)):
        y += CUT if at in cuts else 0
        tops.append(y)
        heights.append(max(PAD + 10 + LINE * len(about) + (8 if _bar(box, most) else 0) + PAD, PORT * len(some) + 10))
        y += heights[-1] + GAP
    canvas = Canvas(width, y + 30)
    canvas.text(left, MARGIN + 12, fitted(header[0], width - left - MARGIN, 13, True), 13, bold=True)
    for at, text in enumerate(header[1:]):
        canvas.text(left, MARGIN + 28 + 13 * at, text, 8.5, QUIET)
    _cuts(canvas, shown, tops, left, width - MARGIN)
    _folds(canvas, shown, tops, heights, left)
    for box, about, top, height in zip(shown.boxes, lines, tops, heights, strict=True):
        _box(canvas, box, about, (left, top, WIDTH, height), most)
    _wires(canvas, shown, ports, lanes, tops, heights, left + WIDTH, stub)
    _straight(canvas, shown, tops, heights, left + WIDTH / 2)
    _key(canvas, left, y + 2)
    return canvas


def _header(plan: Plan, whole: bool) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    rows = "a batch that is not cut" if plan.batch.rows is None else f"a batch of {plan.batch.rows:,} rows"
    micro = "1 micro-batch" if plan.micro_batches == 1 else f"{plan.micro_batches} micro-batches"
    cuts = [f"{leaf.path} dim {leaf.dim}" for leaf in plan.batch.leaves if leaf.dim is not None]
    lines = [f"{plan.ranks:,} ranks ({mesh}) of {plan.cluster.name}, {plan.optimizer}, {plan.precision}, {rows} in {micro}"]
    if cuts:
        lines.append("cut over dp: " + ", ".join(cuts[:3]) + (f" and {len(cuts) - 3} more" if len(cuts) > 3 else ""))
    if plan.replicated:
        names = list(dict.fromkeys(item.op for item in plan.replicated))
        lines.append(f"run whole on every rank: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else ""))
    lines.append(
        "in the order of forward; bytes of one rank and one micro-batch, traffic of one step; bars: kept of what might be kept"
        if whole
        else "from a plan file, which holds decisions alone; make_plan(model, …, plan=plan) adds ops, traffic and what passes between blocks"
    )
    return [plan.model, *(fitted(line, 640, 8.5) for line in lines)]


def _lines(box: Box) -> list[Line]:
    """What a box says below its title."""
    room, lines = WIDTH - 2 * PAD - 12, []
    if box.plan is None:
        lines.append(Line("once a step, over all rows of this rank", quiet=True))
    if box.reads:
        lines += [Line(text, quiet=True) for text in wrapped([f"reads {box.reads[0]}", *box.reads[1:]], room + 12, SMALL)]
    if box.ops is not None:
        lines += [Line(text, COLORS["temporaries"]) for text in wrapped(box.ops.all, room, SMALL)]
        lines += [Line(text, COLORS["gathered parameters"]) for text in wrapped(box.ops.collectives, room, SMALL)]
    if box.saved is not None and (box.saved.keepable or box.saved.values):
        words = _list(f"keeps {format_bytes(box.saved.bytes)} of {format_bytes(box.saved.keepable_bytes)}", box.ops.kept if box.ops else ())
        lines += [Line(text, COLORS["saved values"]) for text in wrapped(words, room, SMALL)]
        whole = box.saved.forward_seconds + box.saved.backward_seconds
        if box.saved.recompute_seconds > 0 and whole > 0:
            share = f"runs again, {100 * box.saved.recompute_seconds / whole:.2g} % of its time"
            words = _list(share, box.ops.again if box.ops else ())
            lines += [Line(text, COLORS["backward"]) for text in wrapped(words, room, SMALL)]
    for op, color in (("GATHER", "gathered parameters"), ("REFRESH", "gathered parameters"), ("REDUCE", "gradients")):
        if op in box.traffic:
            times, size = box.traffic[op]
            lines.append(Line(f"{op} {format_bytes(size)}" + (f" ×{times}" if times > 1 else ""), COLORS[color]))
    return lines


def _list(head: str, names: Names) -> list[str]:
    return [f"{head}: {names[0]}", *names[1:]] if names else [head]


def _turns(count: int, carried: int) -> list[str]:
    return [f"×{count}", *([f"{format_bytes(carried)}", "passed on"] if carried else [])]


def _bar(box: Box, most: int) -> bool:
    return bool(most and box.saved and box.saved.keepable_bytes)


def _ports(shown: Picture, at: int) -> list[Port]:
    """Entering wires first, then leaving ones."""
    entering = [
        Port(number, f"{format_bytes(wire.bytes)} from {fitted(shown.boxes[wire.source].label, 90, SMALL)}", False)
        for number, wire in enumerate(shown.wires)
        if at in _skipping(wire)
    ]
    leaving = [
        Port(number, format_bytes(wire.bytes) + (f" in {wire.values} values" if wire.values > 1 else ""), True)
        for number, wire in enumerate(shown.wires)
        if wire.source == at and _skipping(wire)
    ]
    return [*entering, *leaving]


def _skipping(wire: Wire) -> tuple[int, ...]:
    """The boxes that a wire reaches through a lane: all but the next one."""
    return tuple(target for target in wire.targets if target > wire.source + 1)


def _lanes(wires: tuple[Wire, ...]) -> dict[int, int]:
    """Wire -> lane, so that no two overlap; short ones first, which puts them innermost."""
    spans = {number: (wire.source, max(_skipping(wire))) for number, wire in enumerate(wires) if _skipping(wire)}
    lanes: dict[int, int] = {}
    for number, (start, end) in sorted(spans.items(), key=lambda item: (item[1][1] - item[1][0], item)):
        taken = {lanes[other] for other in lanes if spans[other][0] < end and start < spans[other][1]}
        lanes[number] = next(lane for lane in range(len(spans)) if lane not in taken)
    return lanes


def _box(canvas: Canvas, box: Box, lines: list[Line], place: tuple[float, float, float, float], most: int) -> None:
    x, y, width, height = place
    if box.count > 1:
        canvas.card((x + 3, y + 3, width, height), edge=RULE)
    canvas.card(place)
    title = width - 2 * PAD
    if box.plan is not None:
        text = box.plan.shard + (" kept" if box.plan.keep_gathered and box.plan.shard == "zero3" else "")
        fill, ink = _CHIPS[box.plan.shard]
        chip = text_width(text, SMALL) + 10
        canvas.card((x + width - PAD - chip, y + 5, chip, 13), fill)
        canvas.text(x + width - PAD - chip / 2, y + 14.5, text, SMALL, ink, "middle")
        title -= chip + 8
        where = f"block {box.first}" if box.count == 1 else f"blocks {box.first} … {box.last}"
        canvas.text(x + width - PAD - chip - 8, y + 14.5, where, SMALL, QUIET, "end")
        title -= text_width(where, SMALL) + 8
    canvas.text(x + PAD, y + PAD + 7, fitted(box.label, title, 9, True), 9, bold=True)
    at = y + PAD + 10
    previous = None
    for line in lines:
        at += LINE
        if line.mark is not None and line.mark != previous:
            canvas.boxes([(x + PAD, at - 6, 6, 6)], line.mark)
        canvas.text(x + PAD + (12 if line.mark else 0), at, line.text, SMALL, QUIET if line.quiet else INK)
        previous = line.mark
    if _bar(box, most) and box.saved is not None:
        whole = (width - 2 * PAD) * box.saved.keepable_bytes / most
        canvas.boxes([(x + PAD, at + 6, whole, 4)], RULE)
        canvas.boxes([(x + PAD, at + 6, whole * min(1.0, box.saved.bytes / box.saved.keepable_bytes), 4)], COLORS["saved values"])


def _cuts(canvas: Canvas, shown: Picture, tops: list[float], left: float, right: float) -> None:
    """Above each stage a line, its number, and what goes on from it."""
    for chunk in shown.chunks:
        y = tops[chunk.first] - CUT / 2 - 2
        canvas.line([(MARGIN, y), (right, y)], INK, 0.8, dashed=True)
        name = f"stage {chunk.stage}"
        canvas.text(left, y + 11, name, 9, bold=True)
        if chunk.sends:
            words = "sends " + "; ".join(f"{size} to {', '.join(stages)}" for size, stages in _by_size(chunk.sends).items())
            room = (WIDTH if chunk.first <= 1 else WIDTH / 2) - text_width(name, 9, True) - 14  # beside the arrow from the stage above
            canvas.text(left + text_width(name, 9, True) + 6, y + 11, fitted(words, room, SMALL), SMALL, QUIET)


def _by_size(sends: dict[int, int]) -> dict[str, list[str]]:
    """Bytes in words -> the stages that so many go to."""
    found: dict[str, list[str]] = {}
    for stage, size in sends.items():
        found.setdefault(format_bytes(size), []).append(str(stage))
    return found


def _folds(canvas: Canvas, shown: Picture, tops: list[float], heights: list[float], left: float) -> None:
    for fold in shown.folds:
        top, bottom = tops[fold.first], tops[fold.last] + heights[fold.last]
        canvas.line([(left - 4, top), (left - 8, top), (left - 8, bottom), (left - 4, bottom)], QUIET)
        for at, text in enumerate(_turns(fold.count, fold.carried_bytes)):
            canvas.text(left - 12, (top + bottom) / 2 - 2 + 10 * at, text, SMALL if at else 9, QUIET if at else INK, "end", bold=not at)


def _wires(
    canvas: Canvas, shown: Picture, ports: list[list[Port]], lanes: dict[int, int], tops: list[float], heights: list[float], x: float, stub: float
) -> None:
    levels: dict[tuple[int, int], float] = {}  # (box, wire) -> y
    for at, some in enumerate(ports):
        space = (heights[at] - 6) / max(1, len(some))
        for index, port in enumerate(some):
            levels[at, port.wire] = tops[at] + 3 + space * (index + 0.5) + 3
    for number, lane in lanes.items():
        wire = shown.wires[number]
        across = x + stub + LANE * lane
        start, thick = levels[wire.source, number], _thick(shown, wire.bytes)
        canvas.line([(x + _behind(shown, wire.source), start), (across, start), (across, levels[max(wire.targets), number])], QUIET, thick)
        for target in _skipping(wire):
            canvas.arrow([(across, levels[target, number]), (x + _behind(shown, target), levels[target, number])], QUIET, thick)
    for at, some in enumerate(ports):
        for port in some:
            canvas.text(x + 7, levels[at, port.wire] - 2.5, port.text, SMALL, QUIET)


def _straight(canvas: Canvas, shown: Picture, tops: list[float], heights: list[float], x: float) -> None:
    for at in range(len(shown.boxes) - 1):
        size = sum(wire.bytes for wire in shown.wires if wire.source == at and at + 1 in wire.targets)
        if size:
            bottom = tops[at] + heights[at] + _behind(shown, at)
            canvas.arrow([(x, bottom), (x, tops[at + 1])], QUIET, _thick(shown, size))
            middle = (bottom + tops[at + 1]) / 2
            cut = at + 1 in {chunk.first for chunk in shown.chunks}
            canvas.text(x + 6, (tops[at + 1] - 5 if cut else middle + 2.5), format_bytes(size), SMALL, QUIET)


def _chips_width() -> float:
    return sum(text_width(shard, SMALL) + 10 + 4 + text_width(meaning, SMALL) + 14 for shard, meaning in _SHARDS) - 14


def _behind(shown: Picture, at: int) -> float:
    """How far the card behind a folded box stands out."""
    return 3.0 if shown.boxes[at].count > 1 else 0.0


def _thick(shown: Picture, size: int) -> float:
    return 0.6 + 1.6 * size / max(wire.bytes for wire in shown.wires)


def _key(canvas: Canvas, x: float, y: float) -> None:
    canvas.legend(x, y, _LEGEND)
    for shard, meaning in _SHARDS:
        fill, ink = _CHIPS[shard]
        chip = text_width(shard, SMALL) + 10
        canvas.card((x, y + 9, chip, 13), fill)
        canvas.text(x + chip / 2, y + 18.5, shard, SMALL, ink, "middle")
        canvas.text(x + chip + 4, y + 18.5, meaning, SMALL, QUIET)
        x += chip + 4 + text_width(meaning, SMALL) + 14
