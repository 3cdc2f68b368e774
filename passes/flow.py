"""Where gradients flow in a forward graph: which values depend on a trained parameter, and from which of their uses a gradient comes back.

An op's differentiability is not guessed: each kind of op is run once on fake tensors with one input that requires a gradient, and autograd says which
results depend on it (not through detach, comparisons, integer results, running statistics).
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.passes.graph import Graph
from partitioner.passes.recurrent import opaque

Reach = tuple[bool, ...]
"""Per result of an op: does it depend differentiably on one input?"""


@dataclass(frozen=True)
class Flow:
    """`requires`: tensor values that depend on a parameter; `back[n]`: the ops through whose use of n a gradient comes back to n;
    `ends`: values that are results a gradient starts from (the loss, the leaves of the output)."""

    requires: frozenset[fx.Node]
    back: dict[fx.Node, tuple[fx.Node, ...]]
    ends: frozenset[fx.Node]


def _results(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


class _Probe:
    """Asks autograd about an op, once per kind."""

    def __init__(self, numbers: dict[fx.Node, Any]) -> None:
        self._numbers = numbers
        self._known: dict[Any, dict[int, Reach]] = {}

    def reach(self, node: fx.Node, inputs: list[fx.Node], sources: set[fx.Node]) -> dict[fx.Node, Reach]:
        """What `sources`, some of the op's tensor inputs, reach."""
        value = node.meta["val"]
        results = value.dtype if isinstance(value, Tensor) else tuple([v.dtype if isinstance(v, Tensor) else None for v in _results(value)])
        known = self._known.setdefault((node.target, results, *[n.meta["val"].dtype for n in inputs]), {})
        found = {}
        for at, source in enumerate(inputs):
            if source in sources:
                if at not in known:
                    known[at] = self._ask(node, source, inputs) if _differentiable(source.meta["val"]) else (False,) * len(_results(value))
                found[source] = known[at]
        return found

    def _ask(self, node: fx.Node, source: fx.Node, inputs: list[fx.Node]) -> Reach:
        with FakeTensorMode(), torch.enable_grad():
            env: dict[fx.Node, Any] = dict(self._numbers)
            for one in inputs:
                val = one.meta["val"]
                env[one] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device, requires_grad=one is source)
            args, kwargs = fx.node.map_arg(node.args, env.__getitem__), fx.node.map_arg(node.kwargs, env.__getitem__)
            try:
                out: Any = opaque(node.target, args, kwargs)
                out = node.target(*args, **kwargs) if out is None else out  # type: ignore[operator]
            except RuntimeError:  # no fake form in these shapes: any floating point result may depend on it
                return tuple(_differentiable(v) for v in _results(node.meta["val"]))
            return tuple(isinstance(v, Tensor) and v.requires_grad for v in _results(out))


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_integer(node: fx.Node) -> bool:
    """Whether a node of a Graph computes a number from scalars rather than a tensor."""
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem


def numbers(graph: Graph) -> dict[fx.Node, Any]:
    """Values of the scalar placeholders and integer nodes at the shapes of meta["val"] (which are global: rows is the whole batch)."""
    total = 2
    for node in graph.module.graph.nodes:
        cut = node.meta.get("cut")
        if cut is not None and isinstance(node.meta.get("val"), Tensor):
            total = int(node.meta["val"].shape[cut.dim]) // max(cut.outer * cut.inner, 1)
            break
    known: dict[str, Any] = {"rows": total, "start": 0, "share": 1.0, "part": 1.0}
    found: dict[fx.Node, Any] = {}
    for node, described in zip(graph.placeholders, graph.inputs, strict=True):
        if described.kind == "scalar":
            found[node] = known.get(described.name, 1)
    for node in graph.module.graph.nodes:
        if is_integer(node):
            found[node] = node.target(*fx.node.map_arg(node.args, found.__getitem__))
    return found


def gradient_flow(graph: Graph) -> Flow:
    """Linear in the number of ops; each kind of op costs one fake run per input that requires a gradient."""
    constants = numbers(graph)
    probe = _Probe(constants)
    requires: set[fx.Node] = set()
    reached: dict[fx.Node, dict[fx.Node, Reach]] = {}
    for node, described in zip(graph.placeholders, graph.inputs, strict=True):
        if described.requires_grad and _differentiable(node.meta.get("val")):
            requires.add(node)
    ops = [n for n in graph.module.graph.nodes if n.op == "call_function" and n not in constants]
    for node in ops:
        if node.target is operator.getitem:
            source, index = node.args
            if any(reach[index] for reach in reached.get(source, {}).values()):
                requires.add(node)
            continue
        inputs = node.all_input_nodes
        if requires.isdisjoint(inputs):
            continue
        found = probe.reach(node, [n for n in inputs if n not in constants], requires)
        if any(map(any, found.values())):
            reached[node] = found
            if isinstance(node.meta["val"], Tensor):
                requires.add(node)
    ends = {
        result
        for result, described in zip(graph.results, graph.outputs, strict=True)
        if described.kind in ("loss", "output") and result in requires
    }
    back: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(ops):
        if node.target is operator.getitem or node not in reached:
            continue
        if isinstance(node.meta["val"], Tensor):
            wanted = [0] if node in ends or node in back else []
        else:
            wanted = [int(user.args[1]) for user in node.users if user in requires and (user in ends or user in back)]
        if not wanted:
            continue
        for source, reach in reached[node].items():
            if any(reach[index] for index in wanted):
                back.setdefault(source, []).append(node)
    return Flow(frozenset(requires), {n: tuple(uses) for n, uses in back.items()}, frozenset(ends))
