"""Instances of every op that has a sharding rule, with random shapes: ops on elements and shapes here, layers in rule_cases_layers.py.

A case is a function of `Draw` that returns (args, kwargs); `CASES` maps an overload's name to its cases. Sizes a, b, c, d are drawn anew
for every seed, so each case stands for many instances.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partitioner.passes.rules.registry import words

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
    for name in words(names):
        name = name if "::" in name else f"aten::{name}"
        CASES.setdefault(name if "." in name.split("::")[1] else f"{name}.default", []).extend(cases)


def of(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


# ---- pointwise ----
case(
    "absolute arcsinh arctan neg negative positive square fix contiguous detach alias lift_fresh_copy clone isreal "
    "log_sigmoid hardswish relu gelu silu mish "
    "selu celu elu relu6 leaky_relu sigmoid tanh exp sin cos isfinite isinf isneginf isposinf nan_to_num real conj "
    "resolve_conj resolve_neg detach_copy alias_copy "
    "lift lift_fresh special_expit special_erf special_erfc special_expm1 special_exp2 special_sinc _cast_Double "
    "_cast_Float _cast_Int _cast_Long _cast_Byte "
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
    "add.Tensor sub.Tensor mul.Tensor div.Tensor divide.Tensor true_divide.Tensor multiply.Tensor subtract.Tensor "
    "rsub.Tensor maximum minimum atan2 arctan2 "
    "less.Tensor less_equal.Tensor greater.Tensor greater_equal.Tensor not_equal.Tensor eq.Tensor ne.Tensor "
    "lt.Tensor isclose floor_divide ldexp.Tensor fmod.Tensor "
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
case(
    "baddbmm",
    lambda r: of(r.f(r.a, r.b, r.d), r.f(r.a, r.b, r.c), r.f(r.a, r.c, r.d)),
    lambda r: of(r.f(1, r.d), r.f(r.a, r.b, r.c), r.f(r.a, r.c, r.d)),
)
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
case(
    "unflatten.int",
    lambda r: of(r.f(r.a * r.b, r.c), 0, [r.a, r.b]),
    lambda r: of(r.f(r.c, r.a * r.b), -1, [r.a, -1]),
    lambda r: of(r.f(r.c, r.a), 1, [r.a, 1]),
)
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
case(
    "repeat_interleave.self_int",
    lambda r: of(r.f(r.a, r.b), 3, 1),
    lambda r: of(r.f(r.a, r.b), 2),
    lambda r: ((r.f(r.a, r.b), 2, 0), {"output_size": 2 * r.a}),
)
case("unfold unfold_copy", lambda r: of(r.f(r.a, 7), 1, 3, 2))
case("diagonal diagonal_copy", lambda r: of(r.f(r.a, r.b, r.c), 1, 0, 2))
case("diag_embed", lambda r: of(r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), 1, 0, 2))
case("diag trace", lambda r: of(r.f(r.a, r.a)))
case("rot90", lambda r: of(r.f(r.a, r.b)))
case("block_diag", lambda r: of([r.f(r.a, r.b), r.f(r.c, r.d)]))
case("tril triu", lambda r: of(r.f(r.a, r.b, r.c)), lambda r: of(r.f(r.b, r.c), 1))

# ---- pieces ----
case(
    "split.Tensor split_copy.Tensor unsafe_split.Tensor",
    lambda r: of(r.f(2 * r.a, r.b), r.a),
    lambda r: of(r.f(r.b, 5), 3, 1),
    lambda r: of(r.f(r.a, r.b), 9),
)
case(
    "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes split.sizes",
    lambda r: of(r.f(r.a, 2 * r.b), [r.b, r.b], 1),
    lambda r: of(r.f(r.a + 1, r.b), [r.a, 1]),
)
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
case(
    "cat concat concatenate",
    lambda r: of([r.f(r.a, r.b), r.f(r.a, r.b)], 0),
    lambda r: of([r.f(r.a, r.b), r.f(r.a, 1)], -1),
    lambda r: of([r.f(0), r.f(r.a, r.b)]),
)
case("hstack", lambda r: of([r.f(r.a, r.b), r.f(r.a, r.b)]), lambda r: of([r.f(r.a), r.f(r.b)]))
case("vstack row_stack", lambda r: of([r.f(r.a, r.b), r.f(r.c, r.b)]))
case("stack", lambda r: of([r.f(r.a, r.b), r.f(r.a, r.b), r.f(r.a, r.b)], 1), lambda r: of([r.f(r.a), r.f(r.a)], -1))
case("constant_pad_nd pad", lambda r: of(r.f(r.a, r.b, r.c), [1, 2]), lambda r: of(r.f(r.a, r.b, r.c), [0, 0, 1, -1]))
case("constant_pad_nd", lambda r: of(r.f(r.a, r.b), [1, 0], 2.0))
case(
    "pad",
    lambda r: of(r.f(r.a, r.b, 4), [1, 2], "reflect"),
    lambda r: of(r.f(r.a, r.b, 4), [1, 2], "circular"),
    lambda r: of(r.f(r.a, r.b), [1, 0], "constant", 1.0),
)
case("reflection_pad1d replication_pad1d _pad_circular", lambda r: of(r.f(r.a, r.b, 4), [1, 2]))
case("reflection_pad2d replication_pad2d", lambda r: of(r.f(r.a, r.b, 4, 5), [1, 2, 0, 1]))
case("reflection_pad3d replication_pad3d", lambda r: of(r.f(r.a, r.b, 4, 4, 5), [1, 1, 0, 1, 1, 1]))
case("flip", lambda r: of(r.f(r.a, r.b, r.c), [1]))
case("fliplr flipud", lambda r: of(r.f(r.a, r.b, r.c)))
case("roll", lambda r: of(r.f(r.a, r.b), [1], [1]), lambda r: of(r.f(r.a, r.b), [1]))
case("diff", lambda r: of(r.f(r.a, r.b)), lambda r: of(r.f(r.a, r.b), 1, 0, r.f(1, r.b)))
case("glu", lambda r: of(r.f(r.a, 2 * r.b), -1), lambda r: of(r.f(2 * r.a, r.b), 0))

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
    (
        "partitioner::random",
        "transformers::grouped_mm_fallback",
        *(
            f"aten::{name}"
            for name in words("""
    rand.default randn.default randint.default randint.low rand_like.default randn_like.default randint_like.default
    randint_like.low_dtype empty.memory_format empty_like new_empty empty_strided new_empty_strided empty_permuted randperm.default
    bernoulli _grouped_mm cudnn_batch_norm _neg_view pin_memory native_batch_norm _native_batch_norm_legit
""")
        ),
    )
)

# Torch refuses, dies of, or misshapes empty tensors here: no shard of no elements is tried, or only one of no rows (the first dim).
EMPTY_REFUSED = ("fft_", "quantile", "nanquantile", "_weight_norm", "bilinear", "native_dropout", "pixel_unshuffle")
ONLY_ROWS_EMPTY = tuple(
    words("""
    reflection_pad replication_pad pad _pad instance_norm batch_norm _native_batch_norm native_batch_norm _batch_norm conv max_pool avg_pool
    adaptive_ _adaptive_ max_unpool upsample_ _upsample_ im2col col2im
""")
)
