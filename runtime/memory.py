"""Counts the bytes of tensor storages as operations make and drop them: what a step really holds, on any device.

    with (tracker := Tracker()).track(model.parameters()):
        loss = step()
    tracker.peak_bytes

Counted is every storage that an operation returns, or that `track` is told of, from then until its last reference goes. Views share a storage and are
free; storages that existed before and were not given to `track` stay uncounted, also when views of them are made. What a kernel allocates and frees
inside itself is not seen. Wrapper tensors (DTensor) are let through to the local tensors that they work on.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

# A tensor made from Python numbers is allocated below the dispatcher and first seen as the argument of one of these.
_BIRTHS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that may be left and entered again with the same counters. Storages that die meanwhile are still subtracted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._bytes: dict[int, int] = {}  # storage -> counted bytes
        self._lock = threading.RLock()  # storages may die on a communication thread

    def track(self, tensors: Tensor | Iterable[Any]) -> "Tracker":
        """Count the storages of a tensor, or of all tensors in an iterable or pytree, from now on; each storage once."""
        leaves = [tensors] if isinstance(tensors, Tensor) else tree_leaves(tensors if isinstance(tensors, dict | list | tuple) else list(tensors))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._count(leaf, frozenset())
        return self

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a counted storage has grown or shrunk in place, which is no operation."""
        with self._lock:
            if (known := self._bytes.get(storage._cdata)) is not None:
                self.now_bytes += storage.nbytes() - known
                self._bytes[storage._cdata] = storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""
        with self._lock:
            self.peak_bytes = self.now_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the wrapper runs the operation on its local tensors, which come back here
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in ([result] if isinstance(result, Tensor) else tree_leaves(result)) if isinstance(leaf, Tensor)]
        if outputs:
            given: frozenset[int] = frozenset()
            if func not in _BIRTHS and any(not self._knows(leaf) for leaf in outputs):
                inputs = tree_leaves((args, kwargs))
                given = frozenset(leaf.untyped_storage()._cdata for leaf in inputs if isinstance(leaf, Tensor) and not _wraps(leaf))
            for leaf in outputs:
                self._count(leaf, given)
        return result

    def _knows(self, tensor: Tensor) -> bool:
        return not _wraps(tensor) and self._bytes.get(tensor.untyped_storage()._cdata) == tensor.untyped_storage().nbytes()

    def _count(self, tensor: Tensor, given: frozenset[int]) -> None:
        if _wraps(tensor):
            for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                if isinstance(inner := getattr(tensor, name), Tensor):
                    self._count(inner, given)
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key not in self._bytes:
                if key in given:
                    return
                weakref.finalize(storage, self._drop, key).atexit = False
                self._bytes[key] = 0
            self.now_bytes += size - self._bytes[key]
            self._bytes[key] = size
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _drop(self, key: int) -> None:
        with self._lock:
            self.now_bytes -= self._bytes.pop(key)


def _wraps(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each storage once; of a DTensor the local part."""
    counter = Tracker()
    counter.track(list(tensors))
    return counter.now_bytes
