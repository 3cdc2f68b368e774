"""What capture names, how it treats what must get through, and that it leaves the model alone."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint

from partitioner.errors import CaptureError
from partitioner.passes.capture import capture
from partitioner.passes.verify import verify
from tests.capture_support import names, ok, rows, small, square


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.idle = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.Linear(3, 3)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.shift = torch.full((4,), 0.5)

    def forward(self, ids: Tensor, *, gain: Any = 1.0, mask: Any = None) -> Any:
        h = self.frozen(self.embed(ids)) * self.scale + self.shift
        return self.head(h * gain)


def test_inputs_are_named_and_ordered() -> None:
    ids = torch.randint(0, 7, (2, 3))
    model = Tied()
    graph = capture(model, (ids,), {"gain": 2.0, "mask": None}, loss=square)
    assert [(i.kind, i.name, i.requires_grad) for i in graph.inputs] == [
        ("parameter", "embed.weight", True),
        ("parameter", "frozen.weight", False),
        ("parameter", "frozen.bias", False),
        ("buffer", "scale", False),
        ("constant", "shift", False),
        ("input", "args[0]", False),
    ]
    assert graph.ties == {"head.weight": "embed.weight"}
    assert graph.literals == {"kwargs['gain']": 2.0, "kwargs['mask']": None}
    assert graph.constants["shift"] is not None and [o.kind for o in graph.outputs] == ["loss"]
    assert verify(model, graph, (ids,), {"gain": 2.0, "mask": None}, loss=square) is None
    assert {n.meta["module"] for n in graph.module.graph.nodes if n.op == "call_function"} == {"embed", "frozen", "head", ""}


def test_forward_mode_rebuilds_the_output() -> None:
    model = small(lambda m, x: {"y": (m.linear(x), x), "n": 3})
    graph = capture(model, (rows(),), mode="forward")
    assert [o.name for o in graph.outputs] == ["output['y'][0]", "output['y'][1]"]
    assert graph.out_spec is not None and tree_unflatten([1, 2], graph.out_spec) == {"y": (1, 2), "n": 3}
    assert verify(model, graph, (rows(),)) is None


@pytest.mark.parametrize(
    "output", [lambda v: v, lambda v: (v, v * 2), lambda v: {"loss": v}, lambda v: type("O", (), {"loss": v})(), lambda v: v[None]]
)
def test_a_model_may_return_its_own_loss(output: Callable[[Tensor], Any]) -> None:
    graph = ok(small(lambda m, x: output(m.linear(x).sum())), rows(), loss=None)
    assert graph.results[0].meta["val"].shape == ()


def test_losses() -> None:
    model = small(lambda m, x: m.linear(x))
    target = torch.randint(0, 4, (3,))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]))
    graph = capture(model, (rows(),), loss=weighted, targets=target, has_targets=True)
    assert verify(model, graph, (rows(),), loss=weighted, targets=target, has_targets=True) is None
    assert names(graph, "input") == ["args[0]", "targets"] and names(graph, "constant") == ["criterion.weight"]
    decay = ok(model, rows(), loss=lambda o: square(o) + sum(p.square().sum() for p in model.parameters()))
    assert names(decay, "parameter") == ["linear.weight", "linear.bias"]
    weight = model.linear.weight  # reached by a closure, not by the module
    assert names(ok(model, rows(), loss=lambda o: square(o) + weight.square().sum()), "parameter") == ["linear.weight", "linear.bias"]
    with pytest.raises(CaptureError, match="no loss was given and the model returns a tensor of shape"):
        capture(model, (rows(),))
    with pytest.raises(CaptureError, match=r"tensor of shape \(3, 4\); backward needs one number"):
        capture(model, (rows(),), loss=lambda o: o)
    with pytest.raises(CaptureError, match="not a tensor"):
        capture(model, (rows(),), loss=lambda o: 1.0)
    with pytest.raises(CaptureError, match="not a parameter of the model"):
        capture(model, (rows(),), loss=nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), nn.Linear(3, 1)))


def test_meta_and_fake_models_allocate_nothing() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 1 << 20), nn.BatchNorm1d(1 << 20), nn.Linear(1 << 20, 1 << 20))
    before = dict(model.named_parameters())
    graph = capture(model, (torch.empty(8, 4, device="meta"),), loss=square)
    assert {n.meta["val"].device.type for n in graph.placeholders} == {"cpu"}
    assert all(before[name] is p for name, p in model.named_parameters())
    assert "no data" in str(verify(model, graph, (torch.empty(8, 4, device="meta"),), loss=square))
    with FakeTensorMode():
        faked, x = nn.Linear(4, 4), torch.empty(2, 4)
    assert "no data" in str(verify(faked, capture(faked, (x,), loss=square), (x,), loss=square))
    assert names(capture(nn.Linear(4, 4), (torch.empty(2, 4, device="meta"),), loss=square), "input") == ["args[0]"]


def test_capture_leaves_the_model_alone() -> None:
    model: Any = nn.Sequential(nn.LSTM(4, 4), small(lambda m, x: F.dropout(m.linear(x[0]), 0.3)), nn.BatchNorm1d(4))
    model[2].eval()
    model[0].weight_hh_l0.grad = torch.ones(16, 4)
    attributes: dict[str, dict[Any, Any]] = {name: dict(module.__dict__) for name, module in model.named_modules()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    flat = list(model[0]._flat_weights)
    numpy_state: Any = np.random.get_state
    generator, python, numbers = torch.get_rng_state(), random.getstate(), numpy_state()[1].copy()
    for training in (True, False):
        verify(model, capture(model, (rows(),), loss=square, training=training), (rows(),), loss=square)
    assert torch.equal(generator, torch.get_rng_state()) and random.getstate() == python and (numpy_state()[1] == numbers).all()
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
        assert all(module.__dict__[key] is value for key, value in attributes[name].items())
    assert all(a is b for a, b in zip(flat, model[0]._flat_weights, strict=True))
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert model.training and not model[2].training and torch.equal(model[0].weight_hh_l0.grad, torch.ones(16, 4))


def test_train_and_eval_are_two_graphs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert names(capture(model, (rows(),), loss=square), "scalar") == ["key_shared"]
    assert names(capture(model, (rows(),), loss=square, training=False), "scalar") == []


# -------------------------------------------------------------------------------------------------------- what must get through


def _memo(m: Any, x: Tensor) -> Any:
    if getattr(m, "mask", None) is None:
        m.mask = torch.ones(x.shape[-1]).cumsum(0)
    return m.linear(x) * m.mask


def _memo_inside(m: Any, x: Tensor) -> Any:
    if not m.kept["sizes"]:
        m.kept["sizes"].append(x.shape[-1])
    return m.linear(x) / m.kept["sizes"][0]


def test_memos_and_outputs_left_on_modules() -> None:
    model: Any = small(_memo)
    ok(model, rows())
    assert not hasattr(model, "mask")
    model = small(_memo_inside)
    kept: dict[str, list[int]] = {"sizes": []}
    model.kept = kept
    ok(model, rows())
    assert model.kept is kept == {"sizes": []}

    def leaves_output(m: Any, x: Tensor) -> Any:
        m.width, m.penalty = x.shape[1], m.linear(x).abs().mean()
        return m.linear(x) + m.penalty * m.width

    with pytest.warns(UserWarning, match=r"leaves tensors on the model \(penalty\)"):
        ok(small(leaves_output), rows())


def test_state_that_is_equal_afterwards_needs_no_second_look() -> None:
    def runs(after: Any) -> int:
        counted = []

        def renews(m: Any, x: Tensor) -> Any:
            m.settings = copy.deepcopy(after)
            counted.append(1)
            return m.linear(x)

        model: Any = small(renews)
        model.settings = before = {"a": ([1], {2}), "b": "c"}
        capture(model, (rows(),), loss=square)
        assert model.settings is before
        return len(counted)

    assert runs({"a": ([1], {2}), "b": "c"}) == runs({"a": ([1], {3}), "b": "c"}) - 2


def test_forward_hooks_are_part_of_the_model() -> None:
    model = small(lambda m, x, gain=1.0: torch.tanh(m.linear(x)) * gain)
    model.linear.register_forward_hook(lambda m, i, o: o * 0.5)
    model.linear.register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
    model.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 2.0,), kwargs), with_kwargs=True)
    model.register_forward_hook(lambda m, i, o: o - o.mean(-1, keepdim=True))
    found = [str(n.target) for n in ok(model, rows(), gain=1.5).module.graph.nodes]
    assert found.count("aten.mul.Tensor") == 3 and "aten.mean.dim" in found


def test_non_reentrant_checkpoint_is_plain_ops() -> None:
    model = small(lambda m, x: checkpoint(lambda y: F.dropout(m.linear(y).tanh(), 0.3), x, use_reentrant=False))
    assert [str(n.target) for n in ok(model, rows()).module.graph.nodes].count("aten.linear.default") == 1


def test_parametrised_weights() -> None:
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        graph = ok(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Tanh()), rows())
        assert any("parametrizations" in name for name in names(graph, "parameter"))


@torch.library.custom_op("capture_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: gradient * 5, setup_context=lambda ctx, inputs, output: None)


def test_custom_operators_keep_their_backward() -> None:
    graph = ok(small(lambda m, x: twice(m.linear(x))), rows())
    assert torch.ops.capture_test.twice.default in [n.target for n in graph.module.graph.nodes]
