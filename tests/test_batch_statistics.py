"""BatchNorm by the statistics of each micro-batch, where the user allows it: running statistics move once a step, by those of the whole batch."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Plan, auto_parallelize, make_plan
from partitioner.errors import BatchError, ConstraintError
from partitioner.runtime.inputs import spread
from tests import ranks as pool

OWN = {"batch_statistics": "micro_batch"}
BATCHES = (9, 9, 7, 5, 9)
CLOSE = 1e-10


class Norms(nn.Module):
    """Over rows and positions, over rows alone, cumulative, without weights, without running statistics, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None)
        self.third, self.norm3 = nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False, momentum=0.3)
        self.norm4, self.head = nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.first(x))).mean((2, 3))
        h = torch.tanh(self.norm2(self.second(h)))
        h = torch.tanh(self.norm3(self.third(h)))
        h = torch.tanh(self.norm3(self.third(h)))
        y: Tensor = self.head(self.norm4(h))
        return y


def model() -> Norms:
    torch.manual_seed(1)
    return Norms().double()


def batch(rows: int, number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 3, 4, 4, generator=generator, dtype=torch.float64) + torch.arange(rows)[:, None, None, None] * 0.3
    return x, torch.randint(0, 3, (rows,), generator=generator)


def micro_batches_of(rows: int, ranks: int, count: int) -> list[list[int]]:
    """The rows of each micro-batch: of every rank's the first, and so on. Each needs a row of every rank, and two in all."""
    count = min(count, rows // max(ranks, 2))
    groups: list[list[int]] = [[] for _ in range(count)]
    at = 0
    for mine in spread(rows, ranks):
        for mb, here in enumerate(spread(mine, count)):
            groups[mb] += range(at, at + here)
            at += here
    return groups


def train_plain(ranks: int, count: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process: micro-batch by micro-batch; then every BatchNorm sees what it saw at once, for its running statistics."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    norms = [module for module in plain.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None]
    losses = []
    for number, rows in enumerate(BATCHES):
        x, y = batch(rows, number)
        before = [deepcopy(norm.state_dict()) for norm in norms]
        seen: dict[nn.Module, list[list[Tensor]]] = {norm: [] for norm in norms}  # by micro-batch, then use by use

        def look(norm: nn.Module, given: tuple[Tensor, ...], seen: dict[nn.Module, list[list[Tensor]]] = seen) -> None:
            seen[norm][-1].append(given[0].detach().clone())

        hooks = [norm.register_forward_pre_hook(look) for norm in norms]
        total = 0.0
        for group in micro_batches_of(rows, ranks, count):
            for norm in norms:
                seen[norm].append([])
            loss = F.cross_entropy(plain(x[group]), y[group], reduction="sum") / rows
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        for hook in hooks:
            hook.remove()
        for norm, state in zip(norms, before, strict=True):
            norm.load_state_dict(state)
            with torch.no_grad():
                for use in zip(*seen[norm], strict=True):
                    norm(torch.cat(use))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, plain.state_dict()


def train(gpus: int, constraints: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], tuple[int, int]]:
    """Losses, state, and the bytes measured and predicted of this rank."""
    x, y = batch(BATCHES[0])
    given: dict[str, Any] = {"example_inputs": (x,), "example_targets": y, "loss": F.cross_entropy, "optimizer": "sgd_momentum", "verify": False}
    parallel = auto_parallelize(model(), gpus=gpus, **given, constraints=constraints | OWN)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, rows in enumerate(BATCHES):
        x, y = batch(rows, number)
        losses.append(parallel.train_step(x, targets=y).item())
        optimizer.step()
        optimizer.zero_grad()
    rank = torch.distributed.get_rank() if gpus > 1 else 0
    return losses, parallel.full_state_dict(), (parallel.measured.peak_bytes, parallel.plan.predicted.per_rank[rank].peak_bytes)


@pytest.mark.parametrize(
    ("gpus", "pinned"),
    [
        (1, {"micro_batches": 3}),
        (2, {"micro_batches": 2, "shard": "zero3", "checkpoint": "full"}),
        (3, {"micro_batches": 3, "shard": "zero1"}),
        (2, {"micro_batches": 3, "pp": 2, "checkpoint": "full"}),
        (4, {"micro_batches": 2, "pp": 2, "shard": "zero2"}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(map(str, value.values())),
)
def test_equal_to_micro_batches_one_after_the_other_in_one_process(gpus: int, pinned: dict[str, Any]) -> None:
    losses, state = train_plain(gpus // pinned.get("pp", 1), pinned["micro_batches"])
    for found, after, (measured, predicted) in [train(gpus, pinned)] if gpus == 1 else pool.run(gpus, train, gpus, pinned, seconds=300):
        assert found == pytest.approx(losses, rel=CLOSE)
        assert after.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close({name: after[name]}, {name: value}, rtol=CLOSE, atol=CLOSE)
        assert 0.99 * predicted <= measured <= predicted


def first_statistics() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers of the first norm after a step, and of all after a forward more, which takes all of the batch at once."""
    x, y = batch(9)
    parallel = auto_parallelize(model(), gpus=2, example_inputs=(x,), example_targets=y, loss=F.cross_entropy, constraints={"micro_batches": 4} | OWN)
    parallel.train_step(x, targets=y)
    first = {name.removeprefix("norm1."): buffer.clone() for name, buffer in parallel.full_state_dict().items() if name.startswith("norm1.running")}
    parallel.zero_grad()
    parallel(x)
    return first, {name: buffer.clone() for name, buffer in parallel.full_state_dict().items() if name.startswith("norm1.running")}


def test_the_running_statistics_of_what_no_norm_comes_before_are_those_of_the_plain_model() -> None:
    plain, (x, _) = model(), batch(9)
    plain(x)
    running = ("running_mean", "running_var")
    expected = {name: getattr(plain.norm1, name).clone() for name in running}
    plain(x)
    for first, second in pool.run(2, first_statistics, seconds=300):
        torch.testing.assert_close(first, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(second, {f"norm1.{name}": getattr(plain.norm1, name) for name in running}, rtol=1e-13, atol=1e-13)


def test_running_statistics_of_large_values_keep_their_digits() -> None:
    """A variance as a difference of large numbers would have none left in fp32."""
    torch.manual_seed(0)
    x = 1000.0 + torch.randn(8, 5)
    plain = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    given: dict[str, Any] = {"example_inputs": (x,), "loss": lambda out: out.square().mean(), "verify": False}
    parallel = auto_parallelize(deepcopy(plain), gpus=1, **given, constraints={"micro_batches": 4} | OWN)
    parallel.train_step(x)
    plain(x)
    torch.testing.assert_close(parallel.full_state_dict()["0.running_var"], plain[0].running_var, rtol=1e-4, atol=0.0)


def planned(net: nn.Module, x: Tensor, constraints: dict[str, Any], **more: Any) -> Plan:
    given: dict[str, Any] = {"gpus": "1x2 h100-sxm", "example_inputs": (x,), "verify": False, "loss": squares}
    return make_plan(net, **given | more, constraints=constraints)


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))


def test_without_being_asked_for_it_is_refused_and_named_as_a_way_out() -> None:
    with pytest.raises(BatchError, match=r'all_reduce in 1\).*use micro_batches=1, or constraints=\{"batch_statistics": "micro_batch"\} to let'):
        planned(layers(), torch.randn(8, 4), {"micro_batches": 2})


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(self.layers(x), dim=1)
        return F.cross_entropy(y @ y.t(), torch.arange(x.shape[0]))


def test_what_else_mixes_the_batch_is_refused_still() -> None:
    for own in ({}, OWN):
        with pytest.raises(BatchError, match=r"mixes the rows of the batch \(all_gather in the loss|the model.*use micro_batches=1$"):
            planned(Contrastive(), torch.randn(8, 4), {"micro_batches": 2} | own, loss=None)
    assert planned(Contrastive(), torch.randn(8, 4), OWN, loss=None).micro_batches == 1


class Peeks(nn.Module):
    """The loss depends on running statistics after they moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        assert self.norm.running_var is not None
        loss: Tensor = (y * self.norm.running_var).square().mean()
        return loss


def test_running_statistics_that_the_loss_reads_are_refused_but_not_in_one_micro_batch() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(BatchError, match=r"running statistics, with which .* is computed"):
        planned(Peeks().double(), x, {"micro_batches": 2} | OWN, loss=None)
    plain = Peeks().double()
    parallel = auto_parallelize(deepcopy(plain), gpus=1, example_inputs=(x,), constraints={"micro_batches": 1} | OWN)
    torch.testing.assert_close(parallel.train_step(x), plain(x).detach())


def test_a_micro_batch_of_one_value_a_channel_is_refused() -> None:
    with pytest.raises(BatchError, match="BatchNorm needs two values of a channel for its statistics; use micro_batches=4 or fewer"):
        planned(layers(), torch.randn(8, 4), {"micro_batches": 8} | OWN, gpus=1)
    wide = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
    assert planned(wide, torch.randn(8, 4, 3), {"micro_batches": 8} | OWN, gpus=1).micro_batches == 8


def test_a_plan_says_so_keeps_it_and_gives_the_same_program(tmp_path: Any) -> None:
    x = torch.randn(8, 4)
    plan = planned(layers(), x, {"micro_batches": 2} | OWN)
    for text in (str(plan), plan.explain()):
        assert "NOT THE MATHEMATICS OF ONE DEVICE, AS ASKED: 2 BatchNorms normalise by each micro-batch's" in text
    plan.save(tmp_path / "plan.json")
    again = planned(layers(), x, {}, plan=Plan.load(tmp_path / "plan.json"))
    assert again.batch_statistics == "micro_batch" and again.micro_batches == 2
    texts = [one.emit(tmp_path / name) for name, one in (("one", plan), ("other", again))]
    assert (texts[0] / "rank_0.txt").read_text() == (texts[1] / "rank_0.txt").read_text()
    assert "EPILOGUE block" in (texts[0] / "rank_0.txt").read_text()
    assert "def epilogue_forward" in (texts[0] / "functions.py").read_text()
    for name, drawn in (("graph", plan.draw), ("timeline", plan.draw_timeline), ("memory", plan.draw_memory)):
        drawn(tmp_path / f"{name}.svg")
    assert ">epilogue<" in (tmp_path / "graph.svg").read_text()
    plain = planned(layers(), x, {})
    assert plain.batch_statistics == "global" and "batch statistics  micro_batch → global" in plan.diff(plain)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"constraints\['batch_statistics'\] is 'local'; it may be global, micro_batch"):
        planned(layers(), torch.randn(8, 4), {"batch_statistics": "local"})
