"""A small deep model of equal gated layers, and how the tests of the driver plan it for two CPU ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from partitioner import Plan, make_plan

RANKS = "2 cpu-local"
ROWS = 16


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(2 * width, width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        deep: Tensor = x + self.down(torch.tanh(self.up(h)) * torch.sigmoid(self.gate(h)))
        return deep


class Deep(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, words: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def ids(rows: int = ROWS) -> Tensor:
    return torch.arange(rows * 8).remainder(32).reshape(rows, 8)


def planned(model: nn.Module | None = None, gpus: str = RANKS, **options: Any) -> Plan:
    """A plan of two layers for two ranks, unless told otherwise; the capture is not verified again."""
    given: dict[str, Any] = {"example_inputs": (ids(),), "loss": square, "verify": False, **options}
    return make_plan(Deep() if model is None else model, gpus, **given)
