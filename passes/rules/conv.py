"""Convolution, pooling, resampling: rows are free, positions are whole.

    conv2d  x [n, i, h, w], weight [o, i, y, x], bias [o] -> [n, o, p, q]

Channels of a pooling or resampling op are free too. With groups the channels stay whole: a shard would need another `groups`.
"""

from collections.abc import Callable
from typing import Any

import torch

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by, product
from partitioner.passes.rules.registry import decomposer, rule, words

aten = torch.ops.aten

CONVOLUTIONS = words(
    "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution"
)


def is_transposed(call: Call) -> bool:
    return "transpose" in str(call.target._schema.name) or bool(call.get("transposed", False))


def convolution_dims(call: Call) -> tuple[Labels, dict[str, list[Dim]], list[Dim]] | None:
    """Labels, inputs and result. A leading row dim is optional, as for the modules."""
    shape, weight = call.shape("input"), call.shape("weight")
    rank = len(weight) - 2
    if len(shape) not in (rank + 1, rank + 2):
        return None
    transposed, grouped = is_transposed(call), call["groups"] != 1
    labels = Labels()
    row = labels.of(shape[: len(shape) - rank - 1], "n")
    biased = call["bias"] is not None
    inner = labels.new(shape[-rank - 1], "i", whole=grouped or biased)
    outer = labels.new(call.out.shape[-rank - 1], "o", whole=grouped)
    kernel = labels.of(weight[2:], "y", whole=True)
    if grouped:  # [o, i/g] or, transposed, [i, o/g]
        channels = [inner, labels.new(weight[1], "o", whole=True)] if transposed else [outer, labels.new(weight[1], "i", whole=True)]
    else:
        channels = [inner, outer] if transposed else [outer, inner]
    inputs = {"input": [*row, inner, *labels.of(shape[-rank:], "h", whole=True)], "weight": [*channels, *kernel], "bias": [outer]}
    return labels, inputs, [*row, outer, *labels.of(call.out.shape[-rank:], "p", whole=True)]


def convolution_flops(call: Call, inputs: dict[str, list[Dim]], out: list[Dim]) -> Any:
    """2 · rows · kernel elements · positions (of the input when transposed, else of the result), as torch.utils.flop_counter."""
    rank = len(call.shape("weight")) - 2
    rows = out[: len(out) - rank - 1]
    positions = (inputs["input"] if is_transposed(call) else out)[-rank:]
    return product(2, *rows, *inputs["weight"], *positions)


@rule(*CONVOLUTIONS)
def convolution(call: Call) -> OpDims | None:
    found = convolution_dims(call)
    if found is None:
        return None
    labels, inputs, out = found
    linear = ("input", "bias") if call["bias"] is not None else ()
    alone = () if linear else ("input", "weight")
    return describe_by(call, labels, inputs, [out], linear=linear, linear_one=alone, flops=convolution_flops(call, inputs, out))


@decomposer(*CONVOLUTIONS)
def convolve_then_bias(call: Call) -> Callable[..., Any] | None:
    if call["bias"] is None or call["groups"] != 1:
        return None
    channel = (-1, *[1] * (len(call.shape("weight")) - 2))
    target = call.target

    def run(input: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any) -> Any:
        return aten.add.Tensor(target(input, weight, None, *rest, **options), aten.reshape.default(bias, channel))

    return run


_POOLS = "max_pool{n}d avg_pool{n}d adaptive_avg_pool{n}d adaptive_max_pool{n}d max_pool{n}d_with_indices"
_POOLED = [_POOLS.format(n=n) for n in (1, 2, 3)]
_SAMPLED = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
_LINEAR = ("avg", "upsample")


@rule(*_POOLED, _SAMPLED, "_adaptive_avg_pool2d _adaptive_avg_pool3d max_unpool2d max_unpool3d")
def positions(call: Call) -> OpDims | None:
    """[n, c, positions…] (or [c, positions…]) -> [n, c, other positions…], each row and channel alone."""
    labels = Labels()
    name = str(call.target._schema.name)
    rank = next(int(letter) for letter in name if letter.isdigit())
    first = "input" if "input" in call.values else "self"
    shape = call.shape(first)
    lead = labels.of(shape[: len(shape) - rank])
    mine = [*lead, *labels.of(shape[-rank:], whole=True)]
    out = [*lead, *labels.of(call.out.shape[-rank:], whole=True)]
    inputs = {place.name: mine for place in call.places}
    linear = (first,) if any(word in name for word in _LINEAR) else ()
    return describe_by(call, labels, inputs, [out] * len(call.outputs), linear=linear)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def shuffled(call: Call) -> OpDims | None:
    """Channels and positions trade places; all dims before them are free."""
    labels = Labels()
    shape = call.shape("self")
    tail = len(shape) - 1 if "channel" in str(call.target._schema.name) else 3
    lead = labels.of(shape[: len(shape) - tail])
    mine = [*lead, *labels.of(shape[-tail:], whole=True)]
    return describe_by(call, labels, {"self": mine}, [[*lead, *labels.of(call.out.shape[-tail:], whole=True)]], linear=("self",))


@rule("im2col", "col2im")
def columns(call: Call) -> OpDims | None:
    """[n, c, h, w] <-> [n, (c, window), positions]."""
    labels = Labels()
    shape = call.shape("self")
    unfolds = str(call.target._schema.name) == "aten::im2col"
    image, column = (shape, call.out.shape) if unfolds else (call.out.shape, shape)
    row = labels.of(image[: len(image) - 3])
    channel = labels.new(image[-3])
    pixels = [*row, channel, *labels.of(image[-2:], whole=True)]
    window = labels.new(column[-2] // image[-3], whole=True)
    patches = [*row, (*channel, *window), labels.new(column[-1], whole=True)]
    return describe_by(call, labels, {"self": pixels if unfolds else patches}, [patches if unfolds else pixels], linear=("self",))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: Call) -> OpDims | None:
    """Every point of the grid reads the whole image of its row."""
    labels = Labels()
    shape = call.shape("input")
    row, channel = labels.of(shape[:2])
    points = labels.of(call.out.shape[2:])
    image = [row, channel, *labels.of(shape[2:], whole=True)]
    grid = [row, *points, labels.new(call.shape("grid")[-1], whole=True)]
    return describe_by(call, labels, {"input": image, "grid": grid}, [[row, channel, *points]], linear=("input",))


@rule("affine_grid_generator")
def affine_grid(call: Call) -> OpDims | None:
    labels = Labels()
    theta = labels.of(call.shape("theta"), whole=(1, 2))
    out = [theta[0], *labels.of(call.out.shape[1:], whole=True)]
    return describe_by(call, labels, {"theta": theta}, [out], linear=("theta",))
