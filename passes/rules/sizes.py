"""The size arguments of an op on a shard: those that follow from the local shape of the result are replaced by it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from partitioner.passes.rules.registry import find

Shapes = Sequence[Sequence[object] | None]
"""The local shape of each result; an entry is an int or a node that computes it. None for a result that is no tensor."""
Localiser = Callable[[dict[str, Any], Shapes, tuple[int, ...]], dict[str, Any]]
"""(arguments by name, local shapes, shape of the first tensor argument) -> the arguments that change."""

LOCALISERS: dict[str, Localiser] = {}


def _first(shapes: Shapes) -> list[object]:
    first = shapes[0]
    if first is None:
        raise ValueError("an op with size arguments returns a tensor first; its local shape is missing")
    return list(first)


def _whole_size(name: str) -> Localiser:
    return lambda given, shapes, _: {name: _first(shapes)}


_SIZED = """view.default _unsafe_view view_copy.default _reshape_copy expand expand_copy broadcast_to zeros ones full empty.memory_format
    rand.default randn.default randint new_zeros new_ones new_full new_empty partitioner::random"""
for _name in _SIZED.split():
    LOCALISERS[_name if "::" in _name else f"aten::{_name}"] = _whole_size("size")
LOCALISERS["aten::reshape"] = _whole_size("shape")


def _localiser(*names: str) -> Callable[[Localiser], Localiser]:
    def register(function: Localiser) -> Localiser:
        for name in names:
            LOCALISERS[f"aten::{name}"] = function
        return function

    return register


@_localiser("unflatten.int")
def _unflatten(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    at, count = given["dim"] % max(len(shape), 1), len(given["sizes"])
    return {"sizes": _first(shapes)[at : at + count]}


@_localiser("repeat", "tile")
def _repeat(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    """Copies of a dim of size 1 are as many as the result has elements there."""
    name = "repeats" if "repeats" in given else "dims"
    times = list(given[name])
    local = _first(shapes)
    offset, padded = len(local) - len(times), (1,) * (len(local) - len(shape)) + tuple(shape)
    return {name: [local[offset + k] if count != 1 and padded[offset + k] == 1 else count for k, count in enumerate(times)]}


@_localiser("repeat_interleave.self_int")
def _repeat_interleave(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    if given.get("output_size") is None:
        return {}
    dim = given.get("dim")
    return {"output_size": _first(shapes)[0 if dim is None else dim % len(shape)]}


@_localiser("slice.Tensor", "slice_copy.Tensor")
def _slice(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    """From the start on, the end is the size of the result; any other slice is of a whole dim."""
    if (given.get("start") or 0) != 0 or given.get("step", 1) != 1:
        return {}
    return {"end": _first(shapes)[given.get("dim", 0) % len(shape)]}


@_localiser("narrow.default", "narrow_copy")
def _narrow(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"length": _first(shapes)[given["dim"] % len(shape)]}


@_localiser("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes", "split.sizes")
def _split_with_sizes(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    at = given.get("dim", 0) % len(shape)
    name = "split_size" if "split_size" in given else "split_sizes"
    return {name: [local[at] for local in shapes if local is not None]}


@_localiser("native_group_norm")
def _native_group_norm(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"N": _first(shapes)[0]}


@_localiser("affine_grid_generator")
def _affine_grid(given: dict[str, Any], shapes: Shapes, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"size": [_first(shapes)[0], *given["size"][1:]]}


def _shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def localise(
    target: fx.Node | OpOverload, args: Sequence[Any], kwargs: dict[str, Any], local_shapes: Shapes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op on a shard, where its results have these local shapes.

    `target` is the node (whose arguments then tell the captured shapes) or its overload. Arguments that are no sizes stay as they are;
    `-1` in a view is written out. An argument that was left to its default (slice's end) is passed by name.
    """
    op = target.target if isinstance(target, fx.Node) else target
    captured = target.args if isinstance(target, fx.Node) else args
    if not isinstance(op, OpOverload):
        return tuple(args), dict(kwargs)
    function: Localiser | None = find(LOCALISERS, op)
    if function is None:
        return tuple(args), dict(kwargs)
    schema = op._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    changes = function(given, local_shapes, _shape_of(captured[0]) if captured else ())
    positional = [argument.name for argument in schema[: len(args)]]
    new_kwargs = {**kwargs, **{name: value for name, value in changes.items() if name not in positional}}
    return tuple([changes.get(name, value) for name, value in zip(positional, args, strict=True)]), new_kwargs
