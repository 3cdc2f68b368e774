"""Instances of every op that has a sharding rule, with random shapes.

A case is a function of `Draw` that returns (args, kwargs); `CASES` maps an overload's name to its cases. Sizes a, b, c, d are drawn anew
for every seed, so each case stands for many instances.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Case = Callable[["Draw"], Arguments]


class Draw:
    """Random sizes and tensors, reproducible by seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.a, self.b, self.c, self.d = (self.random.randint(2, 6) for _ in range(4))

    def f(self, *shape: int) -> Tensor:
        """Normal float64."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def u(self, *shape: int) -> Tensor:
        """Uniform in (0.05, 0.95)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.9 + 0.05

    def i(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def m(self, *shape: int) -> Tensor:
        """A mask."""
        return torch.rand(shape, generator=self.generator) < 0.6

    def z(self, *shape: int) -> Tensor:
        """Complex."""
        return torch.complex(self.f(*shape), self.f(*shape))


CASES: dict[str, list[Case]] = {}


def case(names: str, *cases: Case) -> None:
    for name in names.split():
        name = name if "::" in name else f"aten::{name}"
        CASES.setdefault(name if "." in name.split("::")[1] else f"{name}.default", []).extend(cases)


def of(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


# ---- pointwise ----
case(
    "absolute arcsinh arctan neg negative positive square fix contiguous detach alias lift_fresh_copy clone isreal log_sigmoid hardswish relu gelu silu mish "
    "selu celu elu relu6 leaky_relu sigmoid tanh exp sin cos isfinite isinf isneginf isposinf nan_to_num real conj resolve_conj resolve_neg detach_copy alias_copy "
    "lift lift_fresh special_expit special_erf special_erfc special_expm1 special_exp2 special_sinc _cast_Double _cast_Float _cast_Int _cast_Long _cast_Byte "
    "_cast_Half softplus abs sign floor round rad2deg",
    lambda r: of(r.f(r.a, 1, r.b)),
    lambda r: of(r.f(r.a, r.b, r.c)),
)
case(
    "arccos arcsin arctanh logit special_logit sqrt rsqrt log special_gammaln special_log1p special_digamma special_psi lgamma erfinv reciprocal",
    lambda r: of(r.u(r.a, r.b)),
)
case("arccosh", lambda r: of(r.u(r.a, r.b) + 1))
case("imag resolve_conj angle _conj", lambda r: of(r.z(r.a, r.b)))
case("complex polar", lambda r: of(r.f(r.a, r.b), r.f(r.b)))
case("dropout alpha_dropout feature_dropout feature_alpha_dropout", lambda r: of(r.f(r.a, r.b, r.c), 0.5, False))
case("native_dropout", lambda r: of(r.f(r.a, r.b), 0.5, False))
case("prelu", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b)), lambda r: of(r.f(r.a, r.b), r.f(1)), lambda r: of(r.f(r.a), r.f(1)))
case("_prelu_kernel", lambda r: of(r.f(r.a, r.b, r.c), r.f(1, r.b, 1)))
_PAIRS: tuple[Case, ...] = (
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.a, r.b, r.c)),
    lambda r: of(r.f(r.a, 1, r.c), r.f(r.b, 1)),
    lambda r: of(r.f(r.c), r.f(r.a, r.b, 1)),
    lambda r: of(r.f(), r.f(r.a, r.b)),
)
case(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor divide.Tensor true_divide.Tensor multiply.Tensor subtract.Tensor rsub.Tensor maximum minimum atan2 arctan2 "
    "less.Tensor less_equal.Tensor greater.Tensor greater_equal.Tensor not_equal.Tensor eq.Tensor ne.Tensor lt.Tensor isclose floor_divide ldexp.Tensor fmod.Tensor "
    "remainder.Tensor logaddexp hypot copysign.Tensor min.other max.other complex polar",
    *_PAIRS,
)
case("special_xlogy xlogy.Tensor pow.Tensor_Tensor float_power.Tensor_Tensor", lambda r: of(r.u(r.a, 1, r.c), r.u(r.b, 1)))
case("add.Tensor sub.Tensor rsub.Tensor", lambda r: ((r.f(r.a, r.b), r.f(r.b)), {"alpha": 2}))
case("add.Tensor sub.Tensor", lambda r: of(r.f(r.a, r.b), 3.0))
case("mul.Tensor div.Tensor less.Scalar rsub.Scalar add.Scalar mul.Scalar pow.Tensor_Scalar fmod.Scalar", lambda r: of(r.f(r.a, r.b).abs(), 2.0))
case("div.Tensor_mode", lambda r: ((r.f(r.a, r.b), r.f(r.b)), {"rounding_mode": "floor"}))
case("__and__.Tensor __or__.Tensor bitwise_and.Tensor logical_or", lambda r: of(r.m(r.a, r.b), r.m(r.b)))
case("__and__.Scalar __or__.Scalar", lambda r: of(r.i(9, r.a, r.b), 3))
case("clip", lambda r: of(r.f(r.a, r.b), -0.5, 0.5))
case("clamp.Tensor clip.Tensor", lambda r: of(r.f(r.a, r.b), r.f(r.b), r.f(r.a, 1)))
case("clamp", lambda r: of(r.f(r.a, r.b), min=0.1))
case("lerp.Tensor addcmul addcdiv", lambda r: of(r.f(r.a, r.b), r.f(r.b), r.u(r.a, 1)))
case("lerp.Scalar", lambda r: of(r.f(r.a, r.b), r.f(r.b), 0.3))
case("where.self", lambda r: of(r.m(r.a, 1), r.f(r.a, r.b), r.f(r.b)), lambda r: of(r.m(r.b), r.f(r.a, 1), r.f()))
case("where.ScalarOther", lambda r: of(r.m(r.a, r.b), r.f(r.b), 0.0), lambda r: of(r.m(r.a, r.b), r.f(r.b), 1.0))
case("where.ScalarSelf", lambda r: of(r.m(r.a, r.b), 0.0, r.f(r.b)))
case("where.Scalar", lambda r: of(r.m(r.a, r.b), 0.0, 1.0))
case("masked_fill.Scalar", lambda r: of(r.f(r.a, r.b), r.m(r.b), 0.0), lambda r: of(r.f(r.a, r.b), r.m(r.a, 1), -1e9))
case("masked_fill.Tensor", lambda r: of(r.f(r.a, r.b), r.m(r.b), r.f()))
case("to.dtype", lambda r: of(r.f(r.a, r.b), torch.float32), lambda r: of(r.f(r.a, r.b), torch.int64), lambda r: of(r.m(r.a), torch.float64))
case("_to_copy to.dtype_layout", lambda r: of(r.f(r.a, r.b), dtype=torch.float32))
case("to.device", lambda r: of(r.f(r.a, r.b), torch.device("cpu"), torch.float32))
case("to.other type_as", lambda r: of(r.f(r.a, r.b), r.i(4, r.c)))
case("copy", lambda r: of(r.f(r.a, r.b), r.f(r.b)), lambda r: of(r.f(r.a, r.b), r.f(r.a, r.b)))
case("fill.Tensor", lambda r: of(r.f(r.a, r.b), r.f()))
case("fill.Scalar", lambda r: of(r.f(r.a, r.b), 2.0))
case("view_as_real", lambda r: of(r.z(r.a, r.b)))
case("view_as_complex", lambda r: of(r.f(r.a, r.b, 2)))

