"""The functional graph equals eager: value bits, gradients, buffers, random bits; and nothing in it mutates."""

import os
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner.errors import CaptureError
from partitioner.passes.capture import capture
from partitioner.passes.functional_schema import functional_twin
from partitioner.passes.graph import Graph
from partitioner.passes.verify import SEEDS, verify

torch.set_num_threads(1)
aten = torch.ops.aten
RANDOM = torch.ops.partitioner.random.default


class Fn(nn.Module):
    """A model made of a function of (module, x), with a linear layer and what else is registered."""

    def __init__(self, function: Any, width: int = 6, **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, width)
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def example(rows: int = 4, width: int = 6) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def checked(model: nn.Module, *args: Any, exact: bool = True, mode: Any = "forward", training: bool = True, **kwargs: Any) -> Graph:
    """Capture, verify, and compare outputs bit for bit under a seed."""
    graph = capture(model, args, kwargs, mode=mode, training=training)
    assert verify(model, graph, args, kwargs) is None
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            assert "module" in node.meta and "source" in node.meta
            assert node.meta["val"] is not None
    if exact:
        want, have = outputs(model, graph, args, kwargs)
        for a, b in zip(want, have, strict=True):
            assert torch.equal(a, b)
    return graph


def outputs(model: nn.Module, graph: Graph, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """User outputs of eager and of the graph, under one seed."""
    from partitioner.passes.tree import named_leaves, outputs_of

    state = {k: v.clone() for k, v in model.state_dict().items()}
    if model.training != graph.training:
        model.train(graph.training)
    torch.manual_seed(SEEDS[0] + 1)
    want = [value for _, value in outputs_of(model(*args, **kwargs))[0]]
    model.load_state_dict(state)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants, "key_shared": -1}
    named.update(dict(named_leaves(args, kwargs)[0]))
    torch.manual_seed(SEEDS[0] + 1)
    results = fx.Interpreter(graph.module).run(*[named[given.name] for given in graph.inputs])
    return want, results[: len(want)]


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.module.graph.nodes if node.op == "call_function"]


def _slices(m: Any, x: Tensor) -> Any:
    h = m.linear(x).clone()
    h[:, 0] = 1.0
    h[1:3, 2:5] *= 2
    h[..., -1].add_(h[..., 0])
    h[h > 1] = 0
    h[0] = x[0]
    return h.relu_()


def _views(m: Any, x: Tensor) -> Any:
    h = m.linear(x) * 1
    flat, turned = h.view(-1), h.t()
    flat.add_(1)
    turned[0].mul_(3)
    h.unsqueeze(0).squeeze(0).sub_(0.5)
    h.view(2, 2, 6).permute(2, 0, 1).neg_()
    h.diagonal().fill_(0.25)
    h.narrow(0, 1, 2).zero_()
    return flat.sin() + turned.t().reshape(-1)


def _pieces(m: Any, x: Tensor) -> Any:
    h = x * 1
    a, b = h.chunk(2, -1)
    a.exp_()
    b.copy_(a)
    for row in h.unbind(0)[:2]:
        row.tanh_()
    torch.split_with_sizes(h, [1, 3])[1].add_(2)
    h.as_strided((2, 2), (3, 2), 1).fill_(5)
    h.expand(4, 6).data.mul_(2)
    return m.linear(h) + a.sum() * b.repeat(1, 2)


def _in_place_views(m: Any, x: Tensor) -> Any:
    h = m.linear(x) * 1
    h.t_()
    h.unsqueeze_(0)
    h.add_(1)
    h.squeeze_(0)
    return h @ h.t()


def _scatters(m: Any, x: Tensor) -> Any:
    h = m.linear(x)
    out = torch.zeros_like(h)
    index = torch.tensor([0, 2, 2, 1])
    out.index_add_(0, index, h)
    out.scatter_add_(1, torch.zeros(4, 6, dtype=torch.long), h)
    out.masked_fill_(x > 1, -1.0)
    out.index_put_((index, index), h[:, 0], accumulate=True)
    out.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 7.0)
    out.index_copy_(0, torch.tensor([3]), h[:1])
    out.index_fill_(1, torch.tensor([5]), 2.0)
    return out


def _booleans(m: Any, x: Tensor) -> Any:
    mask = x > 0
    mask |= x < -1
    mask &= ~(x == 0)
    mask ^= x > 2
    return torch.where(mask, m.linear(x), x) + (mask & (x > 1)).float()


