"""Ranks that are given different batches are told so; ranks that bring their own rows are not."""

from typing import Any

import pytest
import torch
from torch import nn

from partitioner import RankError, auto_parallelize
from tests import ranks as pool


def trained(rank_seed: bool, local: bool) -> float:
    """Runs on every rank."""
    import os

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 6)
    given: Any = {"gpus": ranks, "example_inputs": (x,), "loss": lambda out: out.square().mean()}
    parallel = auto_parallelize(model, **given)
    torch.manual_seed(rank if rank_seed else 7)
    batch = torch.randn(8, 6)
    loss = parallel.train_step_local(batch) if local else parallel.train_step(batch)
    return float(loss)


def test_different_batches_are_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match=r"rank 1: the rows.* of args\[0\] is .*train_step_local"):
        pool.run(2, trained, True, False, group=False)
    first, second = pool.run(2, trained, False, False, group=False)
    assert first == second


def test_own_rows_may_differ() -> None:
    first, second = pool.run(2, trained, True, True, group=False)
    assert first == second
