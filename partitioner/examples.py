"""Example inputs: given, or found on the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from partitioner.errors import InputError


def example_call(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call on the global batch.

    Without either: `model.dummy_inputs`, `model.example_input_array`, or rows for the first layer of a Sequential. Raises InputError.
    """
    if args is not None and not isinstance(args, (tuple, list)):
        raise InputError(
            f"example_inputs is a {type(args).__name__}; it must be the tuple of positional arguments: write example_inputs=(value,) for a single one"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"example_kwargs is a {type(kwargs).__name__}; write a dict of keyword arguments, such as example_kwargs={{'input_ids': tokens}}"
        )
    if args or kwargs:
        return tuple(args or ()), dict(kwargs or {})
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping) and dummy:
        return (), dict(dummy)
    array = getattr(model, "example_input_array", None)
    if array is not None:
        if isinstance(array, Mapping):
            return (), dict(array)
        return (tuple(array) if isinstance(array, (tuple, list)) else (array,)), {}
    if isinstance(model, nn.Sequential) and len(model) and (found := _for_layer(model[0])) is not None:
        return (found,), {}
    raise InputError(
        f"{type(model).__name__} does not say what its inputs look like, so it cannot be captured; pass one global batch, real or fake: "
        "auto_parallelize(model, gpus=…, example_inputs=(tokens,), example_kwargs={…})"
    )


def _for_layer(layer: nn.Module) -> torch.Tensor | None:
    """Eight rows that the layer accepts, without drawing random numbers."""
    if isinstance(layer, nn.Embedding):
        return torch.arange(8 * 8, device=layer.weight.device).remainder(layer.num_embeddings).reshape(8, 8)
    if isinstance(layer, nn.Linear):
        return _ramp((8, layer.in_features), layer.weight)
    for kind, dims in ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)):
        if isinstance(layer, kind):
            return _ramp((8, layer.in_channels, *([32] * dims)), layer.weight)
    return None


def _ramp(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=like.dtype, device=like.device).reshape(shape)
