"""Programs made of a list of numbers: steps over values of three kinds, and ends whose sum is the loss.

A step takes and makes values of kinds "btd", "bd" and "d". Sizes coincide on purpose: 4 rows, 4 steps of time, 6 = 2 x 3 features.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

F64 = torch.float64
STEPS: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("btd", "btd", lambda p, x: x @ p["w"]),
    ("btd", "btd", lambda p, x: torch.tanh(x)),
    ("btd", "btd", lambda p, x: x.softmax(-1)),
    ("btd", "btd", lambda p, x: x.softmax(1) * 2),
    ("btd", "btd", lambda p, x: x.softmax(0) * 2),
    ("btd", "btd", lambda p, x: x - x.mean(0)),
    ("btd", "btd", lambda p, x: x / (x.var((0, 1), unbiased=False) + 0.5).sqrt()),
    ("btd", "btd", lambda p, x: x + p["table"]),
    ("btd", "btd", lambda p, x: x * p["rows"][:, None]),
    ("btd", "btd", lambda p, x: x.masked_fill(p["mask"][..., None], 0.1)),
    ("btd", "btd", lambda p, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    ("btd", "btd", lambda p, x: x.cumsum(1) / 3),
    ("btd", "btd", lambda p, x: x.flip(0)),
    ("btd", "btd", lambda p, x: x.detach() + 0.5 * x),
    ("btd", "btd", lambda p, x: F.dropout(x, 0.25)),
    ("btd", "btd", lambda p, x: (x.transpose(0, 1).reshape(-1, 6) @ p["w"]).view(4, 4, 6).transpose(0, 1)),
    ("btd", "btd", lambda p, x: x.view(4, 4, 2, 3).transpose(1, 2).reshape(8, 4, 3).softmax(1).view(4, 2, 4, 3).transpose(1, 2).flatten(2)),
    ("btd", "btd", lambda p, x: torch.cat([x, x.tanh()]).chunk(2)[1]),
    ("btd", "btd", lambda p, x: torch.cat([x[:, 1:], p["table"][:1].expand(4, 1, 6)], 1)),
    ("btd", "btd", lambda p, x: F.layer_norm(x, (6,), p["d"])),
    ("btd", "btd", lambda p, x: F.embedding(p["tokens"], p["w"]) * x),
    ("btd btd", "btd", lambda p, x, y: x * y),
    ("btd btd", "btd", lambda p, x, y: torch.where(p["mask"][..., None], x, y)),
    ("btd btd", "btd", lambda p, x, y: (x @ y.mT).softmax(-1) @ y),
    ("btd", "bd", lambda p, x: x.mean(1)),
    ("btd", "bd", lambda p, x: x[:, -1]),
    ("btd", "bd", lambda p, x: x[torch.arange(4), p["labels"] % 4]),
    ("btd", "bd", lambda p, x: x.amax(1)),
    ("bd", "bd", lambda p, x: x @ p["w"]),
    ("bd", "bd", lambda p, x: F.batch_norm(x, None, None, p["d"], training=True)),
    ("bd", "bd", lambda p, x: x[p["labels"] % 4]),
    ("bd", "bd", lambda p, x: x.sort(0).values),
    ("bd bd", "bd", lambda p, x, y: (x @ y.T).softmax(1) @ y),
    ("bd bd", "bd", lambda p, x, y: x + y.roll(1, 0)),
    ("bd", "d", lambda p, x: x.mean(0)),
    ("bd", "d", lambda p, x: x.sum(0) / 4),
    ("bd", "d", lambda p, x: torch.zeros(6, 6, dtype=F64).index_add(0, p["labels"], x).mean(0)),
    ("btd", "d", lambda p, x: x.sum((0, 1)) / p["mask"].sum().clamp(min=1)),
    ("d", "d", lambda p, x: torch.tanh(x * p["d"])),
    ("d", "d", lambda p, x: F.linear(x, p["w"], p["d"])),
    ("d d", "d", lambda p, x, y: x * y),
    ("btd d", "btd", lambda p, x, y: x * y + y),
    ("bd d", "bd", lambda p, x, y: x - y),
    ("bd btd", "btd", lambda p, x, y: x[:, None] + y),
]
ENDS: list[Callable[..., Tensor]] = [
    lambda p, x: x.tanh().mean(),
    lambda p, x: x.tanh().sum() / 7,
    lambda p, x: x.pow(2).mean().add(1).log(),
    lambda p, x: (x.sin() * p["d"]).sum() / p["d"].pow(2).sum(),
    lambda p, x: F.cross_entropy(x.reshape(-1, 6), p["tokens"].flatten()[: x.numel() // 6]),
    lambda p, x: x.abs().max(),
    lambda p, x: x.std() if x.numel() > 1 else x.sum(),
]


class Program(nn.Module):
    """A list of (step, which values), then a list of (end, which value); the loss is the sum of the ends."""

    def __init__(self, steps: list[tuple[int, int, int]], ends: list[tuple[int, int]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.steps, self.ends = steps, ends
        self.w, self.table = nn.Parameter(self.new(generator, 6, 6)), nn.Parameter(self.new(generator, 4, 6))
        self.rows, self.d = nn.Parameter(self.new(generator, 4, 6)), nn.Parameter(self.new(generator, 6))

    @staticmethod
    def new(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64) / 2

    def forward(self, x: Tensor, mask: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        p = {"w": self.w, "table": self.table, "rows": self.rows, "d": self.d, "mask": mask, "tokens": tokens, "labels": labels}
        values: dict[str, list[Tensor]] = {"btd": [x], "bd": [x.sum(1)], "d": [self.d.tanh()]}
        for step, *which in self.steps:
            takes, makes, function = STEPS[step]
            given = [values[kind][which[at] % len(values[kind])] for at, kind in enumerate(takes.split())]
            values[makes].append(function(p, *given))
        every = [value for kind in values.values() for value in kind[::-1]]
        loss: Tensor = sum(ENDS[end](p, every[which % len(every)]) for end, which in self.ends)  # type: ignore[assignment]
        return loss


def program_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)
    return (
        torch.randn(4, 4, 6, generator=generator, dtype=F64),
        mask,
        torch.randint(0, 6, (4, 4), generator=generator),
        torch.randint(0, 6, (4,), generator=generator),
    )