# ---- contraction ----
case("mm", lambda r: of(r.f(r.a, r.b), r.f(r.b, r.c)))
case("bmm", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.a, r.c, r.d)))
case("mv", lambda r: of(r.f(r.a, r.b), r.f(r.b)))
case("outer ger", lambda r: of(r.f(r.a), r.f(r.b)))
case("dot vdot", lambda r: of(r.f(r.a), r.f(r.a)))
case("inner", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.d, r.c)), lambda r: of(r.f(r.c), r.f(r.a, r.c)))
case("kron", lambda r: of(r.f(r.a, r.b), r.f(r.c, r.d)))
case(
    "linear",
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.d, r.c), r.f(r.d)),
    lambda r: of(r.f(r.a, r.b), r.f(r.c, r.b)),
    lambda r: of(r.f(r.b), weight=r.f(r.c, r.b), bias=r.f(r.c)),
    lambda r: of(r.f(r.a, r.b), bias=r.f(r.c), weight=r.f(r.c, r.b)),
    lambda r: of(r.f(r.a, r.b, r.c), r.f(1, r.c)),
)
case("addmm", lambda r: of(r.f(r.c), r.f(r.a, r.b), r.f(r.b, r.c)), lambda r: ((r.f(r.a, 1), r.f(r.a, r.b), r.f(r.b, r.c)), {"beta": 2, "alpha": 3}))
case("baddbmm", lambda r: of(r.f(r.a, r.b, r.d), r.f(r.a, r.b, r.c), r.f(r.a, r.c, r.d)), lambda r: of(r.f(1, r.d), r.f(r.a, r.b, r.c), r.f(r.a, r.c, r.d)))
case("addbmm", lambda r: of(r.f(r.b, r.d), r.f(r.a, r.b, r.c), r.f(r.a, r.c, r.d)))
case("addmv", lambda r: of(r.f(r.a), r.f(r.a, r.b), r.f(r.b)))
case("addr", lambda r: of(r.f(r.a, r.b), r.f(r.a), r.f(r.b)))
case(
    "matmul",
    lambda r: of(r.f(r.a), r.f(r.a)),
    lambda r: of(r.f(r.a, r.b), r.f(r.b)),
    lambda r: of(r.f(r.b), r.f(r.a, r.b, r.c)),
    lambda r: of(r.f(r.a, r.b), r.f(r.b, r.c)),
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.c, r.d)),
    lambda r: of(r.f(r.a, 1, r.b, r.c), r.f(r.d, r.c, 2)),
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.c)),
    lambda r: of(r.f(r.a, r.b), r.f(r.c, r.b, r.d)),
)
case(
    "einsum",
    lambda r: of("bqhd,bkhd->bhqk", [r.f(r.a, r.b, 2, r.c), r.f(r.a, r.d, 2, r.c)]),
    lambda r: of("ij,jk->ik", [r.f(r.a, r.b), r.f(r.b, r.c)]),
    lambda r: of("...i,oi->...o", [r.f(r.a, r.b, r.c), r.f(r.d, r.c)]),
    lambda r: of("bi,bj", [r.f(r.a, r.b), r.f(r.a, r.c)]),
    lambda r: of("bld,dn,bn->bl", [r.f(r.a, r.b, r.c), r.f(r.c, r.d), r.f(r.a, r.d)]),
    lambda r: of("ii->i", [r.f(r.a, r.a)]),
    lambda r: of("b i -> i", [r.f(r.a, r.b)]),
    lambda r: of("bi,bi->b", [r.f(r.a, r.b), r.f(1, r.b)]),
)
case(
    "bilinear",
    lambda r: of(r.f(r.a, r.b), r.f(r.a, r.c), r.f(r.d, r.b, r.c), r.f(r.d)),
    lambda r: of(r.f(r.a, 2, r.b), r.f(r.a, 2, r.c), r.f(r.d, r.b, r.c)),
)
case("tensordot", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.c, r.b, r.d), [1, 2], [1, 0]), lambda r: of(r.f(r.a, r.b), r.f(r.b, r.c), [-1], [0]))

