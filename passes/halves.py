"""Split a backward into two halves: the gradients that other blocks wait for, and those of parameters, which can come later.

    input half    saved values, tangents ── what the gradients of values need ── gradients of values, carried values
    weight half   some of the saved values and tangents, carried values ── the rest ── gradients of parameters

Every op runs once; only views, which are free, are made in both. What the weight half is given, carried values and arguments of backward, is held
until it runs, and shall be few bytes: a minimum cut. An op that only gradients of parameters need may stand in either half, except that matrix
products and convolutions stand in the weight half, which is there to do them. Of equally good cuts the one with the fewest ops in the input half is
taken.

    source ── bytes of a ── a ──┐                  source: runs in the input half, or is an argument of backward
                                ├── op ── sink     sink: runs in the weight half
    source ── bytes of b ── b ──┘                  an edge that is cut: this value is held

A convolution's backward is run once in each half, with the mask of the results wanted there. Other ops that make gradients of both kinds at once
(norms) stand in the input half, and their gradients of parameters, which are small, are carried finished.
"""

import operator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from partitioner.passes.block import Bytes
from partitioner.passes.differentiate import Joint
from partitioner.passes.split import BackwardGraph, ancestors, copy_part
from partitioner.passes.unify import is_number

_CONVOLUTION = torch.ops.aten.convolution_backward.default
_MASK = [argument.name for argument in _CONVOLUTION._schema.arguments].index("output_mask")


@dataclass(frozen=True)
class HalfGraphs:
    """Both halves; fields as in block.Halves. `input` is backward itself where `weight` is None."""

    input: fx.Graph
    weight: fx.Graph | None
    values: tuple[int, ...]
    parameters: tuple[int, ...]
    handed: tuple[int, ...]
    carried: int


def halve(joint: Joint, backward: BackwardGraph) -> HalfGraphs:
    """The halves of a backward that was split from `joint`; bytes are weighed at joint.rows."""
    parameters = tuple(read for read in backward.gradients if joint.placeholders[read].meta["kind"] == "parameter")
    values = tuple(read for read in backward.gradients if read not in parameters)
    if not parameters:
        return HalfGraphs(backward.graph, None, values, (), (), 0)
    graph = fx.Graph()
    results: Any = graph.graph_copy(backward.graph, {})
    graph.output(results)
    by_read = dict(zip(backward.gradients, results, strict=True))
    first, last = [by_read[read] for read in values], [by_read[read] for read in parameters]
    _part_convolutions(graph, ancestors(first, None))
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    free = {
        node
        for node, saved in zip(arguments, backward.saved, strict=False)
        if saved.kind == "read" and joint.placeholders[saved.index].meta.get("kind") != "value"  # is there anyway, or fetched again
    }
    early = _early(graph, first, last, free) if first else set[fx.Node]()
    given, late = _given(last, early)
    handed = [at for at, node in enumerate(arguments) if node in given]
    carried = [node for node in graph.nodes if node in given and node.op != "placeholder"]
    needed = ancestors([*first, *carried], None)
    ahead = copy_part(arguments, [node for node in graph.nodes if node in needed and node.op == "call_function"], [*first, *carried])
    behind = copy_part([*(arguments[at] for at in handed), *carried], [node for node in graph.nodes if node in late], last)
    for node in list(behind.nodes)[len(handed) : len(handed) + len(carried)]:
        node.meta["kind"] = "carried"
    return HalfGraphs(ahead, behind, values, parameters, tuple(handed), len(carried))


def _part_convolutions(graph: fx.Graph, first: set[fx.Node]) -> None:
    """Give each half that wants results of a convolution's backward a call of its own."""
    for node in list(graph.nodes):
        if node.target is not _CONVOLUTION or node not in first:
            continue
        rest = [user for user in node.users if user not in first]
        if not rest:
            continue
        with graph.inserting_after(node):
            twin = graph.create_node("call_function", _CONVOLUTION, node.args, node.kwargs, name=f"{node.name}_weight")
        for user in rest:
            user.replace_input_with(node, twin)
        for half, whole in ((twin, node.meta), (node, node.meta)):
            wanted = {user.args[1] for user in half.users}
            half.args = (*half.args[:_MASK], [index in wanted for index in range(3)], *half.args[_MASK + 1 :])
            picked = {key: tuple(one if at in wanted else None for at, one in enumerate(whole[key])) for key in ("val", "storages")}
            half.meta = {**whole, **picked}


def _early(graph: fx.Graph, first: list[fx.Node], last: list[fx.Node], free: set[fx.Node]) -> set[fx.Node]:
    """The ops of the input half: what `first` needs, and what else makes the weight half hold fewer bytes."""
    before = ancestors(first, None)
    source, sink = "source", "sink"
    net = nx.DiGraph()
    net.add_nodes_from((source, sink))

    def reads(reader: Any, node: fx.Node) -> None:
        for value in _behind_views(node):
            maker = _maker(value)
            given = value.op == "placeholder" or maker in before
            if value not in free:
                net.add_edge(source if given else maker, ("held", value), capacity=value.meta["val"].untyped_storage().nbytes())
                net.add_edge(("held", value), reader)
            if not given:
                net.add_edge(reader, maker)  # what the input half runs finds all that it reads there

    for node in ancestors(last, None) - before:
        if node.op == "placeholder" or _is_view(node) or node.target is operator.getitem:
            continue
        for read in node.all_input_nodes:
            reads(node, read)
        if getattr(node.target, "overloadpacket", None) in flop_registry:
            net.add_edge(node, sink)
    for node in last:
        reads(sink, node)
    # backwards, because networkx gives the cut nearest to what it takes for the source
    _, (_, ours) = nx.minimum_cut(net.reverse(copy=False), sink, source)
    return before | {node for node in ours if isinstance(node, fx.Node)}


def _given(last: list[fx.Node], early: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """What the weight half is given, and the nodes that it runs."""
    given, late, stack = set[fx.Node](), set[fx.Node](), list(last)
    while stack:
        node = stack.pop()
        if node in given or node in late:
            continue
        if node.op == "placeholder" or (not _is_view(node) and _maker(node) in early):
            given.add(node)
        else:
            late.add(node)
            stack += node.all_input_nodes
    return given, late


def _behind_views(node: fx.Node) -> set[fx.Node]:
    """The values of which a node is a view, or the node itself."""
    found, stack = set[fx.Node](), [node]
    while stack:
        one = stack.pop()
        if _is_view(one):
            stack += one.all_input_nodes
        else:
            found.add(one)
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether a node costs nothing: a view, one of several, or a number."""
    if node.op == "placeholder":
        return False
    return is_number(node) or not any(isinstance(place, Bytes) for place in _maker(node).meta["storages"])


def _maker(node: fx.Node) -> fx.Node:
    """The op of which a value is the result or one of the results."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]
