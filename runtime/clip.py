"""The norm of all gradients together, computed once over the axis, and clipping to it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.wire import all_reduce, guarded


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """Norms of half-precision gradients are taken in float32, as their squares overflow or vanish."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _norms(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each gradient that has elements; one launch for all of a kind on CUDA."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms: list[Tensor] = []
    for (_, dtype), members in kinds.items():
        norms.extend(torch._foreach_norm(members, norm_type, dtype=_accurate(dtype)))
    return norms


def _power_sum(gradients: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """sum |g|^p over the gradients as a 0-dim tensor (the maximum for p = inf), zero where there are none."""
    norms = _norms(gradients, norm_type)
    if not norms:
        return torch.zeros_like(like)
    stacked = torch.stack([norm.to(like.dtype) for norm in norms])
    if norm_type == float("inf"):
        return stacked.max()
    return stacked.pow(norm_type).sum()


def total_norm(shards: Sequence[Tensor], wholes: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup | None, like: Tensor) -> Tensor:
    """The p-norm over all elements of all gradients, the same 0-dim tensor on every rank.

    shards: this rank's rows of gradients that are cut over the group; wholes: gradients that every rank holds. `like` gives dtype and device.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; write a positive number, or float('inf') for the largest element")
    mine = _power_sum(shards, norm_type, like)
    if group is not None:
        if norm_type == float("inf"):
            guarded(lambda: dist.all_reduce(mine, dist.ReduceOp.MAX, group=group), group, "the norm of the gradients")
        else:
            all_reduce(mine, group, "the norm of the gradients").wait()
    rest = _power_sum(wholes, norm_type, like)
    if norm_type == float("inf"):
        return torch.maximum(mine, rest)
    return (mine + rest).pow(1.0 / norm_type)


def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place so that their total norm is at most max_norm, as torch.nn.utils.clip_grad_norm_ does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scales: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for gradient in gradients:
        kind = (gradient.device, gradient.dtype)
        if kind not in scales:
            scales[kind] = scale.to(*kind)
        gradient.mul_(scales[kind])


def norm_dtype(gradients: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which the norms of all these gradients are joined."""
    result = torch.float32
    for gradient in gradients:
        result = torch.promote_types(result, _accurate(gradient.dtype))
    return result
