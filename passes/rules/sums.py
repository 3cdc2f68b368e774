"""Means, variances, norms and batch norm written with sums, so that a cut dim only makes Partials.

Each decomposer reads the captured (global) sizes once and closes over them as Python numbers: the functions it returns read no sizes, so
they are right on a shard of any size, none included. 16-bit inputs are summed in 32 bits.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from partitioner.passes.collectives import addend, own_mean
from partitioner.passes.rules.call import Call
from partitioner.passes.rules.norms import uses_batch
from partitioner.passes.rules.reduction import reduced_dims
from partitioner.passes.rules.registry import decomposer

aten = torch.ops.aten
Function = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def cast(x: Any, have: torch.dtype, want: torch.dtype) -> Any:
    return x if have == want else aten.to.dtype(x, want)


def add_up(x: Any, dims: Sequence[int], keepdim: bool) -> Any:
    return aten.sum.dim_IntList(x, list(dims), keepdim)


def _count(call: Call, dims: Sequence[int], name: str = "self") -> int:
    shape = call.shape(name)
    return prod([shape[dim] for dim in dims]) if shape else 1


@decomposer("mean.default", "mean.dim")
def mean(call: Call) -> Function | None:
    rank = len(call.shape("self"))
    dims = reduced_dims(call, rank)
    count, have, out = _count(call, dims), call["self"].dtype, call.out.dtype
    keepdim = bool(call.get("keepdim", False))
    if rank == 0:
        return None

    def run(self: Any, *_: Any, **__: Any) -> Any:
        total = add_up(cast(self, have, wide(out)), dims, keepdim)
        return cast(aten.div.Scalar(total, count), wide(out), out)

    return run


def _moments(call: Call) -> tuple[Function, Sequence[int], float] | None:
    """A function from x to (mean, squared deviation sum), both with dims kept, the dims, and the divisor."""
    rank = len(call.shape("self"))
    if rank == 0 or not call["self"].dtype.is_floating_point:
        return None
    dims = reduced_dims(call, rank)
    count = _count(call, dims)
    correction = call["correction"] if "correction" in call.values else int(bool(call["unbiased"]))
    divisor = max(count - (1 if correction is None else correction), 0)
    have = call["self"].dtype

    def run(self: Any) -> tuple[Any, Any]:
        x = cast(self, have, wide(have))
        centre = aten.div.Scalar(add_up(x, dims, True), count)
        deviation = aten.sub.Tensor(x, centre)
        return centre, add_up(aten.mul.Tensor(deviation, deviation), dims, True)

    return run, dims, divisor


def root(x: Any) -> Any:
    """A square root whose gradient at 0 is 0, as that of torch.std and of norms."""
    zero = aten.eq.Scalar(x, 0)
    return aten.masked_fill.Scalar(aten.sqrt.default(aten.masked_fill.Scalar(x, zero, 1)), zero, 0)


@decomposer("var", "std", "var_mean", "std_mean")
def variance(call: Call) -> Function | None:
    found = _moments(call)
    if found is None:
        return None
    moments, dims, divisor = found
    have, keepdim = call["self"].dtype, bool(call.get("keepdim", False))
    name = str(call.target._schema.name).removeprefix("aten::")

    def finish(x: Any) -> Any:
        return cast(x if keepdim else aten.squeeze.dims(x, list(dims)), wide(have), have)

    def run(self: Any, *_: Any, **__: Any) -> Any:
        centre, squares = moments(self)
        spread = aten.div.Scalar(squares, divisor)
        spread = finish(root(spread) if name.startswith("std") else spread)
        return (spread, finish(centre)) if name.endswith("_mean") else spread

    return run


@decomposer("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype")
def vector_norm(call: Call) -> Function | None:
    """1- and 2-norms; others stay whole."""
    order = call["ord"] if "ord" in call.values else call["p"]
    order = 2 if order is None else order
    rank = len(call.shape("self"))
    have, out = call["self"].dtype, call.out.dtype
    if order not in (1, 2) or rank == 0 or not have.is_floating_point:
        return None
    dims, keepdim = reduced_dims(call, rank), bool(call.get("keepdim", False))

    def run(self: Any, *_: Any, **__: Any) -> Any:
        x = cast(self, have, wide(out))
        total = add_up(aten.abs.default(x) if order == 1 else aten.mul.Tensor(x, x), dims, keepdim)
        return cast(total if order == 1 else root(total), wide(out), out)

    return run


@decomposer("any", "all")
def truth(call: Call) -> Function | None:
    """any: the number of true elements is not 0; all: the number of false ones is 0."""
    rank = len(call.shape("self"))
    if rank == 0 or call.out.dtype != torch.bool:
        return None
    dims, keepdim = reduced_dims(call, rank), bool(call.get("keepdim", False))
    every = str(call.target._schema.name) == "aten::all"

    def run(self: Any, *_: Any, **__: Any) -> Any:
        counted = aten.eq.Scalar(self, 0) if every else aten.ne.Scalar(self, 0)
        total = add_up(counted, dims, keepdim)
        return aten.eq.Scalar(total, 0) if every else aten.ne.Scalar(total, 0)

    return run


@decomposer("batch_norm native_batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats")
def batch_norm(call: Call) -> Function | None:
    """Training batch norm over the whole batch: mean and variance by sums over all dims but the channel.

    Results as the op's: (out, mean, 1/std, new running mean, new running variance) for the functional forms, the first only for batch_norm.
    Gradients flow through `out` alone. With `part` (the scalar of that name) the statistics that normalise are those of the micro-batch; the
    running ones move by those of the whole batch all the same, whose mean and mean square are what micro-batches add up to, in fp64.
    """
    if not uses_batch(call) or (call.get("running_mean") is not None and len(call.outputs) < 4):
        return None
    shape, have = call.shape("input"), call["input"].dtype
    dims = [position for position in range(len(shape)) if position != 1]
    count = _count(call, dims, "input")
    channel = [shape[1], *[1] * (len(shape) - 2)]
    names = [argument.name for argument in call.target._schema.arguments]
    single = len(call.outputs) == 1
    unbiased = count / (count - 1) if count > 1 else float("nan")

    def moved(running: Any, now: Any, momentum: float) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(running, 1 - momentum), aten.mul.Tensor(now, momentum))

    def average(x: Any, part: Any) -> Any:
        found = aten.div.Scalar(add_up(x, dims, True), count)
        return found if part is None else own_mean._opoverload(found, part)

    def of_the_batch(centre: Any, variance: Any, part: Any) -> tuple[Any, Any]:
        mean, spread = (cast(value, wide(have), torch.float64) for value in (centre, variance))
        square = addend._opoverload(aten.add.Tensor(spread, aten.mul.Tensor(mean, mean)), part)
        mean = addend._opoverload(mean, part)
        spread = aten.clamp_min.default(aten.sub.Tensor(square, aten.mul.Tensor(mean, mean)), 0)
        return cast(mean, torch.float64, wide(have)), cast(spread, torch.float64, wide(have))

    def run(*args: Any, part: Any = None, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        x = cast(given["input"], have, wide(have))
        centre = average(x, part)
        deviation = aten.sub.Tensor(x, centre)
        variance = average(aten.mul.Tensor(deviation, deviation), part)
        scale = aten.rsqrt.default(aten.add.Scalar(variance, given["eps"]))
        out = aten.mul.Tensor(deviation, scale)
        if given.get("weight") is not None:
            out = aten.mul.Tensor(out, aten.reshape.default(given["weight"], channel))
        if given.get("bias") is not None:
            out = aten.add.Tensor(out, aten.reshape.default(given["bias"], channel))
        out = cast(out, wide(have), have)
        if single:
            return out
        centre, variance, scale = (aten.squeeze.dims(aten.detach.default(value), dims) for value in (centre, variance, scale))
        results = [out, centre, scale]
        if given.get("running_mean") is not None:
            momentum = given["momentum"]
            if part is not None:
                centre, variance = of_the_batch(centre, variance, part)
            results.append(moved(given["running_mean"], centre, momentum))
            results.append(moved(given["running_var"], aten.mul.Tensor(variance, unbiased), momentum))
        return tuple(results)

    return run
