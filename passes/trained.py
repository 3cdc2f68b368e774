"""Which parameters a loss can teach: those from which gradients flow back to them."""

import torch
from torch import Tensor, fx

from partitioner.passes.graph import Graph


def trained(graph: Graph) -> frozenset[str]:
    """Names of the trainable parameters that the loss depends on other than through detached values and integers."""
    placeholders = {node: described for node, described in zip(graph.placeholders, graph.inputs, strict=True)}
    left: list[fx.Node] = [node for node, described in zip(graph.results, graph.outputs, strict=True) if described.kind == "loss"]
    seen = set(left)
    found: set[str] = set()
    while left:
        node = left.pop()
        if node in placeholders:
            if placeholders[node].kind == "parameter" and placeholders[node].requires_grad:
                found.add(placeholders[node].name)
            continue
        if node.target is torch.ops.aten.detach.default:
            continue
        for read in node.all_input_nodes:
            value = read.meta.get("val")
            flows = not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype.is_complex
            if flows and read not in seen:
                seen.add(read)
                left.append(read)
    return frozenset(found)
