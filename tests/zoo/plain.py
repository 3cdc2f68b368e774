"""Networks of few kinds of layer, and every shape of input, output and batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Case, case, token_loss


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def perceptron(inputs: int = 10, outputs: int = 5, layers: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 12), *(Residual(12) for _ in range(layers)), nn.Linear(12, outputs))


@case()
def mlp() -> Case:
    return {"model": perceptron(), "args": (torch.randn(13, 10),), "targets": torch.randint(0, 5, (13,)), "loss_fn": F.cross_entropy}


@case()
def seven_rows() -> Case:
    return {"model": perceptron(), "args": (torch.randn(7, 10),), "targets": torch.randn(7, 5), "loss_fn": F.mse_loss}


@case()
def two_rows() -> Case:
    return {"model": perceptron(), "args": (torch.randn(2, 10),), "targets": torch.randn(2, 5), "loss_fn": F.smooth_l1_loss}


@case()
def one_row() -> Case:
    return {"model": perceptron(), "args": (torch.randn(1, 10),), "targets": torch.randint(0, 5, (1,)), "loss_fn": F.cross_entropy}


class TiedLanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 67, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@case()
def tied_language_model() -> Case:
    return {"model": TiedLanguageModel(), "args": (torch.randint(0, 67, (13, 6)),), "targets": torch.randint(0, 67, (13, 6)), "loss_fn": token_loss}


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.block, self.head = nn.Embedding(30, 12), nn.Embedding(9, 12), Residual(12), nn.Linear(12, 30)

    def forward(self, *, tokens: Tensor, positions: Tensor, gate: Tensor | None = None) -> Tensor:
        h = self.block(self.token(tokens) + self.position(positions))
        return self.head(h if gate is None else h * gate.unsqueeze(-1))


@case()
def keywords_only() -> Case:
    kwargs = {"gate": torch.rand(12, 9), "positions": torch.arange(9).expand(12, 9).contiguous(), "tokens": torch.randint(0, 30, (12, 9))}
    return {"model": KeywordsOnly(), "args": (), "kwargs": kwargs, "targets": torch.randint(0, 30, (12, 9)), "loss_fn": token_loss}


class NestedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.gates = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden, pairs = [x], []
        for layer, gate in zip(self.layers, self.gates, strict=True):
            pairs.append((torch.tanh(layer(x)), torch.sigmoid(gate(x))))
            x = x + pairs[-1][0] * pairs[-1][1]
            hidden.append(x)
        return {"logits": self.head(x), "hidden": tuple(hidden), "more": {"pairs": pairs, "nothing": None}}


def nested_loss(output: dict[str, Any], targets: Tensor) -> Tensor:
    penalty = sum(h.pow(2).mean() for h in output["hidden"]) + sum((a - b).abs().mean() for a, b in output["more"]["pairs"])
    return F.cross_entropy(output["logits"], targets) + 0.1 * penalty


@case()
def nested_output() -> Case:
    return {"model": NestedOutput(), "args": (torch.randn(13, 12),), "targets": torch.randint(0, 5, (13,)), "loss_fn": nested_loss}


class NestedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.city, self.day, self.image, self.head = (
            nn.Linear(5, 12), nn.Embedding(10, 12), nn.Embedding(7, 12), nn.Conv2d(1, 12, 3), nn.Linear(12, 3)
        )  # fmt: skip

    def forward(self, batch: dict[str, Any], scale: float) -> Tensor:
        h = sum(self.dense(x) for x in batch["dense"]) / len(batch["dense"])
        h = h + self.city(batch["sparse"]["city"]) + self.day(batch["sparse"]["day"])
        picture, weight = batch["image"]
        h = h + self.image(picture).mean((2, 3)) * weight
        return self.head(torch.tanh(h) if batch["mode"] == "tanh" else h) * scale


@case()
def nested_input() -> Case:
    sparse = {"day": torch.randint(0, 7, (12,)), "city": torch.randint(0, 10, (12,))}
    image = (torch.randn(12, 1, 6, 6), torch.rand(1))
    batch = {"sparse": sparse, "dense": [torch.randn(12, 5) for _ in range(3)], "image": image, "mode": "tanh", "absent": None}
    return {"model": NestedInput(), "args": (batch, 1.5), "targets": torch.randint(0, 3, (12,)), "loss_fn": F.cross_entropy}


class UnusedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.levels = nn.Linear(10, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.heads, self.never_called = nn.ModuleList(nn.Linear(12, 2) for _ in range(4)), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> list[Tensor]:
        h, outputs = self.stem(x), []
        for level, head in zip(self.levels, self.heads, strict=True):
            h = torch.relu(level(h))
            outputs.append(head(h))
        return outputs


def first_outputs_loss(outputs: list[Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], targets) + F.mse_loss(outputs[2], targets)


@case()
def unused_parameters() -> Case:
    return {"model": UnusedParameters(), "args": (torch.randn(13, 10),), "targets": torch.randn(13, 2), "loss_fn": first_outputs_loss}


class LowRank(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs) * 0.1), nn.Parameter(torch.randn(outputs, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@case()
def frozen_with_adapters() -> Case:
    blocks = (nn.Sequential(nn.LayerNorm(12), LowRank(12, 24), nn.GELU(), LowRank(24, 12)) for _ in range(2))
    model = nn.Sequential(nn.Embedding(30, 12).requires_grad_(False), *blocks, nn.Linear(12, 30))
    return {"model": model, "args": (torch.randint(0, 30, (14, 5)),), "targets": torch.randint(0, 30, (14, 5)), "loss_fn": token_loss}


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[0]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=tokens.device, dtype=self.embedding.weight.dtype), 1)
        h = self.embedding(tokens)
        for layer in self.encoder:
            h = layer(h, src_mask=mask)
        return self.head(h)


@case(batch_dim=1)
def sequence_first() -> Case:
    return {"model": SequenceFirst(), "args": (torch.randint(0, 30, (6, 12)),), "targets": torch.randint(0, 30, (6, 12)), "loss_fn": token_loss}


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, dim))


class SharedMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.blocks = nn.ModuleList(MaskedAttention() for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        h = self.embedding(tokens) + positions
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)


@case()
def mask_as_long_as_the_batch() -> Case:
    tokens, mask = torch.randint(0, 30, (12, 12)), torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    kwargs = {"mask": mask, "positions": torch.randn(12, 16) * 0.1}
    return {"model": SharedMask(), "args": (tokens,), "kwargs": kwargs, "targets": torch.randint(0, 30, (12, 12)), "loss_fn": token_loss}
