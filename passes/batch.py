"""Which atom of the inputs is the batch: told by the user, or inferred by trying.

Candidates are the atoms of dim 0 of the input leaves (the one that most leaves carry first), then those of dim 1. The first that can be cut
without gathering any value and without a collective beyond the loss is the batch; a sequence-first model is told from a batch-first one
because attention mixes the sequence. Where every candidate mixes (contrastive losses, BatchNorm), dim 0 is the batch, as everywhere in torch.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partitioner.errors import BatchError
from partitioner.passes.dims import Cut, Dims
from partitioner.passes.graph import Graph

LOST = 1_000_000  # a cut that the loss does not see mixes this much


@dataclass(frozen=True)
class Batch:
    """The batch atom, its size (rows of the global batch), and where each input leaf carries it (path -> cut; absent: nowhere)."""

    atom: int
    total: int
    cuts: Mapping[str, Cut]


def _leaves(graph: Graph) -> list[tuple[str, fx.Node]]:
    return [
        (described.name, node)
        for node, described in zip(graph.placeholders, graph.inputs, strict=True)
        if described.kind == "input" and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def _batch(graph: Graph, dims: Dims, atom: int) -> Batch:
    cuts = {name: cut for name, node in _leaves(graph) if (cut := dims.cut(node, atom)) is not None}
    return Batch(atom, dims.sizes((atom,)), cuts)


def candidates(graph: Graph, dims: Dims) -> list[Batch]:
    """Batches worth trying, most likely first."""
    found: list[int] = []
    for position in (0, 1):
        votes: Counter[int] = Counter()
        for _, node in _leaves(graph):
            shape = dims.shape(node) or ()
            if len(shape) > position and shape[position]:
                votes[shape[position][0]] += 1
        found.extend(atom for atom, _ in votes.most_common(16) if atom not in found)
    return [_batch(graph, dims, atom) for atom in found]


def told(graph: Graph, dims: Dims, batch_dim: Any) -> Batch | None:
    """The batch as the user says it: an int for every leaf that has the batch, or a mapping path -> int | None.

    Raises BatchError where leaves contradict each other or the graph's own relations.
    """
    leaves = _leaves(graph)
    wanted: dict[str, int | None] = {}
    for name, node in leaves:
        dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(name)
        if dim is None:
            wanted[name] = None
            continue
        rank = node.meta["val"].dim()
        if not -rank <= dim < rank:
            if isinstance(batch_dim, int):
                continue
            raise BatchError(f"batch_dim says dim {dim} of {name}, which has shape {tuple(node.meta['val'].shape)}; give a dim of it or None")
        wanted[name] = dim % rank
    anchor = next(((name, node) for name, node in leaves if wanted.get(name) is not None), None)
    if anchor is None:
        return None
    shape = dims.shape(anchor[1]) or ()
    atoms = shape[wanted[anchor[0]]] if shape else ()  # type: ignore[index]
    if not atoms:
        return None
    batch = _batch(graph, dims, atoms[0])
    if not isinstance(batch_dim, int):
        for name, dim in wanted.items():
            cut = batch.cuts.get(name)
            if (cut.dim if cut else None) != dim:
                says = "no batch dim" if cut is None else f"the batch in dim {cut.dim}"
                raise BatchError(f"batch_dim says {dim} for {name}, but the way the model uses it gives it {says}; leave batch_dim='auto' or correct it")
    return batch


def infer(graph: Graph, dims: Dims, mixing: Callable[[Batch], int]) -> Batch | None:
    """The first candidate that mixes nothing. Where all mix: of those of dim 0 the one that mixes least, else of all.

    `mixing(batch)` says how badly cutting it fits the model (see place.Placed.mixing).
    """
    scores: list[tuple[bool, int, int]] = []
    tried = candidates(graph, dims)
    for at, batch in enumerate(tried):
        score = mixing(batch)
        if score == 0:
            return batch
        lost, first = score >= LOST, all(cut.dim == 0 for cut in batch.cuts.values())
        scores.append((lost, 0 if first else 1, score * 1000 + at))
    if not scores:
        return None
    lost, _, which = min(scores)
    return None if lost else tried[which % 1000]
