"""Ops that reduce, order or scan dims.

Sum-like reductions leave the reduced labels free: cutting one makes the result Partial. Every other reduced, sorted or scanned label is
whole; means, variances, 2-norms, any and all have decompositions into sums.
"""

from collections.abc import Sequence

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.language import apply
from partitioner.passes.rules.registry import rule, text


def reduced_dims(call: Call, rank: int) -> tuple[int, ...]:
    return call.dims("dim", rank) if "dim" in call.values else tuple(range(rank))


def remaining(dims: Sequence[Dim], gone: Sequence[int], keepdim: bool) -> list[Dim]:
    """The dims of a reduction's result."""
    return [() if position in gone else dim for position, dim in enumerate(dims) if keepdim or position not in gone]


def _reduce(call: Call, whole: bool, linear: bool) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    gone = reduced_dims(call, len(shape))
    mine = labels.of(shape, whole=gone if whole else False)
    out = remaining(mine, gone, bool(call.get("keepdim", False)))
    return describe_by(call, labels, {"self": mine}, [out] * len(call.outputs), linear=("self",) if linear else ())


@rule("sum.default", "sum.dim_IntList")
def sum_(call: Call) -> OpDims | None:
    return _reduce(call, whole=False, linear=call["self"].dtype.is_floating_point)


@rule("nansum", "count_nonzero")
def sum_like(call: Call) -> OpDims | None:
    return _reduce(call, whole=False, linear=False)


@rule("mean.default", "mean.dim")
def mean(call: Call) -> OpDims | None:
    return _reduce(call, whole=True, linear=True)


@rule(
    "nanmean var std var_mean std_mean norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype linalg_vector_norm",
    "argmax argmin any all prod logsumexp special_logsumexp max.default max.dim min.default min.dim amax amin median nanmedian mode kthvalue",
    "aminmax _aminmax frobenius_norm.dim",
)
def whole_reduction(call: Call) -> OpDims | None:
    return _reduce(call, whole=True, linear=False)


