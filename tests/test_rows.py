"""Each rank brings its own rows: the step equals that on the global batch, however the rows are spread; the sampler deals them evenly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from partitioner import auto_parallelize
from partitioner.errors import InputError, RankError
from partitioner.runtime.inputs import spread
from partitioner.runtime.rows import RowSampler, _overlaps
from tests import ranks

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(COUNTS)
def test_rows_that_move_arrive(counts: list[int]) -> None:
    wanted = spread(sum(counts), len(counts))
    sends = [_overlaps(counts, wanted, rank) for rank in range(len(counts))]
    receives = [_overlaps(wanted, counts, rank) for rank in range(len(counts))]
    assert [sum(row) for row in sends] == counts and [sum(row) for row in receives] == wanted
    assert all(sends[a][b] == receives[b][a] for a in range(len(counts)) for b in range(len(counts)))


@settings(max_examples=200)
@given(rows=st.integers(1, 60), batch=st.integers(1, 20), size=st.integers(1, 5), shuffle=st.booleans())
def test_every_rank_sees_as_many_batches_and_each_row_comes_once(rows: int, batch: int, size: int, shuffle: bool) -> None:
    if min(rows, batch) < size:
        with pytest.raises(InputError, match="without a row"):
            RowSampler.of(range(rows), batch, 0, size, shuffle, 0)
        return
    samplers = [RowSampler.of(range(rows), batch, rank, size, shuffle, 0) for rank in range(size)]
    dealt = [list(sampler) for sampler in samplers]
    assert {len(one) for one in dealt} == {len(samplers[0])}
    together = [[row for share in shares for row in share] for shares in zip(*dealt, strict=True)]
    assert sorted(row for one in together for row in one) == list(range(rows))
    for whole, shares in zip(together, zip(*dealt, strict=True), strict=True):
        assert [len(share) for share in shares] == spread(len(whole), size) and min(map(len, shares)) > 0
        assert len(whole) <= batch or len(together) == 1 or batch < 2 * size
    if not shuffle:
        assert [row for one in together for row in one] == list(range(rows))
    elif rows > 20:
        samplers[0].set_epoch(1)
        assert list(samplers[0]) != dealt[0]


class Tokens(nn.Module):
    """Batch dim 1, an input without a batch, a mean over the valid tokens, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 9)
        self.double()

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        x = self.embed(tokens) + weights[:, None]
        logits: Tensor = self.head(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(9, (4, rows), generator=generator)
    return tokens, torch.linspace(0, 1, 24, dtype=torch.float64).reshape(4, 6), torch.randint(9, (4, rows), generator=generator)


def brought(counts: list[list[int]], constraints: dict[str, Any]) -> None:
    """For each spread of rows: the step on them equals the step on all of them, in loss, gradients and buffers, to the bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, weights, targets = batch(7)
    parallel = auto_parallelize(
        Tokens(),
        gpus=size,
        example_inputs=(tokens, weights),
        example_targets=targets,
        loss=loss_of,
        batch_dim={"args": (1, None), "targets": 1},
        constraints=constraints,
        verify=False,
    )
    start = parallel.full_state_dict()
    for mine in counts:
        tokens, weights, targets = batch(sum(mine))
        first, last = sum(mine[:rank]), sum(mine[: rank + 1])
        results = []
        for local in (False, True):
            parallel.load_full_state_dict(start)
            for parameter in parallel.parameters():
                parameter.grad = None
            if local:
                loss = parallel.train_step_local(tokens[:, first:last], weights, targets=targets[:, first:last])
            else:
                loss = parallel.train_step(tokens, weights, targets=targets)
            gradients = [parameter.grad.clone() for parameter in parallel.parameters() if parameter.grad is not None]
            results.append([loss, *gradients, *(buffer.clone() for buffer in parallel.buffers())])
        for one, other in zip(*results, strict=True):
            assert torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)), mine
    kind, message = (InputError, r"hold different numbers of rows: args\[0\] 2, targets 1") if rank == 1 else (RankError, "rank 1 has refused")
    with pytest.raises(kind, match=message):
        parallel.train_step_local(tokens[:, :2], weights, targets=targets[:, : 1 if rank == 1 else 2])
    with pytest.raises(InputError, match="no rank has brought a row"):
        parallel.train_step_local(tokens[:, :0], weights, targets=targets[:, :0])


@pytest.mark.parametrize("constraints", [{"shard": "zero3"}])
def test_rows_of_each_rank_make_the_global_batch(constraints: dict[str, Any]) -> None:
    ranks.run(3, brought, [[3, 2, 2], [2, 5, 0], [0, 0, 7], [1, 0, 1]], constraints)


def trained() -> list[float]:
    """An epoch of rows that the sampler deals."""
    data = TensorDataset(torch.arange(46.0).reshape(23, 2), torch.arange(23.0)[:, None])
    torch.manual_seed(0)
    inputs, targets = data[:6]
    parallel = auto_parallelize(
        nn.Linear(2, 1), gpus=2, example_inputs=(inputs,), example_targets=targets, loss=nn.functional.mse_loss, constraints={"micro_batches": 2}
    )
    loader = DataLoader(data, batch_sampler=parallel.sampler(data))
    return [parallel.train_step_local(x, targets=y).item() for x, y in loader]


def test_an_epoch_of_dealt_rows_is_that_of_one_process() -> None:
    data = TensorDataset(torch.arange(46.0).reshape(23, 2), torch.arange(23.0)[:, None])
    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    expected = [nn.functional.mse_loss(plain(x), y).item() for x, y in DataLoader(data, batch_size=6)]
    assert ranks.run(2, trained) == [pytest.approx(expected, rel=1e-6)] * 2


def test_what_cannot_be_dealt_is_refused() -> None:
    parallel = auto_parallelize(nn.Linear(2, 1), example_inputs=(torch.ones(4, 2),), loss=torch.sum, verify=False)
    assert list(parallel.sampler(range(6), batch_rows=4)) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(InputError, match="a generator without a length"):
        parallel.sampler((row for row in range(3)), batch_rows=2)
