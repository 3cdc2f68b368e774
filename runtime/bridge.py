"""Ties the outputs of a forward program to autograd: when a gradient arrives, the program's own backward is played.

The parameters are no inputs of the autograd function, for they may be shards; their gradients are put into `.grad` by the store. An anchor
that requires a gradient makes autograd call backward at all. A pipeline's forward has no backward: one that is asked for is refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partitioner.errors import PartitionerError
from partitioner.runtime.executor import Run


class _Bridge(torch.autograd.Function):
    """Outputs: the differentiable leaves of a run. The graph holds the run, and with it the saved values, until backward or its own end."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Run, live: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.run, ctx.live, ctx.leaves = run, live, len(run.outputs)
        ctx.set_materialize_grads(False)
        outputs = tuple(run.outputs[index] for index in live)
        run.outputs.clear()  # else output -> graph -> run -> output would be a circle
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        arrived: list[Tensor | None] = [None] * ctx.leaves
        for index, gradient in zip(ctx.live, gradients, strict=True):
            arrived[index] = gradient
        ctx.run.backward(arrived)
        return None, None, None


class _Refusal(torch.autograd.Function):
    """Outputs of a pipeline: they look as if they could be differentiated, and say why not when they are."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        raise PartitionerError(
            "backward() was called on what parallel(…) returned, but in a pipeline no stage keeps the values that it needs; write "
            "loss = parallel.train_step(…), which leaves the gradients in .grad, and call parallel(…) under torch.no_grad() for its output alone"
        )


def refuse(run: Run) -> list[Any]:
    """The run's outputs, whose backward raises PartitionerError."""
    outputs = list(run.outputs)
    live = [index for index, (ref, _) in enumerate(run.program.outputs) if ref.kind == "value" and outputs[index].is_floating_point()]
    if live:
        with torch.enable_grad():
            attached = _Refusal.apply(torch.zeros((), requires_grad=True), [outputs[index] for index in live])  # type: ignore[no-untyped-call]
        for index, output in zip(live, attached, strict=True):
            outputs[index] = output
    return outputs


def attach(run: Run) -> list[Any]:
    """The run's outputs, attached to autograd where a gradient can come back."""
    outputs = list(run.outputs)
    live = tuple(
        index
        for index, (ref, _) in enumerate(run.program.outputs)
        if ref.kind == "value" and ref.name in run.program.differentiable and outputs[index].is_floating_point()
    )
    if run.program.after and live:
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            attached = _Bridge.apply(anchor, run, live)  # type: ignore[no-untyped-call]
        for index, output in zip(live, attached, strict=True):
            outputs[index] = output
    return outputs
