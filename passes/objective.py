"""What is trained: the scalar loss of one call of the user's model, with or without the user's own loss function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.errors import CaptureError


def own_loss(output: Any) -> Tensor:
    """The loss in the output of a model that computes it itself: a scalar tensor, `.loss`, key "loss", or a scalar first element."""
    candidate = output
    if not isinstance(output, Tensor):
        candidate = getattr(output, "loss", None)
        if candidate is None and isinstance(output, dict):
            candidate = output.get("loss")
        if candidate is None and isinstance(output, (tuple, list)) and output:
            candidate = output[0]
    if isinstance(candidate, Tensor) and candidate.numel() == 1:
        return candidate
    found = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__qualname__}"
    raise CaptureError(
        f"no loss was given and the model returns {found}, in which no scalar loss can be found. "
        "Pass loss=callable(output) or loss=callable(output, targets) with example_targets=…, or let the model return its loss "
        "(a scalar, .loss, or the first of a tuple), for a Hugging Face model by passing labels."
    )


def _called(loss: Callable[..., Any], output: Any, *targets: Any) -> Any:
    """The user's loss; where it fails, of what."""
    try:
        return loss(output, *targets)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if type(error).__module__ != "builtins":  # tracing has exceptions of its own, which say more
            raise
        given = " and ".join(f"{name} {_shape(value)}" for name, value in zip(("an output", "targets"), (output, *targets), strict=False))
        hint = "" if targets else ". If it takes targets, pass example_targets=… as well"
        raise CaptureError(f"loss fails on {given}: {type(error).__name__}: {str(error).strip().splitlines()[0]}{hint}") from error


def _shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__qualname__}"


def objective(model: nn.Module, args: Any, kwargs: Any, loss: Callable[..., Any] | None, targets: Any, has_targets: bool) -> Tensor:
    """The loss as a tensor of shape (), raising CaptureError where it is no scalar floating-point tensor."""
    output = model(*args, **kwargs)
    value: Any = own_loss(output) if loss is None else _called(loss, output, *([targets] if has_targets else []))
    if not isinstance(value, Tensor):
        raise CaptureError(f"loss returned a {type(value).__qualname__}, not a tensor; return the scalar tensor to minimise.")
    if value.numel() != 1:
        raise CaptureError(f"loss returned a tensor of shape {tuple(value.shape)}; backward needs one number. Reduce it: .mean() or .sum().")
    if not value.dtype.is_floating_point:
        raise CaptureError(f"loss returned a tensor of {value.dtype}, through which no gradient flows; return a floating-point tensor.")
    return value if value.ndim == 0 else torch.reshape(value, ())
