"""What the drawing of the partitioned graph shows, without geometry: boxes, what is folded, and links between them.

Consecutive blocks that repeat with the same decisions, one alone or several in turn, are folded: every box then stands for `count` blocks.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from partitioner.assemble import Lowered
from partitioner.draw_facts import Ops, ops_of, sent_bytes, unit_traffic, value_bytes
from partitioner.plan import BlockPlan, Plan, SavedSet
from partitioner.runtime.program import Call, Program
from partitioner.schedules import stage_of

_LONGEST_PERIOD = 12
Traffic = dict[str, tuple[int, int]]
"""Instruction -> how often a step, and bytes each time."""


@dataclass(frozen=True)
class Box:
    """One block, or `count` equal ones, number `first` to `last`.

    `plan` is None for the prologue and the epilogue; ops, reads and traffic are empty where the plan came from a file.
    """

    label: str
    first: int
    last: int
    count: int = 1
    plan: BlockPlan | None = None
    saved: SavedSet | None = None
    ops: Ops | None = None
    reads: tuple[str, ...] = ()
    traffic: Traffic = field(default_factory=dict)


@dataclass(frozen=True)
class Fold:
    """Boxes first … last in turn, `count` times over; `carried_bytes` go from the end of one turn to the start of the next."""

    first: int
    last: int
    count: int
    carried_bytes: int = 0


@dataclass(frozen=True)
class Picture:
    """Boxes from top to bottom, folds of them, and what goes between them."""

    boxes: tuple[Box, ...]
    folds: tuple[Fold, ...]
    wires: tuple["Wire", ...]
    chunks: tuple["Chunk", ...] = ()  # of a pipeline, in order


@dataclass(frozen=True)
class Chunk:
    """A run of boxes from number `first` on that one pipeline stage runs. sends: other stage -> bytes that go there per micro-batch."""

    first: int
    stage: int
    sends: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wire:
    """`values` values, together `bytes` per micro-batch and rank, from one box to others further down."""

    source: int
    targets: tuple[int, ...]
    bytes: int
    values: int


def folded(keys: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """The sequence as (start, period, times): at each place the repetition that covers most."""
    found, at = [], 0
    while at < len(keys):
        best = (1, 1)
        for period in range(1, _LONGEST_PERIOD + 1):
            times = 1
            while keys[at : at + period] == keys[at + times * period : at + (times + 1) * period]:
                times += 1
            if times > 1 and period * times > best[0] * best[1]:
                best = (period, times)
        found.append((at, *best))
        at += best[0] * best[1]
    return found


def picture(plan: Plan, lowered: Lowered | None) -> Picture:
    """Everything there is to draw; without programs the blocks and their decisions alone."""
    blocks = plan.blocks
    keys = [(block.block_class, block.shard, block.keep_gathered, block.saved, block.stage) for block in blocks]
    stages = [] if lowered is None else [program for program in lowered.programs if program.rank == 0]
    program = _joined(stages) if stages else None
    early = [] if program is None else [call for call in program.calls if call.label == "prologue"]
    boxes: list[Box] = [Box("prologue", call.number, call.number, reads=_reads(call)) for call in early]
    box_of = {call.number: at for at, call in enumerate(early)}
    folds: list[Fold] = []
    sent: dict[int, Traffic] = {}
    for part in stages:
        sent |= unit_traffic(part)
    for start, period, times in folded(keys):
        for turn in range(times):
            for step in range(period):
                box_of[start + turn * period + step] = len(boxes) + step
        if period > 1 or times > 1:
            folds.append(Fold(len(boxes), len(boxes) + period - 1, times))
        for step in range(period):
            members = [blocks[start + turn * period + step] for turn in range(times)]
            last = start + (times - 1) * period + step
            boxes.append(_box(plan, lowered, program, sent, start + step, last, members))
    for call in [] if program is None else [call for call in program.calls if call.label == "epilogue"]:
        box_of[call.number] = len(boxes)
        boxes.append(Box("epilogue", call.number, call.number))
    chunks = _chunks(plan, box_of, stages)
    if program is None:
        return Picture(tuple(boxes), tuple(folds), (), chunks)
    graph = _graph(program, box_of)
    carried = _carried(graph)
    folds = [replace(fold, carried_bytes=carried[fold.last, fold.first] // max(1, fold.count - 1)) for fold in folds]
    return Picture(tuple(boxes), tuple(folds), _wires(graph), chunks)


def _joined(stages: Sequence[Program]) -> Program:
    """The blocks of all stages as if one rank ran them."""
    if len(stages) == 1:
        return stages[0]
    calls = {call.number: call for program in stages for call in program.calls}
    units = {unit.number: unit for program in stages for unit in program.units}
    functions = {name: function for program in stages for name, function in program.functions.items()}
    return replace(stages[0], calls=tuple(calls[number] for number in sorted(calls)), units=tuple(units.values()), functions=functions)


def _chunks(plan: Plan, box_of: dict[int, int], stages: Sequence[Program]) -> tuple[Chunk, ...]:
    if plan.stages == 1:
        return ()
    blocks: dict[int, list[int]] = defaultdict(list)  # by chunk
    for number, block in enumerate(plan.blocks):
        blocks[block.stage].append(number)
    found = []
    for chunk, own in blocks.items():
        stage = stage_of(plan.schedule, chunk, plan.stages)
        found.append(Chunk(box_of[own[0]], stage, sent_bytes(stages[stage], own) if stages else {}))
    return tuple(found)


def _box(
    plan: Plan, lowered: Lowered | None, program: Program | None, sent: dict[int, Traffic], index: int, last: int, members: Sequence[BlockPlan]
) -> Box:
    first = members[0]
    saved = plan.classes[first.block_class].saved_sets[first.saved]
    label = span(first.label, members[-1].label)
    if lowered is None or program is None:
        return Box(label, index, last, len(members), first, saved)
    call = program.call_of[index]
    units = {program.unit_of[ref.name].number for ref in call.reads if ref.kind == "parameter"}
    traffic: Traffic = {}
    for unit in sorted(units & set(sent)):
        for op, (times, size) in sent[unit].items():
            traffic[op] = (times, traffic.get(op, (0, 0))[1] + size)
    ops = ops_of(lowered.prepared, first.block_class, frozenset(saved.values))
    return Box(label, index, last, len(members), first, saved, ops, _reads(call), traffic)


def _reads(call: Call) -> tuple[str, ...]:
    """Inputs of the model that a block reads."""
    return tuple(dict.fromkeys(ref.name for ref in call.reads if ref.kind == "input"))


def span(first: str, last: str) -> str:
    """`model.layers.0 … 31` of the labels of the first and the last block of a box."""
    first, last = first or "(model)", last or "(model)"
    if first == last:
        return first
    common = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return f"{first} … {last[first.rfind('.', 0, common) + 1 :]}"


def _graph(program: Program, box_of: dict[int, int]) -> nx.MultiDiGraph:
    """Boxes, and an edge for every value that one of them passes to another, or to itself in the next turn."""
    graph: nx.MultiDiGraph = nx.MultiDiGraph()
    graph.add_nodes_from(sorted(set(box_of.values())))
    sizes = value_bytes(program)
    source = {name: box_of[call.number] for call in program.calls for name in call.writes}
    for call in program.calls:
        for name in dict.fromkeys(ref.name for ref in call.reads if ref.kind in ("value", "prologue", "total")):
            graph.add_edge(source[name], box_of[call.number], key=name, bytes=sizes[name])
    return graph


def _carried(graph: nx.MultiDiGraph) -> dict[tuple[int, int], int]:
    """Bytes that go from a box to itself or back up: to the next turn of a fold."""
    carried: dict[tuple[int, int], int] = defaultdict(int)
    for source, target, size in graph.edges(data="bytes"):
        if target <= source:
            carried[source, target] += size
    return carried


def _wires(graph: nx.MultiDiGraph) -> tuple[Wire, ...]:
    """Values that leave a box for the same boxes further down share a wire."""
    wires: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for source in graph:
        targets: dict[str, set[int]] = defaultdict(set)
        for _, target, name in graph.out_edges(source, keys=True):
            if target > source:
                targets[name].add(target)
        for name, boxes in targets.items():
            size = next(size for _, _, key, size in graph.out_edges(source, keys=True, data="bytes") if key == name)
            wires[source, tuple(sorted(boxes))].append(size)
    return tuple(Wire(source, targets, sum(sizes), len(sizes)) for (source, targets), sizes in sorted(wires.items()))
