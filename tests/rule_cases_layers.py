"""Instances of the ops that layers and losses are made of (see rule_cases.py)."""

from typing import Any

import torch
from torch import Tensor

from tests.rule_cases import CASES, Case, Draw, case, of

__all__ = ["CASES"]

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
case(
    "std.correction var.correction var_mean.correction std_mean.correction",
    lambda r: of(r.f(r.a, r.b), [0], correction=0),
    lambda r: of(r.f(r.a, r.b)),
)
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
    "linalg_inv linalg_inv_ex inverse linalg_cholesky linalg_cholesky_ex cholesky linalg_det det logdet slogdet "
    "linalg_slogdet linalg_qr linalg_svdvals linalg_eigh "
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
def _losses(k: dict[str, Any]) -> None:
    """Cases of all losses with one reduction: none, mean, sum."""
    case(
        "mse_loss l1_loss smooth_l1_loss huber_loss",
        lambda r: ((r.f(r.a, r.b), r.f(r.a, r.b)), k),
        *([lambda r: of(r.f(r.a, 1), r.f(r.b), **k)] if k["reduction"] != 1 else []),
    )
    case("soft_margin_loss hinge_embedding_loss", lambda r: ((r.f(r.a, r.b), r.i(2, r.a, r.b) * 2.0 - 1), k))
    case("margin_ranking_loss", lambda r: ((r.f(r.a), r.f(r.a), r.i(2, r.a) * 2.0 - 1), k))
    case("poisson_nll_loss", lambda r: of(r.f(r.a, r.b), r.u(r.a, r.b), True, False, 1e-8, k["reduction"]))
    case("binary_cross_entropy", lambda r: ((r.u(r.a, r.b), r.u(r.a, r.b)), k), lambda r: ((r.u(r.a, r.b), r.u(r.a, r.b), r.u(r.b)), k))
    case(
        "binary_cross_entropy_with_logits",
        lambda r: ((r.f(r.a, r.b), r.u(r.a, r.b)), k),
        lambda r: ((r.f(r.a, r.b), r.u(r.a, r.b), None, r.u(r.b)), k),
        lambda r: ((r.f(r.a, r.b), r.u(r.a, r.b), r.u(r.b), r.u(r.b)), k),
    )
    case("kl_div", lambda r: ((r.f(r.a, r.b), r.u(r.a, r.b)), k), lambda r: ((r.f(r.a, r.b), r.f(r.a, r.b)), {**k, "log_target": True}))
    case(
        "cross_entropy_loss",
        lambda r: of(r.f(r.a, 5), r.i(5, r.a), None, k["reduction"]),
        lambda r: of(r.f(r.a, 5), r.i(5, r.a).masked_fill(r.m(r.a), -100), r.u(5), k["reduction"]),
        lambda r: ((r.f(r.a, 5, r.b), r.i(5, r.a, r.b)), {**k, "ignore_index": 2}),
        lambda r: ((r.f(r.a, 5), r.i(5, r.a), r.u(5)), {**k, "label_smoothing": 0.2, "ignore_index": 1}),
        lambda r: ((r.f(r.a, 5, r.b), r.f(r.a, 5, r.b).softmax(1)), k),
        lambda r: ((r.f(r.a, 5), r.f(r.a, 5).softmax(1), r.u(5)), {**k, "label_smoothing": 0.1}),
        lambda r: ((r.f(5), r.i(5)), k),
    )
    case("nll_loss nll_loss_nd", lambda r: ((r.f(r.a, 5), r.i(5, r.a)), k), lambda r: ((r.f(r.a, 5), r.i(5, r.a), r.u(5)), {**k, "ignore_index": 3}))
    case("nll_loss2d nll_loss_nd", lambda r: ((r.f(r.a, 5, r.b, r.c), r.i(5, r.a, r.b, r.c), r.u(5)), {**k, "ignore_index": 3}))
    case("multi_margin_loss", lambda r: ((r.f(r.a, 5), r.i(5, r.a)), k), lambda r: ((r.f(r.a, 5), r.i(5, r.a), 1, 1.0, r.u(5)), k))
    case("multilabel_margin_loss", lambda r: ((r.f(r.a, 5), r.i(5, r.a, 5)), k))
    case("cosine_embedding_loss", lambda r: ((r.f(r.a, r.b), r.f(r.a, r.b), r.i(2, r.a) * 2 - 1), k))
    case("triplet_margin_loss", lambda r: ((r.f(r.a, r.b), r.f(r.a, r.b), r.f(r.a, r.b)), k))


