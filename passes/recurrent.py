"""LSTM, GRU and RNN as one opaque op with a derivative that computes the forward again.

torch's own kernels keep a workspace between forward and backward whose size only the kernel knows (oneDNN), or unroll into ops per time step; neither
can be planned. Here forward saves nothing but its inputs, whose sizes are known, and backward runs torch's own forward and backward on them: the same
kernels as eager, on every device, for one more forward of the layer. Batches without rows, which those kernels refuse, give zeros.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.errors import CaptureError

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@torch.library.custom_op("partitioner::recurrent", mutates_args=())
def recurrent(
    kind: str,
    input: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """The output and the last states. `state` is [h] or [h, c] as aten.gru and aten.lstm take them, `weights` their flat parameters."""
    if input.numel() == 0:
        return [torch.zeros_like(one) for one in _empty(input, state, bidirectional)]
    results = _call(kind, input, state, weights, (biases, layers, 0.0, train, bidirectional, batch_first))
    return [results[0].contiguous(), *(one.clone(memory_format=torch.contiguous_format) for one in results[1:])]


def _empty(input: Tensor, state: Sequence[Tensor], bidirectional: bool) -> list[Tensor]:
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return [input.new_empty((*input.shape[:-1], width)), *(input.new_empty(one.shape) for one in state)]


def _call(kind: str, input: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    op = getattr(torch.ops.aten, kind).input
    return op(input, list(state) if kind == "lstm" else state[0], list(weights), *options)  # type: ignore[no-any-return]


@recurrent.register_fake
def _(kind, input, state, weights, biases, layers, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
    return _empty(input, state, bidirectional)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside of a kernel, where it is switched off."""
    names = ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradPrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - keys), torch.enable_grad():
        yield


@torch.library.custom_op("partitioner::recurrent_backward", mutates_args=())
def recurrent_backward(
    gradients: Sequence[Tensor | None],
    kind: str,
    input: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Gradients of the input, the states and the weights, from those of the results (None: no gradient arrives)."""
    given = [input, *state, *weights]
    if input.numel() == 0:
        return [torch.zeros_like(one, memory_format=torch.contiguous_format) for one in given]
    with _autograd():
        leaves = [one.detach().requires_grad_() for one in given]
        split = 1 + len(state)
        results = _call(kind, leaves[0], leaves[1:split], leaves[split:], (biases, layers, 0.0, train, bidirectional, batch_first))
        arrived = [(result, gradient) for result, gradient in zip(results, gradients, strict=True) if gradient is not None]
        found = torch.autograd.grad([r for r, _ in arrived], leaves, [g for _, g in arrived], allow_unused=True)
    made: list[Tensor] = []
    for one, gradient in zip(given, found, strict=True):
        own = torch.zeros_like(one) if gradient is None else gradient.clone()
        made.append(own.contiguous())
    return made


@recurrent_backward.register_fake
def _(gradients, kind, input, state, weights, biases, layers, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (input, *state, *weights)]


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    kind, input, state, weights, *options = inputs
    ctx.kind, ctx.options, ctx.states = kind, options, len(state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, *state, *weights)


def _derive(ctx, gradients):  # type: ignore[no-untyped-def]
    input, *rest = ctx.saved_tensors
    state, weights = rest[: ctx.states], rest[ctx.states :]
    found = recurrent_backward(gradients, ctx.kind, input, state, weights, *ctx.options)
    return (None, found[0], found[1 : 1 + ctx.states], found[1 + ctx.states :], *(None for _ in ctx.options))


recurrent.register_autograd(_derive, setup_context=_keep)


def opaque(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Run `aten.lstm.input` and its kin as the opaque op; None where the op is none of them."""
    kind = next((kind for kind in _KINDS if target is getattr(torch.ops.aten, kind).input), None)
    if kind is None:
        return None
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given["dropout"] and given["train"]:
        raise CaptureError(f"{target} draws its dropout inside; capture writes one op a layer with dropout between them")
    hidden = given["hx"]
    state = list(hidden) if isinstance(hidden, (list, tuple)) else [hidden]
    options = (given[name] for name in ("has_biases", "num_layers", "train", "bidirectional", "batch_first"))
    return tuple(recurrent(kind, given["input"], state, list(given["params"]), *options))
