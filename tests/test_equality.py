"""Every model of the zoo on 1 to 4 ranks, over shard levels, checkpointing and micro-batches: after 3 steps it equals the plain model."""

from itertools import combinations, product

import pytest

from tests.equality import CHECKPOINTS, MICRO_BATCHES, PROOF, RANKS, SHARDS, USUAL, Composition, Kind, compare_or_refuse, deal, rows_in, train_twice
from tests.models import MODELS
from tests.ranks import run

NAMES = tuple(MODELS)
EXACT = [name for name in NAMES if not MODELS[name]()["random"]]
RANDOM = [name for name in NAMES if MODELS[name]()["random"]]


def check(name: str, kind: Kind, composition: Composition) -> bool:
    """Assert equality; False where the planner rightly refused the micro-batches instead."""
    verdict = compare_or_refuse(name, kind, composition)
    assert verdict.within(MODELS[name]()[kind.tolerance]), f"{name} {kind.tolerance} {composition}: {verdict}"
    return not verdict.refused


@pytest.mark.parametrize("name", EXACT)
def test_fp64_adamw_equals_one_process(name: str) -> None:
    for composition in deal(NAMES.index(name), rows_in(name)):
        if not check(name, PROOF, composition):
            assert check(name, PROOF, Composition(composition.ranks, composition.shard, composition.checkpoint, 1))


@pytest.mark.parametrize("name", EXACT)
def test_fp32_sgd_equals_one_process(name: str) -> None:
    number = NAMES.index(name)
    composition = deal(number + 1, rows_in(name))[1 + number % 3]
    if not check(name, USUAL, composition):
        assert check(name, USUAL, Composition(composition.ranks, composition.shard, composition.checkpoint, 1))


@pytest.mark.parametrize("name", RANDOM)
def test_random_draws_on_one_rank_are_those_of_the_plain_model(name: str) -> None:
    for checkpoint in CHECKPOINTS:
        assert check(name, PROOF, Composition(1, "none", checkpoint, 1))


@pytest.mark.parametrize("name", RANDOM)
def test_random_draws_are_repeated_by_the_same_seed(name: str) -> None:
    for composition in deal(1, rows_in(name)):
        assert run(composition.ranks, train_twice, name, USUAL, composition) == [True] * composition.ranks


def test_the_deal_covers_every_pair_of_settings_and_each_model_sees_every_level() -> None:
    fields = {"ranks": RANKS, "shard": SHARDS, "checkpoint": CHECKPOINTS, "micro_batches": MICRO_BATCHES}
    for first in range(len(NAMES) - 12):
        hands = [composition for number in range(first, first + 12) for composition in deal(number, 12)]
        for a, b in combinations(fields, 2):
            assert {(getattr(c, a), getattr(c, b)) for c in hands} == {(x, y) for x in fields[a] for y in fields[b]}, (a, b)
    for number in range(len(NAMES)):
        for field, levels in fields.items():
            assert {getattr(c, field) for c in deal(number, 12)} == set(levels)
    dealt = [composition for name in EXACT for composition in deal(NAMES.index(name), rows_in(name))]
    for a, b in combinations(fields, 2):
        for x, y in product(fields[a], fields[b]):
            assert sum(getattr(c, a) == x and getattr(c, b) == y for c in dealt) >= 3, (a, x, b, y)
