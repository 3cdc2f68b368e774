"""Batch sums that depend on inputs alone (the count of valid tokens) go to a *prologue* graph over the whole share of a rank.

Micro-batches, which cut the batch in time, then see such a sum as a constant.
"""

from dataclasses import replace

from torch import fx

from partitioner.passes.collectives import collective_ops, own_mean
from partitioner.passes.dims import Cut
from partitioner.passes.functional import sweep
from partitioner.passes.graph import Graph, Input, Output, module_of
from partitioner.passes.placement import REPLICATE
from partitioner.passes.randomness import random

_DRAW, _OWN = random._opoverload, own_mean._opoverload
Cuts = list[Cut | None]


def hoist(graph: Graph, cuts: Cuts) -> tuple[Graph | None, Graph, Cuts]:
    """The prologue (None where there is nothing to hoist), the graph without it, and how the graph's inputs are cut."""
    described = dict(zip(graph.placeholders, graph.inputs, strict=True))
    cut_of = dict(zip(graph.placeholders, cuts, strict=True))
    chosen = _of_inputs_alone(graph, described)
    if not chosen:
        return None, graph, cuts
    values: dict[fx.Node, fx.Node] = {}
    main = graph.module.graph
    first = next(n for n in main.nodes if n.op != "placeholder" or described[n].kind == "scalar")
    early, env = _copy(graph, described, chosen)
    for number, node in enumerate(chosen):
        name = f"prologue.{number}"
        with main.inserting_before(first):
            value = values[node] = main.placeholder(name.replace(".", "_"))
        value.meta.update(val=node.meta["val"], placement=REPLICATE)
        node.replace_all_uses_with(value)
        described[value], cut_of[value] = Input("prologue", name), None
    sweep(main)
    for node in [n for n in graph.placeholders if not n.users and described[n].kind in ("input", "constant", "scalar", "prologue")]:
        main.erase_node(node)
    graph.module.recompile()
    wanted = {node: described[value] for node, value in values.items() if value.users}
    early.output([env[node] for node in wanted])
    sweep(early)
    prologue = graph.with_module(
        module_of(early),
        inputs=tuple(described[node] for node in env if node.op == "placeholder"),
        outputs=tuple(Output("prologue", given.name) for given in wanted.values()),
    )
    left = replace(graph, inputs=tuple(described[n] for n in graph.placeholders))
    return prologue.check(), left, [cut_of[n] for n in graph.placeholders]


def _of_inputs_alone(graph: Graph, described: dict[fx.Node, Input]) -> list[fx.Node]:
    """Collectives of values that depend on nothing but inputs; not those of a micro-batch's own statistics."""
    alone: set[fx.Node] = set()
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            if described[node].kind in ("input", "constant") or _scalar(described[node], "rows", "start"):
                alone.add(node)
        elif node.op == "call_function" and node.target is not _DRAW and alone.issuperset(node.all_input_nodes):
            alone.add(node)
    own = {n.args[0] for n in graph.module.graph.nodes if n.target is _OWN}
    return [n for n in graph.module.graph.nodes if n in alone and n.target in collective_ops() and n not in own]


def _scalar(given: Input, *names: str) -> bool:
    """Whether an input is one of these scalars; a parameter may have the same name."""
    return given.kind == "scalar" and given.name in names


def _copy(graph: Graph, described: dict[fx.Node, Input], chosen: list[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph that computes these nodes, without an output yet."""
    needed = {node for node, given in described.items() if _scalar(given, "rows")}
    stack = list(chosen)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    early, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.module.graph.nodes:
        if node in needed:
            env[node] = early.node_copy(node, env.__getitem__)
    return early, env
