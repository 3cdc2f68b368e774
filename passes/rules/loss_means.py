"""The mean of a loss is its sum over the global count, never a mean of means.

    cross_entropy(x, y, mean)  =  cross_entropy(x, y, sum) / count(y)

For class indices the count is that of the targets that are not ignored, or the sum of their class weights: it depends on the targets
alone, so over a batch it is computed once, ahead. For all other losses it is the captured number of elements. 0/0 is nan, as in torch.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.losses import ELEMENTWISE, MEAN, SUM
from partitioner.passes.rules.pointwise import broadcast_shape
from partitioner.passes.rules.registry import decomposer
from partitioner.passes.rules.sums import cast, wide

aten = torch.ops.aten


def _with_sum(call: Call) -> Callable[..., Any]:
    """The op with reduction "sum", taking the op's own arguments."""
    names = [argument.name for argument in call.target._schema.arguments]
    target, at = call.target, names.index("reduction")

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = [SUM if position == at else value for position, value in enumerate(args)]
        return target(*changed, **(kwargs if len(args) > at else {**kwargs, "reduction": SUM}))

    return run


def _over(total: Any, count: Any, dtype: torch.dtype) -> Any:
    """total / count with the count exact: 16-bit floats cannot count beyond 256 or 2048."""
    return cast(aten.div.Tensor(cast(total, dtype, wide(dtype)), count), wide(dtype), dtype)


@decomposer(*ELEMENTWISE, "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "triplet_margin_loss")
def constant_count(call: Call) -> Callable[..., Any] | None:
    if call["reduction"] != MEAN:
        return None
    name = str(call.target._schema.name).removeprefix("aten::")
    shapes = [place.spec.shape for place in call.places]
    if name in ELEMENTWISE:
        count = prod(broadcast_shape(shapes))
    elif len(shapes[0]) > 1:
        count = prod(shapes[0][:-1])
    else:
        count = 1
    summed = _with_sum(call)
    return lambda *args, **kwargs: aten.div.Scalar(summed(args, kwargs), count)


@decomposer("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def class_count(call: Call) -> Callable[..., Any] | None:
    if call["reduction"] != MEAN:
        return None
    shape, dtype = call.shape("self"), call.out.dtype
    classes = shape[0] if len(shape) == 1 else shape[1]
    summed = _with_sum(call)
    if call.shape("target") == shape and call["target"].dtype.is_floating_point:
        rows = prod(shape) // classes if classes else 0
        return lambda *args, **kwargs: aten.div.Scalar(summed(args, kwargs), rows)
    names = [argument.name for argument in call.target._schema.arguments]
    weighted, ignored = call["weight"] is not None, call["ignore_index"]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        target = given["target"]
        kept = aten.ne.Scalar(target, ignored)
        if weighted:
            # The ignored index need not be a class: look up class 0 there and weigh it 0.
            indices = aten.mul.Tensor(target, kept)
            weight = cast(given["weight"], call["weight"].dtype, wide(dtype))
            counted = aten.mul.Tensor(aten.index.Tensor(weight, [indices]), kept)
        else:
            counted = aten.to.dtype(kept, wide(dtype))
        return _over(summed(args, kwargs), aten.sum.default(counted), dtype)

    return run
