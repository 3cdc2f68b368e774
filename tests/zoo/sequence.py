"""Recurrences, scans, convolutions in time, experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Case, case, token_loss


class Recurrent(nn.Module):
    def __init__(self, vocabulary: int = 30, dim: int = 8) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, batch_first=True, bidirectional=True)
        self.gru, self.cell = nn.GRU(2 * dim, dim, batch_first=True), nn.RNNCell(dim, dim)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        x, (hidden, memory) = self.lstm(self.embedding(tokens))
        x, _ = self.gru(x, start.transpose(0, 1).contiguous())
        h, outputs = hidden[-1] + memory[0], []
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


@case()
def lstm_and_gru() -> Case:
    args = (torch.randint(0, 30, (7, 4)), torch.randn(7, 1, 8))
    return {"model": Recurrent(), "args": args, "targets": torch.randint(0, 30, (7, 4)), "loss_fn": token_loss}


class SelectiveScan(nn.Module):
    """The recurrence h[t] = exp(dt A) h[t-1] + dt B x[t], y[t] = C h[t], with dt, B and C made from x (Gu and Dao, 2023)."""

    def __init__(self, dim: int = 8, states: int = 4) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=2, groups=dim)
        self.select, self.step = nn.Linear(dim, 2 * states), nn.Linear(dim, dim)
        self.log_a, self.skip = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(dim, 1)), nn.Parameter(torch.ones(dim))

    def forward(self, u: Tensor) -> Tensor:
        x, gate = self.inner(self.norm(u)).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        b, c = self.select(x).chunk(2, -1)
        step = F.softplus(self.step(x))
        decay = torch.exp(-step.unsqueeze(-1) * self.log_a.exp())
        drive = (step * x).unsqueeze(-1) * b.unsqueeze(2)
        h, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(u.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            outputs.append(torch.einsum("bds,bs->bd", h, c[:, t]))
        y = torch.stack(outputs, 1) + x * self.skip
        return u + self.out(y * F.silu(gate))


@case()
def selective_scan() -> Case:
    model = nn.Sequential(nn.Embedding(30, 8), SelectiveScan(), SelectiveScan(), nn.Linear(8, 30))
    return {"model": model, "args": (torch.randint(0, 30, (6, 5)),), "targets": torch.randint(0, 30, (6, 5)), "loss_fn": token_loss}


class DenseExperts(nn.Module):
    """Every expert sees every token; the router's probabilities, zero beyond the best two, weight them."""

    def __init__(self, dim: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(dim, experts, bias=False), nn.LayerNorm(dim)
        self.up, self.down = nn.Parameter(torch.randn(experts, dim, 16) * 0.2), nn.Parameter(torch.randn(experts, 16, dim) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        best, which = self.router(z).softmax(-1).topk(2, dim=-1)
        weight = torch.zeros_like(self.router(z)).scatter(-1, which, best / best.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("btd,edf->btef", z, self.up))
        return x + torch.einsum("btef,efd,bte->btd", hidden, self.down, weight)


@case()
def dense_experts() -> Case:
    model = nn.Sequential(nn.Embedding(30, 8), DenseExperts(), DenseExperts(), nn.Linear(8, 30))
    return {"model": model, "args": (torch.randint(0, 30, (6, 5)),), "targets": torch.randint(0, 30, (6, 5)), "loss_fn": token_loss}
