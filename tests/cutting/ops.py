"""More ops, several to a loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cutting import F64, B, D, Given, T, given


@given("x")
def flat_product(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return torch.dot(h.flatten(), x.flatten()) + h.reshape(-1) @ x.reshape(-1).sin()


@given("x", mixes=True)
def first_numbers(p: Given, x: Tensor) -> Tensor:
    return (x @ p.w).reshape(-1)[:5].pow(2).sum()


@given("flat", "other", mixes=True)
def diagonal(p: Given, x: Tensor, y: Tensor) -> Tensor:
    return torch.diagonal((x @ p.w) @ y.T).pow(2).mean()


@given("flat", mixes=True)
def decision_by_the_batch(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    some, every = (h > 2).any(), (h.sum(1) > -100).all()
    return torch.where(some & every, h.mean(), h.abs().mean()) + h.index_select(0, h[:, 0].argmax()[None]).sum()


@given("x", "mask")
def counts_as_integers(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    kept, count = (x @ p.w)[..., 0] * mask, mask.sum()
    return kept.sum() / count + kept.sum() * (count % 5) / (mask.long().sum() // 2 + 1)


@given("x")
def order_within_rows(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return h.topk(2, dim=1).values.mean() + h.sort(-1).values.cumsum(-1).mean() + h.max(1).values.std(-1).mean()


@given("x")
def layers_of_norms(p: Given, x: Tensor) -> Tensor:
    h = F.layer_norm(x @ p.w, (D,), p.b, p.b) + F.layer_norm(x, (T, D), p.table, p.table)
    h = F.group_norm(h.mT, 3, p.b).mT + F.rms_norm(h, (D,), p.b)
    return F.instance_norm(h.mT, weight=p.b).pow(3).mean() + F.normalize(h, dim=1).mean()


@given("image")
def pictures(p: Given, x: Tensor) -> Tensor:
    kernel = p.w.reshape(4, 3, 3, 1)
    h = F.conv2d(F.pad(x, (1, 1, 0, 0), value=0.5), kernel, stride=(1, 2))
    h = F.conv_transpose2d(h.relu(), kernel) + F.interpolate(h.mean(1, keepdim=True), (5, 4), mode="bilinear")
    return F.max_pool2d(h, 2).pow(2).mean() + F.adaptive_avg_pool2d(h, 1).flatten(1).var(1).mean()


@given("timefirst", "labels")
def last_of_time_first(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    h = F.scaled_dot_product_attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1) @ p.w
    return h[labels % T, torch.arange(B)].pow(2).mean() + h[-1, torch.arange(B), labels].sum()


@given("x", "tokens")
def chosen_tokens(p: Given, x: Tensor, tokens: Tensor) -> Tensor:
    h, at = x @ p.w, torch.arange(B)
    return h[at[:, None], tokens[:, :2] - T].pow(2).mean() + h[at, tokens[:, 0] % T, -tokens[:, 1] - 1].sum() + h[at].mean()


@given("flat", "labels", mixes=True)
def written_by_index(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    h = (x @ p.w).tanh()
    marked = h.index_put((torch.arange(B), labels), torch.zeros((), dtype=F64))
    return (marked * x).mean() + torch.zeros(B, D, dtype=F64).scatter(1, labels[:, None], 1.0).mul(h).sum()


@given("flat", mixes=True)
def weights_without_gradient(p: Given, x: Tensor) -> Tensor:
    each = (x @ p.w).pow(2).mean(1)
    return (each * each.detach().softmax(0)).sum() + (each / each.detach().mean()).mean()


@given("flat", "labels", "tokens")
def tables(p: Given, x: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    h = F.embedding(tokens, p.w, padding_idx=2).sum(1) + F.embedding(labels, p.w.tanh())
    return (h * x).mean() + p.s * F.embedding(labels, p.row)[:, 0].mean()


@given("flat", "vector")
def broadcast_by_hand(p: Given, x: Tensor, v: Tensor) -> Any:
    a, b = torch.broadcast_tensors(v[:, None], p.b)  # type: ignore[no-untyped-call]
    rows, columns = torch.meshgrid(v, p.b, indexing="ij")
    return (a * b * x).mean() + (rows * columns).mean() + (v.unsqueeze(-1).expand_as(x) * x @ p.w).mean()


@given("x")
def many_linear_things(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    total, table = h.sum((0, 1)), h.sum(0)
    moved = torch.roll(total, 1) + F.pad(total[1:], (0, 1)) - total.flip(0) + total.cumsum(0) + (table.T @ p.table).sum(0)
    return (moved * p.b).sum() + torch.stack([total, p.b], 0).sum() + F.linear(total, p.w, p.b).mean() + total[2] + table.mT.reshape(-1)[5]


@given("flat", mixes=True)
def sums_of_sums(p: Given, x: Tensor) -> Tensor:
    total = (x @ p.w).sum(0)
    return F.linear(total.tanh(), p.w, p.b).pow(2).mean() + F.cosine_similarity(total, p.b, dim=0) + total.softmax(0)[0] + total.max()


@given("x")
def sequence_loop(p: Given, x: Tensor) -> Tensor:
    h, states = x.new_zeros(x.shape[0], D), []
    for step in range(T):
        h = torch.tanh(x[:, step] @ p.w + h)
        states.append(h)
    return torch.stack(states, 1).pow(2).mean() + torch.cat(states, -1).mean()


@given("square", mixes=True)
def both_dims_are_the_batch(p: Given, x: Tensor) -> Tensor:
    h = torch.tanh(x * p.s)
    return (h @ h + h.T).pow(2).mean() + torch.trace(h) + h.tril().sum()


@given("x", mixes=True)
def across_rows_by_hand(p: Given, x: Tensor) -> Tensor:
    q = (x @ p.w).mean(1)
    a = F.scaled_dot_product_attention(q[None], q[None], q[None])[0]
    return (a * q).mean()
