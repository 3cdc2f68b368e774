"""Random ops of the functional graph draw eager's bits, and what has no such form is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.errors import CaptureError
from partitioner.passes.capture import capture
from tests.capture_support import Fn, checked, example, targets

aten = torch.ops.aten
RANDOM = torch.ops.partitioner.random.default


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
    with pytest.raises(CaptureError, match=r"capture_support\.py:\d+ in forward") as caught:
        capture(model, (example(),), mode="forward")
    assert name in str(caught.value).lower()
