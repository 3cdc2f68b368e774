"""The zoo itself: every model is the same each time it is made and trains in one process in both precisions."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.models import MODELS, cast, rows_of, train_plain


def test_the_zoo_is_large_enough() -> None:
    assert len(MODELS) >= 40
    assert sum(make()["mixes_batch"] for make in MODELS.values()) == 4


@pytest.mark.parametrize("name", MODELS)
def test_made_twice_it_is_the_same(name: str) -> None:
    one, two = MODELS[name](), MODELS[name]()
    left, right = (tree_leaves((case["model"].state_dict(), case["args"], case["kwargs"], case["targets"])) for case in (one, two))
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert rows_of(one) in range(1, 15)


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_in_one_process(name: str) -> None:
    wide = train_plain(cast(MODELS[name](), torch.float64), "adamw")
    narrow = train_plain(MODELS[name](), "sgd_momentum")
    assert all(math.isfinite(loss) for loss in wide.losses + narrow.losses)
    assert wide.losses[0] == pytest.approx(narrow.losses[0], rel=1e-2 if MODELS[name]()["fp32"] > 1e-3 else 1e-4)
    start = cast(MODELS[name](), torch.float64)["model"].state_dict()
    assert any(not torch.equal(wide.state[key], start[key]) for key in start)
    assert any(gradient is not None and gradient.abs().max() > 1e-4 for gradient in wide.gradients.values())
