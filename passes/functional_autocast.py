"""Autocast regions as explicit casts.

Which arguments an op casts, to which dtype, is asked of torch itself: the op is run once on fake values under autocast, and the casts of its
arguments are seen by a dispatch mode. So the lists of autocast ops are torch's own, for every device.

An op that autocast does not know may contain ones that it knows (einsum contains bmm). If casting all its floating arguments at once, to the low
precision or to float32, gives the same inner ops on the same dtypes, the op stays whole with these casts; else its inner ops are written out.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from partitioner.errors import CaptureError
from partitioner.passes.functional_builder import Builder, aten, first_value
from partitioner.passes.functional_schema import source_of


@dataclass(frozen=True)
class Region:
    """An autocast context; `number` names the outermost one it lies in, within which casts of parameters are shared."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    number: int


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops below autocast and autograd, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result  # a question about a tensor, such as prim.device
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def shape(self) -> list[Any]:
        """What was computed, casts and views left out: a cast may as well stand before a view."""
        return [
            (call[0], [t.dtype for t in tree_leaves(call[3]) if isinstance(t, Tensor)])
            for call in self.calls
            if call[0] is not aten._to_copy.default and not any(r.alias_info for r in call[0]._schema.returns)
        ]


class Autocast:
    """Casts the arguments of ops while a region is entered."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.regions: list[Region] = []
        self._shared: dict[tuple[int, fx.Node, torch.dtype], fx.Node] = {}
        self._known: dict[Any, list[torch.dtype | None] | None] = {}
        self._outermost = 0

    def enter(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> None:
        """Tracing switches the cache of casts off and so hides whether the user had; it is on unless somebody went out of his way."""
        if not self.regions:
            self._outermost += 1
        low = dtype if dtype is not None else torch.get_autocast_dtype(device_type)
        self.regions.append(Region(device_type, low, enabled, self._outermost))

    def leave(self) -> None:
        self.regions.pop()

    def active(self) -> list[Region]:
        latest = {region.device_type: region for region in self.regions}
        return [region for region in latest.values() if region.enabled]

    def apply(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any, Any | None]:
        """(args, kwargs, None) with casts inserted, or the op's result as a node or tuple of nodes where it had to be written out."""
        for region in self.active():
            flat, spec = tree_flatten((list(args), dict(kwargs)))
            tensors = [leaf for leaf in flat if isinstance(leaf, fx.Node) and isinstance(first_value(leaf), Tensor)]
            casts = self._casts(node, region, args, kwargs, tensors)
            if casts is None:
                return args, kwargs, self._written_out(node, region, args, kwargs, tensors)
            wanted = iter(casts)
            flat = [self._cast(region, leaf, next(wanted)) if any(leaf is t for t in tensors) else leaf for leaf in flat]
            given, kwargs = torch.utils._pytree.tree_unflatten(flat, spec)
            args = tuple(given)
        return args, kwargs, None

    def _cast(self, region: Region, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        if dtype is None:
            return node
        shared = node.op == "placeholder" and first_value(node).requires_grad and first_value(node).dtype == torch.float32
        key = (region.number, node, dtype)
        if shared and key in self._shared:
            return self._shared[key]
        made = self.builder.cast(node, dtype)
        if shared:
            self._shared[key] = made
        return made

    def _run(self, node: fx.Node, region: Region | None, args: Any, kwargs: Any) -> tuple[_Trace, Any]:
        trace: Any = _Trace()
        off = torch.autocast("cpu", enabled=False)
        on = torch.autocast(region.device_type, dtype=region.dtype, cache_enabled=False) if region is not None else off
        target: Any = node.target
        with self.builder.mode, torch.no_grad(), on, trace:
            result = target(*args, **kwargs)
        return trace, result

    def _casts(self, node: fx.Node, region: Region, args: Any, kwargs: Any, tensors: list[fx.Node]) -> list[torch.dtype | None] | None:
        """Per tensor argument the dtype it is cast to (None: as it is); None altogether where no such casts say what the op does."""
        plain = tree_map(lambda leaf: "tensor" if isinstance(leaf, fx.Node) else repr(leaf), (list(args), dict(kwargs)))
        given = [(first_value(t).dtype, first_value(t).device.type, tuple(first_value(t).shape)) for t in tensors]
        key = (node.target, region.device_type, region.dtype, repr(plain), repr(given))
        if key not in self._known:
            self._known[key] = self._ask(node, region, map_arg(args, first_value), map_arg(kwargs, first_value))
        return self._known[key]

    def _ask(self, node: fx.Node, region: Region, args: Any, kwargs: Any) -> list[torch.dtype | None] | None:
        trace, _ = self._run(node, region, args, kwargs)
        flat, spec = tree_flatten((list(args), dict(kwargs)))
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        seen: dict[int, torch.dtype] = {}
        for func, inner, named, _ in trace.calls:
            if func is aten._to_copy.default and any(inner[0] is t for t in tensors):
                seen.setdefault(id(inner[0]), named.get("dtype", inner[0].dtype))
        floats = [t for t in tensors if t.dtype.is_floating_point]
        direct: list[torch.dtype | None] = [seen.get(id(t)) for t in tensors]
        candidates: list[list[torch.dtype | None]] = [direct, [None] * len(tensors)]
        for dtype in (region.dtype, torch.float32):
            candidates.append([dtype if any(t is f for f in floats) and t.dtype != dtype else None for t in tensors])
        for candidate in candidates:
            wanted = iter(candidate)
            with self.builder.mode, torch.no_grad():
                cast = [_to(leaf, next(wanted)) if isinstance(leaf, Tensor) else leaf for leaf in flat]
            plain_args, plain_kwargs = torch.utils._pytree.tree_unflatten(cast, spec)
            try:
                plain, _ = self._run(node, None, plain_args, plain_kwargs)
            except RuntimeError:  # mixed dtypes that only autocast reconciles
                continue
            if plain.shape() == trace.shape():
                return candidate
        return None

    def _written_out(self, node: fx.Node, region: Region, args: Any, kwargs: Any, tensors: list[fx.Node]) -> Any:
        """The inner ops of a composite under autocast, as nodes."""
        trace, result = self._run(node, region, map_arg(args, first_value), map_arg(kwargs, first_value))
        known: dict[int, fx.Node] = {id(first_value(t)): t for t in tensors}

        def as_node(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in known:
                raise CaptureError(f"{source_of(node)}: {node.target} under autocast uses a tensor that it did not compute")
            return known[id(value)]

        for func, inner, named, out in trace.calls:
            if func._schema.is_mutable:
                raise CaptureError(
                    f"{source_of(node)}: {node.target} under autocast changes a tensor in place by {func}, which has no functional form here. "
                    "Take it out of the autocast region."
                )
            func = aten.reshape.default if func is aten.view.default else func
            made = self.builder.emit(func, *tree_map(as_node, tuple(inner)), **tree_map(as_node, dict(named)))
            if isinstance(out, Tensor):
                known[id(out)] = made
            else:
                for i, part in enumerate(out):
                    if isinstance(part, Tensor):
                        known[id(part)] = self.builder.emit(operator.getitem, made, i)
        return tree_map(as_node, result)


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
