"""Backward FLOPs of an op, as torch.utils.flop_counter counts its backward ops, in the labels of the op's description."""

from collections.abc import Sequence

import sympy

from partitioner.passes.rules.attention import attention_dims, attention_flops
from partitioner.passes.rules.call import Call
from partitioner.passes.rules.conv import CONVOLUTIONS, convolution_dims, is_transposed
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.einsum import steps
from partitioner.passes.rules.labels import ZERO, product
from partitioner.passes.rules.rnn import CELLS, RECURRENT, cell_backward_flops, recurrent_backward_flops

_CONVOLUTIONS = {f"aten::{name.split('.')[0]}" for name in CONVOLUTIONS}
_ADDED = frozenset(("aten::linear", "aten::addmm", "aten::baddbmm"))


def backward_flops_of(call: Call, dims: OpDims, needs: Sequence[bool] | None = None) -> sympy.Expr:
    """FLOPs of the gradients of the tensor arguments marked in `needs`; None marks every floating-point argument.

    A product costs its forward again for each factor that wants a gradient, a bias nothing. A convolution likewise, but the gradient of its
    weight multiplies over the positions of the result (of the input when transposed). Attention computes all three gradients together. A recurrent
    layer is counted as its products, which the counter sees where no fused kernel runs it.
    """
    if needs is None:
        needs = [place.spec.dtype.is_floating_point for place in call.places]
    name = str(call.target._schema.name)
    wanting = {place.name for place, need in zip(call.places, needs, strict=True) if need}
    if name == "aten::scaled_dot_product_attention":
        found = attention_dims(call)
        if found is None or not wanting & {"query", "key", "value"}:
            return ZERO
        _, _, _, (batch, l, s, e, v) = found  # noqa: E741
        return attention_flops(batch, l, s, e, v, forward=False)
    if dims.flops == 0:
        return ZERO
    if name in _CONVOLUTIONS:
        return _convolution(call, dims, wanting)
    if name in RECURRENT:
        return recurrent_backward_flops(call, dims, needs)
    if name in CELLS:
        return cell_backward_flops(call, dims, needs)
    if name == "aten::einsum":
        # Each pair's product costs once more for its right operand, and for the joint left one if any operand in it wants a gradient.
        return sum((step * (int(needs[k + 1]) + int(any(needs[: k + 1]))) for k, step in enumerate(steps(call))), ZERO)
    factors = [place.name for place in call.places if place.name not in ("bias",) and not (name in _ADDED and place.name == "self")]
    return dims.flops * sum(factor in wanting for factor in factors)


def _convolution(call: Call, dims: OpDims, wanting: set[str]) -> sympy.Expr:
    found = convolution_dims(call)
    if found is None:
        return ZERO
    _, inputs, out = found
    weight = inputs["weight"]
    rank = len(weight) - 2
    total: sympy.Expr = ZERO
    if "input" in wanting:
        total += dims.flops
    if "weight" in wanting:
        # As the counter has it: the weight gradient is a convolution of x with the gradient (or, transposed, of the gradient with x),
        # with all pairs of channels even where groups pair fewer.
        positions = (inputs["input"] if is_transposed(call) else out)[-rank:]
        total += product(2, *out[: len(out) - rank - 1], inputs["input"][-rank - 1], out[-rank - 1], *weight[2:], *positions)
    return total