# ---- views ----
_VIEWS: tuple[Case, ...] = (
    lambda r: of(r.f(r.a, r.b, r.c), [r.a * r.b, r.c]),
    lambda r: of(r.f(r.a * r.b, r.c), [r.a, r.b, r.c]),
    lambda r: of(r.f(r.a, r.b, 6), [r.a, r.b, -1, 2]),
    lambda r: of(r.f(6, 4), [4, 6]),
    lambda r: of(r.f(3, 4, r.a), [4, 3, r.a]),
    lambda r: of(r.f(r.a, 1, r.b), [r.a, r.b, 1]),
    lambda r: of(r.f(r.a, r.b), [-1]),
    lambda r: of(r.f(8, 3, 5), [2, 12, 5]),
    lambda r: of(r.f(1), []),
)
case("view _unsafe_view reshape _reshape_copy view_copy", *_VIEWS)
case("flatten.using_ints", lambda r: of(r.f(r.a, r.b, r.c), 0, 1), lambda r: of(r.f(r.a, r.b, r.c), 1), lambda r: of(r.f(r.a, r.b, r.c)))
case("ravel", lambda r: of(r.f(r.a, r.b)))
case("unflatten.int", lambda r: of(r.f(r.a * r.b, r.c), 0, [r.a, r.b]), lambda r: of(r.f(r.c, r.a * r.b), -1, [r.a, -1]), lambda r: of(r.f(r.c, r.a), 1, [r.a, 1]))
case("view_as reshape_as", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.a * r.b, r.c)))
case("view.dtype", lambda r: of(r.f(r.a, r.b), torch.int64), lambda r: of(r.f(r.a, r.b), torch.int32))
case("permute permute_copy", lambda r: of(r.f(r.a, r.b, r.c), [2, 0, -2]))
case("transpose.int transpose_copy.int swapaxes swapdims", lambda r: of(r.f(r.a, r.b, r.c), 0, -1))
case("t t_copy numpy_T mT adjoint matrix_H mH", lambda r: of(r.f(r.a, r.b)))
case("t t_copy numpy_T", lambda r: of(r.f(r.a)))
case("mT adjoint mH", lambda r: of(r.f(r.a, r.b, r.c)))
case("movedim.int moveaxis.int", lambda r: of(r.f(r.a, r.b, r.c), 0, 2))
case("movedim.intlist moveaxis.intlist", lambda r: of(r.f(r.a, r.b, r.c, r.d), [0, -1], [2, 0]))
case("unsqueeze unsqueeze_copy", lambda r: of(r.f(r.a, r.b), 1), lambda r: of(r.f(r.a, r.b), -1))
case("squeeze squeeze_copy", lambda r: of(r.f(r.a, 1, r.b)))
case("squeeze.dim squeeze_copy.dim", lambda r: of(r.f(r.a, 1, r.b), 1), lambda r: of(r.f(r.a, 1, r.b), 0))
case("squeeze.dims squeeze_copy.dims", lambda r: of(r.f(r.a, 1, r.b), [1, -1]))
case("expand expand_copy broadcast_to", lambda r: of(r.f(1, r.b), [r.a, r.b]), lambda r: of(r.f(r.b), [r.a, r.c, r.b]))
case("expand", lambda r: of(r.f(r.a, 1, r.b), [-1, r.c, -1]), lambda r: of(r.f(), [r.a]))
case("expand_as", lambda r: of(r.f(r.a, 1), r.f(r.b, r.a, r.c)))
case("broadcast_tensors", lambda r: of([r.f(r.a, 1), r.f(r.b), r.f()]))
case("meshgrid", lambda r: of([r.f(r.a), r.f(r.b)]))
case("meshgrid.indexing", lambda r: of([r.f(r.a), r.f(r.b), r.f(r.c)], indexing="xy"), lambda r: of([r.f(r.a), r.f(r.b)], indexing="ij"))
case("repeat tile", lambda r: of(r.f(1, r.b), [r.a, 1, 1]), lambda r: of(r.f(r.a, r.b), [3, 2]), lambda r: of(r.f(r.b), [r.a, r.c, 1]))
case("tile", lambda r: of(r.f(r.a, 1, r.b), [r.c, 1]))
case("repeat_interleave.self_int", lambda r: of(r.f(r.a, r.b), 3, 1), lambda r: of(r.f(r.a, r.b), 2), lambda r: ((r.f(r.a, r.b), 2, 0), {"output_size": 2 * r.a}))
case("unfold unfold_copy", lambda r: of(r.f(r.a, 7), 1, 3, 2))
case("diagonal diagonal_copy", lambda r: of(r.f(r.a, r.b, r.c), 1, 0, 2))
case("diag_embed", lambda r: of(r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), 1, 0, 2))
case("diag trace", lambda r: of(r.f(r.a, r.a)))
case("rot90", lambda r: of(r.f(r.a, r.b)))
case("block_diag", lambda r: of([r.f(r.a, r.b), r.f(r.c, r.d)]))
case("tril triu", lambda r: of(r.f(r.a, r.b, r.c)), lambda r: of(r.f(r.b, r.c), 1))

# ---- pieces ----
case("split.Tensor split_copy.Tensor unsafe_split.Tensor", lambda r: of(r.f(2 * r.a, r.b), r.a), lambda r: of(r.f(r.b, 5), 3, 1), lambda r: of(r.f(r.a, r.b), 9))
case("split_with_sizes split_with_sizes_copy unsafe_split_with_sizes split.sizes", lambda r: of(r.f(r.a, 2 * r.b), [r.b, r.b], 1), lambda r: of(r.f(r.a + 1, r.b), [r.a, 1]))
case("chunk unsafe_chunk tensor_split.sections", lambda r: of(r.f(r.a, 3 * r.b), 3, -1), lambda r: of(r.f(5, r.b), 2), lambda r: of(r.f(5, r.b), 1))
case("tensor_split.indices", lambda r: of(r.f(r.a, 6), [2, 5], 1))
case("hsplit.int dsplit.int", lambda r: of(r.f(r.a, 4, 4), 2))
case("vsplit.int", lambda r: of(r.f(4, r.a), 2))
case("unbind.int unbind_copy.int", lambda r: of(r.f(r.a, r.b, r.c), 1))
case("select.int select_copy.int", lambda r: of(r.f(r.a, r.b, r.c), 1, -1))
case(
    "slice.Tensor slice_copy.Tensor",
    lambda r: of(r.f(r.a, r.b), 0, 0, 9223372036854775807),
    lambda r: of(r.f(r.a, r.b), 1, 1),
    lambda r: of(r.f(r.a, 6), 1, 0, 6),
    lambda r: of(r.f(r.a, 6), 1, 0, 6, 2),
    lambda r: of(r.f(r.a, 6), -1, -3, 9223372036854775807),
    lambda r: of(r.f(r.a, 6)),
)
case("narrow narrow_copy", lambda r: of(r.f(r.a, r.b), 0, 0, r.a), lambda r: of(r.f(r.a, r.b), 1, 1, 1))
case("select_scatter", lambda r: of(r.f(r.a, r.b), r.f(r.a), 1, 0))
case("slice_scatter", lambda r: of(r.f(r.a, 6), r.f(r.a, 2), 1, 1, 3))
case("diagonal_scatter", lambda r: of(r.f(r.a, 4, r.b, 4), r.f(r.a, r.b, 4), 0, 1, 3))
case("cat concat concatenate", lambda r: of([r.f(r.a, r.b), r.f(r.a, r.b)], 0), lambda r: of([r.f(r.a, r.b), r.f(r.a, 1)], -1), lambda r: of([r.f(0), r.f(r.a, r.b)]))
case("hstack", lambda r: of([r.f(r.a, r.b), r.f(r.a, r.b)]), lambda r: of([r.f(r.a), r.f(r.b)]))
case("vstack row_stack", lambda r: of([r.f(r.a, r.b), r.f(r.c, r.b)]))
case("stack", lambda r: of([r.f(r.a, r.b), r.f(r.a, r.b), r.f(r.a, r.b)], 1), lambda r: of([r.f(r.a), r.f(r.a)], -1))
case("constant_pad_nd pad", lambda r: of(r.f(r.a, r.b, r.c), [1, 2]), lambda r: of(r.f(r.a, r.b, r.c), [0, 0, 1, -1]))
case("constant_pad_nd", lambda r: of(r.f(r.a, r.b), [1, 0], 2.0))
case("pad", lambda r: of(r.f(r.a, r.b, 4), [1, 2], "reflect"), lambda r: of(r.f(r.a, r.b, 4), [1, 2], "circular"), lambda r: of(r.f(r.a, r.b), [1, 0], "constant", 1.0))
case("reflection_pad1d replication_pad1d _pad_circular", lambda r: of(r.f(r.a, r.b, 4), [1, 2]))
case("reflection_pad2d replication_pad2d", lambda r: of(r.f(r.a, r.b, 4, 5), [1, 2, 0, 1]))
case("reflection_pad3d replication_pad3d", lambda r: of(r.f(r.a, r.b, 4, 4, 5), [1, 1, 0, 1, 1, 1]))
case("flip", lambda r: of(r.f(r.a, r.b, r.c), [1]))
case("fliplr flipud", lambda r: of(r.f(r.a, r.b, r.c)))
case("roll", lambda r: of(r.f(r.a, r.b), [1], [1]), lambda r: of(r.f(r.a, r.b), [1]))
case("diff", lambda r: of(r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), 1, 0, r.f(1, r.b)))
case("glu", lambda r: of(r.f(r.a, 2 * r.b), -1), lambda r: of(r.f(2 * r.a, r.b), 0))

