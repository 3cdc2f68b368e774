"""The planner: memory decides, figures are kept, a plan says all that its programs need, and depth costs no source."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from partitioner import Plan
from partitioner.errors import InfeasibleError, PlanError
from tests.driver_models import Deep, planned


@cache
def free() -> Plan:
    """What is chosen where memory does not bind."""
    return planned()


def emitted(plan: Plan, folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in plan.emit(folder).iterdir()}


def recomputes(plan: Plan) -> list[str]:
    """Blocks that keep less than they might."""
    sets = [(block.label, plan.classes[block.block_class].saved_sets[block.saved]) for block in plan.blocks]
    return [label for label, saved in sets if saved.recompute_seconds > 0 and saved.bytes < saved.keepable_bytes]


def test_without_need_nothing_is_sharded_and_nothing_recomputed() -> None:
    plan = free()
    assert {block.shard for block in plan.blocks} == {"none"} and not recomputes(plan)
    assert plan.micro_batches == 1 and 0 < plan.bound_seconds <= plan.predicted.step_seconds and plan.gap < 0.01
    assert [block.label for block in plan.blocks][:2] == ["embed", "layers.0"]


def test_a_cap_forces_recomputation() -> None:
    cap = int(free().predicted.peak_bytes * 0.9)
    plan = planned(memory=cap, constraints={"shard": "none", "micro_batches": 1})
    assert recomputes(plan)
    assert plan.predicted.peak_bytes <= cap
    assert plan.predicted.step_seconds > free().predicted.step_seconds
    assert plan.predicted.step_seconds >= plan.bound_seconds >= free().bound_seconds > 0, "less memory cannot prove less"


def test_a_cap_forces_sharding() -> None:
    cap = int(free().predicted.peak_bytes * 0.94)
    plan = planned(memory=cap, constraints={"checkpoint": "none", "micro_batches": 1})
    assert {block.shard for block in plan.blocks} - {"none"} and not recomputes(plan)
    assert plan.predicted.peak_bytes <= cap
    assert plan.predicted.step_seconds > free().predicted.step_seconds


def test_under_a_cap_the_free_choice_beats_the_pinned_ones() -> None:
    cap = int(free().predicted.peak_bytes * 0.85)
    best = planned(memory=cap)
    assert best.predicted.peak_bytes <= cap and best.memory_bytes == cap
    for pinned in ({"shard": "zero3", "checkpoint": "full"}, {"shard": "none"}):
        other = planned(memory=cap, constraints={**pinned, "micro_batches": 1})
        assert other.predicted.peak_bytes <= cap
        assert best.predicted.step_seconds <= other.predicted.step_seconds * 1.001


def test_the_cap_holds_to_the_byte() -> None:
    one_choice = {"pp": 1, "shard": "none", "checkpoint": "full", "micro_batches": 2}
    peak = planned(constraints=one_choice).predicted.peak_bytes
    assert planned(constraints=one_choice, memory=peak).predicted.peak_bytes == peak
    with pytest.raises(InfeasibleError, match="too much"):
        planned(constraints=one_choice, memory=peak - 1)


def test_wide_layers_are_gathered_one_by_one() -> None:
    """On 8 ranks 8 layers take 4 layers' bytes: parameters, two moments, gradients; besides, one layer and the next are gathered, and a gradient
    is reduced. Two layers at a time would take 11 layers' bytes and more."""
    layer = 4096 * 4097 * 4
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]), torch.zeros(64, 4096)
    plan = planned(model, "1x8 h100-sxm", example_inputs=(x,), memory=9 * layer)
    assert [block.shard for block in plan.blocks[:8]] == ["zero3"] * 8 and plan.predicted.peak_bytes <= 9 * layer


def test_what_cannot_fit_is_refused_with_figures() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned(memory="10kB", constraints={"micro_batches": 1})
    said = str(caught.value)
    amount = r"(\d[\d.]* [kMG]?B)"
    found = re.search(rf"fits into {amount} a device: the leanest takes {amount}, {amount} too much, at ", said)
    assert found is not None and found[1] == "10.0 kB", said
    assert f"(1) allow {found[2]} a device" in said and "(2) use more ranks" in said and "(3) take a smaller batch" in said
    for part in ("of parameters", "of optimizer state", "of inputs", "of gradients", "of temporaries", "pinned: micro_batches=1"):
        assert part in said
    held = [float(size) for size in re.findall(r"([\d.]+) kB of ", said)]
    assert abs(sum(held) - float(found[2].split()[0])) < 0.5, "the parts make the whole"


@pytest.mark.parametrize("constraints", [{}, {"shard": "zero3", "micro_batches": 4}, {"shard": "zero1", "checkpoint": "full"}])
def test_a_plan_from_its_file_gives_the_same_programs(constraints: dict[str, object], tmp_path: Path) -> None:
    made = planned(constraints=constraints)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"make_plan\(model, gpus=2"):
        loaded.emit(tmp_path / "unbound")
    again = planned(plan=loaded, constraints=constraints)
    assert again == made and again.to_json() == made.to_json()
    first, second = emitted(made, tmp_path / "first"), emitted(again, tmp_path / "second")
    assert first == second and set(first) == {"functions.py", "rank_0.txt", "rank_1.txt"}
    unpinned = planned(plan=loaded)  # the plan's decisions, not the constraints', are followed
    assert emitted(unpinned, tmp_path / "third") == first
    assert [s.step_seconds for s in unpinned.simulate()] == [s.step_seconds for s in made.simulate()]


def test_depth_costs_no_source_and_the_same_model_gives_the_same_text(tmp_path: Path) -> None:
    shallow, deep = emitted(free(), tmp_path / "shallow"), emitted(planned(Deep(100)), tmp_path / "deep")
    assert len(deep["functions.py"].splitlines()) <= len(shallow["functions.py"].splitlines())
    assert deep["rank_0.txt"].count("FORWARD") == shallow["rank_0.txt"].count("FORWARD") + 98
    again = planned()
    assert emitted(again, tmp_path / "again") == shallow and again.to_json() == free().to_json()


def test_emitted_functions_say_where_they_come_from_and_compile(tmp_path: Path) -> None:
    source = emitted(free(), tmp_path)["functions.py"]
    compile(source, "functions.py", "exec")
    for words in ("# block_1: ", "up_weight,  # parameter [32, 16] f32", "[rows, 8, 16] f32  embed", "layers.N.norm"):
        assert words in source
