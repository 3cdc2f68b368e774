"""Products that sum over a shared label: linear, mm, matmul of any rank, einsum, …

Where a bias is added, cutting the summed label would add the bias once per shard, so it is whole; the decomposition (product, then bias) is not.
"""

from collections.abc import Callable
from typing import Any

import torch

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import ZERO, Labels, describe_by, product
from partitioner.passes.rules.language import apply
from partitioner.passes.rules.registry import decomposer, rule, text

aten = torch.ops.aten

text("mm", "i k, k j -> i j", linear_one=("self", "mat2"), flops="2 i k j")
text("bmm", "b i k, b k j -> b i j", linear_one=("self", "mat2"), flops="2 b i k j")
text("mv", "i k, k -> i", linear_one=("self", "vec"))
text("outer ger", "i, j -> i j", linear_one=("self", "vec2"))
text("kron", "i!.., j!.. -> o!..")


@rule("dot", "vdot", "inner")
def dot(call: Call) -> OpDims | None:
    """inner: i.. k, j.. k -> i.. j.."""
    if str(call.target._schema.name) != "aten::inner":
        return apply(call, "k, k -> ", linear_one=call.tensor_names)
    labels = Labels()
    first, second = labels.of(call.shape("self"), "i"), labels.of(call.shape("other"), "j")
    if not first or not second:
        return None
    second[-1] = first[-1]
    return describe_by(call, labels, {"self": first, "other": second}, [[*first[:-1], *second[:-1]]], linear_one=("self", "other"))


@rule("linear")
def linear(call: Call) -> OpDims | None:
    bias = call["bias"] is not None
    if len(call.shape("weight")) == 1:
        return apply(call, "b.. i, i, ? -> b..", linear_one=("input", "weight"), keep=("i",) if bias else ())
    return apply(
        call,
        "b.. i, o i, o? -> b.. o",
        linear=("input", "bias") if bias else (),
        linear_one=() if bias else ("input", "weight"),
        flops="2 b.. i o",
        keep=("i",) if bias else (),
    )


@rule("addmm", "addbmm", "baddbmm", "addmv", "addr")
def added(call: Call) -> OpDims | None:
    """self + a product, self broadcasting to the result."""
    name = str(call.target._schema.name)
    patterns = {
        "aten::addmm": ("i k, k j -> i j", "2 i k j", ("mat1",)),
        "aten::baddbmm": ("b i k, b k j -> b i j", "2 b i k j", ("batch1",)),
        "aten::addbmm": ("k i l, k l j -> i j", None, ("batch1",)),
        "aten::addmv": ("i k, k -> i", None, ("mat",)),
        "aten::addr": ("i, j -> i j", None, ("vec1",)),
    }
    pattern, flops, first = patterns[name]
    out = pattern.split("->")[1].split()
    rank = len(call.shape("self"))
    if rank > len(out):
        return None
    bias = " ".join(out[len(out) - rank :])
    return apply(call, f"{bias}, {pattern}", linear=("self", *first), flops=flops, keep=("k", "l"))


def _matmul_dims(labels: Labels, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[Dim], list[Dim], list[Dim], list[Dim]]:
    """Dims of both factors, of the result, and of its batch."""
    inner = labels.new(a[-1], "k")
    left = [labels.new(a[-2], "i")] if len(a) > 1 else []
    right = [labels.new(b[-1], "j")] if len(b) > 1 else []
    batch_a, batch_b = a[:-2], b[:-2]
    rank = max(len(batch_a), len(batch_b))
    sizes = [x if x != 1 else y for x, y in zip((1,) * (rank - len(batch_a)) + batch_a, (1,) * (rank - len(batch_b)) + batch_b, strict=True)]
    batch = labels.of(sizes, "b")

    def part(shape: tuple[int, ...]) -> list[Dim]:
        return [() if size == 1 else dim for size, dim in zip(shape, batch[rank - len(shape) :], strict=True)]

    return [*part(batch_a), *left, inner], [*part(batch_b), inner, *right], [*batch, *left, *right], [inner]


@rule("matmul")
def matmul(call: Call) -> OpDims | None:
    a, b = call.shape("self"), call.shape("other")
    if not a or not b:
        return None
    labels = Labels()
    first, second, out, inner = _matmul_dims(labels, a, b)
    # A vector on the right runs as dot or mv, which the flop counter does not count.
    counted = len(b) > 1
    flops = product(2, *out, *inner) if counted else ZERO
    return describe_by(call, labels, {"self": first, "other": second}, [out], linear_one=("self", "other"), flops=flops)


@rule("bilinear")
def bilinear(call: Call) -> OpDims | None:
    bias = call["bias"] is not None
    keep = ("i", "j") if bias else ()
    return apply(call, "b.. i, b.. j, o i j, o? -> b.. o", linear_one=() if bias else ("input1", "input2", "weight"), keep=keep)


@rule("tensordot")
def tensordot(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("self"), "i")
    theirs = labels.of(call.shape("other"), "j")
    sums = list(zip(call["dims_self"], call["dims_other"], strict=True))
    for a, b in sums:
        if call.shape("self")[a] == call.shape("other")[b]:
            theirs[b] = mine[a]
        else:  # one of them is 1: broadcast, then summed
            labels.keep(mine[a], theirs[b])
    gone_a, gone_b = {a % len(mine) for a, _ in sums}, {b % len(theirs) for _, b in sums}
    out = [dim for i, dim in enumerate(mine) if i not in gone_a] + [dim for i, dim in enumerate(theirs) if i not in gone_b]
    flops = product(2, *out, *[mine[a] for a in gone_a])
    return describe_by(call, labels, {"self": mine, "other": theirs}, [out], linear_one=("self", "other"), flops=flops)


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(call: Call) -> OpDims | None:
    """Rows sorted by group times one matrix per group: [s, k], [g, k, n] -> [s, n]. The offsets count all rows, so rows are whole."""
    if len(call.places) != 3 or [len(place.spec.shape) for place in call.places] != [2, 3, 1]:
        return None
    return apply(call, "s! k, g! k n, g! -> s! n", linear_one=call.tensor_names[:2], flops="2 s k n")


@decomposer("linear")
def linear_then_bias(call: Call) -> Callable[..., Any] | None:
    if call["bias"] is None:
        return None
    return lambda input, weight, bias: aten.add.Tensor(aten.linear.default(input, weight), bias)


def _product_then_add(matrix_product: Any) -> Callable[..., Any]:
    def run(self: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        value = matrix_product(first, second)
        value = value if alpha == 1 else aten.mul.Tensor(value, alpha)
        return aten.add.Tensor(value, self if beta == 1 else aten.mul.Tensor(self, beta))

    return run


@decomposer("addmm.default", "baddbmm.default", "addmv")
def product_then_add(call: Call) -> Callable[..., Any] | None:
    ops = {"aten::addmm": aten.mm.default, "aten::baddbmm": aten.bmm.default, "aten::addmv": aten.mv.default}
    return _product_then_add(ops[str(call.target._schema.name)])
