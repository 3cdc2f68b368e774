"""Softmaxes and normalisations: what they normalise over is whole, the rest is free.

Batch norm over a cut batch runs by its decomposition (sums over all ranks); the other norms never mix rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.registry import decomposer, rule, words

aten = torch.ops.aten


@rule("softmax.int", "log_softmax.int", "_softmax", "_log_softmax", "_safe_softmax", "special_softmax", "special_log_softmax")
def softmax(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    mine = labels.of(shape, whole=(call.dim("dim", len(shape)),))
    return describe_by(call, labels, {"self": mine}, [mine])


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> OpDims | None:
    """Over the trailing `normalized_shape`; statistics, where returned, keep the leading dims and ones."""
    labels = Labels()
    shape = call.shape("input")
    lead = len(shape) - len(call["normalized_shape"])
    mine = labels.of(shape, whole=range(lead, len(shape)))
    statistics = [() if position >= lead else dim for position, dim in enumerate(mine)]
    inputs = {place.name: mine if place.name == "input" else mine[lead:] for place in call.places}
    return describe_by(call, labels, inputs, [mine, *[statistics for _ in call.outputs[1:]]])


@rule("group_norm", "native_group_norm")
def group_norm(call: Call) -> OpDims | None:
    """Rows are free; channels of a group and all positions are normalised together."""
    labels = Labels()
    shape = call.shape("input")
    mine = labels.of(shape, whole=range(1, len(shape)))
    inputs = {place.name: mine if place.name == "input" else [mine[1]] for place in call.places}
    outputs: list[Sequence[Dim] | None] = [mine]
    for spec in call.outputs[1:]:
        outputs.append(None if spec is None else [mine[0], labels.new(spec.shape[1], whole=True)])
    return describe_by(call, labels, inputs, outputs)


@rule("instance_norm")
def instance_norm(call: Call) -> OpDims | None:
    """Each row and channel alone, but torch folds rows into channels and refuses to run without rows: they are whole, not so in the decomposition."""
    labels = Labels()
    shape = call.shape("input")
    mine = labels.of(shape, whole=[position for position in range(len(shape)) if position != 1])
    inputs = {place.name: mine if place.name == "input" else [mine[1]] for place in call.places}
    return describe_by(call, labels, inputs, [mine])


@decomposer("instance_norm")
def groups_of_one(call: Call) -> Callable[..., Any] | None:
    """Instance norm is group norm with one channel a group, or batch norm by running statistics."""
    channels, own, stored = call.shape("input")[1], call["use_input_stats"], call["running_mean"] is not None

    def run(input: Any, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, cudnn: bool) -> Any:
        if own:
            return aten.group_norm.default(input, channels, weight, bias, eps, cudnn)
        return aten.batch_norm.default(input, weight, bias, mean, var, False, momentum, eps, cudnn)

    # Own statistics that also move stored ones are written out before rules see them.
    return None if own and stored else run


BATCH_NORMS = words("""batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm""")

_PASSES_STATISTICS = frozenset(("aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update_functional"))


def uses_batch(call: Call) -> bool:
    """Whether a batch norm computes its statistics from its input."""
    name = str(call.target._schema.name).removeprefix("aten::")
    if name in ("_native_batch_norm_legit_no_training", "_batch_norm_no_update"):
        return False
    return bool(call.get("training", True)) or call.get("running_mean") is None


@rule(*BATCH_NORMS)
def batch_norm(call: Call) -> OpDims | None:
    """Channels are free. In training, rows and positions are normalised together; with running statistics they are free too."""
    labels = Labels()
    shape = call.shape("input")
    # A functional form in evaluation hands its running statistics through: results that no row adds to, which a cut row would make Partial.
    mixes = uses_batch(call) or call.target._schema.name in _PASSES_STATISTICS
    mine = labels.of(shape, whole=[position for position in range(len(shape)) if mixes and position != 1])
    channel = mine[1]
    inputs = {place.name: mine if place.name == "input" else [channel] for place in call.places}
    outputs: list[Sequence[Dim] | None] = [mine]
    for spec in call.outputs[1:]:
        if spec is None:
            outputs.append(None)
        elif spec.shape == shape[1:2]:
            outputs.append([channel])
        else:  # empty statistics of evaluation, or the reserve space of cuDNN
            outputs.append(labels.of(spec.shape, whole=True))
    return describe_by(call, labels, inputs, outputs)


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(call: Call) -> OpDims | None:
    """g * v / ‖v‖ with the norm over all dims of v but `dim`."""
    labels = Labels()
    v, g = call.tensor_names[:2]
    shape = call.shape(v)
    at = call.dim("dim", len(shape)) if call["dim"] != -1 else None
    mine = labels.of(shape, whole=[position for position in range(len(shape)) if position != at])
    scale: list[Dim] = [dim if position == at else () for position, dim in enumerate(mine)]
    if at is None:
        scale = [() for _ in call.shape(g)]
    return describe_by(call, labels, {v: mine, g: scale}, [mine, *[scale for _ in call.outputs[1:]]])


@rule("renorm")
def renorm(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    mine = labels.of(shape, whole=[position for position in range(len(shape)) if position != at])
    return describe_by(call, labels, {"self": mine}, [mine])
