"""Normalisations that keep running statistics, as functions of the old statistics that return the new ones."""

import operator
from typing import Any

from torch import fx

from partitioner.passes.functional_builder import Builder, aten, first_value


def batch_norm(builder: Builder, given: dict[str, Any]) -> tuple[fx.Node, dict[str, fx.Node]] | None:
    """(output, new values by argument name) of a batch_norm that updates its statistics; None where it updates nothing."""
    if not given["training"] or given["running_mean"] is None or given["running_var"] is None:
        return None
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    made = builder.emit(aten._native_batch_norm_legit_functional.default, *(given[name] for name in names))
    out, _, _, mean, var = (builder.emit(operator.getitem, made, i) for i in range(5))
    return out, {"running_mean": builder.detached(mean), "running_var": builder.detached(var)}


def instance_norm(builder: Builder, given: dict[str, Any]) -> tuple[fx.Node, dict[str, fx.Node]] | None:
    """The same for instance_norm: its running statistics are means over the batch of each instance's own."""
    if not given["use_input_stats"] or given["running_mean"] is None or given["running_var"] is None:
        return None
    x, momentum = given["input"], given["momentum"]
    plain = (x, given["weight"], given["bias"], None, None, True, momentum, given["eps"], given["cudnn_enabled"])
    out = builder.emit(aten.instance_norm.default, *plain)
    spatial = list(range(2, first_value(x).ndim))
    made = builder.emit(aten.var_mean.correction, builder.detached(x), spatial, correction=1)
    new = {}
    for index, name in ((1, "running_mean"), (0, "running_var")):
        batch = builder.emit(aten.mean.dim, builder.emit(operator.getitem, made, index), [0])
        old = builder.emit(aten.mul.Tensor, given[name], 1 - momentum)
        new[name] = builder.emit(aten.add.Tensor, old, builder.emit(aten.mul.Tensor, batch, momentum))
    return out, new


NORMS = {aten.batch_norm.default: batch_norm, aten.instance_norm.default: instance_norm}
