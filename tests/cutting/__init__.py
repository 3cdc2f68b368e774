"""Small losses of a batch, each written to break the cutting of the batch.

A case is a function of the parameters and buffers `p`, some of them as long as the batch, and of the inputs it names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

B, T, D = 7, 4, 6
F64 = torch.float64


class Given(nn.Module):
    """Parameters and buffers for a loss function, which is the forward."""

    mean: Tensor
    bank: Tensor

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=F64)

        self.function = function
        self.w, self.b, self.s = nn.Parameter(new(D, D)), nn.Parameter(new(D)), nn.Parameter(new())
        self.row, self.one, self.table = nn.Parameter(new(B, D)), nn.Parameter(new(1, D)), nn.Parameter(new(T, D))
        self.seven = nn.Parameter(new(D, B))
        self.register_buffer("mean", new(D))
        self.register_buffer("bank", new(B, D))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    return {
        "x": new(B, T, D),
        "flat": new(B, D),
        "other": new(B, D),
        "weight": new(B).abs(),
        "mask": (torch.arange(T) < torch.tensor([4, 0, 2, 0, 0, 3, 1])[:, None]),
        "labels": torch.randint(0, D, (B,), generator=generator),
        "tokens": torch.randint(0, D, (B, T), generator=generator),
        "timefirst": new(T, B, D),
        "merged": new(B * T, D),
        "square": new(B, B),
        "number": torch.tensor(0.7, dtype=F64),
        "vector": new(B),
        "ids": torch.randint(0, B, (B,), generator=generator),
        "attention": torch.ones(T, T, dtype=torch.bool).tril(),
        "image": new(B, 3, 5, 5),
        "pairs": new(6, D),
    }


INPUTS = _inputs()


@dataclass(frozen=True)
class Case:
    """A loss function of (p, *inputs). `mixes`: values are gathered or summed in between; `rows`: of the batch that is found (None: none)."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    mixes: bool
    rows: int | None

    def call(self) -> tuple[Given, tuple[Tensor, ...]]:
        return Given(self.function), tuple(INPUTS[name].clone() for name in self.inputs)


CASES: dict[str, Case] = {}


def given(*names: str, mixes: bool = False, rows: int | None = B) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = Case(function, names, mixes, rows)
        return function

    return register