# ---- reduction ----
_REDUCED: tuple[Case, ...] = (
    lambda r: of(r.f(r.a, r.b, r.c), [1]),
    lambda r: of(r.f(r.a, r.b, r.c), [0, -1], True),
)
case("sum.dim_IntList mean.dim nansum amax amin logsumexp special_logsumexp nanmean", *_REDUCED)
case("sum.default mean.default prod median nanmedian max min std var count_nonzero any all", lambda r: of(r.f(r.a, r.b)))
case("sum.default", lambda r: of(r.m(r.a, r.b)), lambda r: of(r.i(5, r.a, r.b)))
case("sum.dim_IntList", lambda r: of(r.i(5, r.a, r.b), [0]))
case("sum.dim_IntList mean.dim", lambda r: of(r.f(r.a, r.b), None))
case("count_nonzero.dim_IntList", lambda r: of(r.i(2, r.a, r.b), [0]))
case("std.dim var.dim var_mean.dim std_mean.dim", lambda r: of(r.f(r.a, r.b, r.c), [0, 2], True, True), lambda r: of(r.f(r.a, r.b), [0], False))
case("std.correction var.correction var_mean.correction std_mean.correction", lambda r: of(r.f(r.a, r.b), [0], correction=0), lambda r: of(r.f(r.a, r.b)))
case("var_mean std_mean", lambda r: of(r.f(r.a, r.b)))
case("norm.Scalar", lambda r: of(r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), 1), lambda r: of(r.f(r.a, r.b), 3))
case("norm.ScalarOpt_dim", lambda r: of(r.f(r.a, r.b), 2, [0]))
case("norm.ScalarOpt_dtype", lambda r: of(r.f(r.a, r.b), 2, dtype=torch.float64))
case("norm.ScalarOpt_dim_dtype", lambda r: of(r.f(r.a, r.b), 2, [0], True, dtype=torch.float64))
case("linalg_vector_norm", lambda r: of(r.f(r.a, r.b), 2, [0]), lambda r: of(r.f(r.a, r.b), 1, [1], True), lambda r: of(r.f(r.a, r.b), float("inf")))
case("frobenius_norm.dim", lambda r: of(r.f(r.a, r.b, r.c), [1, 2]))
case("argmax argmin", lambda r: of(r.f(r.a, r.b), 1), lambda r: of(r.f(r.a, r.b)))
case("any.dim all.dim", lambda r: of(r.m(r.a, r.b), 0), lambda r: of(r.m(r.a, r.b), 1, True))
case("any.dims all.dims", lambda r: of(r.m(r.a, r.b, r.c), [0, 1]))
case("prod.dim_int", lambda r: of(r.f(r.a, r.b), 0))
case("max.dim min.dim median.dim nanmedian.dim mode", lambda r: of(r.f(r.a, r.b), 1), lambda r: of(r.f(r.a, r.b), 0, True))
case("kthvalue", lambda r: of(r.f(r.a, r.b), 1, 0))
case("aminmax", lambda r: of(r.f(r.a, r.b), dim=0), lambda r: of(r.f(r.a, r.b)))
case("_aminmax", lambda r: of(r.f(r.a, r.b)))
case("_aminmax.dim", lambda r: of(r.f(r.a, r.b), 1))
case("topk", lambda r: of(r.f(r.a, 6), 2), lambda r: of(r.f(6, r.b), 6, 0))
case("sort argsort msort", lambda r: of(r.f(r.a, r.b)))
case("sort.stable argsort.stable", lambda r: of(r.f(r.a, r.b), stable=True, dim=0))
case("cumsum cumprod logcumsumexp cummax cummin", lambda r: of(r.f(r.a, r.b), 0), lambda r: of(r.f(r.a, r.b), -1))
case("quantile nanquantile", lambda r: of(r.f(r.a, r.b), torch.tensor([0.2, 0.5], dtype=torch.float64), 1))
case("quantile.scalar nanquantile.scalar", lambda r: of(r.f(r.a, r.b), 0.5, 0, True))
case("searchsorted.Tensor", lambda r: of(torch.sort(r.f(r.a)).values, r.f(r.b, r.c)), lambda r: of(torch.sort(r.f(r.a, r.b)).values, r.f(r.a, r.c)))
case("bucketize.Tensor", lambda r: of(r.f(r.a, r.b), torch.sort(r.f(r.c)).values))
case("histc", lambda r: of(r.f(r.a, r.b), 4, -1, 1), lambda r: of(r.f(r.a, r.b), 4))
case("isin.Tensor_Tensor", lambda r: of(r.i(5, r.a, r.b), r.i(5, r.c)))
case("isin.Tensor_Scalar", lambda r: of(r.i(5, r.a, r.b), 2))
case("cosine_similarity", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b, r.c), 1), lambda r: of(r.f(r.a, 1, r.c), r.f(1, r.b, r.c), -1))
case("pairwise_distance", lambda r: of(r.f(r.a, r.b), r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), r.f(r.b), 2, 1e-6, True))
case("dist", lambda r: of(r.f(r.a, r.b), r.f(r.b)))
case("cross", lambda r: of(r.f(r.a, 3), r.f(r.a, 3), 1))
case("linalg_cross", lambda r: of(r.f(r.a, 3), r.f(1, 3)))
case("cdist _euclidean_dist", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.a, r.d, r.c)), lambda r: of(r.f(r.b, r.c), r.f(r.d, r.c)))
case("_cdist_forward", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.a, r.d, r.c), 1.0, None))
case("pdist", lambda r: of(r.f(r.a, r.b)))


