"""Plans: JSON both ways, hostile files, one screen, and which model a plan belongs to."""

import copy
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from partitioner.cluster import Cluster
from partitioner.errors import PlanError
from partitioner.fingerprint import fingerprint
from partitioner.plan import (
    Batch,
    BatchLeaf,
    BlockPlan,
    ClassPlan,
    ClusterSummary,
    Explanation,
    Plan,
    Predicted,
    RankPrediction,
    Replicated,
    SavedSet,
)
from partitioner.plan_file import MAX_FILE_BYTES
from partitioner.schedules import chunks_of


def plan_of(layers: int = 4, ranks: int = 4, **changes: Any) -> Plan:
    some = SavedSet(
        values=("mul", "linear_1", "sdpa"),
        bytes=12_300_000,
        keepable=19,
        keepable_bytes=80_100_000,
        recompute_seconds=0.002,
        forward_seconds=0.01,
        backward_seconds=0.015,
    )
    every = SavedSet(values=("embedding",), bytes=1000, keepable=1, keepable_bytes=1000)
    figures = RankPrediction(step_seconds=1.25, peak_bytes=61_200_000_000, breakdown={"parameters": 2_000_000_000, "saved": 59_200_000_000})
    fields: dict[str, Any] = {
        "model": "Llama",
        "fingerprint": "ab" * 32,
        "mesh": {"dp": ranks},
        "micro_batches": 2,
        "batch": Batch(rows=512, leaves=(BatchLeaf(path="kwargs['input_ids']", dim=0), BatchLeaf(path="kwargs['mask']"))),
        "classes": {
            "embed": ClassPlan(saved_sets={"all": every}),
            "layer": ClassPlan(description="attention, MLP", saved_sets={"some": some, "all": every}),
        },
        "blocks": (
            BlockPlan(label="model.embed", block_class="embed", shard="zero2", saved="all"),
            *(BlockPlan(label=f"model.layers.{i}", block_class="layer", shard="zero3", saved="some") for i in range(layers)),
        ),
        "memory_bytes": 80_000_000_000,
        "cluster": ClusterSummary.of(Cluster.parse("8x8 h100-sxm")),
        "replicated": (Replicated(op="aten.sort.stable", module="router", source="moe.py:88 in forward", reason="no rule"),) * 3,
        "predicted": Predicted.of([figures] * ranks),
        "bound_seconds": 1.0,
        "constraints": {"shard": "zero3"},
    }
    return Plan(**{**fields, **changes})


