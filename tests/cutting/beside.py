"""What has no batch, or as many rows: parameters, tables, masks, random numbers, experts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cutting import F64, B, D, Given, T, given


@given("flat")
def parameters_per_sample(p: Given, x: Tensor) -> Tensor:
    return ((x @ p.w) * p.row + p.row).pow(2).mean()


@given("x")
def table_of_positions(p: Given, x: Tensor) -> Tensor:
    return ((x + p.table) @ p.w).pow(2).mean()


@given("tokens")
def learnt_positions(p: Given, tokens: Tensor) -> Tensor:
    h = F.embedding(tokens, p.w) + F.embedding(torch.arange(T), p.table)
    return F.scaled_dot_product_attention(h, h, h, is_causal=True).pow(2).mean()


@given("x")
def expanded_token(p: Given, x: Tensor) -> Tensor:
    h = torch.cat([p.one.expand(B, 1, D), x @ p.w], 1)
    return F.scaled_dot_product_attention(h, h, h)[:, 0].pow(2).mean()


@given("x")
def repeated_token(p: Given, x: Tensor) -> Tensor:
    h = torch.cat([p.one.repeat(B, 1).unsqueeze(1), x @ p.w], 1)
    return h.softmax(1)[:, 0].pow(2).mean() + p.one.repeat_interleave(B, 0).mul(x[:, 0]).mean()


@given("flat")
def initial_state(p: Given, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], D, dtype=F64)
    for _ in range(3):
        h = torch.tanh(h @ p.w + x)
    return h.pow(2).mean()


@given("flat")
def numbered_rows(p: Given, x: Tensor) -> Tensor:
    return ((x @ p.w).sum(1) * torch.arange(B, dtype=F64)).mean() + torch.linspace(0, 1, B, dtype=F64).mul(x.sum(1)).mean() * p.s


@given("x")
def size_as_a_number(p: Given, x: Tensor) -> Tensor:
    return (x @ p.w).pow(2).sum() / x.shape[0] + (x * p.b).sum() / x.numel()


@given("x", "attention")
def mask_without_batch(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    h = x @ p.w
    return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).pow(2).mean()


@given("x", "mask")
def mask_of_rows(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    h = (x @ p.w)[:, None]
    keep = mask[:, None, None, :] | torch.eye(T, dtype=torch.bool)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=keep).pow(2).mean()


@given("flat", "number")
def branch_without_batch(p: Given, x: Tensor, number: Tensor) -> Tensor:
    gate = (p.w @ p.b).sigmoid()
    return ((x @ p.w) * gate).pow(2).mean() + (p.table @ gate).pow(2).sum() * number


@given("flat", "labels", mixes=True)
def table_as_input(p: Given, table: Tensor, labels: Tensor) -> Tensor:
    return F.embedding(labels, table @ p.w).pow(2).mean()


@given("x", mixes=True)
def experts(p: Given, x: Tensor) -> Tensor:
    h = x.reshape(-1, D)
    gate = (h @ p.w).softmax(-1)
    value, index = gate.topk(2, dim=-1)
    out = torch.zeros_like(h)
    for expert in range(3):
        weight = (value * (index == expert)).sum(-1, keepdim=True)
        out = out + weight * (h @ p.w * p.table[expert]).relu()
    importance = gate.mean(0)
    load = F.one_hot(index[:, 0], D).double().mean(0)
    return out.pow(2).mean() + D * (importance * load).sum()


@given("x")
def slots(p: Given, x: Tensor) -> Tensor:
    q = p.table.expand(B, T, D)
    a = (q @ (x @ p.w).mT).softmax(1)
    a = a / a.sum(-1, keepdim=True)
    return (a @ x).pow(2).mean() * p.s


@given("x")
def squeezed(p: Given, x: Tensor) -> Tensor:
    return ((x @ p.w)[:, :1].squeeze(1) - x[..., 0:1].squeeze().mean(1, keepdim=True)).pow(2).mean()


@given("flat", "labels", mixes=True)
def pieces_of_rows(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for part, target in zip((x @ p.w).split(3), labels.split(3), strict=True):  # type: ignore[no-untyped-call]
        total = total + F.cross_entropy(part, target, reduction="sum")
    return total / len(x)


@given("flat")
def random_numbers(p: Given, x: Tensor) -> Tensor:
    h = F.dropout(x @ p.w, 0.3)
    noise = torch.randn(D, dtype=F64)
    rows = torch.rand(B, dtype=F64)
    return (h * noise).pow(2).mean() + (h.sum(1) * rows).mean() + torch.randn_like(p.w).mul(p.w).sum()


@given("flat", mixes=True)
def mixup(p: Given, x: Tensor) -> Tensor:
    order = torch.rand(B, dtype=F64).argsort()
    share = torch.rand((), dtype=F64)
    h = (share * x + (1 - share) * x[order]) @ p.w
    return h.pow(2).mean()


@given("x")
def dropped_rows(p: Given, x: Tensor) -> Tensor:
    keep = (torch.rand(B, 1, 1, dtype=F64) > 0.3).double()
    return ((x @ p.w) * keep / 0.7 + x).pow(2).mean()


@given("flat", rows=None)
def loss_without_rows(p: Given, x: Tensor) -> Tensor:
    return p.w.pow(2).sum()


@given("flat")
def gradient_penalty_by_hand(p: Given, x: Tensor) -> Any:
    h = torch.tanh(x @ p.w)
    slope = (1 - h * h) @ p.w.T
    return h.mean() + (slope.norm(dim=1) - 1).pow(2).mean()


@given("flat", "labels")
def many_losses(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    h = x @ p.w
    onehot = F.one_hot(labels, D).double()
    return (
        F.smooth_l1_loss(h, onehot)
        + F.binary_cross_entropy_with_logits(h, onehot, pos_weight=p.b.detach().abs())
        + F.kl_div(h.log_softmax(-1), onehot.softmax(-1), reduction="batchmean")
        + F.multi_margin_loss(h, labels)
        + F.cosine_embedding_loss(h, x, torch.ones(B, dtype=F64))
        + F.triplet_margin_loss(h, x, onehot)
        + F.nll_loss(h.log_softmax(-1), labels, ignore_index=2)
        + F.cross_entropy(h, labels, label_smoothing=0.1, ignore_index=1)
        + F.l1_loss(h, onehot, reduction="sum")
        + F.cross_entropy(h, onehot.softmax(-1))
    )