def _positive(r: Draw) -> Tensor:
    x = r.f(r.a, 3, 3)
    return x @ x.mT + torch.eye(3, dtype=torch.float64)


case(
    "linalg_inv linalg_inv_ex inverse linalg_cholesky linalg_cholesky_ex cholesky linalg_det det logdet slogdet linalg_slogdet linalg_qr linalg_svdvals linalg_eigh "
    "linalg_eigvalsh linalg_eigvals linalg_eig linalg_matrix_exp matrix_exp pinverse linalg_lu linalg_lu_factor linalg_svd svd qr",
    lambda r: of(_positive(r)),
)
case("linalg_matrix_rank linalg_pinv", lambda r: of(_positive(r), 1e-9))
case("linalg_matrix_norm", lambda r: of(_positive(r), 2))
case("linalg_matrix_power matrix_power", lambda r: of(_positive(r), 2))
case("linalg_solve linalg_solve_ex cholesky_solve", lambda r: of(_positive(r), r.f(r.a, 3, 3)))
case("linalg_solve_triangular", lambda r: of(_positive(r).tril(), r.f(r.a, 3, 2), upper=False))
case("cholesky_inverse", lambda r: of(_positive(r).tril()))
case("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", lambda r: of(r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), None, 0))
case("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn", lambda r: of(r.f(r.a, r.b, r.c), None, [1, 2]))
case("fft_fftn", lambda r: of(r.f(r.a, r.b, r.c), [4, 4]))
case("fft_fftshift fft_ifftshift", lambda r: of(r.f(r.a, r.b), [1]))

# ---- norms ----
case("softmax.int log_softmax.int special_softmax special_log_softmax", lambda r: of(r.f(r.a, r.b, r.c), 1), lambda r: of(r.f(r.a, r.b), -1))
case("_softmax _log_softmax", lambda r: of(r.f(r.a, r.b), -1, False))
case("_safe_softmax", lambda r: of(r.f(r.a, r.b), -1))
case("layer_norm", lambda r: of(r.f(r.a, r.b, r.c), [r.c], r.f(r.c), r.f(r.c)), lambda r: of(r.f(r.a, r.b, r.c), [r.b, r.c]))
case("native_layer_norm", lambda r: of(r.f(r.a, r.b, r.c), [r.c], r.f(r.c), None, 1e-5))
case("rms_norm", lambda r: of(r.f(r.a, r.b, r.c), [r.c], r.f(r.c), 1e-6), lambda r: of(r.f(r.a, r.b), [r.b], None, 1e-6))
case("_fused_rms_norm", lambda r: of(r.f(r.a, r.b, r.c), [r.c], r.f(r.c), 1e-6))
case("group_norm", lambda r: of(r.f(r.a, 4, r.b), 2, r.f(4), r.f(4)), lambda r: of(r.f(r.a, 6, r.b, r.c), 3))
case("native_group_norm", lambda r: of(r.f(r.a, 4, r.b), r.f(4), r.f(4), r.a, 4, r.b, 2, 1e-5))
case("instance_norm", lambda r: of(r.f(r.a, r.b, 4), r.f(r.b), r.f(r.b), None, None, True, 0.1, 1e-5, False))
case("instance_norm", lambda r: of(r.f(r.a, r.b, 4), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), False, 0.1, 1e-5, False))
case(
    "batch_norm",
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), False, 0.1, 1e-5, False),
    lambda r: of(r.f(r.a, r.b, r.c, 2), r.f(r.b), r.f(r.b), None, None, True, 0.1, 1e-5, False),
    lambda r: of(r.f(r.a + 1, r.b), None, None, None, None, True, 0.1, 1e-5, False),
)
case("native_batch_norm", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), None, None, True, 0.1, 1e-5))
case(
    "_native_batch_norm_legit_functional",
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), True, 0.1, 1e-5),
    lambda r: of(r.f(r.a + 1, r.b), None, None, r.f(r.b), r.u(r.b), True, 0.3, 1e-5),
    lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), False, 0.1, 1e-5),
)
case("_native_batch_norm_legit.no_stats", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), True, 0.1, 1e-5))
case("_native_batch_norm_legit_no_training", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), 0.1, 1e-5))
case("_batch_norm_no_update", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), 0.1, 1e-5))
case("_batch_norm_with_update_functional", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.b), r.f(r.b), r.f(r.b), r.u(r.b), 0.1, 1e-5))
case("_weight_norm", lambda r: of(r.f(r.a, r.b, r.c), r.f(r.a, 1, 1), 0))
case("_weight_norm_interface", lambda r: of(r.f(r.a, r.b), r.f(r.a, 1), 0))
case("renorm", lambda r: of(r.f(r.a, r.b, r.c), 2, 0, 1.0))

# ---- attention ----
case(
    "scaled_dot_product_attention",
    lambda r: of(r.f(r.a, r.b, 5, 4), r.f(r.a, r.b, 3, 4), r.f(r.a, r.b, 3, r.c)),
    lambda r: ((r.f(r.a, r.b, 4, 4), r.f(r.a, r.b, 4, 4), r.f(r.a, r.b, 4, 4)), {"is_causal": True}),
    lambda r: of(r.f(r.a, r.b, 4, 4), r.f(r.a, r.b, 3, 4), r.f(r.a, r.b, 3, 4), r.f(r.a, 1, 4, 3)),
    lambda r: of(r.f(r.a, r.b, 4, 4), r.f(r.a, r.b, 3, 4), r.f(r.a, r.b, 3, 4), r.f(4, 3)),
    lambda r: of(r.f(r.a, r.b, 4, 4), r.f(r.a, r.b, 3, 4), r.f(r.a, r.b, 3, 4), r.f(r.b, 4, 3)),
    lambda r: of(r.f(r.a, 4, 4), r.f(r.a, 3, 4), r.f(r.a, 3, 4)),
    lambda r: of(r.f(4, 4), r.f(3, 4), r.f(3, 4)),
    lambda r: ((r.f(r.a, 6, 4, 4), r.f(r.a, 2, 3, 4), r.f(r.a, 2, 3, 4)), {"enable_gqa": True}),
    lambda r: ((r.f(r.a, 6, 4, 4), r.f(r.a, 2, 3, 4), r.f(r.a, 2, 3, 4), r.f(r.a, 6, 4, 3)), {"enable_gqa": True}),
    lambda r: ((r.f(r.a, 6, 4, 4), r.f(r.a, 1, 3, 4), r.f(r.a, 1, 3, 4)), {"enable_gqa": True}),
)

