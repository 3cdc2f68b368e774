"""Running statistics of BatchNorms that normalise by a micro-batch's own statistics go to an *epilogue* graph, which runs after all micro-batches.

    main       sum ─ all_reduce ─ own_mean ─┬─ normalise ─ … ─ loss
                                            └─ addend ──→ an output of kind "total", summed over micro-batches
    epilogue   totals, old buffers ─ new running statistics ──→ outputs of kind "buffer"

So the running statistics move once a step, by those of the whole batch. A value of a micro-batch's own is replicated over ranks but not over
micro-batches: it may only be used together with rows of that micro-batch, or as an addend. Where it is used otherwise, or what moves with the
totals is read by more than buffers, the batch cannot be cut in time after all, and that use is named.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from partitioner.passes.collectives import addend, collective_ops, own_mean
from partitioner.passes.dims import Cut
from partitioner.passes.functional import sweep
from partitioner.passes.graph import Graph, Input, Output, module_of
from partitioner.passes.placement import PARTIAL, REPLICATE

OUTSIDE = "forward or the loss"
"""Where an op is that no submodule runs, in words."""

_OWN, _ADDEND = own_mean._opoverload, addend._opoverload


@dataclass(frozen=True)
class Deferred:
    """What was found. `kept`: which of the graph's old outputs are still its; `totals`: its new ones, behind those.

    mixing: why the batch cannot be cut in time, by op and module. statistics: collectives that make statistics of a micro-batch.
    """

    epilogue: Graph | None
    kept: tuple[bool, ...]
    totals: tuple[str, ...]
    mixing: tuple[str, ...]
    statistics: tuple[str, ...]


def defer(graph: Graph) -> tuple[Graph, Deferred]:
    """The graph without what moves running statistics, and what was found. Without addends the graph stays as it is."""
    nodes = list(graph.module.graph.nodes)
    talking = {id(op) for op in collective_ops()}
    collectives = [n for n in nodes if id(n.target) in talking]
    own = [n for n in collectives if n.users and all(user.target is _OWN for user in n.users)]
    mixing = [f"{_named(n)} in {_where(n)}" for n in collectives if n not in own]
    mixing += [f"the statistics of a micro-batch, which {_named(n)} of {_where(n)} uses," for n in _misused(graph, nodes)]
    late = _descendants(nodes)
    described = dict(zip(graph.placeholders, graph.inputs, strict=True))
    stray = [n for n, given in zip(graph.results, graph.outputs, strict=True) if n in late and given.kind != "buffer"]
    needed = _ancestors(late)
    stray += [n for n in needed if n.op == "placeholder" and described[n].kind not in ("buffer", "constant")]
    mixing += [f"running statistics, with which {n.name} of {_where(n)} is computed," for n in stray]
    statistics = tuple(f"{_named(n)} in {_where(n)}" for n in own)
    if not late or stray:
        return graph, Deferred(None, (True,) * len(graph.outputs), (), tuple(mixing), statistics)
    kept = tuple(n not in late for n in graph.results)
    epilogue = _epilogue(graph, late, needed, described)
    totals = tuple(given.name for given in epilogue.inputs if given.kind == "total")
    return _without(graph, kept, totals), Deferred(epilogue, kept, totals, tuple(mixing), statistics)


def _named(node: fx.Node) -> str:
    return str(node.target).removeprefix("partitioner.").removeprefix("aten.").removesuffix(".default")


def _where(node: fx.Node) -> str:
    return node.meta.get("module") or OUTSIDE


def _misused(graph: Graph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Ops that do with a micro-batch's own value what only a value of the whole batch allows, and own values that are results."""
    own: set[fx.Node] = set()
    wrong = []
    for node in nodes:
        if node.op != "call_function" or node.target is _ADDEND or (node.target is not _OWN and own.isdisjoint(node.all_input_nodes)):
            continue
        places = node.meta["placement"] if isinstance(node.meta["placement"], tuple) else (node.meta["placement"],)
        if PARTIAL in places:
            wrong.append(node)
        elif not all(isinstance(place, Cut) for place in places):
            own.add(node)
    return wrong + [node for node in graph.results if node in own]


def _descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What depends on an addend, the addends included."""
    late: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and (node.target is _ADDEND or not late.isdisjoint(node.all_input_nodes)):
            late.add(node)
    return late


def _ancestors(late: set[fx.Node]) -> set[fx.Node]:
    """What the epilogue reads besides the totals, and all that it is made from."""
    found: set[fx.Node] = set()
    stack = [source for node in late if node.target is not _ADDEND for source in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in late and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _epilogue(graph: Graph, late: set[fx.Node], needed: set[fx.Node], described: dict[fx.Node, Input]) -> Graph:
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = []
    for node in graph.module.graph.nodes:
        if node in needed and node.op == "placeholder":
            env[node] = new.node_copy(node)
            inputs.append(described[node])
    for node in graph.module.graph.nodes:
        if node in late and node.target is _ADDEND:
            env[node] = new.placeholder(node.name)
            env[node].meta.update(val=node.meta["val"], placement=REPLICATE)
            inputs.append(Input("total", node.name))
    for node in graph.module.graph.nodes:
        if node not in env and (node in needed or node in late):
            env[node] = new.node_copy(node, env.__getitem__)
    results = [(node, given) for node, given in zip(graph.results, graph.outputs, strict=True) if node in late]
    new.output([env[node] for node, _ in results])
    return graph.with_module(module_of(new), inputs=tuple(inputs), outputs=tuple(given for _, given in results)).check()


def _without(graph: Graph, kept: tuple[bool, ...], totals: tuple[str, ...]) -> Graph:
    """The graph whose outputs are those kept, then the totals' addends."""
    main = graph.module.graph
    by_name = {node.name: node for node in main.nodes}
    results = [node for node, keep in zip(graph.results, kept, strict=True) if keep] + [by_name[name] for name in totals]
    main.erase_node(next(iter(reversed(main.nodes))))
    main.output(results)
    sweep(main)
    graph.module.recompile()
    outputs = [given for given, keep in zip(graph.outputs, kept, strict=True) if keep] + [Output("total", name) for name in totals]
    return replace(graph, outputs=tuple(outputs)).check()
