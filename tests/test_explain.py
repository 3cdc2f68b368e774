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
from tests.test_plan import plan_of

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
