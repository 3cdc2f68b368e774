"""`x[arange(B), i]` reads of every row its own elements: written as a gather along the row, whose rows are free.

Indexing by a tensor may read any row, so its first dim may not be cut; last-token pooling (`h[arange(B), lengths - 1]`) and the scores of chosen
actions (`logits[arange(B), actions]`) would gather the batch. An index that enumerates its dim (an arange of its size, whatever views and
casts lie between) says that row b is read for row b. Then

    x [n, s.., rest..], i.. of shape [n, k..]   =   gather(x as [n, S, rest..], 1, ravel(i..) as [n, K, rest..]) as [n, k.., rest..]

with S and K the products of s.. and k... The graph is changed in place; every other node stays what it is.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.dims import Cut
from partitioner.passes.graph import Graph
from partitioner.passes.placement import carried, locate
from partitioner.passes.rules import describe, tensor_arguments
from partitioner.passes.rules.pointwise import broadcast_shape
from partitioner.passes.rules.registry import words

aten = torch.ops.aten
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_MOVES = frozenset(
    words("view reshape unsqueeze squeeze expand expand_as unflatten flatten transpose permute alias clone contiguous detach to _to_copy repeat")
)


def pair_rows(graph: Graph) -> None:
    """Write indexing by an enumeration of the rows as gathers; a graph that has none, or no more, stays as it is."""
    if not any(node.target is aten.index.Tensor for node in graph.module.graph.nodes):
        return
    counted: dict[fx.Node, int] = {}  # node -> the dim whose positions its values are
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        if (dim := _enumerates(node, counted)) is not None:
            counted[node] = dim
        elif node.target is aten.index.Tensor and (own := _own(node, counted)) is not None:
            with graph.module.graph.inserting_before(node):
                node.replace_all_uses_with(_Gather(node).write(own))
            _erase(node)
    graph.module.recompile()


def _erase(node: fx.Node) -> None:
    """Erase an op that nothing uses, and what only it used."""
    dead = [node]
    while dead:
        sources = dead[-1].all_input_nodes
        node.graph.erase_node(dead.pop())
        dead += [source for source in sources if source.op == "call_function" and not source.users]


def _enumerates(node: fx.Node, counted: dict[fx.Node, int]) -> int | None:
    """The dim along which the values of an integer tensor are 0, 1, 2, …"""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.is_floating_point():
        return None
    if node.target in _ARANGES:
        numbers = list(node.args)
        start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
        return 0 if start == 0 and step == 1 else None
    sources = tensor_arguments(node)
    if not sources or sources[0] not in counted or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target._schema.name.removeprefix("aten::") not in _MOVES or (rule := describe(node)) is None:
        return None
    names, outs = rule.inputs[0], rule.outputs[0]
    if names is None or outs is None or (label := locate(Cut(counted[sources[0]]), names, rule.sizes)) is None:
        return None
    at = carried(label, outs, rule.sizes)
    return at.dim if at is not None and at.outer == at.inner == 1 else None


def _own(node: fx.Node, counted: dict[fx.Node, int]) -> int | None:
    """Which of the indices enumerates the rows, where the others read within the row."""
    x, indices = node.args[0].meta["val"], node.args[1]  # type: ignore[union-attr]
    if any(i is None or not i.meta["val"].dtype.is_signed for i in indices):  # type: ignore[union-attr]
        return None
    shape = broadcast_shape([tuple(i.meta["val"].shape) for i in indices])  # type: ignore[union-attr]
    for at, index in enumerate(indices):  # type: ignore[arg-type]
        value = index.meta["val"]
        if index in counted and value.shape[counted[index]] == x.shape[at] == shape[0] and counted[index] == value.dim() - len(shape):
            return at
    return None


class _Gather:
    """Writes one indexing anew, at the graph's insertion point."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def call(self, target: Any, *args: Any) -> fx.Node:
        new = self.node.graph.call_function(target, args)
        with torch.no_grad():
            value = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        new.meta.update(val=value, module=self.node.meta.get("module"), source=self.node.meta.get("source"))
        return new

    def write(self, own: int) -> fx.Node:
        args: Any = self.node.args
        x, indices = args[0], list(args[1])
        indexed, shape = len(indices), list(x.meta["val"].shape)
        order = [own, *(d for d in range(len(shape)) if d != own)]
        rows, inner, rest = shape[own], [shape[d] for d in order[1:indexed]], shape[indexed:]
        if own != 0:
            x = self.call(aten.permute.default, x, order)
        places = broadcast_shape([tuple(i.meta["val"].shape) for i in indices])
        others = [i for at, i in enumerate(indices) if at != own]
        x = self.call(aten.reshape.default, x, [rows, prod(inner), *rest])
        at = self.ravel(others, inner) if others else self.call(aten.mul.Scalar, indices[own], 0)
        at = self.call(aten.expand.default, at, list(places))
        at = self.call(aten.reshape.default, at, [rows, prod(places[1:]), *[1] * len(rest)])
        at = self.call(aten.expand.default, at, [rows, prod(places[1:]), *rest])
        return self.call(aten.reshape.default, self.call(aten.gather.default, x, 1, at), [*places, *rest])

    def ravel(self, indices: Sequence[fx.Node], sizes: Sequence[int]) -> fx.Node:
        """One index into the flattened dims; negative ones count from the end."""
        total: fx.Node | None = None
        for index, size in zip(indices, sizes, strict=True):
            index = self.call(aten.to.dtype, index, torch.int64)
            index = self.call(aten.where.self, self.call(aten.lt.Scalar, index, 0), self.call(aten.add.Scalar, index, size), index)
            total = index if total is None else self.call(aten.add.Tensor, self.call(aten.mul.Scalar, total, size), index)
        assert total is not None
        return total