def _out(m: Any, x: Tensor) -> Any:
    h = torch.empty(4, 6)
    with torch.no_grad():
        torch.mul(x, 2, out=h)
        torch.add(h, x, out=h[:, :6])
    values, indices = torch.empty(4), torch.empty(4, dtype=torch.long)
    with torch.no_grad():
        torch.max(x, 1, out=(values, indices))
    return m.linear(h) + values[:, None] + indices[:, None]


def _casting(m: Any, x: Tensor) -> Any:
    half = x.bfloat16().clone()
    half += m.linear(x).mean(0)  # result keeps the type of what it is written to
    counts = torch.zeros(6, dtype=torch.long)
    counts += 3
    return half.float() + counts


def _complex(m: Any, x: Tensor) -> Any:
    z = torch.view_as_complex(m.linear(x).reshape(4, 3, 2).contiguous())
    z = z * torch.polar(torch.ones(3), torch.arange(3.0))
    return torch.view_as_real(z).flatten(1)


def _idle_dropout(m: Any, x: Tensor) -> Any:
    h = m.linear(x) * 1
    F.dropout(h, 0.5, False).add_(1)
    return h


IN_PLACE = {
    "slices": _slices,
    "views": _views,
    "pieces": _pieces,
    "in-place views": _in_place_views,
    "scatters": _scatters,
    "booleans": _booleans,
    "out": _out,
    "casting": _casting,
    "complex": _complex,
    "dropout that drops nothing is its argument": _idle_dropout,
    "clone is not its argument": lambda m, x: (h := m.linear(x) * 1, h.clone().add_(1), h)[2],
    "fill with a value that has a gradient": lambda m, x: torch.zeros(4, 6).copy_(m.linear(x)) + torch.zeros(4).fill_(m.linear(x).sum())[:, None],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_ops_become_functional(name: str) -> None:
    graph = checked(Fn(IN_PLACE[name]), example())
    assert not [t for t in targets(graph) if isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable]


def test_composites_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    found = targets(checked(model, torch.randn(2, 3, 6)))
    for whole in (aten.linear.default, aten.layer_norm.default, aten.scaled_dot_product_attention.default):
        assert whole in found
    assert aten.addmm.default not in found


def test_regions_without_gradient_are_detached() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        with torch.no_grad():
            a = h * 2
            b = a + h
            with torch.enable_grad():
                c = m.linear(b) + a  # carries a gradient through the weight, not through a and b
        return b * h + c

    graph = checked(Fn(run), example())
    assert targets(graph).count(aten.detach.default) == 2


def test_detached_values() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        with torch.inference_mode():
            g = m.linear(x)
        return h.detach() * h + h.data.sin() * h + g

    checked(Fn(run), example())


def test_sparse_gradients_become_dense() -> None:
    checked(nn.Embedding(9, 4, sparse=True), torch.tensor([[1, 2], [2, 8]]))


def test_buffers_that_change_are_outputs() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        m.steps.add_(1)
        with torch.no_grad():
            m.average = 0.9 * m.average + 0.1 * h.mean(0)
            m.table[1] += 1
        m.inner.peak.copy_(torch.maximum(m.inner.peak, h.detach().max()))
        return h - m.average + m.steps

    model: Any = Fn(run, steps=torch.zeros((), dtype=torch.long), average=torch.zeros(6), table=torch.zeros(3, 2))
    model.inner = nn.Module()
    model.inner.register_buffer("peak", torch.zeros(()))
    graph = checked(model, example())
    assert [o.name for o in graph.outputs if o.kind == "buffer"] == ["steps", "average", "table", "inner.peak"]
    assert float(model.steps) == 0 and not model.average.any()


NORMS: dict[str, Any] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "no affine": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)),
    "no running": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)),
    "cumulative": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
    "used twice": lambda: nn.Sequential(*[shared := nn.BatchNorm1d(6), nn.Linear(6, 6), shared]),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_batch_norm(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = NORMS[name]()
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 6))
    graph = checked(model, example(8), training=training)
    changed = [o.name for o in graph.outputs if o.kind == "buffer"]
    assert bool(changed) == (training and name != "no running")


def test_batch_norm_frozen_in_a_training_model() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[1].eval()
    assert not [o for o in checked(model, example()).outputs if o.kind == "buffer"]


