"""Rows that meet: contrastive losses, statistics of the batch, order, indices, memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cutting import F64, B, D, Given, given


@given("flat", "other", mixes=True)
def contrastive(p: Given, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(x @ p.w, dim=-1), F.normalize(y @ p.w, dim=-1)
    logits = a @ b.T * p.s.exp()
    at = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2


@given("flat", "other", mixes=True)
def two_views(p: Given, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(torch.cat([x @ p.w, y @ p.w]), dim=-1)
    scores = (z @ z.T).masked_fill(torch.eye(2 * B, dtype=torch.bool), -1e9)
    at = (torch.arange(2 * B) + B) % (2 * B)
    return F.cross_entropy(scores, at)


@given("flat", "other")
def two_views_in_one_net(p: Given, x: Tensor, y: Tensor) -> Tensor:
    a, b = (torch.cat([x, y]) @ p.w).tanh().chunk(2)
    return (a - b).pow(2).mean() + (a * b).sum(-1).mean()


@given("flat", mixes=True)
def softmax_over_the_batch(p: Given, x: Tensor) -> Tensor:
    return ((x @ p.w).softmax(0) * x).sum()


@given("flat", mixes=True)
def sorted_by_score(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    order = h[:, 0].argsort()
    return (h[order] * torch.arange(B, dtype=F64)[:, None]).mean()


@given("flat", mixes=True)
def running_sum(p: Given, x: Tensor) -> Tensor:
    return (x @ p.w).cumsum(0).pow(2).mean()


@given("flat", mixes=True)
def reversed_rows(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h * h.flip(0)).mean()


@given("flat", mixes=True)
def rolled_rows(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h - h.roll(1, 0)).pow(2).mean()


@given("flat", mixes=True)
def neighbours(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h[1:] - h[:-1]).pow(2).mean()


@given("flat", mixes=True)
def first_rows(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return h[:3].pow(2).mean() + h[-1].sum()


@given("flat", mixes=True)
def unequal_halves(p: Given, x: Tensor) -> Any:
    a, b = (x @ p.w).split([3, 4])  # type: ignore[no-untyped-call]
    return a.pow(2).mean() - b.mean()


@given("flat", "other", mixes=True)
def distances(p: Given, x: Tensor, y: Tensor) -> Tensor:
    a, b = x @ p.w, y @ p.w
    return torch.cdist(a, b).mean() + (a[:, None] - b[None]).pow(2).sum(-1).add(1).log().mean()


@given("flat", mixes=True)
def distances_of_itself(p: Given, x: Tensor) -> Tensor:
    a = x @ p.w
    d = (a[:, None] - a[None]).pow(2).sum(-1)
    return torch.exp(-d).sum() / B**2


@given("flat", "square", mixes=True)
def pairwise_weights(p: Given, x: Tensor, weights: Tensor) -> Tensor:
    a = x @ p.w
    return (a @ a.T * weights).mean()


@given("flat", "square", mixes=True)
def graph_of_rows(p: Given, x: Tensor, adjacency: Tensor) -> Tensor:
    h = (adjacency.softmax(1) @ (x @ p.w)).relu()
    return (adjacency.T @ h).pow(2).mean()


@given("flat", "ids", mixes=True)
def gathered_rows(p: Given, x: Tensor, ids: Tensor) -> Tensor:
    h = x @ p.w
    return (h[ids] - h).pow(2).mean() + h.index_select(0, ids).sum() + h.gather(0, ids[:, None].expand(B, D)).sum()


@given("flat", "ids", mixes=True)
def scattered_rows(p: Given, x: Tensor, ids: Tensor) -> Tensor:
    h = x @ p.w
    added = torch.zeros_like(h).index_add(0, ids, h)
    spread = torch.zeros(B, D, dtype=F64).scatter_add(0, ids[:, None].expand(B, D), h)
    return (added * x).sum() + spread.pow(2).mean()


@given("flat", "labels", mixes=True)
def sums_by_class(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    centres = torch.zeros(D, D, dtype=F64).index_add(0, labels, x @ p.w)
    return centres.pow(2).mean() + F.one_hot(labels, D).double().T.matmul(x @ p.w).abs().sum()


@given("flat", "labels")
def own_column(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    logits = (x @ p.w).log_softmax(-1)
    return -logits[torch.arange(B), labels].mean()


@given("x", "mask")
def last_token(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    h = x @ p.w
    last = mask.sum(1) - 1
    return h[torch.arange(B), last].pow(2).mean()


@given("x", "tokens")
def gathered_in_the_row(p: Given, x: Tensor, tokens: Tensor) -> Tensor:
    logits = (x @ p.w).log_softmax(-1)
    return -logits.gather(-1, tokens[..., None]).squeeze(-1).mean()


@given("flat", mixes=True)
def norm_over_the_batch(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    h = (h - h.mean(0, keepdim=True)) / (h.var(0, keepdim=True, unbiased=False) + 1e-5).sqrt()
    return (h * p.b).pow(3).mean()


@given("flat", mixes=True)
def batch_norm(p: Given, x: Tensor) -> Tensor:
    h = F.batch_norm(x @ p.w, None, None, p.b, p.b, training=True)
    return h.pow(3).mean()


@given("flat", mixes=True)
def detached_statistics(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    m, v = h.mean(0).detach(), h.detach().var(0)
    return ((h - m) / (v + 1e-5).sqrt()).pow(3).mean()


@given("flat", mixes=True)
def detached_rows(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h - h.mean(0).detach() * h.detach().softmax(-1)).pow(2).mean()


@given("flat", mixes=True)
def centre_moves(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    with torch.no_grad():
        p.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return (h - p.mean).pow(2).mean()


@given("flat", mixes=True)
def memory_bank(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    loss = (h @ p.bank.T).logsumexp(1).mean()
    with torch.no_grad():
        p.bank.copy_(0.5 * p.bank + 0.5 * h)
    return loss


@given("flat", mixes=True)
def norm_of_everything(p: Given, x: Tensor) -> Any:
    h = x @ p.w
    return (h / h.norm()).pow(3).sum() + h.norm(dim=0).sum() + torch.linalg.vector_norm(h, ord=1) / h.abs().max()


@given("flat", mixes=True)
def median_and_quantile(p: Given, x: Tensor) -> Tensor:
    h = (x @ p.w).sum(1)
    return h.median() + h.quantile(0.3) + h.logsumexp(0) + h.prod()


@given("flat", mixes=True)
def gram_then_inverse(p: Given, x: Tensor) -> Any:
    h = x @ p.w
    gram = h.T @ h + torch.eye(D, dtype=F64)
    return torch.linalg.solve(gram, h.T @ x).pow(2).sum() + torch.logdet(gram)


@given("vector", "weight", mixes=True)
def correlation(p: Given, x: Tensor, y: Tensor) -> Any:
    x = (x * p.s).tanh()
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / (x.norm() * y.norm())


@given("vector")
def inputs_of_one_dim(p: Given, x: Tensor) -> Tensor:
    return (x * p.s).sigmoid().log().mean() + torch.dot(x * p.s, x)


@given("flat", mixes=True)
def outer_product(p: Given, x: Tensor) -> Tensor:
    h = (x @ p.w).sum(1)
    return torch.outer(h, h).tril().sum()