# ---- losses ----
for _reduction in (0, 1, 2):
    _k = {"reduction": _reduction}
    case(
        "mse_loss l1_loss smooth_l1_loss huber_loss",
        lambda r, k=_k: ((r.f(r.a, r.b), r.f(r.a, r.b)), k),
        lambda r, k=_k: ((r.f(r.a, 1), r.f(r.b)), k),
    )
    case("soft_margin_loss hinge_embedding_loss", lambda r, k=_k: ((r.f(r.a, r.b), r.i(2, r.a, r.b) * 2.0 - 1), k))
    case("margin_ranking_loss", lambda r, k=_k: ((r.f(r.a), r.f(r.a), r.i(2, r.a) * 2.0 - 1), k))
    case("poisson_nll_loss", lambda r, k=_k: of(r.f(r.a, r.b), r.u(r.a, r.b), True, False, 1e-8, k["reduction"]))
    case("binary_cross_entropy", lambda r, k=_k: ((r.u(r.a, r.b), r.u(r.a, r.b)), k), lambda r, k=_k: ((r.u(r.a, r.b), r.u(r.a, r.b), r.u(r.b)), k))
    case(
        "binary_cross_entropy_with_logits",
        lambda r, k=_k: ((r.f(r.a, r.b), r.u(r.a, r.b)), k),
        lambda r, k=_k: ((r.f(r.a, r.b), r.u(r.a, r.b), None, r.u(r.b)), k),
        lambda r, k=_k: ((r.f(r.a, r.b), r.u(r.a, r.b), r.u(r.b), r.u(r.b)), k),
    )
    case("kl_div", lambda r, k=_k: ((r.f(r.a, r.b), r.u(r.a, r.b)), k), lambda r, k=_k: ((r.f(r.a, r.b), r.f(r.a, r.b)), {**k, "log_target": True}))
    case(
        "cross_entropy_loss",
        lambda r, k=_k: of(r.f(r.a, 5), r.i(5, r.a), None, k["reduction"]),
        lambda r, k=_k: of(r.f(r.a, 5), r.i(5, r.a).masked_fill(r.m(r.a), -100), r.u(5), k["reduction"]),
        lambda r, k=_k: ((r.f(r.a, 5, r.b), r.i(5, r.a, r.b)), {**k, "ignore_index": 2}),
        lambda r, k=_k: ((r.f(r.a, 5), r.i(5, r.a), r.u(5)), {**k, "label_smoothing": 0.2, "ignore_index": 1}),
        lambda r, k=_k: ((r.f(r.a, 5, r.b), r.f(r.a, 5, r.b).softmax(1)), k),
        lambda r, k=_k: ((r.f(r.a, 5), r.f(r.a, 5).softmax(1), r.u(5)), {**k, "label_smoothing": 0.1}),
        lambda r, k=_k: ((r.f(5), r.i(5)), k),
    )
    case("nll_loss nll_loss_nd", lambda r, k=_k: ((r.f(r.a, 5), r.i(5, r.a)), k), lambda r, k=_k: ((r.f(r.a, 5), r.i(5, r.a), r.u(5)), {**k, "ignore_index": 3}))
    case("nll_loss2d nll_loss_nd", lambda r, k=_k: ((r.f(r.a, 5, r.b, r.c), r.i(5, r.a, r.b, r.c), r.u(5)), {**k, "ignore_index": 3}))
    case("multi_margin_loss", lambda r, k=_k: ((r.f(r.a, 5), r.i(5, r.a)), k), lambda r, k=_k: ((r.f(r.a, 5), r.i(5, r.a), 1, 1.0, r.u(5)), k))
    case("multilabel_margin_loss", lambda r, k=_k: ((r.f(r.a, 5), r.i(5, r.a, 5)), k))
    case("cosine_embedding_loss", lambda r, k=_k: ((r.f(r.a, r.b), r.f(r.a, r.b), r.i(2, r.a) * 2 - 1), k))
    case("triplet_margin_loss", lambda r, k=_k: ((r.f(r.a, r.b), r.f(r.a, r.b), r.f(r.a, r.b)), k))