def test_instance_norm_with_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    graph = checked(model, torch.randn(4, 2, 5, 5), exact=False)
    assert len([o for o in graph.outputs if o.kind == "buffer"]) == 2
    checked(model, torch.randn(4, 2, 5, 5), training=False)


def _gumbel(m: Any, x: Tensor) -> Any:
    return F.gumbel_softmax(m.linear(x), tau=0.5, hard=True)


def _noises(m: Any, x: Tensor) -> Any:
    h = m.linear(x) + torch.rand(4, 6) + torch.randn(6) + torch.rand_like(x) + torch.randn_like(x)
    h = h + torch.randint(0, 9, (4, 6)) + torch.randint_like(x, 5) + torch.empty(4, 6).uniform_(-1, 2)
    h = h + torch.bernoulli(torch.sigmoid(x)) + torch.bernoulli(x, 0.3) + torch.empty(4, 6).normal_(1, 2)
    h = h + torch.empty(4, 6, dtype=torch.bool).bernoulli_(0.4)
    h = h + torch.normal(h.detach(), 0.1) + torch.normal(0.0, 1.0, (4, 6)) + torch.empty(4, 6).exponential_(2.0) + torch.empty(4, 6).random_(0, 7)
    return h + torch.normal(h.detach(), h.detach().abs())


def _layouts(m: Any, x: Tensor) -> Any:
    h = m.linear(x)
    turned = F.dropout(h.t(), 0.4) + torch.randn_like(h.t()) + torch.rand_like(h.t())
    big = torch.zeros(4, 12)
    big[:, ::2].normal_()
    big[:, 1::2].uniform_()
    image = F.dropout(h.reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last), 0.3)
    return turned.t() + big[:, :6] + image.reshape(4, 6)


RANDOMS = {
    "dropout": lambda m, x: F.dropout(F.dropout(m.linear(x), 0.3), 0.5, inplace=True),
    "dropout of all": lambda m, x: F.dropout(m.linear(x), 1.0) + m.linear(x),
    "alpha dropout": lambda m, x: F.alpha_dropout(m.linear(x), 0.3, training=True),
    "feature dropout": lambda m, x: F.dropout2d(m.linear(x).reshape(2, 3, 2, 2), 0.5),
    "feature alpha dropout": lambda m, x: F.feature_alpha_dropout(m.linear(x).reshape(2, 3, 2, 2), 0.5, training=True),
    "gumbel": _gumbel,
    "noises": _noises,
    "layouts": _layouts,
    "half": lambda m, x: F.dropout(m.linear(x).bfloat16(), 0.3).float(),
    "float64": lambda m, x: F.dropout(m.linear(x).double(), 0.3) + torch.rand(4, 6, dtype=torch.float64),
}


@pytest.mark.parametrize("name", RANDOMS)
def test_random_bits_equal_eager(name: str) -> None:
    graph = checked(Fn(RANDOMS[name]), example())
    draws = [node for node in graph.module.graph.nodes if node.target is RANDOM]
    assert [node.args[7] for node in draws] == list(range(len(draws)))
    if draws:
        assert graph.inputs[-1].name == "key_shared" and all(node.args[6] is graph.placeholders[-1] for node in draws)


def test_dead_draws_before_a_live_one_are_kept() -> None:
    graph = checked(Fn(lambda m, x: (F.dropout(x), F.dropout(m.linear(x)), F.dropout(x))[1]), example())
    assert targets(graph).count(RANDOM) == 2


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "float mask": {"attn_mask": torch.randn(5, 5)},
    "scale": {"scale": 0.3},
    "half": {"dtype": torch.bfloat16},
    "groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_dropout(name: str) -> None:
    options = dict(ATTENTION[name])
    dtype = options.pop("dtype", torch.float32)

    def run(m: Any, x: Tensor) -> Any:
        q, k, v = (p.reshape(2, 5, 2, 3).transpose(1, 2).to(dtype) for p in (m.linear(x), x, x * 2))
        if options.get("enable_gqa"):
            k, v = k[:, :1], v[:, :1]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **options)

    found = targets(checked(Fn(run), torch.randn(2, 5, 6)))
    assert aten.scaled_dot_product_attention.default not in found and RANDOM in found


