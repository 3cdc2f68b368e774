"""The pictures: what they say, that no text overlaps another or is cut off, and that equal plans give equal files."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from partitioner import Plan, make_plan
from partitioner.draw_axis import nice
from partitioner.draw_canvas import Canvas, fitted, plain, text_width, wrapped
from partitioner.draw_graph import graph_canvas
from partitioner.draw_memory import _columns, memory_canvas
from partitioner.draw_model import Picture, Wire, folded, picture, span
from partitioner.draw_pipeline import turns
from partitioner.draw_timeline import _labels, _share, simulated, timeline_canvas
from partitioner.errors import PlanError
from partitioner.pipeline import Pipeline
from partitioner.runtime.text import parse_instruction
from partitioner.runtime.timeline import Timeline
from tests.driver_models import Deep, ids, planned, square
from tests.models import MODELS
from tests.test_plan import plan_of
from tests.zoo.vision import UNet

UNET_ROWS = 8


def deep() -> Plan:
    """Layers whose decisions fold, for ranks of which not all are simulated."""
    constraints = {"shard": "zero3", "micro_batches": 2}
    return make_plan(Deep(layers=6), "2x8 h100-sxm", example_inputs=(ids(64),), loss=square, verify=False, optimizer="adamw", constraints=constraints)


def tight() -> Plan:
    """Two CPU ranks whose cap forces values to run again."""
    lean = planned(Deep(layers=3), constraints={"shard": "zero3", "checkpoint": "full"}).predicted.peak_bytes
    return planned(Deep(layers=3), memory=int(lean * 1.15))


def unet() -> Plan:
    targets = torch.zeros(UNET_ROWS, 16, 16, dtype=torch.long)
    inputs = (torch.zeros(UNET_ROWS, 3, 16, 16),)
    return make_plan(UNet(4, 2), "2 cpu-local", example_inputs=inputs, example_targets=targets, loss=F.cross_entropy, verify=False)


def t5() -> Plan:
    case = MODELS["hf_t5"]()
    given = {"example_kwargs": case["kwargs"], "example_targets": case["targets"], "loss": case["loss_fn"]}
    return make_plan(case["model"], "2 cpu-local", verify=False, **given)


def staged() -> Plan:
    """Two stages of two ranks, in turns of two runs of blocks each."""
    pinned = {"pp": 2, "dp": 2, "micro_batches": 4, "shard": "zero3", "schedule": "interleaved"}
    return make_plan(Deep(layers=6), "4 h100-sxm", example_inputs=(ids(64),), loss=square, verify=False, optimizer="adamw", constraints=pinned)


MAKE = {"deep": deep, "tight": tight, "unet": unet, "t5": t5, "staged": staged}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: make() for name, make in MAKE.items()}


@pytest.fixture(params=list(MAKE))
def plan(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Plan:
    return plans[request.param]


def canvases(plan: Plan) -> Iterator[Canvas]:
    yield graph_canvas(plan)
    yield graph_canvas(Plan.from_json(plan.to_json()))
    yield timeline_canvas(plan)
    yield memory_canvas(plan, plan.predicted.peak_bytes)


def texts(canvas: Canvas) -> list[str]:
    return [text.get_text() for text in canvas.figure.axes[0].texts]


def check_text(canvas: Canvas) -> None:
    """No two texts overlap and none is cut off, as the renderer measures them."""
    figure: Any = canvas.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    placed = [(text.get_text(), text.get_window_extent(renderer)) for text in figure.axes[0].texts]
    assert placed
    for text, box in placed:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (one, a), (other, b) in combinations(placed, 2):
        assert min(a.x1, b.x1) - max(a.x0, b.x0) <= 1 or min(a.y1, b.y1) - max(a.y0, b.y0) <= 1, (one, other)


def test_no_text_overlaps_or_is_cut_off(plan: Plan) -> None:
    for canvas in canvases(plan):
        check_text(canvas)


@pytest.mark.parametrize("layers", [4, 400])
def test_long_and_strange_labels_are_drawn_in_bounds(layers: int) -> None:
    plan = plan_of(layers=layers, model="M" * 300)
    blocks = tuple(
        block.model_copy(update={"label": label}) for block, label in zip(plan.blocks, ("x" * 900, "a\x00\n</text>$\\frac$ 层 b", "c"), strict=False)
    )
    canvas = graph_canvas(plan.model_copy(update={"blocks": (*blocks, *plan.blocks[3:])}))
    check_text(canvas)
    assert any(text.startswith("a??</text>$") for text in texts(canvas))


def test_every_block_stands_in_one_box_by_its_label(plan: Plan) -> None:
    shown = picture(plan, plan._lowered)  # type: ignore[arg-type]
    boxes = [box for box in shown.boxes if box.plan is not None]
    assert sum(box.count for box in boxes) == len(plan.blocks)
    for drawn in (graph_canvas(plan), graph_canvas(Plan.from_json(plan.to_json()))):
        found = texts(drawn)
        for box in boxes:
            assert box.plan is not None and (box.label in found)
            assert span(plan.blocks[box.first].label, plan.blocks[box.last].label) == box.label
            assert box.plan == plan.blocks[box.first] and (f"block {box.first}" if box.count == 1 else f"blocks {box.first} … {box.last}") in found


def test_files_are_written_and_equal_plans_give_equal_bytes(plans: dict[str, Plan], tmp_path: Path) -> None:
    heads = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}
    for kind, draw in (("svg", "draw"), ("svg", "draw_timeline"), ("svg", "draw_memory"), ("pdf", "draw_timeline"), ("png", "draw_memory")):
        written = [getattr(plans["tight"], draw)(tmp_path / f"{turn}" / f"{draw}.{kind}").read_bytes() for turn in range(2)]
        assert written[0] == written[1] and written[0].startswith(heads[kind]) and len(written[0]) > 2000
    plan = plans["tight"]
    again = planned(Deep(layers=3), memory=plan.memory_bytes, plan=Plan.from_json(plan.to_json()))  # bound to another copy of the model
    for draw in ("draw", "draw_timeline", "draw_memory"):
        text = getattr(again, draw)(tmp_path / "again.svg").read_text()
        assert text == (tmp_path / "0" / f"{draw}.svg").read_text() and "dc:date" not in text


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.svg.gz"])
def test_another_ending_is_refused(plans: dict[str, Plan], name: str, tmp_path: Path) -> None:
    for draw in ("draw", "draw_timeline", "draw_memory"):
        with pytest.raises(PlanError, match=r"cannot be drawn; end the name in \.svg or \.pdf or \.png"):
            getattr(plans["unet"], draw)(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_plan_from_a_file_says_what_it_lacks(plans: dict[str, Plan], tmp_path: Path) -> None:
    loaded = Plan.from_json(plans["unet"].to_json())
    assert loaded.draw(tmp_path / "graph.svg").exists()
    assert any("which holds decisions alone" in text for text in texts(graph_canvas(loaded)))
    for draw in ("draw_timeline", "draw_memory"):
        with pytest.raises(PlanError, match=rf"plan\.{draw} needs the model's programs.*make_plan\(model, gpus=2"):
            getattr(loaded, draw)(tmp_path / "x.svg")


# ------------------------------------------------------------------------------------------------------------------------- graph


def shown_of(plan: Plan) -> Picture:
    return picture(plan, plan._lowered)  # type: ignore[arg-type]


def test_skips_of_a_unet_run_past_the_boxes_between(plans: dict[str, Plan]) -> None:
    """Every skip of the model that crosses blocks, with the bytes of the tensor, and nothing else but the prologue's count."""
    plan = plans["unet"]
    shown = shown_of(plan)
    rows = UNET_ROWS // 2 // plan.micro_batches
    skips = {rows * 4 * 2**level * (16 // 2**level) ** 2 * 4 for level in range(2)}
    long = [wire for wire in shown.wires if any(target > wire.source + 1 for target in wire.targets) and shown.boxes[wire.source].plan is not None]
    assert long and {wire.bytes for wire in long} <= skips
    assert any("silu" in name or "conv2d" in name for box in shown.boxes if box.ops for name in box.ops.all)
    labels = texts(graph_canvas(plan))
    assert sum(" from " in text for text in labels) == sum(len([t for t in wire.targets if t > wire.source + 1]) for wire in shown.wires)


def test_the_encoder_states_of_a_t5_reach_every_layer_of_the_decoder(plans: dict[str, Plan]) -> None:
    shown = shown_of(plans["t5"])
    layers = {at for at, box in enumerate(shown.boxes) if box.label.startswith("decoder.block")}
    assert layers and any(layers <= set(wire.targets) for wire in shown.wires)


def test_kept_and_repeated_ops_and_traffic_are_those_of_the_program(plans: dict[str, Plan]) -> None:
    plan = plans["tight"]
    lowered: Any = plan._lowered
    program = lowered.programs[0]
    assert any(box.ops and box.ops.again for box in shown_of(plan).boxes)
    for box in shown_of(plan).boxes:
        if box.plan is None or box.saved is None or box.ops is None:
            continue
        kept = sum(int(name.partition(" ×")[2] or 1) for name in box.ops.kept)
        assert kept == len(box.saved.values)
        assert bool(box.ops.again) == (box.saved.recompute_seconds > 0)
        units = {program.unit_of[ref.name].number for ref in program.call_of[box.first].reads if ref.kind == "parameter"}
        for op, (times, size) in box.traffic.items():
            mine = [i for i in program.instructions if i.op == op and i.unit in units]
            assert times == len(mine) / len({i.unit for i in mine}) and size == sum({i.unit: i.bytes for i in mine}.values())


def test_layers_are_folded_and_pass_their_bytes_on(plans: dict[str, Plan]) -> None:
    shown = shown_of(plans["deep"])
    (fold,) = [fold for fold in shown.folds if fold.count > 2]
    assert fold.first == fold.last and shown.boxes[fold.first].count == fold.count
    assert fold.carried_bytes == 64 // 16 // 2 * 8 * 16 * 4  # rows of a rank and micro-batch, positions, width, float32
    assert f"×{fold.count}" in texts(graph_canvas(plans["deep"]))
    assert all(wire.source < min(wire.targets) for wire in shown.wires)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("aaab", [(0, 1, 3), (3, 1, 1)]),
        ("xababab", [(0, 1, 1), (1, 2, 3)]),
        ("aabaabc", [(0, 3, 2), (6, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
    ],
)
def test_folding_finds_what_repeats(keys: str, expected: list[tuple[int, int, int]]) -> None:
    assert folded(keys) == expected
    assert folded(list(keys)) == expected


def test_a_span_names_both_ends() -> None:
    assert span("model.layers.0", "model.layers.31") == "model.layers.0 … 31"
    assert span("h.10", "h.11") == "h.10 … 11"
    assert span("", "") == "(model)" and span("embed", "head") == "embed … head"


def test_wires_never_share_a_lane_where_they_overlap(plans: dict[str, Plan]) -> None:
    from partitioner.draw_graph import _lanes

    wires = tuple(Wire(a, (b,), 1, 1) for a in range(6) for b in range(a + 1, 7))
    lanes = _lanes(wires)
    assert set(lanes) == {number for number, wire in enumerate(wires) if wire.targets[0] > wire.source + 1}
    for one, other in combinations(lanes, 2):
        a, b = wires[one], wires[other]
        assert lanes[one] != lanes[other] or a.targets[0] <= b.source or b.targets[0] <= a.source


# ---------------------------------------------------------------------------------------------------------------------- timeline


def test_the_chrome_trace_is_the_simulation(plan: Plan, tmp_path: Path) -> None:
    trace = json.loads(plan.draw_timeline(tmp_path / "step.json").read_text())["traceEvents"]
    for process, (timeline, simulation) in enumerate(zip(simulated(plan), plan.simulate(), strict=True)):
        mine = [event for event in trace if event["pid"] == process]
        assert [event["args"]["name"] for event in mine if event["name"] == "process_name"] == [timeline.name]
        spans = [event for event in mine if event["ph"] == "X"]
        assert len(spans) == len(simulation.events)
        assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(simulation.step_seconds * 1e6)
        assert {event["args"]["name"] for event in mine if event["name"] == "thread_name"} == {stream for stream, *_ in simulation.events}
        counters = [event for event in mine if event["ph"] == "C"]
        assert len(counters) == len(simulation.memory) and max(sum(c["args"].values()) for c in counters) == simulation.peak_bytes
    assert any(event["name"].startswith("FORWARD ") and plan.blocks[0].label in event["name"] for event in trace)


def test_streams_say_how_busy_they_are(plans: dict[str, Plan]) -> None:
    (first, *_) = simulated(plans["deep"])
    assert 0 < first.busy["compute"] <= first.step_seconds and set(first.busy) == {"compute", "gather", "reduce"}
    found = texts(timeline_canvas(plans["deep"]))
    assert sum(text.startswith("busy ") for text in found) in (3, 6) and any("the first and the last" in text for text in found)


def test_labels_name_an_instruction_as_fully_as_there_is_room() -> None:
    words = _labels(parse_instruction("FORWARD block 3 mb 1 on compute"), {3: "layers.0"}, True)
    assert words == ["F3 layers.0 mb 1", "F3 layers.0", "F3 mb 1", "F3"]
    assert _labels(parse_instruction("FORWARD block 3 mb 0 on compute"), {3: "layers.0"}, False) == ["F3 layers.0", "F3"]
    assert _labels(parse_instruction("REFRESH unit 2 on gather bytes 8"), {}, False) == ["G2"]
    assert _labels(parse_instruction("REDUCE unit 2 mb 1 on reduce bytes 8"), {2: "no block"}, True) == ["R2 mb 1", "R2"]
    assert _labels(parse_instruction("LOSS on reduce bytes 4"), {}, True) == ["LOSS"]


def test_instructions_too_narrow_for_a_box_keep_their_time() -> None:
    columns: dict[int, float] = defaultdict(float)
    for at in range(500):
        _share(columns, 0.2 * at, 0.2 * at + 0.13)
    assert sum(columns.values()) == pytest.approx(500 * 0.13) and max(columns.values()) <= 3.0


def test_thousands_of_instructions_stay_a_picture(tmp_path: Path, plans: dict[str, Plan]) -> None:
    events = tuple(("compute", f"FORWARD block {k % 100} mb {k // 100} on compute", k * 1e-4, (k + 1) * 1e-4) for k in range(4000))
    many = Timeline(7, 0.4, events, {k: f"layers.{k}" for k in range(100)})
    canvas = timeline_canvas(plans["unet"], [many])
    check_text(canvas)
    assert "rank 7, measured" in texts(canvas) and len(texts(canvas)) < 120
    assert canvas.save(tmp_path / "many.svg").stat().st_size < 400_000


def test_a_pipeline_is_a_lane_a_stage_with_the_turns_of_its_schedule(plans: dict[str, Plan]) -> None:
    plan = plans["staged"]
    played = simulated(plan)
    assert [timeline.name for timeline in played] == ["stage 0, rank 0", "stage 0, rank 1", "stage 1, rank 0", "stage 1, rank 1"]
    for timeline in played:
        found = [turn for turn in turns(plan, timeline, 1.0) if turn.mb is not None]
        order = Pipeline(2, tuple(block.stage for block in plan.blocks), "interleaved").turns(timeline.stage, 4)
        names = {"forward": "F", "backward": "B"}
        assert [(names[turn.kind], turn.turn, turn.mb) for turn in found] == [(turn.op, turn.chunk // 2, turn.mb) for turn in order]
        busy = sum(turn.end - turn.start for turn in turns(plan, timeline, 0.0))
        assert busy == pytest.approx(timeline.busy["compute"]) and busy + timeline.bubble_seconds <= timeline.step_seconds * 1.000001
        (run,) = {run.compute_seconds for run in plan.predicted.per_rank[2 * timeline.stage : 2 * timeline.stage + 2]}
        assert run == pytest.approx(busy)
    said = texts(timeline_canvas(plan))
    assert said.count("stage 0, ranks 0, 1") == 1 == said.count("stage 1, ranks 0, 1")
    assert {str(mb) for mb in range(4)} <= set(said) and sum(text.startswith("busy ") for text in said) == 2
    slower = replace(played[2], step_seconds=1.5 * played[2].step_seconds, measured=True)
    both = timeline_canvas(plan, [slower])
    check_text(both)
    assert {"simulated", "measured", "stage 1"} <= set(texts(both))


def test_stages_are_parted_by_lines_that_say_what_crosses(plans: dict[str, Plan]) -> None:
    plan = plans["staged"]
    shown = shown_of(plan)
    assert [chunk.stage for chunk in shown.chunks] == [0, 1, 0, 1]
    firsts = [shown.boxes[chunk.first].plan for chunk in shown.chunks]
    assert [first.stage for first in firsts if first is not None] == [0, 1, 2, 3]
    lowered: Any = plan._lowered
    for program in (program for program in lowered.programs if program.rank == 0):
        sent = sum(instruction.bytes for instruction in program.instructions if instruction.op == "SEND" and instruction.mb == 0)
        assert sent == sum(sum(chunk.sends.values()) for chunk in shown.chunks if chunk.stage == program.stage) > 0
    said = texts(graph_canvas(plan))
    assert said.count("stage 0") == said.count("stage 1") == 2 and sum(text.startswith("sends ") for text in said) == 3
    of_file = texts(graph_canvas(Plan.from_json(plan.to_json())))
    assert of_file.count("stage 1") == 2 and not any(text.startswith("sends ") for text in of_file)


def test_memory_of_a_pipeline_is_drawn_stage_by_stage(plans: dict[str, Plan]) -> None:
    said = texts(memory_canvas(plans["staged"]))
    assert {"stage 0", "stage 1", "this plan, stage 0", "this plan, stage 1", "plain data parallel, 4 ranks"} <= set(said)
    assert sum(text.startswith("peak ") for text in said) == 2


@pytest.mark.parametrize(("value", "expected"), [(0.7, 1), (1.0, 1), (1.2, 2), (3.0, 5), (0.0012, 0.002), (7e6, 1e7), (5.1, 10)])
def test_steps_of_an_axis_are_round(value: float, expected: float) -> None:
    assert nice(value) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------------------------------ memory


def test_memory_shows_the_peak_and_where_it_is(plan: Plan) -> None:
    simulation = max(plan.simulate(), key=lambda simulation: simulation.peak_bytes)
    columns = _columns(simulation, simulation.step_seconds)
    assert len(columns) == 700 and max(moment.peak_bytes for moment in columns) == simulation.peak_bytes == plan.predicted.peak_bytes
    assert all(a.seconds <= b.seconds for a, b in pairwise(columns)) and columns[-1].instruction == "optimizer.step"
    words = simulation.peak_at.split(" on ")[0]
    assert any(text.startswith("peak ") and words in text for text in texts(memory_canvas(plan)))


def test_memory_before_and_after(plans: dict[str, Plan]) -> None:
    plan = plans["tight"]
    lowered: Any = plan._lowered
    one, two = lowered.plain(1), lowered.plain(2)
    free = planned(Deep(layers=3), constraints={"shard": "none", "checkpoint": "none", "micro_batches": 1})
    assert two.peak_bytes == free.predicted.peak_bytes and one.peak_bytes > two.peak_bytes > plan.predicted.peak_bytes
    found = texts(memory_canvas(plan, round(plan.predicted.peak_bytes * 1.01)))
    assert {"plain, one device", "plain data parallel, 2 ranks", "this plan, predicted", "this plan, measured"} <= set(found)
    assert any(text.endswith("+1.000 %") for text in found) and sum(text.startswith("cap ") for text in found) == 2
    assert "this plan, measured" not in texts(memory_canvas(plan))


# ------------------------------------------------------------------------------------------------------------------------ canvas


def test_text_is_fitted_and_wrapped_by_its_measure() -> None:
    assert fitted("short", 100) == "short"
    cut = fitted("model.layers.12.attention.output", 60)
    assert cut.startswith("mod") and cut.endswith("t") and "…" in cut and text_width(cut) <= 60
    lines = wrapped([f"op_{k}" for k in range(30)], 90)
    assert len(lines) > 2 and all(text_width(line) <= 90 for line in lines)
    assert " ".join(lines).split(", ") == [f"op_{k}" for k in range(30)]
    assert plain("a\nb\x7f é") == "a?b? é"
