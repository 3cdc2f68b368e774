"""The contract of a sharding rule: one op instance described by named dims.

A rule turns an fx node into `OpDims`. Labels name dims of this op instance only. From one OpDims follow every legal
placement, the Partial results, the local shapes and the cost. Example, `aten.linear(x[8,10,32], w[64,32], b[64])`:

    inputs  = ((("b0",), ("b1",), ("i",)), (("o",), ("i",)), (("o",),))
    outputs = ((("b0",), ("b1",), ("o",)),)
    sizes   = {"b0": 8, "b1": 10, "i": 32, "o": 64}
    flops   = 2*b0*b1*i*o
"""

from dataclasses import dataclass, field

import sympy

Dim = tuple[str, ...]
"""The labels one tensor dim is made of, major first: () for size 1, ("b","t") for a dim that merges b and t."""


@dataclass(frozen=True)
class OpDims:
    """Named dims of one op instance.

    inputs: one entry per tensor argument of the node, in the order of flattening node.args then node.kwargs, duplicates kept
        (see `tensor_arguments`); None for one of which the op reads neither values nor sizes (`x.new_zeros(4)`, `x.type_as(y)`'s y),
        so that any placement will do; outputs: one entry per result of the op (one for a single-output op), None for a result that is no tensor.
    sizes: the size of every label at the captured shapes.
    whole: labels that no shard may cut (softmax's dim, a convolution's spatial dims, a sorted dim).
    A label in inputs, absent from outputs and not in `whole` is summed: cutting it makes the outputs Partial(sum).
    A label in the outputs and absent from all inputs is made by the op (expand, a factory): cutting it costs nothing.
    linear: indices of tensor arguments in which, jointly, the op is linear and homogeneous (f(sum x) = sum f(x) with the other
        arguments fixed); a Partial in all of them passes through. Empty: Partial must be summed first.
        For add/sub both arguments jointly; for mul and div by a non-partial factor list each alternative in `linear_one`.
    linear_one: indices of tensor arguments in each of which alone the op is linear while the others are not Partial.
    flops: forward floating-point operations as torch.utils.flop_counter counts them (0 where it counts none), in label symbols.
    """

    inputs: tuple[tuple[Dim, ...] | None, ...]
    outputs: tuple[tuple[Dim, ...] | None, ...]
    sizes: dict[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[int, ...] = ()
    linear_one: tuple[int, ...] = ()
    flops: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