@rule("topk", "sort", "argsort", "msort")
def ordered(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dim", len(shape)) if "dim" in call.values else 0
    mine = labels.of(shape, whole=(at,))
    out = list(mine)
    if shape and call.out.shape[at] != shape[at]:
        out[at] = labels.new(call.out.shape[at], whole=True)
    return describe_by(call, labels, {"self": mine}, [out] * len(call.outputs))


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def scan(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    mine = labels.of(shape, whole=(call.dim("dim", len(shape)),))
    adds = str(call.target._schema.name) == "aten::cumsum" and call.out.dtype.is_floating_point and call["self"].dtype.is_floating_point
    return describe_by(call, labels, {"self": mine}, [mine] * len(call.outputs), linear=("self",) if adds else ())


@rule("quantile", "nanquantile")
def quantile(call: Call) -> OpDims | None:
    """A tensor of quantiles adds a leading dim; each is computed alone."""
    labels = Labels()
    shape = call.shape("self")
    gone = reduced_dims(call, len(shape))
    mine = labels.of(shape, whole=gone)
    out = remaining(mine, gone, bool(call["keepdim"]))
    if not call.is_tensor("q"):
        return describe_by(call, labels, {"self": mine}, [out])
    asked = labels.of(call.shape("q"))
    return describe_by(call, labels, {"self": mine, "q": asked}, [[*asked, *out]])


@rule("searchsorted.Tensor")
def searchsorted(call: Call) -> OpDims | None:
    """One boundary list for all, or one per row."""
    if len(call.shape("sorted_sequence")) == 1:
        return apply(call, "s!, v.., s!? -> v..")
    return apply(call, "b.. s!, b.. v, b.. s!? -> b.. v")


text("bucketize.Tensor", "v.., s! -> v..")


@rule("histc")
def histc(call: Call) -> OpDims | None:
    """Counts add up, unless the range is that of the data."""
    labels = Labels()
    fixed = call["min"] != call["max"]
    return describe_by(call, labels, {"self": labels.of(call.shape("self"), whole=not fixed)}, [labels.of(call.out.shape, whole=True)])


@rule("isin.Tensor_Tensor")
def isin(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("elements"))
    return describe_by(call, labels, {"elements": mine, "test_elements": labels.of(call.shape("test_elements"), whole=True)}, [mine])


@rule("isin.Tensor_Scalar")
def isin_scalar(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("elements"))
    return describe_by(call, labels, {"elements": mine}, [mine])


@rule("cosine_similarity", "pairwise_distance", "dist", "cross", "linalg_cross")
def pairs(call: Call) -> OpDims | None:
    """Two tensors, broadcast, compared along one dim (all dims for dist)."""
    labels = Labels()
    first, second = call.tensor_names[:2]
    shapes = [call.shape(first), call.shape(second)]
    rank = max(map(len, shapes))
    shapes = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    sizes = [a if a != 1 else b for a, b in zip(*shapes, strict=True)]
    name = str(call.target._schema.name)
    if name == "aten::dist":
        gone: tuple[int, ...] = tuple(range(rank))
    elif name == "aten::pairwise_distance":
        gone = (rank - 1,)
    elif call["dim"] is None:  # cross picks the first dim of size 3
        gone = (sizes.index(3),)
    else:
        gone = (call.dim("dim", rank),)
    made = labels.of(sizes, whole=gone)
    inputs = {}
    for argument, shape in zip((first, second), shapes, strict=True):
        dims = [() if size == 1 else dim for size, dim in zip(shape, made, strict=True)]
        inputs[argument] = dims[rank - len(call.shape(argument)) :]
    out = made if name.endswith("cross") else remaining(made, gone, bool(call.get("keepdim", False)))
    return describe_by(call, labels, inputs, [out], linear_one=(first, second) if name.endswith("cross") else ())


text("cdist _euclidean_dist _cdist_forward", "b.. p d!, b.. r d! -> b.. p r")


@rule("pdist")
def pdist(call: Call) -> OpDims | None:
    labels = Labels()
    return describe_by(call, labels, {"self": labels.of(call.shape("self"), whole=True)}, [labels.of(call.out.shape, whole=True)])


_MATRIX = """linalg_inv linalg_inv_ex inverse linalg_cholesky linalg_cholesky_ex cholesky linalg_det det logdet slogdet linalg_slogdet linalg_qr
    linalg_svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_eigvals linalg_eig linalg_matrix_exp matrix_exp linalg_pinv.default pinverse
    linalg_matrix_power matrix_power linalg_matrix_norm linalg_solve linalg_solve_ex linalg_solve_triangular cholesky_solve cholesky_inverse
    linalg_lu linalg_lu_factor linalg_svd svd qr linalg_matrix_rank.default"""


@rule(_MATRIX)
def matrices(call: Call) -> OpDims | None:
    """Dense linear algebra on the last two dims of every tensor; the dims before them are a batch."""
    labels = Labels()
    if any(len(place.spec.shape) < 2 for place in call.places) or len({place.spec.shape[:-2] for place in call.places}) != 1:
        return None
    batch = labels.of(call.places[0].spec.shape[:-2])
    inputs = {place.name: [*batch, *labels.of(place.spec.shape[-2:], whole=True)] for place in call.places}
    outputs = [None if spec is None else [*batch, *labels.of(spec.shape[len(batch) :], whole=True)] for spec in call.outputs]
    return describe_by(call, labels, inputs, outputs)


@rule("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn")
def fourier(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    if call["dim"] is None and call.get("s") is not None:
        gone: tuple[int, ...] = tuple(range(len(shape) - len(call["s"]), len(shape)))
    else:
        gone = call.dims("dim", len(shape))
    mine = labels.of(shape, whole=gone)
    out = [labels.new(size, whole=True) if position in gone else mine[position] for position, size in enumerate(call.out.shape)]
    dtype = call["self"].dtype
    return describe_by(call, labels, {"self": mine}, [out], linear=("self",) if dtype.is_floating_point or dtype.is_complex else ())


@rule("fft_fftshift", "fft_ifftshift")
def fourier_shift(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    mine = labels.of(shape, whole=call.dims("dim", len(shape)))
    return describe_by(call, labels, {"self": mine}, [mine], linear=("self",))
