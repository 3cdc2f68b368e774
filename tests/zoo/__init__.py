"""How a small model enters the zoo: a function that builds model, inputs and loss from one seed, and what is particular about it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Case = dict[str, Any]
MODELS: dict[str, Callable[[], Case]] = {}


def case(
    *, mixes_batch: bool = False, random: bool = False, batch_dim: int | str = "auto", fp32: float = 1e-5, fp64: float = 1e-9
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a function that returns dict(model, args, and where they are not empty kwargs, targets, loss_fn).

    `loss_fn(output, targets)`, or absent where the model returns its loss. The made dict also holds the flags:
    mixes_batch: one row's result depends on other rows, so that cutting the batch in time may be refused;
    random: draws random numbers in forward, so that several ranks can only be compared with themselves;
    batch_dim: what to pass as `batch_dim=`; fp32, fp64: relative tolerances against one process, where rounding inside the model needs another.
    """

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        flags: Case = {"mixes_batch": mixes_batch, "random": random, "batch_dim": batch_dim, "fp32": fp32, "fp64": fp64}

        @wraps(make)
        def seeded() -> Case:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return {"kwargs": {}, "targets": None, "loss_fn": None, **flags, **make()}

        MODELS[make.__name__] = seeded
        return seeded

    return register


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits[..., vocabulary] over all tokens."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
