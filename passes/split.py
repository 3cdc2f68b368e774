"""Split a joint graph into forward and backward functions for one saved set.

    forward    reads ── ops that the writes and the saved values need ── writes, own saved values
    backward   saved values, tangents ── recomputed ops, each as late as possible, and the backward ops in the joint graph's order ── gradients

Backward starts from saved values and from reads that the caller can give again for free (parameters, buffers, constants, inputs, scalars). A saved
value that is a view of a read is not handed on: it would hold the read's memory, so the read itself is passed and viewed again.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from partitioner.errors import CaptureError
from partitioner.passes.block import Saved
from partitioner.passes.collectives import collective_ops
from partitioner.passes.differentiate import Joint, after_tangents, root
from partitioner.passes.randomness import random
from partitioner.passes.unify import is_number

_RANDOM = random._opoverload


@dataclass(frozen=True)
class ForwardGraph:
    """Placeholders are the reads in order; the output is the writes, then the own saved values."""

    graph: fx.Graph
    writes: int


@dataclass(frozen=True)
class BackwardGraph:
    """Placeholders are the saved values in the order of `saved`, then the tangents; the output is the gradients.

    `recomputed` names the ops that forward runs too.
    """

    graph: fx.Graph
    saved: tuple[Saved, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    recomputed: tuple[str, ...]


def split(
    joint: Joint, saved: Iterable[str], free: Iterable[str] = (), keep: Iterable[str] = (), *, communicate_again: bool = False
) -> tuple[ForwardGraph, BackwardGraph | None]:
    """Split for the saved set `saved`: names of reads or of ops in `joint.forward`.

    free: names of reads that backward may read again without their being saved; scalars always are. keep: ops that must never run again (random draws
    in eager order). Collectives run again only with `communicate_again`. Backward is None where no read wants a gradient.
    Raises CaptureError where backward needs a value that is neither saved nor may be made again.
    """
    splitter = _Splitter(joint, frozenset(saved), frozenset(free), frozenset(keep), communicate_again)
    backward = splitter.backward() if joint.gradients else None
    return splitter.forward(), backward


class _Splitter:
    def __init__(self, joint: Joint, saved: frozenset[str], free: frozenset[str], keep: frozenset[str], again: bool) -> None:
        wrong = [name for name in saved if name not in joint.nodes or not isinstance(joint.nodes[name].meta.get("val"), Tensor)]
        if wrong:
            raise CaptureError(f"block {joint.name} has no tensors {sorted(wrong)} to save; name reads or single results of forward ops")
        self._joint, self._keep, self._again = joint, keep, again
        self._reads = joint.placeholders[: joint.reads]
        self._saved = set(saved) | free | {self._reads[i].name for i in joint.scalars}
        for name in saved:  # a view of a read holds the read's memory: pass the read
            maker, _ = root(joint.nodes[name]) if joint.nodes[name].op != "placeholder" else (joint.nodes[name], 0)
            if maker.op == "placeholder":
                self._saved.discard(name)
                self._saved.add(maker.name)
        self._own: list[fx.Node] = []

    def backward(self) -> BackwardGraph:
        joint = self._joint
        late = after_tangents(joint.module.graph, joint.reads)
        gradients = joint.results[joint.writes :]
        needed = ancestors(gradients, late)
        order: list[fx.Node] = []  # what backward runs, in order
        ready: set[fx.Node] = set()
        starts: dict[fx.Node, None] = {}
        recomputed: list[str] = []
        for node in joint.module.graph.nodes:
            if node not in needed or node.op == "placeholder":
                continue
            for source in node.all_input_nodes:
                if source not in late:
                    self._make(source, order, ready, starts, recomputed)
            order.append(node)
        for gradient in gradients:
            if gradient not in late:
                self._make(gradient, order, ready, starts, recomputed)
        positions = {node: index for index, node in enumerate(self._reads)}
        place = {node: index for index, node in enumerate(joint.module.graph.nodes)}
        given = sorted(starts, key=lambda n: (n not in positions, place[n]))
        self._own = [node for node in given if node not in positions]
        saved = tuple(Saved("read", positions[n]) if n in positions else Saved("own", self._own.index(n)) for n in given)
        graph = copy_part([*given, *joint.placeholders[joint.reads :]], order, gradients)
        before = {node.name for node in self._needed_forward()}
        return BackwardGraph(graph, saved, joint.tangents, joint.gradients, tuple(name for name in recomputed if name in before))

    def _make(self, wanted: fx.Node, order: list[fx.Node], ready: set[fx.Node], starts: dict[fx.Node, None], recomputed: list[str]) -> None:
        """Make a value that depends on no tangent available now: from a saved one, or by running its ops again."""
        stack = [(wanted, False)]
        while stack:
            node, inputs_ready = stack.pop()
            if node in ready or node in starts:
                continue
            if node.name in self._saved:
                starts[node] = None
                continue
            if inputs_ready:
                order.append(node)
                ready.add(node)
                if not is_number(node) and node.target is not operator.getitem:
                    recomputed.append(node.name)
                continue
            self._may_run_again(node, wanted)
            stack.append((node, True))
            stack += [(source, False) for source in reversed(node.all_input_nodes)]

    def _may_run_again(self, node: fx.Node, wanted: fx.Node) -> None:
        where = f"backward of block {self._joint.name} needs {wanted.name}"
        if node.op == "placeholder":
            raise CaptureError(f"{where}, made from the read {node.name}, which is neither saved nor free; save {wanted.name} or {node.name}")
        if node.name in self._keep:
            raise CaptureError(f"{where}, made from {node.name}, which must not run again (an eager random draw); save {node.name}")
        if node.target in collective_ops() and not self._again:
            raise CaptureError(f"{where}, made from {node.name}, which communicates; save it, or allow communication in recomputation")

    def forward(self) -> ForwardGraph:
        joint = self._joint
        results = joint.results[: joint.writes] + self._own
        needed = self._needed_forward()
        graph = copy_part(self._reads, [n for n in joint.module.graph.nodes if n in needed and n.op == "call_function"], results)
        return ForwardGraph(graph, joint.writes)

    def _needed_forward(self) -> set[fx.Node]:
        draws = [n for n in self._joint.module.graph.nodes if n.target is _RANDOM]  # a draw in eager order is never dead
        return ancestors([*self._joint.results[: self._joint.writes], *self._own, *draws], None)


def ancestors(nodes: list[fx.Node], within: set[fx.Node] | None) -> set[fx.Node]:
    """The nodes and what they are made from (within a set)."""
    found: set[fx.Node] = set()
    stack = [n for n in nodes if within is None or n in within]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [n for n in node.all_input_nodes if within is None or n in within]
    return found


def copy_part(placeholders: list[fx.Node], order: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
    """A graph that is given `placeholders` (arguments or ops of another graph), runs `order` and returns `results`."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in placeholders:
        env[node] = graph.create_node("placeholder", node.name, name=node.name)
        env[node].meta = {**node.meta}
    for node in order:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in results))
    return graph
