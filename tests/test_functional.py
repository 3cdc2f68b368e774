"""The functional graph equals eager: value bits, gradients, buffers; and nothing in it mutates."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.errors import CaptureError
from partitioner.passes.capture import capture
from partitioner.passes.functional_schema import functional_twin
from partitioner.passes.verify import verify
from tests.capture_support import Fn, checked, example, targets

aten = torch.ops.aten


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
