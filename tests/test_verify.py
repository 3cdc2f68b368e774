"""Verification compares the captured graph with eager and names what differs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from partitioner.errors import CaptureError
from partitioner.passes.capture import capture
from partitioner.passes.verify import PlainDraws, verify
from tests.capture_support import ok, rows, small, square


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

    model: Any = small(initialises)
    graph = capture(model, (rows(),), loss=square)
    with pytest.raises(CaptureError, match=r"the second call of Fn differs from the first.*ready"):
        verify(model, graph, (rows(),), loss=square)
    model.ready = True
    ok(model, rows())


def test_verification_names_what_differs() -> None:
    model = small(lambda m, x: m.linear(x))
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

    model = small(drifts)
    graph = capture(model, (rows(),), loss=square)
    with pytest.raises(CaptureError, match="two results for the same seed"):
        verify(model, graph, (rows(),), loss=square)
