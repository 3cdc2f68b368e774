"""Where the batch is: second, merged with time, hidden in the input, beside equal sizes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cutting import B, D, Given, T, given


@given("timefirst")
def time_first(p: Given, x: Tensor) -> Tensor:
    q = x.transpose(0, 1)
    h = F.scaled_dot_product_attention(q, q @ p.w, q)
    return h.transpose(0, 1).pow(2).mean()


@given("x")
def batch_merged_with_time(p: Given, x: Tensor) -> Tensor:
    h = x.reshape(-1, D) @ p.w
    return (h.view(B, T, D) + p.table).softmax(1).pow(2).mean()


@given("timefirst")
def time_merged_with_batch(p: Given, x: Tensor) -> Tensor:
    h = x.reshape(-1, D) @ p.w
    h = h.view(T, B, D) + p.table[:, None]
    return h.softmax(0).pow(2).mean()


@given("merged")
def hidden_batch(p: Given, x: Tensor) -> Tensor:
    h = (x @ p.w).view(B, T, D)
    return F.scaled_dot_product_attention(h, h, h).pow(2).mean()


@given("merged")
def hidden_batch_inside(p: Given, x: Tensor) -> Tensor:
    h = (x @ p.w).view(T, B, D).transpose(0, 1)
    return F.scaled_dot_product_attention(h, h, h).pow(2).mean()


@given("x")
def swapped_then_merged(p: Given, x: Tensor) -> Tensor:
    h = x.transpose(0, 1).reshape(T * B, D) @ p.w
    return h.view(T, B, D).transpose(0, 1).cumsum(1).pow(2).mean()


@given("x", rows=4)
def merged_into_features(p: Given, x: Tensor) -> Tensor:
    h = x.permute(1, 2, 0).reshape(T, D * B)
    return (h.view(T, D, B) * p.seven).pow(2).mean()


@given("x")
def heads_in_the_batch(p: Given, x: Tensor) -> Tensor:
    h = (x @ p.w).view(B, T, 2, 3).transpose(1, 2).reshape(B * 2, T, 3)
    a = torch.bmm(h, h.transpose(1, 2)).softmax(-1)
    h = torch.bmm(a, h).view(B, 2, T, 3).transpose(1, 2).reshape(B, T, D)
    return h.pow(2).mean()


@given("pairs", rows=3)
def rows_in_pairs(p: Given, x: Tensor) -> Tensor:
    h = (x @ p.w).view(3, 2, D)
    return (h[:, 0] - h[:, 1]).pow(2).mean()


@given("x")
def folded_time(p: Given, x: Tensor) -> Any:
    return (x.flatten(1).unflatten(1, (T, D)).flatten(0, 1) @ p.w).pow(2).mean()  # type: ignore[no-untyped-call]


@given("image")
def patches(p: Given, x: Tensor) -> Tensor:
    h = F.unfold(x, 2).transpose(1, 2)
    return h[..., :D].matmul(p.w).pow(2).mean() + F.avg_pool2d(x, 2).mean() * p.s


@given("x")
def einsum(p: Given, x: Tensor) -> Tensor:
    h = torch.einsum("btd,de->bte", x, p.w)
    a = torch.einsum("bid,bjd->bij", h, h).softmax(-1)
    return torch.einsum("bij,bjd->bid", a, h).pow(2).mean() + torch.einsum("btd,td->", h, p.table)


@given("x")
def pairs_in_a_row(p: Given, x: Tensor) -> Tensor:
    h = x[:, :, :] @ p.w
    return (h @ h.mT).pow(2).mean()