# ---- index ----
case("embedding", lambda r: of(r.f(7, r.c), r.i(7, r.a, r.b)), lambda r: of(r.f(7, r.c), r.i(7, r.a), 3, True))
case("embedding_bag _embedding_bag", lambda r: of(r.f(7, r.c), r.i(7, 6), torch.tensor([0, 2, 3]), False, 1))
case("gather", lambda r: of(r.f(r.a, r.b, r.c), 1, r.i(r.b, r.a, r.d, r.c)), lambda r: of(r.f(r.a + 1, r.b), 1, r.i(r.b, r.a, r.d)))
case("take_along_dim", lambda r: of(r.f(r.a, r.b), r.i(r.b, r.a, r.d), 1), lambda r: of(r.f(1, r.b), r.i(r.b, r.a, r.d), 1), lambda r: of(r.f(r.a, r.b), r.i(r.a, r.c)))
case("scatter.src scatter_add", lambda r: of(r.f(r.a, 6), 1, torch.arange(4).expand(r.a, 4), r.f(r.a, 4)))
case("scatter.value", lambda r: of(r.f(r.a, 6), 1, r.i(6, r.a, 4), 1.5), lambda r: of(r.f(r.a + 1, 6), 1, r.i(6, r.a, 4), 1.5))
case("scatter.reduce", lambda r: ((r.f(r.a, 6), 1, r.i(6, r.a, 4), r.f(r.a, 4)), {"reduce": "add"}))
case("scatter.value_reduce", lambda r: ((r.f(r.a, 6), 1, r.i(6, r.a, 4), 2.0), {"reduce": "multiply"}))
case("scatter_reduce.two", lambda r: of(r.f(r.a, 6), 1, r.i(6, r.a, 4), r.f(r.a, 4), "amax"))
case("index_select", lambda r: of(r.f(r.a, r.b, r.c), 1, r.i(r.b, r.d)))
case("index_add index_copy", lambda r: of(r.f(r.a, 6), 1, torch.randperm(6, generator=r.generator)[:4], r.f(r.a, 4)))
case("index_fill.int_Scalar", lambda r: of(r.f(r.a, 6), 1, r.i(6, 3), 2.0))
case("index_fill.int_Tensor", lambda r: of(r.f(r.a, 6), 1, r.i(6, 3), r.f()))
case("index_reduce", lambda r: of(r.f(r.a, 6), 1, r.i(6, 3), r.f(r.a, 3), "amax"))
case(
    "index.Tensor _unsafe_index.Tensor",
    lambda r: of(r.f(r.a, r.b, r.c), [None, r.i(r.b, r.d)]),
    lambda r: of(r.f(r.a, r.b, r.c), [r.i(r.a, r.d), r.i(r.b, r.d)]),
    lambda r: of(r.f(r.a, r.b, r.c), [r.i(r.a, r.d, 1), None, r.i(r.c, 3)]),
    lambda r: of(r.f(r.a, r.b, r.c, 3), [None, r.i(r.b, 2, 1), r.i(r.c, r.d)]),
    lambda r: of(r.f(r.a, r.b), [r.i(r.a, r.c, r.d)]),
    lambda r: of(r.f(r.a), [r.i(r.a)]),
)
case(
    "index_put _unsafe_index_put",
    lambda r: of(r.f(r.a, r.b), [r.m(r.a, r.b)], r.f()),
    lambda r: of(r.f(r.a, r.b), [r.m(r.a)], r.f(1)),
    lambda r: of(r.f(r.a, r.b, r.c), [None, r.i(r.b, 4)], r.f(r.a, 4, r.c), True),
    lambda r: of(r.f(r.a, r.b), [r.i(r.a, 3), r.i(r.b, 3)], r.f(3), True),
    lambda r: of(r.f(r.a, r.b), [r.i(r.a, 3)], r.f(r.b), True),
)
case("masked_scatter", lambda r: of(r.f(r.a, r.b), r.m(r.a, r.b), r.f(r.a * r.b)))
case("put", lambda r: of(r.f(r.a, r.b), r.i(r.a, 3), r.f(3), True))
case("take", lambda r: of(r.f(r.a, r.b), r.i(r.a, r.c, r.d)))
case("one_hot", lambda r: of(r.i(4, r.a, r.b), 4))

