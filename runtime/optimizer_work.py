"""What an optimizer's step computes, counted on torch's own step with tensors that have shapes and no data (`meta`).

Every op of it reads its tensor arguments and writes its results; the bytes go with the elements of the parameters, the launches with their number (on
CPU, where torch steps parameter by parameter) or not (elsewhere, foreach).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partitioner.runtime.optimizer_bytes import Shapes, prepared_step


@dataclass(frozen=True)
class Work:
    """Bytes read and written, and kernels launched."""

    bytes: float
    launches: float


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = _tensors((args, kwargs))
            changed = [value for value, given in zip(args, func._schema.arguments, strict=False) if given.alias_info and given.alias_info.is_write]
            known = {id(tensor) for tensor in read}
            made = [tensor for tensor in _tensors(result) if id(tensor) not in known]
            self.bytes += sum(tensor.nbytes for tensor in (*read, *_tensors(changed), *made))
            self.launches += 1
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def step_work(optimizer: str, shapes: Shapes, device: str = "cpu") -> Work:
    """The work of one `step()` on parameters of these (shape, dtype) on one rank."""
    elements = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes) / 4
    tensors = sum(bool(torch.Size(shape).numel()) for shape, _ in shapes)
    if not tensors:
        return Work(0.0, 0.0)
    base, per_element, per_tensor = _slopes(optimizer, device)
    return Work(elements * per_element, base + (tensors - 1) * per_tensor)


@lru_cache
def _slopes(optimizer: str, device: str) -> tuple[float, float, float]:
    """(launches of one tensor, bytes per float32 element, launches per further tensor)."""
    small, large, two = (_count(optimizer, sizes, device) for sizes in ((1000,), (2000,), (1000, 1000)))
    return small.launches, (large.bytes - small.bytes) / 1000, two.launches - small.launches


def _count(optimizer: str, sizes: tuple[int, ...], device: str) -> Work:
    step = prepared_step(optimizer, [((size,), torch.float32) for size in sizes], device)
    with (counter := _Counter()):
        step()
    return Work(counter.bytes, counter.launches)
