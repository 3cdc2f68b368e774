"""A small model with everything that a checkpoint must keep apart, and how ranks train, save and load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import auto_parallelize
from partitioner.runtime.checkpoint import save
from partitioner.runtime.module import ParallelModule
from partitioner.runtime.together import Peers

ROWS = 12


class Model(nn.Module):
    """Ties, a buffer that trains, a frozen, an unused, a 0-dim and a one-row parameter, rows that no number of ranks divides."""

    def __init__(self, dropout: float = 0.0, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.hidden = nn.Linear(width, 7)
        self.back = nn.Linear(7, width)
        self.back.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.zeros(1, width))
        self.idle = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(dropout)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids)) * self.scale + self.one
        logits: Tensor = self.head(self.back(torch.tanh(self.dropout(self.hidden(x)))))
        return nn.functional.cross_entropy(logits, ids.roll(1))


def batch(step: int) -> Tensor:
    return torch.randint(11, (ROWS,), generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which one has another learning rate."""
    named = dict(model.named_parameters())
    first = [named.pop("hidden.weight"), named.pop("scale")]
    groups: list[dict[str, Any]] = [{"params": first, "lr": 0.02}, {"params": list(named.values())}]
    return torch.optim.AdamW(groups, lr=0.01)


Pins = str | dict[str, Any]
"""Constraints, or the shard level alone."""


def place(model: nn.Module, ranks: int, pins: Pins) -> ParallelModule:
    constraints = {"shard": pins} if isinstance(pins, str) else pins
    return auto_parallelize(model, gpus=ranks, example_inputs=(batch(0),), constraints=constraints, verify=False)


def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> list[float]:
    """Train; the learning rate falls, as a schedule makes it."""
    losses = []
    for step in numbers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if isinstance(model, ParallelModule):
            loss = model.train_step(batch(step))
        else:
            loss = model(batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_and_save(ranks: int, pins: Pins, folder: Path, numbers: Sequence[int], more: Sequence[int] = (), dropout: float = 0.0) -> list[float]:
    """Train, save, and go on undisturbed; the losses after saving."""
    torch.manual_seed(5)
    parallel = place(Model(dropout), ranks, pins)
    optimizer = adamw(parallel)
    steps(parallel, optimizer, numbers)
    saved = parallel.save(folder, optimizer)
    assert saved.parent == folder and saved.name.endswith(f"step-{len(numbers)}")
    return steps(parallel, optimizer, more)


def load_and_train(ranks: int, pins: Pins, folder: Path, numbers: Sequence[int], save: bool = False, dropout: float = 0.0) -> list[float]:
    """Load into a model that starts elsewhere, and go on."""
    model = Model(dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    torch.manual_seed(99)
    parallel = place(model, ranks, pins)
    optimizer = adamw(parallel)
    assert parallel.load(folder, optimizer) > 0
    losses = steps(parallel, optimizer, numbers)
    if save:
        parallel.save(folder, optimizer)
    return losses


def train_plain(numbers: Sequence[int]) -> list[float]:
    model = Model()
    return steps(model, adamw(model), numbers)


def save_plain(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int = 1, peers: Peers | None = None) -> Path:
    """As `parallel.save` does, without ranks unless `peers` says so."""
    return save(folder, model, optimizer, step, "", peers or Peers(), torch.device("cpu"))
