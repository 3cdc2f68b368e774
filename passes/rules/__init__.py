"""Sharding rules: one op instance described by named dims, from which placements, Partial results, local shapes and costs follow.

    describe(node)             the named dims of an op, None where no rule covers it (the caller computes it replicated and says so by name)
    tensor_arguments(node)     the nodes that OpDims.inputs speaks of
    localise(node, …)          size arguments on a shard
    decomposition(node)        the op by finer ones that have rules, for labels that it keeps whole
    normalises_by_batch(node)  whether it is a BatchNorm by the statistics of what it gets
    backward_flops(node)       FLOPs of its gradients

Reading order: describe.py (the contract), call.py, labels.py, language.py, registry.py, then the rules by idea: pointwise.py, contraction.py,
einsum.py, reshaping.py, views.py, pieces.py, reduction.py, norms.py, attention.py, losses.py, index.py, conv.py, rnn.py, factory.py.
sums.py and loss_means.py hold the decompositions, sizes.py localise, flops.py the backward costs.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from partitioner.passes.rules import (
    attention,
    contraction,
    conv,
    einsum,
    factory,
    index,
    loss_means,
    losses,
    norms,
    pieces,
    pointwise,
    reduction,
    registry,
    rnn,
    sums,
    views,
)
from partitioner.passes.rules.call import Call, Spec, frozen, results_of
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.flops import backward_flops_of
from partitioner.passes.rules.sizes import localise

__all__ = ["DIMS", "OpDims", "backward_flops", "decomposition", "describe", "describe_call", "localise", "normalises_by_batch", "tensor_arguments"]

DIMS = "dims"

# Importing these files fills the tables of the registry.
_FILES = (attention, contraction, conv, einsum, factory, index, loss_means, losses, norms, pieces, pointwise, reduction, rnn, sums, views)


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold one tensor, in the order of flattening args then kwargs, duplicates kept, lists flattened."""
    found: list[fx.Node] = []

    def note(one: fx.Node) -> fx.Node:
        if isinstance(one.meta.get("val"), Tensor):
            found.append(one)
        return one

    map_arg(node.args, note)
    if node.kwargs:
        map_arg(node.kwargs, note)
    return found


def _key(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...], tuple[Any, ...], tuple[Spec | None, ...]] | None:
    if not isinstance(node.target, OpOverload):
        return None
    return node.target, frozen(node.args), frozen(node.kwargs), results_of(node.meta.get("val"))


@lru_cache(maxsize=65536)
def describe_call(target: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], outputs: tuple[Spec | None, ...]) -> OpDims | None:
    """`describe` by frozen arguments (see call.frozen); equal instances share one OpDims."""
    found = registry.find(registry.RULES, target)
    if found is None and pointwise.is_pointwise(target):
        found = pointwise.pointwise
    if found is None or not outputs or all(spec is None for spec in outputs):
        return None
    result: OpDims | None = found(Call(target, args, dict(kwargs), outputs))
    return result


def describe(node: fx.Node) -> OpDims | None:
    """The named dims of an op instance, from the fake tensors in meta["val"] of the node and of its arguments.

    None: no rule covers it, or the node is no ATen op (placeholder, getitem, scalar arithmetic). Remembered in meta["dims"]; a pass that gives
    a node other arguments makes a new node.
    """
    if DIMS not in node.meta:
        key = _key(node)
        node.meta[DIMS] = None if key is None else describe_call(*key)
    found: OpDims | None = node.meta[DIMS]
    return found


def decomposition(node: fx.Node) -> Callable[..., Any] | None:
    """The op as a function of the node's own args and kwargs, written in ATen ops that have rules and whose labels may be cut.

    For ops that average over a label, or keep it whole for the sake of one argument (a bias). The function reads no sizes of its tensors:
    what it needs of the captured, global, sizes it holds as numbers. None where there is no such form.
    """
    key = _key(node)
    if key is None:
        return None
    target, args, kwargs, outputs = key
    found = registry.find(registry.DECOMPOSERS, target)
    function: Callable[..., Any] | None = None if found is None else found(Call(target, args, dict(kwargs), outputs))
    return function


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether an op is a BatchNorm by statistics of its own input; its decomposition then takes the keyword `part` (see sums.batch_norm)."""
    key = _key(node)
    if key is None or registry.find(registry.RULES, key[0]) is not norms.batch_norm:
        return False
    target, args, kwargs, outputs = key
    return norms.uses_batch(Call(target, args, dict(kwargs), outputs))


def backward_flops(node: fx.Node, needs: Sequence[bool] | None = None) -> sympy.Expr:
    """FLOPs of the gradients of an op in the label symbols of `describe(node)`, as torch.utils.flop_counter counts them.

    `needs` tells, per tensor argument, whether it wants a gradient; None: every floating-point argument does.
    """
    key = _key(node)
    dims = describe(node)
    if key is None or dims is None:
        return sympy.Integer(0)
    target, args, kwargs, outputs = key
    return backward_flops_of(Call(target, args, dict(kwargs), outputs), dims, needs)
