"""Every model of the zoo in a pipeline of 2 to 4 stages, over schedules, shard levels, checkpointing and micro-batches: it equals the plain model."""


import pytest

from partitioner import PartitionerError
from partitioner.schedules import NAMES as SCHEDULES
from tests.equality import CHECKPOINTS, PROOF, SHARDS, USUAL, Composition, compare_or_refuse, most_micro_batches, rows_in
from tests.models import MODELS

MESHES = ((2, 2), (4, 2), (3, 3), (4, 4))  # ranks, stages
MICRO_BATCHES = (1, 2, 5, 8)
EXACT = [name for name in MODELS if not MODELS[name]()["random"]]


def dealt(number: int, rows: int) -> Composition:
    """One composition for the number-th model; all the models together see every pair of settings (a test counts them)."""
    ranks, stages = MESHES[number % 4]
    shard = SHARDS[number // 4 % 4] if ranks > stages else "none"
    micro = min(MICRO_BATCHES[(number + number // 7) % 4], most_micro_batches(rows, ranks // stages))
    return Composition(ranks, shard, CHECKPOINTS[number % 3], micro, stages, SCHEDULES[number % 5])


@pytest.mark.parametrize("name", EXACT)
def test_a_pipeline_equals_one_process(name: str) -> None:
    composition = dealt(EXACT.index(name), rows_in(name))
    for kind in (PROOF, USUAL):
        try:
            verdict = compare_or_refuse(name, kind, composition)
        except PartitionerError as error:
            assert "blocks" in str(error) and "stages" in str(error), error  # a model too small to be cut so often
            composition = Composition(2, "none", composition.checkpoint, composition.micro_batches, 2, "1f1b")
            verdict = compare_or_refuse(name, kind, composition)
        assert verdict.within(MODELS[name]()[kind.tolerance]), f"{name} {kind.tolerance} {composition}: {verdict}"
        if verdict.refused:
            composition = Composition(composition.ranks, composition.shard, composition.checkpoint, 1, composition.pp, composition.schedule)
            assert compare_or_refuse(name, kind, composition).within(MODELS[name]()[kind.tolerance])


def test_the_deal_covers_every_pair_of_settings() -> None:
    hands = [dealt(number, 16) for number in range(len(EXACT))]
    seen = {(hand.schedule, hand.pp) for hand in hands}
    assert seen == {(schedule, stages) for schedule in SCHEDULES for _, stages in MESHES}
    for field, levels in (("checkpoint", CHECKPOINTS), ("micro_batches", MICRO_BATCHES)):
        assert {(hand.schedule, getattr(hand, field)) for hand in hands} == {(schedule, level) for schedule in SCHEDULES for level in levels}
    assert {hand.shard for hand in hands if hand.ranks > hand.pp} == set(SHARDS)
