"""How much of the work on inputs a placement spreads over the ranks."""

import operator

import torch

from partitioner.passes.collectives import collective_ops
from partitioner.passes.graph import Graph
from partitioner.passes.placement import REPLICATE
from partitioner.passes.rules import describe
from partitioner.passes.rules.describe import OpDims

_ops = torch.ops.partitioner


def whole_share(graph: Graph) -> float:
    """The share, 0 … 1, of the FLOPs and of the elements written by ops that depend on inputs that every rank does whole; 0 where there are none."""
    moved = {id(op) for op in (*collective_ops(), _ops.shard.default, _ops.share.default, operator.getitem)}
    dependent = {node for node, given in zip(graph.placeholders, graph.inputs, strict=True) if given.kind == "input"}
    whole = spread = 0
    known: dict[int, tuple[OpDims, int]] = {}  # descriptions of equal ops are one object (rules.describe_call)
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or dependent.isdisjoint(node.all_input_nodes):
            continue
        dependent.add(node)
        if id(node.target) in moved or "placement" not in node.meta:
            continue
        place = node.meta["placement"]
        place = place[0] if isinstance(place, tuple) else place
        rule = describe(node)
        if rule is None:
            work = _elements(node.meta["val"])
        else:
            if id(rule) not in known:
                known[id(rule)] = rule, _elements(node.meta["val"]) + _flops(rule)
            work = known[id(rule)][1]
        if place == REPLICATE:
            whole += work
        else:
            spread += work
    return whole / (whole + spread) if whole else 0.0


def _elements(value: object) -> int:
    entries = value if isinstance(value, (tuple, list)) else (value,)
    return sum(entry.numel() for entry in entries if isinstance(entry, torch.Tensor))


def _flops(rule: OpDims) -> int:
    return int(rule.flops.subs(rule.sizes)) if rule.flops.free_symbols else int(rule.flops)
