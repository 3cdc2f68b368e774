"""Capture refuses what export alone gets silently wrong, with the line to change."""

import copy
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partitioner.errors import CaptureError
from partitioner.passes.capture import capture
from tests.capture_support import Fn, rows, small, square


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


round_through: Any = Round.apply


def _apply_late(x: Tensor) -> Any:
    function: Any = Round
    return function.apply(x)


def _counts(m: Any, x: Tensor) -> Any:
    m.calls = getattr(m, "calls", 0) + 1
    return m.linear(x) * m.calls


def _carries(m: Any, x: Tensor) -> Any:
    h = m.linear(x)
    if getattr(m, "hidden", None) is not None:
        h = h + m.hidden
    m.hidden = h.detach()
    return h


def _appends(m: Any, x: Tensor) -> Any:
    m.__dict__.setdefault("history", []).append(x.shape)
    return m.linear(x) * len(m.history)


def _hooks_a_value(m: Any, x: Tensor) -> Any:
    h = m.linear(x)
    h.register_hook(lambda g: g * 2)
    return h


def _branches(m: Any, x: Tensor) -> Any:
    h = m.linear(x)
    return h if h.sum() > 0 else -h


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        self.extra = nn.Linear(4, 4)
        return self.extra(self.linear(x))


REFUSED: dict[str, tuple[Any, str]] = {
    "custom function": (lambda m, x: _apply_late(m.linear(x)), r"Round is a custom autograd\.Function"),
    "its apply, bound early": (lambda m, x: round_through(m.linear(x)), r"Round is a custom autograd\.Function"),
    "reentrant checkpoint": (lambda m, x: checkpoint(m.linear, x.requires_grad_(), use_reentrant=True), "use_reentrant=False"),
    "python randomness": (lambda m, x: m.linear(x) * random.uniform(0, 1), r"in <lambda>: forward draws from random;"),
    "numpy randomness": (lambda m, x: m.linear(x) * float(np.random.rand()), r"forward draws from numpy\.random;"),
    "counter": (_counts, "reads and changes calls"),
    "hidden state": (_carries, "reads and changes hidden"),
    "growing list": (_appends, "reads and changes history"),
    "tensor hook": (_hooks_a_value, r"in _hooks_a_value: Tensor\.register_hook is called"),
    "backward inside": (lambda m, x: (m.linear(x).sum().backward(), m.linear(x))[1], r"\.backward\(\) is called"),
    "gradient inside": (lambda m, x: torch.autograd.grad(m.linear(x).sum(), m.linear.weight)[0], r"torch\.autograd\.grad is called"),
    "vmap": (lambda m, x: torch.vmap(lambda row: m.linear(row))(x), "no tensor op"),
    "if on a tensor": (_branches, r"in _branches, module Fn: Python needs a value that is known only when the data is"),
    "item": (lambda m, x: m.linear(x) * x.max().item(), "depends on the data|known only when"),
    "nonzero": (lambda m, x: m.linear(x)[x > 0], "depends on the data|known only when"),
    "cond": (lambda m, x: torch.cond(x.sum() > 0, lambda y: m.linear(y), lambda y: -m.linear(y), (x,)), "cond"),
    "error of its own": (lambda m, x: m.linear(x) @ x, "test_refuse.py.*cannot be captured: RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_tracing(name: str) -> None:
    function, message = REFUSED[name]
    model = small(function)
    before = dict(model.__dict__)
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, (rows(),), loss=square)
    where = re.search(r"(test_refuse|capture_support)\.py:\d+ in \S+", str(caught.value))  # the line itself, or that of forward
    assert where or name in ("counter", "hidden state", "growing list")
    assert model.__dict__.keys() == before.keys() and not isinstance(model.linear.weight, torch._subclasses.FakeTensor)


def _adds(m: Any, x: Tensor) -> Any:
    m.state += 1
    return m.linear(x) * m.state


def _adds_inside(m: Any, x: Tensor) -> Any:
    m.state["calls"][0] += 1
    return m.linear(x) * m.state["calls"][0]


@pytest.mark.parametrize(("function", "state"), [(_adds, 0), (_adds_inside, {"calls": [0]})])
def test_state_that_was_there_before(function: Any, state: Any) -> None:
    model, before = Fn(function, 4, state=state), copy.deepcopy(state)
    with pytest.raises(CaptureError, match="reads and changes state"):
        capture(model, (rows(),), loss=square)
    assert model.state is state and state == before


def _backward_hook(model: Any) -> None:
    model.linear.register_full_backward_hook(lambda m, i, o: None)


def _backward_pre_hook(model: Any) -> None:
    model.register_full_backward_pre_hook(lambda m, o: None)


def _parameter_hook(model: Any) -> None:
    model.linear.weight.register_hook(lambda g: g)


def _accumulate_hook(model: Any) -> None:
    model.linear.weight.register_post_accumulate_grad_hook(lambda p: None)


def _lazy(model: Any) -> None:
    model.more = nn.LazyLinear(3)


def _script(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.more = torch.jit.script(nn.ReLU())


def _sync(model: Any) -> None:
    model.more = nn.SyncBatchNorm(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_backward_hook, "Linear 'linear' has a backward hook"),
        (_backward_pre_hook, r"the model \(Fn\) has a backward hook"),
        (_parameter_hook, r"parameter linear\.weight has a gradient hook"),
        (_accumulate_hook, r"parameter linear\.weight has a gradient hook"),
        (_lazy, r"parameter more\.weight has no shape yet"),
        (_sync, "is a SyncBatchNorm"),
        (_script, "is TorchScript"),
    ],
)
def test_refused_at_sight(change: Callable[[nn.Module], None], message: str) -> None:
    model = small(lambda m, x: m.linear(x))
    change(model)
    with pytest.raises(CaptureError, match=message):
        capture(model, (rows(),), loss=square)


def test_refused_by_name() -> None:
    class Clash(nn.Linear):
        def forward(self, x: Tensor, targets: Any = None) -> Tensor:
            return super().forward(x)

    with pytest.raises(CaptureError, match="has a parameter called targets"):
        capture(Clash(4, 4), (rows(),), loss=F.mse_loss, targets=rows(), has_targets=True)
    with pytest.raises(CaptureError, match="adds or replaces extra"):
        capture(Grows(), (rows(),), loss=square)
    model = small(lambda m, x: m.linear(x) + m.count.add_(1))
    model.count = torch.zeros(())
    with pytest.raises(CaptureError, match=r"changes count in place, a tensor that is neither parameter nor buffer"):
        capture(model, (rows(),), loss=square)
    model = small(lambda m, x: m.linear(x) * m.weight)
    model.__dict__["weight"] = torch.ones(4, requires_grad=True)
    with pytest.raises(CaptureError, match="trains the tensor weight, which is not a parameter"):
        capture(model, (rows(),), loss=square)
