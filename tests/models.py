"""The zoo: MODELS[name]() -> dict(model, args, kwargs, targets, loss_fn and the flags of `tests.zoo.case`), tiny and the same every time.

Also how one trains in a single process, which is what every parallel run is compared with.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tests.zoo import MODELS, Case, losses, plain, sequence, state, vision

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other packages say while they are imported
    from tests.zoo import huggingface

__all__ = ["MODELS", "Case", "Trained", "cast", "clone", "loss_of", "optimizer_of", "rows_of", "train", "train_plain"]
FAMILIES = (plain, losses, vision, sequence, state, huggingface)


def cast(case: Case, dtype: torch.dtype) -> Case:
    """The case with its floating-point parameters, buffers, inputs and targets in `dtype`."""

    def change(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    tensors = {key: tree_map(change, case[key]) for key in ("args", "kwargs", "targets")}
    return {**case, "model": case["model"].to(dtype), **tensors}


def clone(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def rows_of(case: Case) -> int:
    """Rows of the global batch."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves((case["args"], case["kwargs"])) if isinstance(leaf, Tensor) and leaf.dim()]
    dim = case["batch_dim"] if isinstance(case["batch_dim"], int) else 0
    return max(leaf.shape[dim] for leaf in leaves)


def loss_of(case: Case, output: Any) -> Tensor:
    loss: Tensor = output if case["loss_fn"] is None else case["loss_fn"](output, clone(case["targets"]))
    return loss


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Over what trains: AdamW with weight decay, so that a parameter without gradient is seen to stay, or SGD with momentum, for a state."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Trained:
    """What a run leaves, as whole tensors: the loss of each step, the gradients of the last one (None where there is none), the final state."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


def whole(gradient: Tensor | None) -> Tensor | None:
    """A copy of a gradient, joined from all ranks where it is sharded."""
    if gradient is None:
        return None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()


def train(kind: str, model: nn.Module, step: Callable[[], Tensor], state: Callable[[], dict[str, Tensor]], steps: int = 3) -> Trained:
    """The user's loop: `step` computes loss and gradients; step i starts from seed 1000 + i."""
    optimizer, losses, gradients = optimizer_of(kind, model), [], {}
    for number in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(1000 + number)
        losses.append(float(step()))
        if number == steps - 1:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
    return Trained(losses, gradients, {name: value.detach().clone() for name, value in state().items()})


def train_plain(case: Case, kind: str) -> Trained:
    """The plain model in this process."""
    model: nn.Module = case["model"].train()

    def step() -> Tensor:
        loss = loss_of(case, model(*clone(case["args"]), **clone(case["kwargs"])))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return train(kind, model, step, model.state_dict)
