"""Annotated models of the zoo, their inputs at other sizes, and what autograd keeps when a captured graph is run."""

from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from partitioner.passes.annotate import KINDS, Annotated, annotate
from partitioner.passes.annotate_sizes import sizes_of
from partitioner.passes.capture import capture
from partitioner.passes.dims import analyse
from partitioner.passes.graph import Graph
from partitioner.passes.tree import named_leaves
from tests.models import MODELS, Case


def captured(case: Case) -> Graph:
    given, loss = case["loss_fn"] is not None, case["loss_fn"]
    return capture(case["model"].train(), case["args"], case["kwargs"], loss=loss, targets=case["targets"], has_targets=given)


@cache
def known(name: str) -> tuple[Case, Graph, Annotated]:
    case = MODELS[name]()
    graph = captured(case)
    return case, graph, annotate(graph)


def totals(facts: Annotated, **sizes: int) -> dict[str, int]:
    return {kind: facts.total(kind)(**sizes) for kind in KINDS}


def resized(case: Case, graph: Graph, facts: Annotated, **sizes: int) -> Case:
    """The case with its inputs repeated or cut to other sizes."""
    found = sizes_of(graph, analyse(graph), None)
    new: dict[int, Tensor] = {}
    leaves = dict(named_leaves(tuple(case["args"]), dict(case["kwargs"]), case["targets"], case["targets"] is not None)[0])
    for node, described in zip(graph.placeholders, graph.inputs, strict=True):
        if described.kind == "input":
            tensor = leaves[described.name]
            for dim in range(tensor.dim()):
                tensor = tensor.index_select(dim, torch.arange(facts.formula(found.dim(node, dim))(**sizes)) % tensor.shape[dim])
            new[id(leaves[described.name])] = tensor
    return {**case, **{part: tree_map(lambda leaf: new.get(id(leaf), leaf), case[part]) for part in ("args", "kwargs", "targets")}}


def kept_bytes(case: Case, graph: Graph) -> int:
    """Bytes of the storages that autograd keeps when the captured graph is run, but for those of its inputs."""
    leaves = dict(named_leaves(tuple(case["args"]), dict(case["kwargs"]), case["targets"], case["targets"] is not None)[0])
    model = case["model"]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants, **leaves}
    inputs = [-1 if described.kind == "scalar" else tensors[described.name] for described in graph.inputs]
    mine = {one.untyped_storage()._cdata for one in inputs if isinstance(one, Tensor)}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        graph.module(*inputs)
    sizes = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in kept}
    return sum(size for storage, size in sizes.items() if storage not in mine)