# ---- convolution, pooling, resampling ----
case("conv1d", lambda r: of(r.f(r.a, r.b, 7), r.f(r.c, r.b, 3), r.f(r.c)), lambda r: of(r.f(r.b, 7), r.f(r.c, r.b, 3)), lambda r: of(r.f(r.a, 4, 7), r.f(4, 1, 3), None, [1], [1], [1], 4))
case("conv2d", lambda r: of(r.f(r.a, r.b, 5, 6), r.f(r.c, r.b, 3, 2), r.f(r.c), [2, 1], [1, 0]), lambda r: of(r.f(r.a, 4, 5, 5), r.f(6, 2, 3, 3), r.f(6), [1, 1], [0, 0], [1, 1], 2))
case("conv2d", lambda r: of(r.f(r.a, r.b, 5, 6), r.f(r.c, r.b, 3, 2)))
case("conv3d", lambda r: of(r.f(r.a, r.b, 4, 4, 4), r.f(r.c, r.b, 2, 2, 2), r.f(r.c)))
case("conv1d.padding", lambda r: of(r.f(r.a, r.b, 7), r.f(r.c, r.b, 3), r.f(r.c), [1], "same"))
case("conv2d.padding", lambda r: of(r.f(r.a, r.b, 5, 5), r.f(r.c, r.b, 3, 3), None, [1, 1], "valid"))
case("conv3d.padding", lambda r: of(r.f(r.a, r.b, 4, 4, 4), r.f(r.c, r.b, 3, 3, 3), None, [1, 1, 1], "same"))
case("conv_transpose1d", lambda r: of(r.f(r.a, r.b, 5), r.f(r.b, r.c, 3), r.f(r.c), [2]))
case("conv_transpose2d.input", lambda r: of(r.f(r.a, r.b, 4, 4), r.f(r.b, r.c, 2, 2), None, [2, 2]), lambda r: of(r.f(r.a, 4, 4, 4), r.f(4, 3, 2, 2), r.f(6), [2, 2], [0, 0], [0, 0], 2))
case("conv_transpose3d.input", lambda r: of(r.f(r.a, r.b, 3, 3, 3), r.f(r.b, r.c, 2, 2, 2), r.f(r.c)))
case("convolution", lambda r: of(r.f(r.a, r.b, 5, 5), r.f(r.c, r.b, 3, 3), r.f(r.c), [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
case("convolution", lambda r: of(r.f(r.a, r.b, 5, 5), r.f(r.b, r.c, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1))
case("max_pool1d avg_pool1d", lambda r: of(r.f(r.a, r.b, 6), [2]))
case("max_pool1d_with_indices", lambda r: of(r.f(r.a, r.b, 6), [2]))
case("max_pool2d avg_pool2d max_pool2d_with_indices", lambda r: of(r.f(r.a, r.b, 6, 5), [2, 2]), lambda r: of(r.f(r.b, 6, 5), [3, 2], [1, 1]))
case("max_pool3d avg_pool3d max_pool3d_with_indices", lambda r: of(r.f(r.a, r.b, 4, 4, 4), [2, 2, 2]))
case("adaptive_avg_pool1d adaptive_max_pool1d", lambda r: of(r.f(r.a, r.b, 6), [2]))
case("adaptive_avg_pool2d adaptive_max_pool2d _adaptive_avg_pool2d", lambda r: of(r.f(r.a, r.b, 6, 5), [1, 1]), lambda r: of(r.f(r.b, 6, 5), [2, 3]))
case("adaptive_avg_pool3d adaptive_max_pool3d _adaptive_avg_pool3d", lambda r: of(r.f(r.a, r.b, 4, 4, 4), [2, 1, 2]))
case("max_unpool2d", lambda r: of(r.f(r.a, r.b, 2, 2), torch.tensor([[0, 3], [8, 10]]).expand(r.a, r.b, 2, 2).contiguous(), [4, 4]))
case("max_unpool3d", lambda r: of(r.f(r.a, r.b, 1, 2, 2), torch.tensor([[[0, 3], [8, 10]]]).expand(r.a, r.b, 1, 2, 2).contiguous(), [1, 4, 4], [1, 2, 2], [0, 0, 0]))
case("upsample_nearest1d _upsample_nearest_exact1d", lambda r: of(r.f(r.a, r.b, 4), [8]))
case("upsample_nearest2d _upsample_nearest_exact2d", lambda r: of(r.f(r.a, r.b, 4, 4), [8, 6]))
case("upsample_nearest2d.vec", lambda r: of(r.f(r.a, r.b, 4, 4), None, [2.0, 2.0]))
case("upsample_nearest3d _upsample_nearest_exact3d", lambda r: of(r.f(r.a, r.b, 2, 2, 2), [4, 4, 4]))
case("upsample_linear1d", lambda r: of(r.f(r.a, r.b, 4), [8], False))
case("upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa", lambda r: of(r.f(r.a, r.b, 4, 4), [8, 6], True))
case("upsample_bilinear2d.vec", lambda r: of(r.f(r.a, r.b, 4, 4), [3, 3], False, None))
case("upsample_trilinear3d", lambda r: of(r.f(r.a, r.b, 2, 2, 2), [4, 4, 4], False))
case("pixel_shuffle", lambda r: of(r.f(r.a, 8, 3, 3), 2))
case("pixel_unshuffle", lambda r: of(r.f(r.a, 2, 4, 4), 2))
case("channel_shuffle native_channel_shuffle", lambda r: of(r.f(r.a, 4, 3, 3), 2))
case("im2col", lambda r: of(r.f(r.a, r.b, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]))
case("col2im", lambda r: of(r.f(r.a, 4 * r.b, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1]))
case("grid_sampler grid_sampler_2d", lambda r: of(r.f(r.a, r.b, 4, 4), r.u(r.a, 3, r.c, 2), 0, 0, False))
case("grid_sampler_3d", lambda r: of(r.f(r.a, r.b, 3, 3, 3), r.u(r.a, 2, 3, r.c, 3), 0, 0, False))
case("affine_grid_generator", lambda r: of(r.f(r.a, 2, 3), [r.a, 3, 4, 5], False), lambda r: of(r.f(r.a, 3, 4), [r.a, 3, 4, 5, 2], True))


# ---- recurrent ----
def _weights(r: Draw, gates: int, inputs: int, hidden: int, biased: bool = True) -> list[Tensor]:
    shapes = [(gates * hidden, inputs), (gates * hidden, hidden), *([(gates * hidden,)] * 2 if biased else [])]
    return [r.f(*shape) * 0.3 for shape in shapes]


case(
    "lstm.input",
    lambda r: of(r.f(r.a, r.b, r.c), [r.f(1, r.a, r.d), r.f(1, r.a, r.d)], _weights(r, 4, r.c, r.d), True, 1, 0.0, False, False, True),
    lambda r: of(r.f(r.b, r.a, r.c), [r.f(2, r.a, r.d), r.f(2, r.a, r.d)], _weights(r, 4, r.c, r.d, False) * 2, False, 1, 0.0, False, True, False),
)
case("gru.input", lambda r: of(r.f(r.a, r.b, r.c), r.f(1, r.a, r.d), _weights(r, 3, r.c, r.d), True, 1, 0.0, False, False, True))
case("rnn_tanh.input rnn_relu.input", lambda r: of(r.f(r.b, r.a, r.c), r.f(1, r.a, r.d), _weights(r, 1, r.c, r.d), True, 1, 0.0, False, False, False))
case("lstm_cell", lambda r: of(r.f(r.a, r.b), [r.f(r.a, r.c), r.f(r.a, r.c)], *_weights(r, 4, r.b, r.c)))
case("gru_cell", lambda r: of(r.f(r.a, r.b), r.f(r.a, r.c), *_weights(r, 3, r.b, r.c)))
case("rnn_tanh_cell rnn_relu_cell", lambda r: of(r.f(r.a, r.b), r.f(r.a, r.c), *_weights(r, 1, r.b, r.c)), lambda r: of(r.f(r.a, r.b), r.f(r.a, r.c), *_weights(r, 1, r.b, r.c, False)))

# ---- factories ----
case("zeros ones", lambda r: of([r.a, r.b]))
case("full", lambda r: of([r.a, r.b], 3.0))
case("scalar_tensor", lambda r: of(2.0))
case("new_zeros new_ones", lambda r: of(r.f(r.c), [r.a, r.b]))
case("new_full", lambda r: of(r.f(r.c), [r.a, r.b], 2.0))
case("zeros_like ones_like", lambda r: of(r.f(r.a, r.b)))
case("full_like", lambda r: of(r.f(r.a, r.b), 2.0))
case("arange", lambda r: of(r.a))
case("linspace logspace", lambda r: of(0, 1, r.a))
case("range", lambda r: of(0, 4))
case("eye", lambda r: of(r.a))
case("tril_indices triu_indices", lambda r: of(r.a, r.b))
case("hann_window hamming_window blackman_window bartlett_window kaiser_window", lambda r: of(r.a + 2))
case("fft_fftfreq fft_rfftfreq", lambda r: of(r.a))

# Rules whose numbers are not a function of the arguments, or that this build cannot run: only their dims are checked, elsewhere.
NOT_NUMERIC = frozenset(
    "aten::rand.default aten::randn.default aten::randint.default aten::randint.low aten::rand_like.default aten::randn_like.default "
    "aten::randint_like.default aten::randint_like.low_dtype aten::empty.memory_format aten::empty_like aten::new_empty aten::empty_strided "
    "aten::new_empty_strided aten::empty_permuted aten::randperm.default aten::bernoulli partitioner::random aten::_grouped_mm "
    "transformers::grouped_mm_fallback aten::cudnn_batch_norm aten::_reshape_alias aten::_neg_view aten::pin_memory "
    "aten::native_batch_norm aten::_native_batch_norm_legit".split()
)

# Torch refuses, dies of, or misshapes empty tensors here: no shard of no elements is tried, or only one of no rows (the first dim).
EMPTY_REFUSED = ("fft_", "quantile", "nanquantile", "_weight_norm", "bilinear", "native_dropout", "pixel_unshuffle")
ONLY_ROWS_EMPTY = (
    "reflection_pad replication_pad pad _pad instance_norm batch_norm _native_batch_norm native_batch_norm _batch_norm conv max_pool avg_pool adaptive_ _adaptive_ "
    "max_unpool upsample_ _upsample_ im2col col2im"
).split()
