"""Losses of several terms: sums, means, products and ratios of them, weights and masks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cutting import F64, D, Given, given


@given("x")
def mean_sum_and_penalty(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return h.pow(2).mean() + 0.1 * h.abs().sum() + 0.01 * p.w.pow(2).sum() + p.s


@given("flat", "other", mixes=True)
def product_of_means(p: Given, x: Tensor, y: Tensor) -> Tensor:
    return (x @ p.w).mean() * (y @ p.w).mean()


@given("flat", "other", mixes=True)
def ratio_of_means(p: Given, x: Tensor, y: Tensor) -> Tensor:
    return (x @ p.w).mean() / (y * p.b).pow(2).mean()


@given("flat", mixes=True)
def square_of_a_mean(p: Given, x: Tensor) -> Tensor:
    m = (x @ p.w).mean()
    return m * m + m


@given("flat", mixes=True)
def root_mean_square(p: Given, x: Tensor) -> Tensor:
    return F.mse_loss(x @ p.w, x).sqrt()


@given("flat", mixes=True)
def log_of_a_mean(p: Given, x: Tensor) -> Tensor:
    return (x @ p.w).pow(2).mean().log()


@given("flat", mixes=True)
def largest_of_the_batch(p: Given, x: Tensor) -> Tensor:
    return (x @ p.w).sum(1).max()


@given("flat", mixes=True)
def hardest_rows(p: Given, x: Tensor) -> Tensor:
    return (x @ p.w).pow(2).sum(1).topk(3).values.mean()


@given("flat", mixes=True)
def variance_over_the_batch(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    return h.var(0).sum() + h.std() + h.var(0, unbiased=False).mean()


@given("flat", mixes=True)
def covariance(p: Given, x: Tensor) -> Tensor:
    h = x @ p.w
    h = h - h.mean(0)
    c = h.T @ h / (h.shape[0] - 1)
    return (c - torch.eye(D, dtype=F64)).pow(2).sum()


@given("flat", "weight")
def weighted_by_input(p: Given, x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ p.w).pow(2).mean(1) * weight).sum() / weight.sum()


@given("flat", "weight")
def weights_normalised_first(p: Given, x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ p.w).pow(2).mean(1) * (weight / weight.sum())).sum()


@given("flat", mixes=True)
def weights_of_the_model(p: Given, x: Tensor) -> Tensor:
    weight = (x @ p.w)[:, 0].sigmoid()
    return ((x * p.b).sum(1) * weight).sum() / weight.sum()


@given("x", "mask")
def mean_over_a_mask(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    each = (x @ p.w).pow(2).mean(-1)
    return (each * mask).sum() / mask.sum()


@given("x", "mask")
def mean_per_row_then_over_rows(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    each = (x @ p.w).pow(2).mean(-1) * mask
    return (each.sum(1) / mask.sum(1).clamp(min=1)).mean()


@given("x", "mask")
def filled_mask(p: Given, x: Tensor, mask: Tensor) -> Tensor:
    h = (x @ p.w).masked_fill(~mask[..., None], 0.0)
    return torch.where(mask[..., None], h, p.b).mean()


@given("flat", "number")
def scalar_input(p: Given, x: Tensor, number: Tensor) -> Tensor:
    return (x @ p.w).mean() * number + number


@given("flat")
def sum_over_parameters_and_rows(p: Given, x: Tensor) -> Tensor:
    return torch.stack([(x @ p.w).mean(), p.w.norm(), (x * p.b).sum()]).sum()


@given("flat", mixes=True)
def max_of_two_terms(p: Given, x: Tensor) -> Tensor:
    return torch.maximum((x @ p.w).mean(), (x * p.b).mean())


@given("flat", mixes=True)
def means_of_rows_stacked(p: Given, x: Tensor) -> Tensor:
    return torch.cat([(x @ p.w).mean(0), p.b]).pow(2).sum()


@given("flat", rows=None)
def loss_per_sample(p: Given, x: Tensor) -> Tensor:
    return torch.stack([(x[i] @ p.w).pow(2).sum() for i in range(x.shape[0])]).mean()


@given("flat", rows=None)
def mean_of_unbound_rows(p: Given, x: Tensor) -> Tensor:
    return torch.stack([(row @ p.w).pow(2).sum() for row in x.unbind(0)]).sum() / len(x)


@given("flat", "labels")
def focal(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(x @ p.w, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@given("flat", "labels")
def class_balanced(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    count = F.one_hot(labels, D).sum(0)
    weight = 1.0 / count.clamp(min=1).double()
    return F.cross_entropy(x @ p.w, labels, weight=weight)


@given("flat", "labels")
def one_hot_product(p: Given, x: Tensor, labels: Tensor) -> Tensor:
    return -(F.one_hot(labels, D) * (x @ p.w).log_softmax(-1)).sum(-1).mean()


@given("flat", mixes=True)
def unbalanced_transport(p: Given, x: Tensor) -> Tensor:
    scores = (x @ p.w).exp()
    scores = scores / scores.sum(0, keepdim=True)
    scores = scores / scores.sum(1, keepdim=True)
    return (scores * x).sum()


@given("flat", mixes=True)
def entropy_of_the_mean(p: Given, x: Tensor) -> Tensor:
    q = (x @ p.w).softmax(-1).mean(0)
    return -(q * q.log()).sum()
