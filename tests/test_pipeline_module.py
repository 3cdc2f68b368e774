"""What a user does with a model in stages besides training it: outputs, evaluation, short batches, clipping, losses that are not finite."""

import copy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import auto_parallelize
from partitioner.errors import NonFiniteError, PartitionerError
from partitioner.runtime import wire
from tests import ranks
from tests.equality import PROOF, Composition, train_parallel

ROWS = 8


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


torch.utils._pytree.register_dataclass(Answer, serialized_type_name="tests.test_pipeline_module.Answer")


class Staged(nn.Module):
    """A weight that both ends read, buffers in the middle, and an output of some form."""

    def __init__(self, form: str = "tensor", norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.form = form
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(torch.tanh(self.second(torch.tanh(self.first(x)))))
        logits = torch.tanh(self.third(hidden)) @ self.first.weight
        forms = {"tensor": logits, "tuple": (logits, hidden), "dict": {"logits": logits, "none": None, "hidden": hidden}}
        return Answer(logits, hidden) if self.form == "dataclass" else forms[self.form]


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found: Tensor = output.logits if isinstance(output, Answer) else output["logits"] if isinstance(output, dict) else output[0]
    return found


def error(output: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(logits_of(output), targets)


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def staged(model: nn.Module, gpus: int, **constraints: Any) -> Any:
    x, targets = batch(0)
    given: dict[str, Any] = {"example_inputs": (x,), "example_targets": targets, "loss": error, "verify": False}
    return auto_parallelize(model, gpus=gpus, constraints={"pp": 2, **constraints}, **given)


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Answer):
        return [output.logits, output.hidden]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return [value for value in values if value is not None]


def use(form: str, constraints: dict[str, Any], gpus: int) -> str:
    """Train, clip, evaluate and look, in stages and in this process alone; what backward() says."""
    plain = Staged(form)
    parallel = staged(copy.deepcopy(plain), gpus, **constraints)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, parallel))
    for step in range(2):
        x, targets = batch(step)
        loss = error(plain(x), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(parallel.train_step(x, targets=targets), loss.detach(), rtol=1e-12, atol=1e-12)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(parallel.clip_grad_norm_(0.05), expected, rtol=1e-12, atol=1e-12)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(parallel.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    x, _ = batch(7)
    for training in (False, True):
        plain.train(training)
        parallel.train(training)
        mine, theirs = parallel(x), plain(x)
        assert type(mine) is type(theirs) and (not isinstance(mine, dict) or list(mine) == list(theirs))
        for found, expected in zip(leaves(mine), leaves(theirs), strict=True):
            assert found.requires_grad
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not logits_of(parallel(x)).requires_grad
        plain(x)  # in training it changes buffers as well
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(parallel.full_state_dict()[name], value, rtol=1e-12, atol=1e-12)
    with pytest.raises(PartitionerError) as refused:
        logits_of(mine).sum().backward()  # type: ignore[no-untyped-call]
    return str(refused.value)


@pytest.mark.parametrize(("form", "shard"), [("dict", "zero3"), ("dataclass", "zero1")])
def test_a_model_in_stages_is_used_as_the_plain_one(form: str, shard: str) -> None:
    for said in ranks.run(4, use, form, {"dp": 2, "shard": shard}, 4):
        assert said.startswith("backward() was called on what parallel(…) returned") and "parallel.train_step(…)" in said


def train_on(rows: list[int], schedule: str) -> list[tuple[float, float]]:
    plain = Staged("tuple", norm=False)
    parallel = staged(copy.deepcopy(plain), 2, micro_batches=4, schedule=schedule)
    losses = []
    for step, count in enumerate(rows):
        x, targets = batch(step, count)
        loss = error(plain(x), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append((parallel.train_step(x, targets=targets).item(), loss.item()))
        with torch.no_grad():
            for model in (plain, parallel):
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    return losses


def test_batches_may_have_other_numbers_of_rows_and_fewer_than_micro_batches() -> None:
    for losses in ranks.run(2, train_on, [8, 3, 1, 8, 11], "1f1b"):
        assert [mine for mine, _ in losses] == pytest.approx([plain for _, plain in losses], rel=1e-12)


def patiently() -> list[float]:
    """Sends that waited until the value's other messages are over would sit out ten minutes each."""
    with patch.object(wire, "_SETTLE_LOOKS", 3_000_000):
        return train_parallel("hf_llama", PROOF, Composition(4, "none", "none", 4, 4, "1f1b")).losses


def test_a_message_does_not_wait_for_those_of_the_same_value_to_other_stages() -> None:
    """Rotary tables go to three stages at once."""
    assert len(set(map(tuple, ranks.run(4, patiently)))) == 1


def meet_a_nan() -> tuple[list[str], float]:
    """What is said of NaNs that come up in either stage, in the second micro-batch; and the loss of the next batch."""
    parallel = staged(Staged(norm=False), 2, micro_batches=2)
    said = []
    x, targets = batch(0)
    x[-1, 0] = torch.nan
    with pytest.raises(NonFiniteError) as refused:
        parallel.train_step(x, targets=targets)
    said.append(str(refused.value))
    x, targets = batch(0)
    targets[-1, 0] = torch.nan
    with pytest.raises(NonFiniteError) as refused:
        parallel.train_step(x, targets=targets)
    said.append(str(refused.value))
    for parameter in parallel.parameters():
        parameter.grad = None
    x, targets = batch(0)
    return said, parallel.train_step(x, targets=targets).item()


def test_a_nan_is_told_on_all_ranks_with_its_block_and_stage() -> None:
    x, targets = batch(0)
    expected = error(Staged(norm=False)(x), targets).item()
    results = ranks.run(2, meet_a_nan)
    for (early, late), loss in results:
        assert "micro-batch 1 on rank 0 (stage 0): the input args[0]" in early
        assert "micro-batch 1 on rank 1 (stage 1): the input targets" in late
        assert loss == pytest.approx(expected, rel=1e-12)
    assert results[0] == results[1]
