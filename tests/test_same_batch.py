"""Ranks that are given different batches are told so; ranks that bring their own rows are not."""

from typing import Any

import pytest
import torch
from torch import nn

from partitioner import RankError, auto_parallelize
from partitioner.runtime.same import digest
from tests import ranks as pool


def trained(rank_seed: bool, local: bool, constraints: dict[str, Any] | None = None, alike: int = 0) -> float:
    """Runs on every rank: so many steps on the same batch, then one that differs where `rank_seed` says so."""
    import os

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 6)
    given: Any = {"gpus": ranks, "example_inputs": (x,), "loss": lambda out: out.square().mean(), "constraints": constraints}
    parallel = auto_parallelize(model, **given)
    for _ in range(alike):
        parallel.train_step(x)
    torch.manual_seed(rank if rank_seed else 7)
    batch = torch.randn(8, 6)
    loss = parallel.train_step_local(batch) if local else parallel.train_step(batch)
    late = parallel.drain()
    return float(loss if late is None else late)


def test_different_batches_are_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match=r"rank 1: the rows.* of args\[0\] is .*train_step_local"):
        pool.run(2, trained, True, False, group=False)
    first, second = pool.run(2, trained, False, False, group=False)
    assert first == second


@pytest.mark.parametrize("constraints", [{"dp": 2}, {"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "2bw", "micro_batches": 2}])
def test_so_are_those_of_later_steps(constraints: dict[str, Any]) -> None:
    with pytest.raises(RankError, match=r"rank 1: the rows.* of args\[0\] is .*train_step_local"):
        pool.run(2, trained, True, False, constraints, 2, group=False)
    first, second = pool.run(2, trained, False, False, constraints, 2, group=False)
    assert first == second


def test_the_digest_sees_every_bit_and_place() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(100, (3, 2**18), generator=generator)
    same = {"x": batch, "mask": torch.tensor([True, False]), "at": torch.tensor(2.0), "none": None, "waves": torch.ones(2, dtype=torch.complex64)}

    def number(**changed: Any) -> int:
        return int(digest({**same, **changed}, torch.device("cpu")))

    swapped, moved = batch.clone(), batch.clone()
    swapped[0, :2] = torch.tensor([7, 9])
    moved[0, :2] = torch.tensor([9, 7])
    found = [number(), number(x=swapped), number(x=moved), number(x=batch.flip(0)), number(mask=torch.tensor([False, True]))]
    found += [number(at=torch.tensor(3.0))]
    found += [number(x=torch.cat([swapped[:, :1] + 3, swapped[:, 1:2] - 1, swapped[:, 2:]], 1)), number(waves=torch.tensor([1, 1j]))]
    assert len(set(found)) == len(found) and number(x=batch.clone()) == found[0] and all(0 <= each < 2**62 for each in found)
    assert number(x=batch.mT.contiguous().mT) == found[0]
    assert int(digest({}, torch.device("cpu"))) == int(digest({"none": None}, torch.device("cpu"))) == 0


def test_own_rows_may_differ() -> None:
    first, second = pool.run(2, trained, True, True, group=False)
    assert first == second