RNNS: dict[str, Any] = {
    "lstm": lambda **k: nn.LSTM(6, 5, num_layers=3, dropout=0.3, bidirectional=True, batch_first=True, **k),
    "gru": lambda **k: nn.GRU(6, 5, num_layers=2, dropout=0.3, **k),
    "rnn": lambda **k: nn.RNN(6, 5, num_layers=2, dropout=0.3, nonlinearity="relu", **k),
}


@pytest.mark.parametrize("name", RNNS)
def test_recurrent_layers_with_dropout(name: str) -> None:
    torch.manual_seed(0)
    model = RNNS[name]()
    assert RANDOM in targets(checked(model, torch.randn(3, 4, 6), exact=False))
    assert targets(checked(model, torch.randn(3, 4, 6), training=False)).count(RANDOM) == 0


REFUSED_RANDOM = {
    "randperm": lambda m, x: m.linear(x)[torch.randperm(4)],
    "multinomial": lambda m, x: m.linear(x)[:, torch.multinomial(torch.ones(6), 2)],
    "rrelu": lambda m, x: F.rrelu(m.linear(x), training=True),
    "generator": lambda m, x: m.linear(x) + torch.rand(6, generator=m.generator),
    "cauchy": lambda m, x: m.linear(x) + torch.empty(6).cauchy_(),
}


@pytest.mark.parametrize("name", REFUSED_RANDOM)
def test_random_ops_without_a_form_are_refused(name: str) -> None:
    model: Any = Fn(REFUSED_RANDOM[name])
    model.generator = torch.Generator().manual_seed(0)
    with pytest.raises(CaptureError, match=r"test_functional\.py:\d+ in") as caught:
        capture(model, (example(),), mode="forward")
    assert name in str(caught.value).lower()


def _autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.linear(x)
        h = m.linear(h) + x  # the weight is cast once
        h = torch.einsum("ij,kj->ik", h, x) @ h.float()
        h = F.layer_norm(h, (6,)) + F.softmax(h, -1)
        with torch.autocast("cpu", enabled=False):
            h = m.linear(h.float())
        q = h.reshape(2, 2, 6)
        h = h + F.scaled_dot_product_attention(q, q, q).reshape(4, 6)
        h = h + F.dropout(m.linear(h), 0.2) + torch.cat([h, h.bfloat16()], -1)[:, :6]
        h = h + F.gelu(h) + F.cosine_similarity(h, h.bfloat16().float()).mean() + torch.bmm(q, q.transpose(1, 2)).sum()
    return F.linear(h.float(), m.linear.weight)


def test_autocast_becomes_casts() -> None:
    graph = checked(Fn(_autocast), example())
    casts = [node for node in graph.module.graph.nodes if node.target is aten._to_copy.default and node.args[0].name.endswith("linear_weight")]
    assert len(casts) == 1 and aten.einsum.default in targets(graph)


def test_attributes_shared_by_name_are_refused_when_written_under_no_grad() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        with torch.no_grad():
            h.clamp_(-1, 1)
        return h

    with pytest.raises(CaptureError, match=r"in place under torch\.no_grad"):
        capture(Fn(run), (example(),), mode="forward")
    with pytest.raises(CaptureError, match=r"\.detach\(\) or \.data"):
        capture(Fn(lambda m, x: (h := m.linear(x), h.data.mul_(2), h)[2]), (example(),), mode="forward")
    with pytest.raises(CaptureError, match=r"changes parameter linear\.weight in place"):
        capture(Fn(lambda m, x: (m.linear.weight.data.clamp_(-1, 1), m.linear(x))[1]), (example(),), mode="forward")


def test_an_input_that_changes_leaves_the_callers_tensor() -> None:
    model = Fn(lambda m, x: m.linear(x.add_(1)))
    with pytest.warns(UserWarning, match=r"changes its input args\[0\] in place"):
        graph = capture(model, (example(),), mode="forward")
    assert verify(model, graph, (example(),)) is None


def test_functional_twins() -> None:
    assert functional_twin(aten.add_.Tensor) is aten.add.Tensor
    assert functional_twin(aten.mv.out) is aten.mv.default
    assert functional_twin(aten.__ior__.Tensor) is aten.bitwise_or.Tensor
    assert functional_twin(aten.max.dim_max) is aten.max.dim
    assert functional_twin(aten._index_put_impl_.default) is aten._index_put_impl.default


def test_everything_is_quiet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(nn.LSTM(6, 6), (example()[None],), mode="forward")
