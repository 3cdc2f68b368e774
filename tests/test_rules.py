"""Every sharding rule, numerically: cut a label, run the op on each shard, recombine, compare with the whole op."""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from partitioner.passes.rules import decomposition, describe, localise, registry, tensor_arguments
from partitioner.passes.rules.describe import Dim, OpDims
from tests.rule_cases import CASES, EMPTY_REFUSED, NOT_NUMERIC, ONLY_ROWS_EMPTY, Draw

torch.set_num_threads(1)
SEEDS = (0, 1, 2)


def overload(name: str) -> OpOverload:
    namespace, rest = name.split("::")
    op, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), variant)  # type: ignore[no-any-return]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def call_node(target: OpOverload, args: Any, kwargs: Any, value: Any) -> tuple[fx.Node, list[Tensor]]:
    """A graph node that stands for a call on real tensors, and those tensors in the order of `tensor_arguments`."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placeholder(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = x
        tensors.append(x)
        return node

    nodes, keywords = tree_map(placeholder, (args, kwargs))
    node = graph.call_function(target, nodes, keywords)
    node.meta["val"] = value
    return node, tensors


def piece(x: Tensor, dims: tuple[Dim, ...], sizes: dict[str, int], label: str, start: int, length: int) -> Tensor:
    """The part of a tensor whose label runs from start to start + length."""
    for position, dim in enumerate(dims):
        if label in dim:
            at = dim.index(label)
            outer, inner = prod(sizes[name] for name in dim[:at]), prod(sizes[name] for name in dim[at + 1 :])
            shape = x.shape
            x = x.reshape(*shape[:position], outer, sizes[label], inner, *shape[position + 1 :]).narrow(position + 1, start, length)
            x = x.reshape(*shape[:position], outer * length * inner, *shape[position + 1 :])
    return x.contiguous()


def join(parts: list[Tensor], dims: tuple[Dim, ...], sizes: dict[str, int], label: str, lengths: list[int]) -> Tensor:
    position = next(position for position, dim in enumerate(dims) if label in dim)
    dim = dims[position]
    at = dim.index(label)
    outer, inner = prod(sizes[name] for name in dim[:at]), prod(sizes[name] for name in dim[at + 1 :])
    split = [x.reshape(*x.shape[:position], outer, length, inner, *x.shape[position + 1 :]) for x, length in zip(parts, lengths, strict=True)]
    joined = torch.cat(split, position + 1)
    return joined.reshape(*parts[0].shape[:position], -1, *parts[0].shape[position + 1 :]) if joined.numel() else joined.flatten()


def close(found: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda text: f"{what}: {text}")


def may_be_empty(target: OpOverload, dims: OpDims, label: str) -> bool:
    """Whether torch runs the op on a shard with nothing of this label."""
    name = str(target._schema.name).removeprefix("aten::")
    if name.startswith(EMPTY_REFUSED):
        return False
    if not name.startswith(tuple(ONLY_ROWS_EMPTY)):
        return True
    first = dims.inputs[0]
    spatial = next((int(letter) for letter in name if letter.isdigit()), None)
    has_rows = first is not None and (spatial is None or len(first) == spatial + 2)
    return has_rows and label in first[0]  # type: ignore[index]


def check_cuts(target: OpOverload, args: Any, kwargs: Any) -> int:
    """Cut every label that may be cut; return how many there were."""
    whole = target(*args, **kwargs)
    node, tensors = call_node(target, args, kwargs, whole)
    dims = describe(node)
    assert dims is not None, f"{target} has no rule for {args} {kwargs}"
    assert len(dims.inputs) == len(tensors) == len(tensor_arguments(node))
    wholes = as_list(whole)
    assert len(dims.outputs) == len(wholes)
    cut = [label for label in dims.sizes if label not in dims.whole]
    for label in cut:
        size = dims.sizes[label]
        assert size > 1
        for lengths in ([1, size - 1], *([[size, 0]] if may_be_empty(target, dims, label) else ())):
            check_one(node, tensors, dims, wholes, label, lengths)
    check_linear(node, tensors, dims, wholes)
    return len(cut)


def local_dim(dim: Dim, sizes: dict[str, int], label: str, length: int) -> int:
    return prod(length if name == label else sizes[name] for name in dim)


def check_one(node: fx.Node, tensors: list[Tensor], dims: OpDims, wholes: list[Tensor], label: str, lengths: list[int]) -> None:
    what = f"{node.target} cut {label} of {dims} into {lengths}"
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    results: list[list[Tensor]] = []
    for start, length in zip(starts, lengths, strict=True):
        local = [x if entry is None else piece(x, entry, dims.sizes, label, start, length) for x, entry in zip(tensors, dims.inputs, strict=True)]
        shapes = [None if entry is None else [local_dim(dim, dims.sizes, label, length) for dim in entry] for entry in dims.outputs]
        result = run(node, local, shapes)
        for x, shape in zip(result, shapes, strict=True):
            assert shape is None or list(x.shape) == shape, what
        results.append(result)
    carried = any(label in dim for entry in dims.inputs if entry is not None for dim in entry)
    for position, (entry, wanted) in enumerate(zip(dims.outputs, wholes, strict=True)):
        parts = [result[position] for result in results]
        if entry is not None and any(label in dim for dim in entry):
            close(join(parts, entry, dims.sizes, label, lengths).reshape(wanted.shape), wanted, what)
        elif carried:
            close(sum(parts[1:], parts[0]), wanted, what)
        else:
            for part in parts:
                close(part, wanted, what)


def run(node: fx.Node, tensors: list[Tensor], shapes: list[list[int] | None]) -> list[Tensor]:
    """The node's op on local tensors."""
    args, kwargs = localise(node, node.args, dict(node.kwargs), shapes)
    given = iter(tensors)
    args, kwargs = tree_map(lambda x: next(given) if isinstance(x, fx.Node) else x, (list(args), kwargs))
    return as_list(node.target(*args, **kwargs))  # type: ignore[operator]


def check_linear(node: fx.Node, tensors: list[Tensor], dims: OpDims, wholes: list[Tensor]) -> None:
    """f(x + y) = f(x) + f(y) in the arguments of `linear` together and of `linear_one` one by one."""
    shapes: list[list[int] | None] = [list(x.shape) for x in wholes]
    for group in (dims.linear, *((index,) for index in dims.linear_one)):
        if not group:
            continue
        first = [torch.randn_like(x) if index in group else x for index, x in enumerate(tensors)]
        second = [x - first[index] if index in group else x for index, x in enumerate(tensors)]
        for a, b, wanted in zip(run(node, first, shapes), run(node, second, shapes), wholes, strict=True):
            torch.testing.assert_close(a + b, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, group=group: f"{node.target} is not linear in {group}: {text}")