def staged_plan(stages: int = 2, schedule: str = "1f1b", layers: int = 4, **changes: Any) -> Plan:
    """The plan in stages of two ranks, each of as many blocks or one more; later stages wait longer and hold less."""
    plan = plan_of(layers=layers)
    chunks = chunks_of(schedule, stages)  # type: ignore[arg-type]
    blocks = [block.model_copy(update={"stage": at * chunks // len(plan.blocks)}) for at, block in enumerate(plan.blocks)]
    figures = [
        RankPrediction(
            step_seconds=1.25,
            peak_bytes=(61 - stage) * 10**9,
            compute_seconds=1.0 - stage % 2 / 8,
            bubble_seconds=0.125 + stage % 2 / 8,
            breakdown={"parameters": 2 * 10**9, "saved values": (59 - stage) * 10**9},
        )
        for stage in range(stages)
    ]
    fields: dict[str, Any] = {
        "mesh": {"pp": stages, "dp": 2},
        "schedule": schedule,
        "blocks": tuple(blocks),
        "predicted": Predicted.of(figure for figure in figures for _ in range(2)),
        "constraints": {"pp": stages},
    }
    return plan_of(layers=layers, **{**fields, **changes})


def test_a_plan_in_stages_prints_them() -> None:
    lines = str(staged_plan()).split("\n")
    assert lines[0].startswith("Llama on 4 ranks (pp 2 x dp 2)")
    at = lines.index("stages: 2, 1f1b, 2 micro-batches")
    assert lines[at + 1 : at + 3] == [
        "  0  model.embed … layers.1  3 blocks  parameters 2.0 GB  peak 61.0 GB  busy 80 %  bubble 10 %",
        "  1  model.layers.2 … 3      2 blocks  parameters 2.0 GB  peak 60.0 GB  busy 70 %  bubble 20 %",
    ]
    assert Plan.from_json(staged_plan().to_json()) == staged_plan()
    turns = str(staged_plan(schedule="interleaved")).split("\n")
    assert any(line.startswith("  0  model.embed … layers.0, model.layers.2  3 blocks") for line in turns)
    many = str(staged_plan(stages=40, layers=80)).split("\n")
    assert len(many) <= 40 and max(map(len, many)) <= 120 and "  … 32 more stages" in many


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "new" / "plan.json")
    loaded = Plan.load(tmp_path / "new" / "plan.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert loaded != plan_of(micro_batches=4)
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    block = {"label": "model.layers.0", "class": "layer", "shard": "zero3", "keep_gathered": False, "saved": "some", "stage": 0}
    assert json.loads(plan.to_json())["blocks"][1] == block
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["plan.json"], "no temporary file stays behind"


def test_a_plan_file_has_a_line_a_block() -> None:
    short, long = (plan_of(layers=layers).to_json().count("\n") for layers in (2, 102))
    assert long - short == 100


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        plan_of().micro_batches = 3


def test_figures_over_ranks() -> None:
    ranks = [RankPrediction(step_seconds=s, peak_bytes=b) for s, b in ((1.0, 10), (1.0, 10), (1.5, 7))]
    predicted = Predicted.of(ranks)
    assert len(predicted.runs) == 2
    assert list(predicted.per_rank) == ranks
    assert (predicted.step_seconds, predicted.peak_bytes) == (1.5, 10)
    assert plan_of().gap == pytest.approx(0.25)
    assert plan_of(bound_seconds=0.0).gap == float("inf")


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(plan_of().to_json()), **fields})


HOSTILE = {
    "deep lists": ("[" * 1_000_000, "nested"),
    "deep objects": ('{"a":' * 500_000, "nested"),
    "deep constraint": (changed(constraints={"a": json.loads("[" * 900 + "]" * 900)}), "no plan"),
    "too long": (changed(model="x" * MAX_FILE_BYTES), "at most"),
    "long name": (changed(model="x" * 100_000), "model"),
    "many values": (changed(blocks=[1] * 1_000_000), "more than"),
    "many bad blocks": (changed(blocks=[1] * 45_000), "blocks.0"),
    "many bad constraints": (changed(constraints={str(i): [] for i in range(45_000)}), "constraints"),
    "many ranks": (changed(mesh={"dp": 10**6, "pp": 10**6}), "1,000,000 ranks"),
    "huge integer": (changed(micro_batches=10**400), "micro_batches"),
    "endless integer": ('{"version": ' + "9" * 100_000 + "}", "JSON"),
    "infinity": (changed(bound_seconds=float("inf")), "finite"),
    "an axis that is not there yet": (json.dumps({**json.loads(plan_of().to_json()), "mesh": {"dp": 2, "tp": 1}}), "mesh"),
    "overflow": (changed(bound_seconds=1e308).replace("1e+308", "1e999"), "1e999 is more than a number can be"),
    "nan": (changed(bound_seconds=float("nan")), "finite"),
    "negative": (changed(memory_bytes=-1), "memory_bytes"),
    "text for a number": (changed(memory_bytes="5"), "memory_bytes"),
    "true for a number": (changed(micro_batches=True), "micro_batches"),
    "half a character": (changed(model="\ud800"), "no plan"),
    "unknown field": (changed(code="__import__('os')"), "code"),
    "newer version": (changed(version=2), "version 2"),
    "no version": ("{}", "no version"),
    "true version": (changed(version=True), "version True"),
    "null": ("null", "NoneType"),
    "nothing": ("", "JSON"),
    "python": ("{'version': 1}", "JSON"),
    "key twice": ('{"version": 1, "version": 1}', "twice"),
    "other mesh": (changed(mesh={"dp": 3}), "predicted"),
    "unknown axis": (changed(mesh={"xx": 4}), "mesh"),
    "no classes": (changed(classes={}), "classes"),
    "unknown saved set": (changed(blocks=[{"label": "a", "class": "embed", "saved": "some"}]), "saved set"),
    "unknown shard": (changed(blocks=[{"label": "a", "class": "embed", "saved": "all", "shard": "zero9"}]), "shard"),
    "more micro-batches than rows": (changed(micro_batches=513), "512 rows"),
    "bad fingerprint": (changed(fingerprint="xyz"), "fingerprint"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_plans_are_refused_within_a_second(name: str) -> None:
    text, says = HOSTILE[name]
    start = time.process_time()
    with pytest.raises(PlanError, match=says) as error:
        Plan.from_json(text)
    assert time.process_time() - start < 1
    assert len(str(error.value)) < 2000


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\x80\x04\x95")
    (tmp_path / "large.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    for name, says in (("none.json", "cannot be read"), (".", "plan file"), ("binary.json", "UTF-8"), ("large.json", "at most")):
        with pytest.raises(PlanError, match=says):
            Plan.load(tmp_path / name)


_FIELDS = st.sampled_from(sorted(json.loads(plan_of().to_json())))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(_FIELDS, _JSON)
def test_any_other_value_is_a_plan_or_a_plan_error(field: str, value: Any) -> None:
    try:
        plan = Plan.from_json(changed(**{field: value}))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    str(plan).encode()


class _Lowered:
    simulations = ("timeline",)
    explanation = Explanation(alternatives=(), compute_seconds=1.0, communication_seconds=0.0, peak_at="FORWARD block 0 mb 0")

    def write(self, folder: Path) -> None:
        (folder / "program.txt").write_text("FORWARD block 0 mb 0 on compute\n")


def test_simulate_and_emit_need_the_programs(tmp_path: Path) -> None:
    plan = plan_of()
    for call in (plan.simulate, lambda: plan.emit(tmp_path / "out")):
        with pytest.raises(PlanError, match=r"make_plan\(model, gpus=4.*plan=plan"):
            call()
    plan._lowered = _Lowered()
    assert plan.simulate() == ("timeline",)
    assert (plan.emit(tmp_path / "out") / "program.txt").exists()
    assert plan == plan_of(), "what is attached is no decision"
    travelled = pickle.loads(pickle.dumps(plan))
    assert travelled == plan
    assert travelled._lowered is None


def test_a_plan_prints_on_one_screen() -> None:
    text = str(plan_of(layers=32))
    assert "model.layers.0 … 31" in text
    assert "x32" in text
    assert "saves 3 of 19 values (12.3 MB of 80.1 MB)" in text
    assert "recompute 8.0 %" in text
    assert "peak 61.2 GB of 80.0 GB (76 %)" in text
    assert "gap 25 %" in text
    assert "aten.sort.stable x3 in router at moe.py:88 in forward: no rule" in text
    assert "SHARED OUT" not in text
    alone = str(plan_of(batch=Batch(rows=None))).split("\n")
    assert "NOT SHARED OUT: no dim with a row for each of 4 ranks was found, so every rank computes all of it" in alone[2]
    blocks = tuple(BlockPlan(label=f"stage.{i}." + "x" * 200, block_class="layer" if i % 2 else "embed", saved="all") for i in range(300))
    awful = plan_of(
        blocks=blocks,
        replicated=tuple(Replicated(op=f"op{i}", module="m" * 300) for i in range(50)),
        constraints={str(i): "y" * 50 for i in range(50)},
        predicted=Predicted.of([RankPrediction(step_seconds=0.0, peak_bytes=5, breakdown={str(i): 1 for i in range(40)})] * 4),
        model="\x1b[31m" + "z" * 500,
    )
    lines = str(awful).split("\n")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert "\x1b" not in str(awful)


def test_the_fingerprint_tells_models_apart() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def print_of(change: Any = None, paths: tuple[str, ...] = ("args[0]",)) -> str:
        changed_model = copy.deepcopy(model())
        if change is not None:
            change(changed_model)
        return fingerprint(changed_model, paths)

    same = print_of()
    assert same == print_of(), "other values, same model"
    assert same == fingerprint(model().to("meta"), ("args[0]",))
    different = [
        print_of(paths=("args[0]", "args[1]")),
        print_of(lambda m: m[0].weight.requires_grad_(False)),
        print_of(lambda m: m.double()),
        print_of(lambda m: setattr(m[2], "weight", m[0].weight)),
        print_of(lambda m: m.append(nn.Linear(4, 4))),
        print_of(lambda m: m.register_buffer("scale", torch.ones(()))),
        print_of(lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 3)))),
    ]
    assert len({same, *different}) == 8
