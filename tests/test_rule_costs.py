"""FLOPs of the rules against torch's counter, the ops that models export to, and the time to describe a large graph."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from partitioner.passes.rules import backward_flops, describe, pointwise, registry
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.registry import words
from tests.test_rules import call_node, overload


def count(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def value(expression: Any, dims: OpDims) -> int:
    return int(expression.subs(dims.sizes))


def f(*shape: int) -> Tensor:
    return torch.randn(shape)


COUNTED: list[tuple[str, tuple[Any, ...]]] = [
    ("linear.default", (f(2, 3, 4), f(5, 4), f(5))),
    ("linear.default", (f(3, 4), f(5, 4))),
    ("mm.default", (f(3, 4), f(4, 5))),
    ("bmm.default", (f(2, 3, 4), f(2, 4, 5))),
    ("addmm.default", (f(5), f(3, 4), f(4, 5))),
    ("baddbmm.default", (f(2, 3, 5), f(2, 3, 4), f(2, 4, 5))),
    ("matmul.default", (f(2, 3, 4), f(4, 5))),
    ("matmul.default", (f(2, 1, 3, 4), f(6, 4, 5))),
    ("matmul.default", (f(2, 3, 4), f(4))),
    ("matmul.default", (f(3, 4), f(4))),
    ("matmul.default", (f(4), f(4, 5))),
    ("matmul.default", (f(4), f(4))),
    ("matmul.default", (f(3, 4), f(2, 4, 5))),
    ("einsum.default", ("bqhd,bkhd->bhqk", [f(2, 3, 4, 5), f(2, 6, 4, 5)])),
    ("einsum.default", ("bld,dn,bn->bl", [f(2, 3, 4), f(4, 5), f(2, 5)])),
    ("conv1d.default", (f(2, 3, 9), f(4, 3, 3), f(4))),
    ("conv2d.default", (f(2, 3, 8, 8), f(4, 3, 3, 3), None, [2, 2], [1, 1])),
    ("conv2d.default", (f(2, 4, 8, 8), f(6, 2, 3, 3), f(6), [1, 1], [0, 0], [1, 1], 2)),
    ("conv1d.default", (f(2, 4, 8), f(4, 1, 3), f(4), [1], [1], [1], 4)),
    ("conv3d.default", (f(2, 3, 4, 4, 4), f(4, 3, 2, 2, 2))),
    ("conv_transpose2d.input", (f(2, 3, 4, 4), f(3, 5, 2, 2), f(5), [2, 2])),
    ("conv2d.default", (f(3, 8, 8), f(4, 3, 3, 3))),
]


@pytest.mark.parametrize("case", COUNTED, ids=[f"{name}-{position}" for position, (name, _) in enumerate(COUNTED)])
def test_flops_equal_those_of_the_counter(case: tuple[str, tuple[Any, ...]]) -> None:
    name, args = case
    target = overload(f"aten::{name}")
    node, tensors = call_node(target, args, {}, target(*args))
    dims = describe(node)
    assert dims is not None
    assert value(dims.flops, dims) == count(lambda: target(*args))
    everything = [True] * len(tensors)
    singles = [[index == chosen for index in range(len(tensors))] for chosen in range(len(tensors))]
    for needs in (everything, *singles):
        for x, need in zip(tensors, needs, strict=True):
            x.grad = None
            x.requires_grad_(need)
        both = count(lambda: target(*args).sum().backward())
        assert value(backward_flops(node, needs), dims) == both - count(lambda: target(*args)), needs
        for x in tensors:
            x.requires_grad_(False)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_flops(heads: int) -> None:
    """The counter counts the fused kernels that a GPU runs; their formulas are functions of the shapes."""
    q, k, v = f(2, 4, 5, 8), f(2, heads, 6, 8), f(2, heads, 6, 8)
    target = torch.ops.aten.scaled_dot_product_attention.default
    kwargs = {"enable_gqa": heads != 4}
    node, _ = call_node(target, (q, k, v), kwargs, target(q, k, v, **kwargs))
    dims = describe(node)
    assert dims is not None
    formulas: Any = flop_counter
    assert value(dims.flops, dims) == formulas.sdpa_flop_count(q.shape, k.shape, v.shape)
    assert value(backward_flops(node), dims) == formulas.sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    with sdpa_kernel(SDPBackend.MATH):
        assert value(dims.flops, dims) == count(lambda: target(q, k, v, **kwargs))


# ---- what models export to ----

EXPORTED = """
    __and__.Tensor abs add.Tensor addmm alias arange argmax bitwise_not cat chunk clamp clone contiguous conv1d conv2d copy cos
    cross_entropy_loss cumsum diff div.Tensor dropout einsum embedding empty_like eq.Scalar eq.Tensor exp expand fill.Tensor flatten.using_ints
    floor floor_divide full_like gather ge.Scalar gelu gt.Scalar gt.Tensor histc index.Tensor index_put layer_norm le.Tensor lift_fresh_copy
    linear log lt.Scalar masked_fill.Scalar matmul max_pool2d mean.dim min.other mul.Tensor ne.Scalar neg new_ones new_zeros numpy_T ones pad
    permute pow.Tensor_Scalar rand relu repeat repeat_interleave.self_int reshape roll rsqrt scaled_dot_product_attention select.int sigmoid
    silu sin slice.Tensor softmax.int softplus sort split.Tensor split_with_sizes squeeze.dim stack sub.Tensor sum sum.dim_IntList t tanh
    to.device to.dtype to.dtype_layout topk transpose.int tril type_as unsqueeze view where.ScalarOther where.self zeros zeros_like
    adaptive_avg_pool1d adaptive_avg_pool2d batch_norm _native_batch_norm_legit_functional
"""


def test_every_op_of_transformers_models_has_a_rule() -> None:
    """Llama, GPT-2, BERT, T5, ViT, ResNet, Mamba, Mamba-2, Mixtral, OPT, GPT-NeoX, Gemma-2, Swin, Whisper and CLIP export to these."""
    for name in words(EXPORTED):
        target = overload(f"aten::{name}" if "." in name else f"aten::{name}.default")
        assert registry.find(registry.RULES, target) is not None or pointwise.is_pointwise(target), name
    assert "transformers::grouped_mm_fallback" in registry.RULES


def test_describing_a_large_graph_is_fast() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = f(8, 10, 32)
    w = graph.placeholder("w")
    w.meta["val"] = f(32, 32)
    out = x
    for step in range(3000):
        out = graph.call_function(torch.ops.aten.linear.default, (out, w)) if step % 2 else graph.call_function(torch.ops.aten.add.Tensor, (out, x))
        out.meta["val"] = x.meta["val"]
    started = time.process_time()
    for node in graph.nodes:
        describe(node)
    assert time.process_time() - started < 0.25  # seconds, for half of a deep model
