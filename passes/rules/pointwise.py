"""Ops that treat every element alone: dims are aligned from the right, size 1 broadcasts.

    add(x[8,10,32], y[10,1])  =  d0 d1 d2, d1 1 -> d0 d1 d2

Every op that torch tags as pointwise is one, and the composites below, which torch does not tag.
"""

from collections.abc import Callable, Iterable

import torch
from torch._ops import OpOverload

from partitioner.passes.rules.call import Call, Spec
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.registry import RULES, rule, words

UNTAGGED = words("""
    __and__ __or__ _to_copy absolute alpha_dropout arccos arccosh arcsin arcsinh arctan arctan2 arctanh bernoulli contiguous
    detach detach_copy lift lift_fresh lift_fresh_copy alias alias_copy clone divide dropout native_dropout fix floor_divide greater
    greater_equal hardswish isclose isreal less less_equal log_sigmoid masked_fill multiply negative not_equal nan_to_num rsub.Tensor
    square subtract true_divide where.self where.Scalar where.ScalarOther where.ScalarSelf real imag conj resolve_conj resolve_neg complex
    polar pin_memory _cast_Byte _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long isneginf isposinf to.dtype to.dtype_layout to.device
    isfinite isinf clip special_expit special_logit special_gammaln special_erf special_erfc special_expm1 special_log1p special_exp2
    special_xlogy special_digamma special_psi special_sinc logit mish selu celu silu gelu relu6 elu leaky_relu
     fill.Scalar _conj _neg_view ldexp float_power
""")

NOT_ELEMENTWISE = frozenset(("aten::equal", "aten::rrelu", "aten::rrelu_with_noise"))

# Linear in all of these arguments at once.
JOINTLY = {
    "add": ("self", "other"),
    "sub": ("self", "other"),
    "subtract": ("self", "other"),
    "rsub": ("self", "other"),
    "where": ("self", "other"),
    "lerp": ("self", "end"),
    "complex": ("real", "imag"),
    **dict.fromkeys(
        words("neg negative positive clone contiguous alias detach lift_fresh_copy lift_fresh real imag conj resolve_conj rad2deg deg2rad"), ("self",)
    ),
}
# Linear in each of these arguments alone.
ALONE = {"mul": ("self", "other"), "multiply": ("self", "other"), "addcmul": (), "div": ("self",), "divide": ("self",), "true_divide": ("self",)}
CASTS = frozenset(("to", "_to_copy", "_cast_Float", "_cast_Half", "_cast_Double"))


def broadcast_shape(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all of these broadcast to."""
    shapes = list(shapes)
    rank = max((len(shape) for shape in shapes), default=0)
    columns = zip(*[(1,) * (rank - len(shape)) + shape for shape in shapes], strict=True)
    return tuple([next((size for size in column if size != 1), 1) for column in columns])


def broadcast(labels: Labels, shapes: Iterable[tuple[int, ...]]) -> Callable[[tuple[int, ...]], list[Dim]]:
    """Labels of the broadcast shape; the result turns each shape into its dims."""
    made = labels.of(broadcast_shape(shapes))

    def dims(shape: tuple[int, ...]) -> list[Dim]:
        return [() if size == 1 else dim for size, dim in zip(shape, made[len(made) - len(shape) :], strict=True)]

    return dims


def pointwise(call: Call) -> OpDims | None:
    labels = Labels()
    dims = broadcast(labels, [place.spec.shape for place in call.places])
    inputs = {place.name: dims(place.spec.shape) for place in call.places}
    outputs = [None if spec is None else dims(spec.shape) for spec in call.outputs]
    joint, alone = linearity(call)
    return describe_by(call, labels, inputs, outputs, joint, alone)


def linearity(call: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Argument names in which the op is linear: jointly, and each alone."""
    name = str(call.target._schema.name).removeprefix("aten::")
    if name in CASTS:
        return (("self",) if widens(call) else ()), ()
    if name == "masked_fill":
        return (("self",) if call.get("value") == 0 else ()), ()
    if name in JOINTLY:
        names = JOINTLY[name]
        # A plain number in place of one tensor makes the op affine, unless it is zero.
        return (names if all(call.is_tensor(n) or call.get(n) == 0 for n in names) else ()), ()
    if name in ALONE and call.get("rounding_mode") is None and call.out.dtype.is_floating_point:
        return (), ALONE[name]
    return (), ()


def widens(call: Call) -> bool:
    """Whether a cast keeps every value of a floating-point tensor; rounding is not linear, so a Partial is summed before it."""
    source, out = call["self"].dtype, call.out.dtype
    return bool(source.is_floating_point and out.is_floating_point and torch.promote_types(source, out) == out)


def is_pointwise(target: OpOverload) -> bool:
    return torch.Tag.pointwise in target.tags and str(target._schema.name) not in NOT_ELEMENTWISE


for _name in UNTAGGED:
    RULES.setdefault(f"aten::{_name}", pointwise)


@rule("to.other", "type_as", "copy", "fill.Tensor")
def first_in_shape_of(call: Call) -> OpDims | None:
    """`type_as` and `to` read only the dtype of the other tensor; `copy` and `fill` only the shape of the first."""
    labels = Labels()
    name = str(call.target._schema.name)
    mine = labels.of(call.shape("self"))
    other = next(n for n in call.tensor_names if n != "self")
    if name in ("aten::to", "aten::type_as"):
        return describe_by(call, labels, {"self": mine, other: None}, [mine], linear=("self",) if widens(call) else ())
    source: Spec = call[other]
    rank = len(mine) - len(source.shape)
    theirs = [() if size == 1 else dim for size, dim in zip(source.shape, mine[rank:], strict=True)]
    return describe_by(call, labels, {"self": mine, other: theirs}, [mine])


@rule("prelu", "_prelu_kernel")
def prelu(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("self"))
    weight = call.shape("weight")
    if len(weight) == len(mine):  # the kernel's form: already broadcast
        return pointwise(call)
    slope = [() if size == 1 else mine[1] for size in weight]
    return describe_by(call, labels, {"self": mine, "weight": slope}, [mine])


@rule("feature_dropout", "feature_alpha_dropout")
def feature_dropout(call: Call) -> OpDims | None:
    """Drops whole channels: one draw for all spatial positions, so these stay together."""
    labels = Labels()
    mine = labels.of(call.shape("input"), whole=range(2, 9))
    return describe_by(call, labels, {"input": mine}, [mine])


@rule("view_as_real", "view_as_complex")
def complex_pairs(call: Call) -> OpDims | None:
    """[…] complex <-> […, 2] real."""
    labels = Labels()
    real = str(call.target._schema.name).endswith("real")
    mine = labels.of(call.shape("self")) if real else [*labels.of(call.shape("self")[:-1]), labels.new(2, whole=True)]
    out = [*mine, labels.new(2, whole=True)] if real else mine[:-1]
    return describe_by(call, labels, {"self": mine}, [out], linear=("self",))
