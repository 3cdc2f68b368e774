"""Why a plan and not another: the figures are those of plans made under the same decisions, and the text says what binds."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from partitioner import Plan
from partitioner.errors import PlanError
from partitioner.explain import WIDTH, named, reason
from partitioner.plan import Alternative, Explanation, MoreMemory
from tests.driver_models import Deep, planned
from tests.test_plan import plan_of, staged_plan

CAP = 400_000


@pytest.fixture(scope="module")
def tight() -> Plan:
    """Four wide layers on two ranks, in less memory than plain training takes."""
    return planned(Deep(layers=4, width=32), memory=CAP)


def way(**changes: Any) -> Alternative:
    fields = {"ranks": 4, "shard": "zero2", "checkpoint": "none", "micro_batches": 1, "step_seconds": 1.25, "peak_bytes": 10**9}
    return Alternative(**{**fields, **changes})


def test_every_way_is_predicted_as_its_plan_is(tight: Plan) -> None:
    assert tight.explained is not None
    ways = tight.explained.alternatives
    assert {(found.ranks, found.shard, found.checkpoint) for found in ways if found.micro_batches == 1} == {
        (1, "none", "none"), (1, "none", "full"), *((2, shard, kept) for shard in ("none", "zero1", "zero2", "zero3") for kept in ("none", "full"))
    }  # fmt: skip
    for found in ways:
        if (found.ranks, found.shard, found.checkpoint) not in ((1, "none", "none"), (2, "none", "full"), (2, "zero2", "none")):
            continue
        pinned = {"shard": found.shard, "checkpoint": found.checkpoint, "micro_batches": found.micro_batches}
        made = planned(Deep(layers=4, width=32), f"{found.ranks} cpu-local", constraints=pinned)
        assert made.predicted.peak_bytes == found.peak_bytes, found
        assert made.predicted.step_seconds == pytest.approx(found.step_seconds), found


def test_what_does_not_fit_is_tried_in_more_micro_batches(tight: Plan) -> None:
    assert tight.explained is not None
    by_way: dict[tuple[Any, ...], list[Alternative]] = {}
    for found in tight.explained.alternatives:
        by_way.setdefault((found.ranks, found.shard, found.checkpoint), []).append(found)
    assert any(len(ways) == 2 for ways in by_way.values()), "the cap was chosen so that some way needs micro-batches"
    for ways in by_way.values():
        assert len(ways) == 1 or (ways[0].peak_bytes > tight.capacity_bytes >= ways[1].peak_bytes and ways[1].micro_batches > 1)


def test_more_memory_buys_what_it_says(tight: Plan) -> None:
    assert tight.explained is not None
    steps = [tight.predicted.step_seconds, *(more.step_seconds for more in tight.explained.more_memory)]
    assert len(steps) > 1, "the cap binds"
    assert steps == sorted(steps, reverse=True)
    assert all(more.memory_bytes > tight.capacity_bytes for more in tight.explained.more_memory)
    middle = tight.explained.more_memory[len(tight.explained.more_memory) // 2]
    assert planned(Deep(layers=4, width=32), memory=middle.memory_bytes).predicted.step_seconds <= middle.step_seconds * 1.01


def test_the_text_says_why(tight: Plan) -> None:
    text = tight.explain()
    assert repr(text) == str(text), "a prompt shows the lines"
    lines = text.split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert sum(line.endswith("  chosen") for line in lines) == 1
    assert "needs" in text and "the cap is 400 kB" in text
    assert "in backward of" in text
    assert "more memory would make the step shorter" in text
    free = planned(Deep(layers=4, width=32)).explain()
    assert "more memory would not" in free
    assert "needs" not in free


def test_a_loaded_plan_explains_itself(tight: Plan, tmp_path: Path) -> None:
    tight.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == tight
    assert loaded.explain() == tight.explain()
    bare = Plan.from_json(tight.to_json())
    assert bare.explained is None
    assert "does not hold what was not chosen" in bare.explain()
    assert "chosen" in bare.explain()


def test_an_explanation_holds_no_model() -> None:
    model = Deep()
    alive, plan = weakref.ref(model), planned(model)
    del model
    gc.collect()
    assert alive() is None
    assert "one device" in plan.explain()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peak_bytes": 95 * 10**9}, "needs 95.0 GB, the cap is 80.0 GB"),
        ({"step_seconds": 1.625}, "shard=zero3 was asked for"),
        ({"step_seconds": 1.625, "shard": "zero3"}, "takes 1.30x as long"),
        ({"step_seconds": 1.275, "shard": "zero3"}, "takes 2.0 % longer"),
        ({"shard": "zero3", "peak_bytes": 70 * 10**9}, "is as fast, but takes more memory"),
        ({"shard": "zero3"}, "is as fast"),
        ({"step_seconds": 1.0, "shard": "zero3"}, "is 20 % faster: the search missed it"),
        ({"step_seconds": 1.243, "shard": "zero3"}, "is as fast within the solver's gap"),
        ({"step_seconds": 1.243, "ranks": 1}, "is 0.6 % faster: gpus=1 does better"),
        ({"step_seconds": 1.0, "ranks": 1}, "is 20 % faster: gpus=1 does better"),
    ],
)
def test_reasons(changes: dict[str, Any], says: str) -> None:
    assert says in reason(plan_of(), way(**changes))


def test_names_of_ways() -> None:
    assert named(way(ranks=1, shard="none")) == "one device"
    assert named(way(shard="none")) == "DDP"
    assert named(way(checkpoint="full", micro_batches=4)) == "ZeRO-2 + full checkpointing, 4 micro-batches"


def test_communication_that_limits_is_named() -> None:
    found = Explanation(
        alternatives=(way(),),
        more_memory=(MoreMemory(memory_bytes=84 * 10**9, step_seconds=1.1, micro_batches=2),),
        compute_seconds=0.5,
        communication_seconds=1.0,
        peak_at="backward of model.layers.3",
    )
    text = plan_of(explanation=found).explain()
    assert (
        "limit: communication; computation takes 500 ms of the 1.25 s; communication, 1.00 s, runs beside it, and 750 ms of it is waited"
        in " ".join(text.split())
    )
    assert "with 4.0 GB more a rank 1.10 s, 12 % less, in 2 micro-batches" in text


def in_stages(*ways: Alternative, **changes: Any) -> Plan:
    return staged_plan(explanation=Explanation(alternatives=ways, compute_seconds=1.0, communication_seconds=0.1, peak_at="forward"), **changes)


def test_a_pipeline_is_explained_stage_by_stage_and_what_is_faster_without_is_told() -> None:
    slow = way(step_seconds=1.5)
    text = in_stages(slow, way(ranks=1, shard="none", step_seconds=2.0)).explain()
    lines = text.split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert lines[lines.index("stages: 2, 1f1b, 2 micro-batches") + 2].endswith(" GB  busy 70 %  bubble 20 %")
    assert "limit: stage 0, which computes 80 % of the 1.25 s" in text
    assert "without stages: the best, ZeRO-2, takes 1.50 s" in text
    assert "this plan: 2 stages (1f1b) of " in text
    quick = in_stages(slow, way(shard="none", step_seconds=1.0)).explain()
    assert "without stages: DDP takes 1.00 s, 20 % less; leave out pp" in quick
    assert "  is 20 % faster, but pp=2 was asked for" in quick
    alone = in_stages(slow, way(ranks=1, shard="none", step_seconds=1.0)).explain()
    assert "without stages: one device takes 1.00 s, 20 % less; plan with gpus=1" in alone
    assert "without stages: nothing fits" in in_stages(way(peak_bytes=10**12)).explain()
    assert "stages: 2, 1f1b" in Plan.from_json(staged_plan().to_json()).explain(), "a file that holds no alternatives"


def test_a_pipeline_is_compared_with_all_its_devices_without_stages() -> None:
    made = planned(Deep(layers=2), "4 cpu-local", constraints={"pp": 2, "dp": 2, "micro_batches": 2, "schedule": "1f1b"})
    assert made.explained is not None
    assert {found.ranks for found in made.explained.alternatives} == {1, 4}
    for found in made.explained.alternatives:
        if found.checkpoint == "none" and found.shard in ("none", "zero2"):  # a plan of zero3 may keep parameters gathered, alternatives do not
            same = planned(Deep(layers=2), f"{found.ranks} cpu-local", constraints={"shard": found.shard, "checkpoint": "none", "micro_batches": 1})
            assert same.predicted.peak_bytes == found.peak_bytes
            assert same.predicted.step_seconds == pytest.approx(found.step_seconds)
    for run in made.predicted.runs:
        assert 0 < run.compute_seconds < run.step_seconds and 0 < run.bubble_seconds < run.step_seconds - run.compute_seconds + 1e-9
    assert "stages: 2, 1f1b, 2 micro-batches" in str(made) and "without stages: " in made.explain()


def test_differences_name_the_cuts_that_moved_and_the_schedule() -> None:
    plan = staged_plan()
    moved = tuple(block.model_copy(update={"stage": 1}) if block.label == "model.layers.1" else block for block in plan.blocks)
    text = plan.diff(staged_plan(blocks=moved))
    assert "blocks: 4 of 5 decided alike" in text and "  model.layers.1: stage 0 → stage 1" in text
    text = plan.diff(staged_plan(schedule="gpipe"))
    assert "schedule  1f1b → gpipe" in text and "blocks: 5 of 5 decided alike" in text
    text = plan.diff(staged_plan(schedule="interleaved"))
    assert "stage 1 → stage 0" in text and "chunk" not in text
    assert "schedule   1f1b → none" in plan.diff(plan_of()), "the mesh says what became of the stages"
    assert "stage 0" not in plan.diff(plan_of())


def test_a_plan_does_not_differ_from_itself(tight: Plan) -> None:
    assert tight.diff(Plan.from_json(tight.to_json())) == "the plans decide and predict the same"


def test_differences_fold_equal_blocks() -> None:
    plan = plan_of()
    changed = tuple(block.model_copy(update={"shard": "zero2"}) if block.label != "model.embed" else block for block in plan.blocks)
    text = plan.diff(plan_of(blocks=changed, micro_batches=4, memory_bytes=40_000_000_000))
    assert "memory         80.0 GB → 40.0 GB" in text
    assert "micro-batches  2 → 4" in text
    assert "blocks: 1 of 5 decided alike" in text
    assert "  model.layers.0 … 3  x4: zero3 → zero2" in text
    assert "predicted: the same step and the same peak" in text


def test_differences_of_saved_values_depth_and_figures() -> None:
    plan = plan_of(layers=4)
    kept = tuple(block.model_copy(update={"saved": "all"}) for block in plan.blocks)
    deeper = plan_of(layers=6)
    assert "saves 3 of 19 values (12.3 MB) → 1 of 1 values (1.0 kB)" in plan.diff(plan_of(blocks=kept))
    assert "model.layers.4 … 5  x2: only in the second plan, zero3" in plan.diff(deeper)
    assert "model.layers.4 … 5  x2: only in the first plan, zero3" in deeper.diff(plan)
    faster = plan.predicted.fullest.model_copy(update={"step_seconds": 1.0, "breakdown": {"parameters": 10**9}})
    text = plan.diff(plan_of(predicted={"runs": (faster.model_copy(update={"ranks": 4}),)}))
    assert "1.25 s →   1.00 s  -20 %" in text
    assert "59.2 GB →      0 B  -100 %" in text


def test_a_plan_is_compared_with_plans() -> None:
    with pytest.raises(PlanError, match="given a str"):
        plan_of().diff("plan.json")  # type: ignore[arg-type]
