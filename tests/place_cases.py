"""Small losses of a batch, each written to break the cutting of the batch.

A case is a function of the parameters `p` (w, b, s, some of them as long as the batch, and buffers) and of the inputs it names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, D = 7, 4, 6
F64 = torch.float64


class Given(nn.Module):
    """Parameters and buffers for a loss function, which is the forward."""

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


# --- losses of several terms ---------------------------------------------------------------------------------------


@given("x")
def mean_sum_and_penalty(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return h.pow(2).mean() + 0.1 * h.abs().sum() + 0.01 * p.w.pow(2).sum() + p.s


@given("flat", "other")
def product_of_means(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x @ p.w).mean() * (y @ p.w).mean()


@given("flat", "other")
def ratio_of_means(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x @ p.w).mean() / (y * p.b).pow(2).mean()


@given("flat", mixes=True)
def square_of_a_mean(p: Any, x: Tensor) -> Tensor:
    m = (x @ p.w).mean()
    return m * m + m


@given("flat", mixes=True)
def root_mean_square(p: Any, x: Tensor) -> Tensor:
    return F.mse_loss(x @ p.w, x).sqrt()


@given("flat", mixes=True)
def log_of_a_mean(p: Any, x: Tensor) -> Tensor:
    return (x @ p.w).pow(2).mean().log()


@given("flat", mixes=True)
def largest_of_the_batch(p: Any, x: Tensor) -> Tensor:
    return (x @ p.w).sum(1).max()


@given("flat", mixes=True)
def hardest_rows(p: Any, x: Tensor) -> Tensor:
    return (x @ p.w).pow(2).sum(1).topk(3).values.mean()


@given("flat", mixes=True)
def variance_over_the_batch(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return h.var(0).sum() + h.std() + h.var(0, unbiased=False).mean()


@given("flat", mixes=True)
def covariance(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    h = h - h.mean(0)
    c = h.T @ h / (h.shape[0] - 1)
    return (c - torch.eye(D, dtype=F64)).pow(2).sum()


@given("flat", "weight")
def weighted_by_input(p: Any, x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ p.w).pow(2).mean(1) * weight).sum() / weight.sum()


@given("flat", "weight")
def weights_normalised_first(p: Any, x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ p.w).pow(2).mean(1) * (weight / weight.sum())).sum()


@given("flat", mixes=True)
def weights_of_the_model(p: Any, x: Tensor) -> Tensor:
    weight = (x @ p.w)[:, 0].sigmoid()
    return ((x * p.b).sum(1) * weight).sum() / weight.sum()


@given("x", "mask")
def mean_over_a_mask(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    each = (x @ p.w).pow(2).mean(-1)
    return (each * mask).sum() / mask.sum()


@given("x", "mask")
def mean_per_row_then_over_rows(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    each = (x @ p.w).pow(2).mean(-1) * mask
    return (each.sum(1) / mask.sum(1).clamp(min=1)).mean()


@given("x", "mask")
def filled_mask(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = (x @ p.w).masked_fill(~mask[..., None], 0.0)
    return torch.where(mask[..., None], h, p.b).mean()


@given("flat", "number")
def scalar_input(p: Any, x: Tensor, number: Tensor) -> Tensor:
    return (x @ p.w).mean() * number + number


@given("flat")
def sum_over_parameters_and_rows(p: Any, x: Tensor) -> Tensor:
    return torch.stack([(x @ p.w).mean(), p.w.norm(), (x * p.b).sum()]).sum()


@given("flat", mixes=True)
def max_of_two_terms(p: Any, x: Tensor) -> Tensor:
    return torch.maximum((x @ p.w).mean(), (x * p.b).mean())


@given("flat", mixes=True)
def means_of_rows_stacked(p: Any, x: Tensor) -> Tensor:
    return torch.cat([(x @ p.w).mean(0), p.b]).pow(2).sum()


@given("flat", rows=None)
def loss_per_sample(p: Any, x: Tensor) -> Tensor:
    return torch.stack([(x[i] @ p.w).pow(2).sum() for i in range(x.shape[0])]).mean()


@given("flat", rows=None)
def mean_of_unbound_rows(p: Any, x: Tensor) -> Tensor:
    return sum((row @ p.w).pow(2).sum() for row in x.unbind(0)) / len(x)


@given("flat", "labels")
def focal(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(x @ p.w, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@given("flat", "labels")
def class_balanced(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    count = F.one_hot(labels, D).sum(0)
    weight = 1.0 / count.clamp(min=1).double()
    return F.cross_entropy(x @ p.w, labels, weight=weight)


@given("flat", "labels")
def one_hot_product(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    return -(F.one_hot(labels, D) * (x @ p.w).log_softmax(-1)).sum(-1).mean()


@given("flat", mixes=True)
def unbalanced_transport(p: Any, x: Tensor) -> Tensor:
    scores = (x @ p.w).exp()
    scores = scores / scores.sum(0, keepdim=True)
    scores = scores / scores.sum(1, keepdim=True)
    return (scores * x).sum()


@given("flat", mixes=True)
def entropy_of_the_mean(p: Any, x: Tensor) -> Tensor:
    q = (x @ p.w).softmax(-1).mean(0)
    return -(q * q.log()).sum()


# --- layouts -------------------------------------------------------------------------------------------------------


@given("timefirst")
def time_first(p: Any, x: Tensor) -> Tensor:
    q = x.transpose(0, 1)
    h = F.scaled_dot_product_attention(q, q @ p.w, q)
    return h.transpose(0, 1).pow(2).mean()


@given("x")
def batch_merged_with_time(p: Any, x: Tensor) -> Tensor:
    h = x.reshape(-1, D) @ p.w
    return (h.view(B, T, D) + p.table).softmax(1).pow(2).mean()


@given("timefirst")
def time_merged_with_batch(p: Any, x: Tensor) -> Tensor:
    h = x.reshape(-1, D) @ p.w
    h = h.view(T, B, D) + p.table[:, None]
    return h.softmax(0).pow(2).mean()


@given("merged")
def hidden_batch(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.w).view(B, T, D)
    return F.scaled_dot_product_attention(h, h, h).pow(2).mean()


@given("merged")
def hidden_batch_inside(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.w).view(T, B, D).transpose(0, 1)
    return F.scaled_dot_product_attention(h, h, h).pow(2).mean()


@given("x")
def swapped_then_merged(p: Any, x: Tensor) -> Tensor:
    h = x.transpose(0, 1).reshape(T * B, D) @ p.w
    return h.view(T, B, D).transpose(0, 1).cumsum(1).pow(2).mean()


@given("x", rows=4)
def merged_into_features(p: Any, x: Tensor) -> Tensor:
    h = x.permute(1, 2, 0).reshape(T, D * B)
    return (h.view(T, D, B) * p.seven).pow(2).mean()


@given("x")
def heads_in_the_batch(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.w).view(B, T, 2, 3).transpose(1, 2).reshape(B * 2, T, 3)
    a = torch.bmm(h, h.transpose(1, 2)).softmax(-1)
    h = torch.bmm(a, h).view(B, 2, T, 3).transpose(1, 2).reshape(B, T, D)
    return h.pow(2).mean()


@given("pairs", rows=3)
def rows_in_pairs(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.w).view(3, 2, D)
    return (h[:, 0] - h[:, 1]).pow(2).mean()


@given("x")
def folded_time(p: Any, x: Tensor) -> Tensor:
    return (x.flatten(1).unflatten(1, (T, D)).flatten(0, 1) @ p.w).pow(2).mean()


@given("image")
def patches(p: Any, x: Tensor) -> Tensor:
    h = F.unfold(x, 2).transpose(1, 2)
    return h[..., :D].matmul(p.w).pow(2).mean() + F.avg_pool2d(x, 2).mean() * p.s


@given("x")
def einsum(p: Any, x: Tensor) -> Tensor:
    h = torch.einsum("btd,de->bte", x, p.w)
    a = torch.einsum("bid,bjd->bij", h, h).softmax(-1)
    return torch.einsum("bij,bjd->bid", a, h).pow(2).mean() + torch.einsum("btd,td->", h, p.table)


@given("x")
def pairs_in_a_row(p: Any, x: Tensor) -> Tensor:
    h = x[:, :, :] @ p.w
    return (h @ h.mT).pow(2).mean()


# --- rows that meet ------------------------------------------------------------------------------------------------


@given("flat", "other", mixes=True)
def contrastive(p: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(x @ p.w, dim=-1), F.normalize(y @ p.w, dim=-1)
    logits = a @ b.T * p.s.exp()
    at = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2


@given("flat", "other", mixes=True)
def two_views(p: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(torch.cat([x @ p.w, y @ p.w]), dim=-1)
    scores = (z @ z.T).masked_fill(torch.eye(2 * B, dtype=torch.bool), -1e9)
    at = (torch.arange(2 * B) + B) % (2 * B)
    return F.cross_entropy(scores, at)


@given("flat", "other")
def two_views_in_one_net(p: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = (torch.cat([x, y]) @ p.w).tanh().chunk(2)
    return (a - b).pow(2).mean() + (a * b).sum(-1).mean()


@given("flat", mixes=True)
def softmax_over_the_batch(p: Any, x: Tensor) -> Tensor:
    return ((x @ p.w).softmax(0) * x).sum()


@given("flat", mixes=True)
def sorted_by_score(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    order = h[:, 0].argsort()
    return (h[order] * torch.arange(B, dtype=F64)[:, None]).mean()


@given("flat", mixes=True)
def running_sum(p: Any, x: Tensor) -> Tensor:
    return (x @ p.w).cumsum(0).pow(2).mean()


@given("flat", mixes=True)
def reversed_rows(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h * h.flip(0)).mean()


@given("flat", mixes=True)
def rolled_rows(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h - h.roll(1, 0)).pow(2).mean()


@given("flat", mixes=True)
def neighbours(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h[1:] - h[:-1]).pow(2).mean()


@given("flat", mixes=True)
def first_rows(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return h[:3].pow(2).mean() + h[-1].sum()


@given("flat", mixes=True)
def unequal_halves(p: Any, x: Tensor) -> Tensor:
    a, b = (x @ p.w).split([3, 4])
    return a.pow(2).mean() - b.mean()


@given("flat", "other")
def distances(p: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = x @ p.w, y @ p.w
    return torch.cdist(a, b).mean() + (a[:, None] - b[None]).pow(2).sum(-1).add(1).log().mean()


@given("flat", mixes=True)
def distances_of_itself(p: Any, x: Tensor) -> Tensor:
    a = x @ p.w
    d = (a[:, None] - a[None]).pow(2).sum(-1)
    return torch.exp(-d).sum() / B**2


@given("flat", "square", mixes=True)
def pairwise_weights(p: Any, x: Tensor, weights: Tensor) -> Tensor:
    a = x @ p.w
    return (a @ a.T * weights).mean()


@given("flat", "square", mixes=True)
def graph_of_rows(p: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    h = (adjacency.softmax(1) @ (x @ p.w)).relu()
    return (adjacency.T @ h).pow(2).mean()


@given("flat", "ids", mixes=True)
def gathered_rows(p: Any, x: Tensor, ids: Tensor) -> Tensor:
    h = x @ p.w
    return (h[ids] - h).pow(2).mean() + h.index_select(0, ids).sum() + h.gather(0, ids[:, None].expand(B, D)).sum()


@given("flat", "ids", mixes=True)
def scattered_rows(p: Any, x: Tensor, ids: Tensor) -> Tensor:
    h = x @ p.w
    added = torch.zeros_like(h).index_add(0, ids, h)
    spread = torch.zeros(B, D, dtype=F64).scatter_add(0, ids[:, None].expand(B, D), h)
    return (added * x).sum() + spread.pow(2).mean()


@given("flat", "labels", mixes=True)
def sums_by_class(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    centres = torch.zeros(D, D, dtype=F64).index_add(0, labels, x @ p.w)
    return centres.pow(2).mean() + F.one_hot(labels, D).double().T.matmul(x @ p.w).abs().sum()


@given("flat", "labels")
def own_column(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    logits = (x @ p.w).log_softmax(-1)
    return -logits[torch.arange(B), labels].mean()


@given("x", "mask")
def last_token(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = x @ p.w
    last = mask.sum(1) - 1
    return h[torch.arange(B), last].pow(2).mean()


@given("x", "tokens")
def gathered_in_the_row(p: Any, x: Tensor, tokens: Tensor) -> Tensor:
    logits = (x @ p.w).log_softmax(-1)
    return -logits.gather(-1, tokens[..., None]).squeeze(-1).mean()


@given("flat", mixes=True)
def norm_over_the_batch(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    h = (h - h.mean(0, keepdim=True)) / (h.var(0, keepdim=True, unbiased=False) + 1e-5).sqrt()
    return (h * p.b).pow(3).mean()


@given("flat", mixes=True)
def batch_norm(p: Any, x: Tensor) -> Tensor:
    h = F.batch_norm(x @ p.w, None, None, p.b, p.b, training=True)
    return h.pow(3).mean()


@given("flat", mixes=True)
def detached_statistics(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    m, v = h.mean(0).detach(), h.detach().var(0)
    return ((h - m) / (v + 1e-5).sqrt()).pow(3).mean()


@given("flat", mixes=True)
def detached_rows(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h - h.mean(0).detach() * h.detach().softmax(-1)).pow(2).mean()


@given("flat", mixes=True)
def centre_moves(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    with torch.no_grad():
        p.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return (h - p.mean).pow(2).mean()


@given("flat", mixes=True)
def memory_bank(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    loss = (h @ p.bank.T).logsumexp(1).mean()
    with torch.no_grad():
        p.bank.copy_(0.5 * p.bank + 0.5 * h)
    return loss


@given("flat", mixes=True)
def norm_of_everything(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return (h / h.norm()).pow(3).sum() + h.norm(dim=0).sum() + torch.linalg.vector_norm(h, ord=1) / h.abs().max()


@given("flat", mixes=True)
def median_and_quantile(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.w).sum(1)
    return h.median() + h.quantile(0.3) + h.logsumexp(0) + h.prod()


@given("flat", mixes=True)
def gram_then_inverse(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    gram = h.T @ h + torch.eye(D, dtype=F64)
    return torch.linalg.solve(gram, h.T @ x).pow(2).sum() + torch.logdet(gram)


@given("vector", "weight", mixes=True)
def correlation(p: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x * p.s).tanh()
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / (x.norm() * y.norm())


@given("vector")
def inputs_of_one_dim(p: Any, x: Tensor) -> Tensor:
    return (x * p.s).sigmoid().log().mean() + torch.dot(x * p.s, x)


@given("flat", mixes=True)
def outer_product(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.w).sum(1)
    return torch.outer(h, h).tril().sum()


# --- parameters, tables and constants as long as the batch ---------------------------------------------------------


@given("flat")
def parameters_per_sample(p: Any, x: Tensor) -> Tensor:
    return ((x @ p.w) * p.row + p.row).pow(2).mean()


@given("x")
def table_of_positions(p: Any, x: Tensor) -> Tensor:
    return ((x + p.table) @ p.w).pow(2).mean()


@given("tokens")
def learnt_positions(p: Any, tokens: Tensor) -> Tensor:
    h = F.embedding(tokens, p.w) + F.embedding(torch.arange(T), p.table)
    return F.scaled_dot_product_attention(h, h, h, is_causal=True).pow(2).mean()


@given("x")
def expanded_token(p: Any, x: Tensor) -> Tensor:
    h = torch.cat([p.one.expand(B, 1, D), x @ p.w], 1)
    return F.scaled_dot_product_attention(h, h, h)[:, 0].pow(2).mean()


@given("x")
def repeated_token(p: Any, x: Tensor) -> Tensor:
    h = torch.cat([p.one.repeat(B, 1).unsqueeze(1), x @ p.w], 1)
    return h.softmax(1)[:, 0].pow(2).mean() + p.one.repeat_interleave(B, 0).mul(x[:, 0]).mean()


@given("flat")
def initial_state(p: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], D, dtype=F64)
    for _ in range(3):
        h = torch.tanh(h @ p.w + x)
    return h.pow(2).mean()


@given("flat")
def numbered_rows(p: Any, x: Tensor) -> Tensor:
    return ((x @ p.w).sum(1) * torch.arange(B, dtype=F64)).mean() + torch.linspace(0, 1, B, dtype=F64).mul(x.sum(1)).mean() * p.s


@given("x")
def size_as_a_number(p: Any, x: Tensor) -> Tensor:
    return (x @ p.w).pow(2).sum() / x.shape[0] + (x * p.b).sum() / x.numel()


@given("x", "attention")
def mask_without_batch(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = x @ p.w
    return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).pow(2).mean()


@given("x", "mask")
def mask_of_rows(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = (x @ p.w)[:, None]
    keep = mask[:, None, None, :] | torch.eye(T, dtype=torch.bool)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=keep).pow(2).mean()


@given("flat", "number")
def branch_without_batch(p: Any, x: Tensor, number: Tensor) -> Tensor:
    gate = (p.w @ p.b).sigmoid()
    return ((x @ p.w) * gate).pow(2).mean() + (p.table @ gate).pow(2).sum() * number


@given("flat", "labels", mixes=True)
def table_as_input(p: Any, table: Tensor, labels: Tensor) -> Tensor:
    return F.embedding(labels, table @ p.w).pow(2).mean()


@given("x", mixes=True)
def experts(p: Any, x: Tensor) -> Tensor:
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
def slots(p: Any, x: Tensor) -> Tensor:
    q = p.table.expand(B, T, D)
    a = (q @ (x @ p.w).mT).softmax(1)
    a = a / a.sum(-1, keepdim=True)
    return (a @ x).pow(2).mean() * p.s


@given("x")
def squeezed(p: Any, x: Tensor) -> Tensor:
    return ((x @ p.w)[:, :1].squeeze(1) - x[..., 0:1].squeeze().mean(1, keepdim=True)).pow(2).mean()


@given("flat", "labels", mixes=True)
def pieces_of_rows(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for part, target in zip((x @ p.w).split(3), labels.split(3), strict=True):
        total = total + F.cross_entropy(part, target, reduction="sum")
    return total / len(x)


@given("flat")
def random_numbers(p: Any, x: Tensor) -> Tensor:
    h = F.dropout(x @ p.w, 0.3)
    noise = torch.randn(D, dtype=F64)
    rows = torch.rand(B, dtype=F64)
    return (h * noise).pow(2).mean() + (h.sum(1) * rows).mean() + torch.randn_like(p.w).mul(p.w).sum()


@given("flat", mixes=True)
def mixup(p: Any, x: Tensor) -> Tensor:
    order = torch.rand(B, dtype=F64).argsort()
    share = torch.rand((), dtype=F64)
    h = (share * x + (1 - share) * x[order]) @ p.w
    return h.pow(2).mean()


@given("x")
def dropped_rows(p: Any, x: Tensor) -> Tensor:
    keep = (torch.rand(B, 1, 1, dtype=F64) > 0.3).double()
    return ((x @ p.w) * keep / 0.7 + x).pow(2).mean()


@given("flat", rows=None)
def loss_without_rows(p: Any, x: Tensor) -> Tensor:
    return p.w.pow(2).sum()


@given("flat")
def gradient_penalty_by_hand(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p.w)
    slope = (1 - h * h) @ p.w.T
    return h.mean() + (slope.norm(dim=1) - 1).pow(2).mean()


@given("flat", "labels")
def many_losses(p: Any, x: Tensor, labels: Tensor) -> Tensor:
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


# --- more ops ------------------------------------------------------------------------------------------------------


@given("x")
def flat_product(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return torch.dot(h.flatten(), x.flatten()) + h.reshape(-1) @ x.reshape(-1).sin()


@given("x", mixes=True)
def first_numbers(p: Any, x: Tensor) -> Tensor:
    return (x @ p.w).reshape(-1)[:5].pow(2).sum()


@given("flat", "other", mixes=True)
def diagonal(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.diagonal((x @ p.w) @ y.T).pow(2).mean()


@given("flat", mixes=True)
def decision_by_the_batch(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    some, every = (h > 2).any(), (h.sum(1) > -100).all()
    return torch.where(some & every, h.mean(), h.abs().mean()) + h.index_select(0, h[:, 0].argmax()[None]).sum()


@given("x", "mask")
def counts_as_integers(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    kept, count = (x @ p.w)[..., 0] * mask, mask.sum()
    return kept.sum() / count + kept.sum() * (count % 5) / (mask.long().sum() // 2 + 1)


@given("x")
def order_within_rows(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    return h.topk(2, dim=1).values.mean() + h.sort(-1).values.cumsum(-1).mean() + h.max(1).values.std(-1).mean()


@given("x")
def layers_of_norms(p: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(x @ p.w, (D,), p.b, p.b) + F.layer_norm(x, (T, D), p.table, p.table)
    h = F.group_norm(h.mT, 3, p.b).mT + F.rms_norm(h, (D,), p.b)
    return F.instance_norm(h.mT, weight=p.b).pow(3).mean() + F.normalize(h, dim=1).mean()


@given("image")
def pictures(p: Any, x: Tensor) -> Tensor:
    kernel = p.w.reshape(4, 3, 3, 1)
    h = F.conv2d(F.pad(x, (1, 1, 0, 0), value=0.5), kernel, stride=(1, 2))
    h = F.conv_transpose2d(h.relu(), kernel) + F.interpolate(h.mean(1, keepdim=True), (5, 4), mode="bilinear")
    return F.max_pool2d(h, 2).pow(2).mean() + F.adaptive_avg_pool2d(h, 1).flatten(1).var(1).mean()


@given("timefirst", "labels")
def last_of_time_first(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    h = F.scaled_dot_product_attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1) @ p.w
    return h[labels % T, torch.arange(B)].pow(2).mean() + h[-1, torch.arange(B), labels].sum()


@given("x", "tokens")
def chosen_tokens(p: Any, x: Tensor, tokens: Tensor) -> Tensor:
    h, at = x @ p.w, torch.arange(B)
    return h[at[:, None], tokens[:, :2] - T].pow(2).mean() + h[at, tokens[:, 0] % T, -tokens[:, 1] - 1].sum() + h[at].mean()


@given("flat", "labels", mixes=True)
def written_by_index(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    h = (x @ p.w).tanh()
    marked = h.index_put((torch.arange(B), labels), torch.zeros((), dtype=F64))
    return (marked * x).mean() + torch.zeros(B, D, dtype=F64).scatter(1, labels[:, None], 1.0).mul(h).sum()


@given("flat", mixes=True)
def weights_without_gradient(p: Any, x: Tensor) -> Tensor:
    each = (x @ p.w).pow(2).mean(1)
    return (each * each.detach().softmax(0)).sum() + (each / each.detach().mean()).mean()


@given("flat", "labels", "tokens")
def tables(p: Any, x: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    h = F.embedding(tokens, p.w, padding_idx=2).sum(1) + F.embedding(labels, p.w.tanh())
    return (h * x).mean() + p.s * F.embedding(labels, p.row)[:, 0].mean()


@given("flat", "vector")
def broadcast_by_hand(p: Any, x: Tensor, v: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(v[:, None], p.b)
    rows, columns = torch.meshgrid(v, p.b, indexing="ij")
    return (a * b * x).mean() + (rows * columns).mean() + (v.unsqueeze(-1).expand_as(x) * x @ p.w).mean()


@given("x")
def many_linear_things(p: Any, x: Tensor) -> Tensor:
    h = x @ p.w
    total, table = h.sum((0, 1)), h.sum(0)
    moved = torch.roll(total, 1) + F.pad(total[1:], (0, 1)) - total.flip(0) + total.cumsum(0) + (table.T @ p.table).sum(0)
    return (moved * p.b).sum() + torch.stack([total, p.b], 0).sum() + F.linear(total, p.w, p.b).mean() + total[2] + table.mT.reshape(-1)[5]


@given("flat", mixes=True)
def sums_of_sums(p: Any, x: Tensor) -> Tensor:
    total = (x @ p.w).sum(0)
    return F.linear(total.tanh(), p.w, p.b).pow(2).mean() + F.cosine_similarity(total, p.b, dim=0) + total.softmax(0)[0] + total.max()


@given("x")
def sequence_loop(p: Any, x: Tensor) -> Tensor:
    h, states = x.new_zeros(x.shape[0], D), []
    for step in range(T):
        h = torch.tanh(x[:, step] @ p.w + h)
        states.append(h)
    return torch.stack(states, 1).pow(2).mean() + torch.cat(states, -1).mean()


@given("square", mixes=True)
def both_dims_are_the_batch(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x * p.s)
    return (h @ h + h.T).pow(2).mean() + torch.trace(h) + h.tril().sum()


@given("x", mixes=True)
def across_rows_by_hand(p: Any, x: Tensor) -> Tensor:
    q = (x @ p.w).mean(1)
    a = F.scaled_dot_product_attention(q[None], q[None], q[None])[0]
    return (a * q).mean()
