"""One op written by finer ones, as a graph at the captured shapes (see rules.decomposition)."""

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from partitioner.passes.rules import decomposition, tensor_arguments


def finer(node: fx.Node, own_statistics: bool = False) -> fx.Graph | None:
    """The op as a graph whose placeholders are its tensor arguments in order; None where it has no finer form.

    own_statistics: it is a BatchNorm by the statistics of a micro-batch; then a last placeholder stands for the scalar `part`.

    The decompositions read no sizes of their tensors, so they are recorded from proxies and each op then runs once on the fake values.
    """
    function = decomposition(node)
    if function is None:
        return None
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    flat, spec = tree_flatten((node.args, node.kwargs))
    values = iter(tensor_arguments(node))
    leaves: list[Any] = list(flat)
    for at, leaf in enumerate(flat):
        if isinstance(leaf, fx.Node):
            placeholder = graph.placeholder(f"argument_{at}")
            placeholder.meta["val"] = next(values).meta["val"]
            leaves[at] = fx.Proxy(placeholder, tracer)
    args, kwargs = tree_unflatten(leaves, spec)
    if own_statistics:
        part = graph.placeholder("part")
        part.meta["val"] = 1.0
        kwargs = {**kwargs, "part": fx.Proxy(part, tracer)}
    result = function(*args, **kwargs)
    graph.output(fx.node.map_aggregate(result, lambda proxy: proxy.node if isinstance(proxy, fx.Proxy) else proxy))
    with torch.no_grad():
        for inner in graph.nodes:
            if inner.op == "call_function":
                inner.meta["val"] = inner.target(*fx.map_arg(inner.args, _value), **fx.map_arg(inner.kwargs, _value))
    return graph


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
