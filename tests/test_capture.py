"""What capture names, leaves alone, and refuses: everything that export alone gets silently wrong."""

import collections
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
from partitioner.passes.graph import Graph
from partitioner.passes.tree import named_leaves, outputs_of
from partitioner.passes.verify import PlainDraws, verify

torch.set_num_threads(1)


class Fn(nn.Module):
    """A linear layer and a function of (module, *args)."""

    def __init__(self, function: Any, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def rows() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def ok(model: nn.Module, *args: Any, loss: Any = square, **kwargs: Any) -> Graph:
    graph = capture(model, args, kwargs, loss=loss)
    assert verify(model, graph, args, kwargs, loss=loss) is None
    return graph


def names(graph: Graph, kind: str) -> list[str]:
    return [given.name for given in graph.inputs if given.kind == kind]


# ------------------------------------------------------------------------------------------------------------------------ trees


@dataclass
class Batch:
    dense: list[Tensor]
    scale: float
    extra: Tensor | None = None


def test_leaves_have_paths() -> None:
    tensor = torch.zeros(2)
    leaves, spec = named_leaves((Batch([tensor, tensor], 2.0), {"a": (tensor, None)}), {"b": "text", "a": tensor}, tensor)
    assert [path for path, _ in leaves] == [
        "args[0].dense[0]",
        "args[0].dense[1]",
        "args[0].scale",
        "args[0].extra",
        "args[1]['a'][0]",
        "args[1]['a'][1]",
        "kwargs['a']",
        "kwargs['b']",
        "targets",
    ]
    rebuilt = tree_unflatten([leaf for _, leaf in leaves], spec)
    assert isinstance(rebuilt["args"][0], Batch) and rebuilt["args"][0].dense[0] is tensor
    assert named_leaves((), {"b": 1, "a": 2})[1] == named_leaves((), {"a": 2, "b": 1})[1]
    assert len(named_leaves((), {}, None, has_targets=True)[0]) == 1 and not named_leaves((), {})[0]


def test_outputs_rebuild_the_users_structure() -> None:
    tensor = torch.zeros(2)
    Pair = collections.namedtuple("Pair", "first second")
    cache = type("Cache", (), {})()
    cache.keys = [tensor]
    output = {"x": Pair(tensor, 3), "y": Batch([tensor], 1.5), "cache": cache, "name": "text"}
    found, spec = outputs_of(output)
    assert [path for path, _ in found] == ["output['x'].first", "output['y'].dense[0]"]
    rebuilt = tree_unflatten([torch.ones(1), torch.ones(2)], spec)
    assert rebuilt["x"] == Pair(torch.ones(1), 3) and rebuilt["y"].scale == 1.5 and rebuilt["cache"] is None and rebuilt["name"] == "text"


def test_leaves_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"args\[0\] is a numpy array"):
        named_leaves((np.zeros(3),), {})
    with pytest.raises(CaptureError, match=r"kwargs\['x'\] is no dense tensor"):
        named_leaves((), {"x": torch.eye(2).to_sparse()})
    holder = type("Holder", (), {})()
    holder.tensor = torch.zeros(1)
    with pytest.raises(CaptureError, match=r"args\[0\] is a Holder that holds tensors"):
        named_leaves((holder,), {})


# ----------------------------------------------------------------------------------------------------------- inputs and outputs


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
    model = Fn(lambda m, x: {"y": (m.linear(x), x), "n": 3})
    graph = capture(model, (rows(),), mode="forward")
    assert [o.name for o in graph.outputs] == ["output['y'][0]", "output['y'][1]"]
    assert graph.out_spec is not None and tree_unflatten([1, 2], graph.out_spec) == {"y": (1, 2), "n": 3}
    assert verify(model, graph, (rows(),)) is None


@pytest.mark.parametrize(
    "output", [lambda v: v, lambda v: (v, v * 2), lambda v: {"loss": v}, lambda v: type("O", (), {"loss": v})(), lambda v: v[None]]
)
def test_a_model_may_return_its_own_loss(output: Callable[[Tensor], Any]) -> None:
    graph = ok(Fn(lambda m, x: output(m.linear(x).sum())), rows(), loss=None)
    assert graph.results[0].meta["val"].shape == ()


def test_losses() -> None:
    model = Fn(lambda m, x: m.linear(x))
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
    model: Any = nn.Sequential(nn.LSTM(4, 4), Fn(lambda m, x: F.dropout(m.linear(x[0]), 0.3)), nn.BatchNorm1d(4))
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