for _reduction in (0, 1, 2):
    _losses({"reduction": _reduction})

# ---- index ----
case("embedding", lambda r: of(r.f(7, r.c), r.i(7, r.a, r.b)), lambda r: of(r.f(7, r.c), r.i(7, r.a), 3, True))
case("embedding_bag _embedding_bag", lambda r: of(r.f(7, r.c), r.i(7, 6), torch.tensor([0, 2, 3]), False, 1))
case("gather", lambda r: of(r.f(r.a, r.b, r.c), 1, r.i(r.b, r.a, r.d, r.c)), lambda r: of(r.f(r.a + 1, r.b), 1, r.i(r.b, r.a, r.d)))
case(
    "take_along_dim",
    lambda r: of(r.f(r.a, r.b), r.i(r.b, r.a, r.d), 1),
    lambda r: of(r.f(1, r.b), r.i(r.b, r.a, r.d), 1),
    lambda r: of(r.f(r.a, r.b), r.i(r.a, r.c)),
)
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
case(
    "conv1d",
    lambda r: of(r.f(r.a, r.b, 7), r.f(r.c, r.b, 3), r.f(r.c)),
    lambda r: of(r.f(r.b, 7), r.f(r.c, r.b, 3)),
    lambda r: of(r.f(r.a, 4, 7), r.f(4, 1, 3), None, [1], [1], [1], 4),
)
case(
    "conv2d",
    lambda r: of(r.f(r.a, r.b, 5, 6), r.f(r.c, r.b, 3, 2), r.f(r.c), [2, 1], [1, 0]),
    lambda r: of(r.f(r.a, 4, 5, 5), r.f(6, 2, 3, 3), r.f(6), [1, 1], [0, 0], [1, 1], 2),
)
case("conv2d", lambda r: of(r.f(r.a, r.b, 5, 6), r.f(r.c, r.b, 3, 2)))
case("conv3d", lambda r: of(r.f(r.a, r.b, 4, 4, 4), r.f(r.c, r.b, 2, 2, 2), r.f(r.c)))
case("conv1d.padding", lambda r: of(r.f(r.a, r.b, 7), r.f(r.c, r.b, 3), r.f(r.c), [1], "same"))
case("conv2d.padding", lambda r: of(r.f(r.a, r.b, 5, 5), r.f(r.c, r.b, 3, 3), None, [1, 1], "valid"))
case("conv3d.padding", lambda r: of(r.f(r.a, r.b, 4, 4, 4), r.f(r.c, r.b, 3, 3, 3), None, [1, 1, 1], "same"))
case("conv_transpose1d", lambda r: of(r.f(r.a, r.b, 5), r.f(r.b, r.c, 3), r.f(r.c), [2]))
case(
    "conv_transpose2d.input",
    lambda r: of(r.f(r.a, r.b, 4, 4), r.f(r.b, r.c, 2, 2), None, [2, 2]),
    lambda r: of(r.f(r.a, 4, 4, 4), r.f(4, 3, 2, 2), r.f(6), [2, 2], [0, 0], [0, 0], 2),
)
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
case(
    "max_unpool3d",
    lambda r: of(r.f(r.a, r.b, 1, 2, 2), torch.tensor([[[0, 3], [8, 10]]]).expand(r.a, r.b, 1, 2, 2).contiguous(), [1, 4, 4], [1, 2, 2], [0, 0, 0]),
)
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
case(
    "rnn_tanh_cell rnn_relu_cell",
    lambda r: of(r.f(r.a, r.b), r.f(r.a, r.c), *_weights(r, 1, r.b, r.c)),
    lambda r: of(r.f(r.a, r.b), r.f(r.a, r.c), *_weights(r, 1, r.b, r.c, False)),
)
