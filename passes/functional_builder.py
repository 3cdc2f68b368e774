"""Writes the functional graph: emits nodes with fake values, knows what carries a gradient, and draws random numbers as eager would.

Gradients. A node made while gradients are off is *untracked*: eager would not differentiate through it, autograd over the functional graph would.
So whoever reads an untracked node while gradients are on gets it through one `aten.detach`.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from partitioner.errors import CaptureError
from partitioner.passes.randomness import EAGER_KEY

aten = torch.ops.aten
_NEVER_DIFFERENTIABLE = frozenset(
    (
        aten.detach.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
    )
)


def first_value(node: fx.Node) -> Any:
    """The example value of a node."""
    return node.meta.get("val")


def _floating(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, (tuple, list)) and any(_floating(v) for v in value)


class Builder:
    """The graph under construction. `where` is the {"module", "source"} that new nodes inherit; `grad` says whether gradients are on."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.mode = mode
        self.grad = True
        self.where: dict[str, str] = {}
        self.draws = 0
        self.key: fx.Node | None = None
        self._differentiable: set[fx.Node] = set()
        self._untracked: set[fx.Node] = set()
        self._detached: dict[fx.Node, fx.Node] = {}

    def placeholder(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        if isinstance(value, Tensor) and value.requires_grad:
            self._differentiable.add(node)
        return node

    def copy(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The same op on new arguments; its example value is kept as traced."""
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        new.meta["val"] = node.meta.get("val")
        return self._note(new)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new op; its example value is computed."""
        new = self.graph.create_node("call_function", target, args, kwargs)
        with self.mode, torch.no_grad():
            new.meta["val"] = target(*map_arg(args, first_value), **map_arg(kwargs, first_value))
        return self._note(new)

    def _note(self, node: fx.Node) -> fx.Node:
        node.meta.update(self.where)
        if (
            _floating(node.meta["val"])
            and node.target not in _NEVER_DIFFERENTIABLE
            and any(i in self._differentiable for i in node.all_input_nodes)
        ):
            self._differentiable.add(node)
            if not self.grad:
                self._untracked.add(node)
        return node

    def tracked(self, node: fx.Node) -> bool:
        """Whether eager would carry a gradient through this value."""
        return node in self._differentiable and node not in self._untracked

    def read(self, node: fx.Node) -> fx.Node:
        """The node as an op reads it in the present gradient mode."""
        return self.detached(node) if self.grad and node in self._untracked else node

    def detached(self, node: fx.Node) -> fx.Node:
        """The value without its gradient."""
        if node not in self._differentiable:
            return node
        if node not in self._detached:
            self._detached[node] = self.emit(aten.detach.default, node)
        return self._detached[node]

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if first_value(node).dtype == dtype else self.emit(aten._to_copy.default, node, dtype=dtype)

    def expand(self, node: fx.Node, size: Any) -> fx.Node:
        return node if first_value(node).shape == torch.Size(size) else self.emit(aten.expand.default, node, list(size))

    def draw(self, like: Tensor, dtype: torch.dtype, kind: str, a: float, b: float = 0.0) -> fx.Node:
        """Random numbers in the shape of `like`, in the order in which eager fills a tensor laid out as `like`.

        Kernels fill a dense tensor in the order of its memory, so a transposed tensor is drawn in memory order and transposed.
        `normal_` fills tensors that are not contiguous by another algorithm, which has its own kind.
        """
        shape, strides = list(like.shape), like.stride()
        order = list(range(len(shape)))
        if not like.is_contiguous():
            order.sort(key=lambda d: (-strides[d] if shape[d] > 1 else 0, d))
            kind = "normal_serial" if kind == "normal" else kind
        if self.key is None:
            raise CaptureError("a random number was drawn before the graph had its key")
        size = [shape[d] for d in order]
        drawn = self.emit(torch.ops.partitioner.random.default, size, dtype, like.device, kind, float(a), float(b), self.key, self.draws)
        self.draws += 1
        if order != list(range(len(shape))):
            drawn = self.emit(aten.permute.default, drawn, [order.index(d) for d in range(len(shape))])
        return drawn

    def empty_like(self, value: Tensor) -> Tensor:
        """A fake tensor laid out as `torch.empty_like` would."""
        with self.mode, torch.no_grad():
            return torch.empty_like(value)

    def add_key(self) -> None:
        self.key = self.placeholder("key_shared", EAGER_KEY)