# ---------------------------------------------------------------------------------------------- what export gets silently wrong


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
    "error of its own": (lambda m, x: m.linear(x) @ x, "test_capture.py.*cannot be captured: RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_tracing(name: str) -> None:
    function, message = REFUSED[name]
    model = Fn(function)
    before = dict(model.__dict__)
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, (rows(),), loss=square)
    assert "test_capture.py" in str(caught.value) or name in ("counter", "hidden state", "growing list")
    assert model.__dict__.keys() == before.keys() and not isinstance(model.linear.weight, torch._subclasses.FakeTensor)


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
    model = Fn(lambda m, x: m.linear(x))
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
    model = Fn(lambda m, x: m.linear(x) + m.count.add_(1))
    model.count = torch.zeros(())
    with pytest.raises(CaptureError, match=r"changes count in place, a tensor that is neither parameter nor buffer"):
        capture(model, (rows(),), loss=square)
    model = Fn(lambda m, x: m.linear(x) * m.weight)
    model.__dict__["weight"] = torch.ones(4, requires_grad=True)
    with pytest.raises(CaptureError, match="trains the tensor weight, which is not a parameter"):
        capture(model, (rows(),), loss=square)


# -------------------------------------------------------------------------------------------------------- what must get through


def _memo(m: Any, x: Tensor) -> Any:
    if getattr(m, "mask", None) is None:
        m.mask = torch.ones(x.shape[-1]).cumsum(0)
    return m.linear(x) * m.mask


def test_memos_and_outputs_left_on_modules() -> None:
    model = Fn(_memo)
    ok(model, rows())
    assert not hasattr(model, "mask")

    def leaves_output(m: Any, x: Tensor) -> Any:
        m.width, m.penalty = x.shape[1], m.linear(x).abs().mean()
        return m.linear(x) + m.penalty * m.width

    with pytest.warns(UserWarning, match=r"leaves tensors on the model \(penalty\)"):
        ok(Fn(leaves_output), rows())


def test_forward_hooks_are_part_of_the_model() -> None:
    model = Fn(lambda m, x, gain=1.0: torch.tanh(m.linear(x)) * gain)
    model.linear.register_forward_hook(lambda m, i, o: o * 0.5)
    model.linear.register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
    model.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 2.0,), kwargs), with_kwargs=True)
    model.register_forward_hook(lambda m, i, o: o - o.mean(-1, keepdim=True))
    found = [str(n.target) for n in ok(model, rows(), gain=1.5).module.graph.nodes]
    assert found.count("aten.mul.Tensor") == 3 and "aten.mean.dim" in found


def test_non_reentrant_checkpoint_is_plain_ops() -> None:
    model = Fn(lambda m, x: checkpoint(lambda y: F.dropout(m.linear(y).tanh(), 0.3), x, use_reentrant=False))
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
    graph = ok(Fn(lambda m, x: twice(m.linear(x))), rows())
    assert torch.ops.capture_test.twice.default in [n.target for n in graph.module.graph.nodes]


# ------------------------------------------------------------------------------------------------------------------ verification


def test_fused_dropout_is_compared_in_plain_draws() -> None:
    x = torch.ones(64)
    with PlainDraws():  # type: ignore[no-untyped-call]
        torch.manual_seed(3)
        fused, mask = torch.native_dropout(x, 0.25, True)
    torch.manual_seed(3)
    plain = F.dropout(x, 0.25)
    assert torch.equal(mask, plain != 0) and torch.allclose(fused, plain)


def test_verification_notices_a_first_call_that_is_special() -> None:
    def initialises(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        if not getattr(m, "ready", False):
            m.ready = True
            h = h / h.std()
        return h

    model: Any = Fn(initialises)
    graph = capture(model, (rows(),), loss=square)
    with pytest.raises(CaptureError, match=r"the second call of Fn differs from the first.*ready"):
        verify(model, graph, (rows(),), loss=square)
    model.ready = True
    ok(model, rows())


def test_verification_names_what_differs() -> None:
    model = Fn(lambda m, x: m.linear(x))
    graph = capture(model, (rows(),), loss=square)
    for node in graph.module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            node.args = (*node.args[:2], None)
    with pytest.raises(CaptureError, match=r"gradient of linear\.bias: none captured but in eager") as caught:
        verify(model, graph, (rows(),), loss=square)
    assert "loss: off by" in str(caught.value) and "Probable causes" in str(caught.value)


def test_verification_notices_what_eager_cannot_repeat() -> None:
    calls = []

    def drifts(m: Any, x: Tensor) -> Any:
        calls.append(0)
        return m.linear(x) * len(calls)

    model = Fn(drifts)
    graph = capture(model, (rows(),), loss=square)
    with pytest.raises(CaptureError, match="two results for the same seed"):
        verify(model, graph, (rows(),), loss=square)
