"""Which atom of the inputs is the batch: told by the user, or inferred by trying.

Candidates are the atoms of dim 0 of the input leaves (the one that most leaves carry first), then those of dim 1; a dim that parameters have, as
features do, comes last. The first whose cut mixes nothing is the batch; a sequence-first model is told from a batch-first one because attention
mixes the sequence. Where every candidate mixes (contrastive losses, BatchNorm), it is the one whose cut spares the ranks most work, and among
equals that of dim 0, as everywhere in torch.

Inputs that meet in nothing but products of their rows (images and texts, compared all with all) share no atom. Each is one of the batch's atoms
where it has as many rows and cutting it too spares work.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.errors import BatchError
from partitioner.passes.dims import Cut, Dims
from partitioner.passes.graph import Graph

MOST = 16  # candidates tried per dim
LOST = 0.95  # a cut that leaves this share of the work whole spares nothing
SPARED = 0.05  # the share of the work that makes it worth cutting another group of inputs


@dataclass(frozen=True)
class Batch:
    """The batch atoms (one, or one of each group of inputs), their size (rows of the global batch), and where each input leaf carries one
    (path -> cut; absent: nowhere)."""

    atoms: tuple[int, ...]
    total: int
    cuts: Mapping[str, Cut]

    @property
    def atom(self) -> int:
        """The atom that stands for all of them once the batch is chosen."""
        return self.atoms[0]


@dataclass(frozen=True)
class Fit:
    """How a cut fits the model: `whole` is the share of the work on inputs that every rank does whole, `mixed` counts the values that are
    gathered or summed before the loss."""

    whole: float
    mixed: int


def _leaves(graph: Graph) -> list[tuple[str, fx.Node]]:
    return [
        (described.name, node)
        for node, described in zip(graph.placeholders, graph.inputs, strict=True)
        if described.kind == "input" and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def _batch(graph: Graph, dims: Dims, *atoms: int) -> Batch:
    cuts: dict[str, Cut] = {}
    for name, node in _leaves(graph):
        for atom in atoms:
            if name not in cuts and (cut := dims.cut(node, atom)) is not None:
                cuts[name] = cut
    return Batch(tuple(sorted(atoms)), dims.sizes(atoms[:1]), cuts)


def _settled(batch: Batch, dims: Dims) -> Batch:
    """From here on the batch's atoms are one."""
    for other in batch.atoms[1:]:
        dims.unify(batch.atoms[:1], (other,))
    return batch


def _voted(graph: Graph, dims: Dims, position: int) -> Iterator[int]:
    """Atoms of this dim of the leaves: major ones first (the batch of a merged (batch·time)), by the number of leaves."""
    votes: Counter[int] = Counter()
    for _, node in _leaves(graph):
        shape = dims.shape(node) or ()
        if -len(shape) <= position < len(shape):
            for rank, atom in enumerate(shape[position]):
                votes[atom] += 1000 if rank == 0 else 1
    yield from (atom for atom, _ in votes.most_common(MOST))


def candidates(graph: Graph, dims: Dims, dim: int | None = None) -> list[Batch]:
    """Batches worth trying, most likely first; with `dim`, those that every leaf which has them carries there."""
    positions = (0, 1) if dim is None else (dim,)
    atoms: dict[int, None] = {}
    for position in positions:
        if position == 0 or atoms or dim is not None:  # where no leaf has more than one row, the batch is that row
            atoms.update(dict.fromkeys(_voted(graph, dims, position)))
    found = [_batch(graph, dims, atom) for atom in atoms]
    return found if dim is None else [batch for batch in found if all(_at(graph, name, dim) == cut.dim for name, cut in batch.cuts.items())]


def _at(graph: Graph, leaf: str, dim: int) -> int | None:
    """A dim of a leaf, counted from the front; None where it has no such dim."""
    rank = next(node.meta["val"].dim() for name, node in _leaves(graph) if name == leaf)
    return dim % rank if -rank <= dim < rank else None


def infer(graph: Graph, dims: Dims, fit: Callable[[Batch], Fit], dim: int | None = None) -> Batch | None:
    """The batch, found by trying `fit` on candidates (place.Placed.fit); `dim` is the user's word for where it is in every leaf that has it.

    None where no cut would spare any work: every rank computes the whole batch. Raises BatchError where `dim` contradicts the graph.
    """
    tried = candidates(graph, dims, dim)
    if not tried and dim is not None:
        _refuse(graph, dims, dim)
    features = _of_parameters(graph, dims)
    behind = [b for b in tried if b.atom in features and (dim is not None or all(cut.dim == 0 for cut in b.cuts.values()))]
    for group in ([b for b in tried if b.atom not in features], behind):
        best = _best(group, fit, LOST if dim is None else 2.0)
        if best is not None:
            return _settled(_joined(graph, dims, *best, fit, dim), dims)
    return None


def _best(group: list[Batch], fit: Callable[[Batch], Fit], lost: float) -> tuple[Batch, Fit] | None:
    """The first that mixes nothing, else the one that leaves least work whole; None where that is too much."""
    best: tuple[tuple[float, bool, int], Batch, Fit] | None = None
    for batch in group:
        found = fit(batch)
        if found.mixed == 0 and found.whole <= lost / 2:
            return batch, found
        key = (round(found.whole, 1), any(cut.dim != 0 for cut in batch.cuts.values()), found.mixed)
        if found.whole < lost and (best is None or key < best[0]):
            best = key, batch, found
    return None if best is None else best[1:]


def _joined(graph: Graph, dims: Dims, batch: Batch, now: Fit, fit: Callable[[Batch], Fit], dim: int | None) -> Batch:
    """The batch with the leaves of as many rows whose cutting spares work."""
    position = Counter(cut.dim for cut in batch.cuts.values()).most_common(1)[0][0] if dim is None else dim
    for name, node in _leaves(graph):
        at, shape = _at(graph, name, position), dims.shape(node)
        if name in batch.cuts or at is None or not shape or not shape[at] or dims.sizes(shape[at][:1]) != batch.total:
            continue
        wider = _batch(graph, dims, *batch.atoms, shape[at][0])
        found = fit(wider)
        if found.whole <= now.whole - SPARED:
            batch, now = wider, found
    return batch


def _of_parameters(graph: Graph, dims: Dims) -> set[int]:
    """Atoms of the dims of parameters."""
    parameters = [node for node, given in zip(graph.placeholders, graph.inputs, strict=True) if given.kind == "parameter"]
    return {atom for node in parameters for dim in dims.shape(node) or () for atom in dim}


def _refuse(graph: Graph, dims: Dims, dim: int) -> None:
    """Say which leaves contradict each other; return where none has a batch to speak of (a single row)."""
    leaves = _leaves(graph)
    if leaves and all(_at(graph, name, dim) is None for name, _ in leaves):
        shapes = ", ".join(f"{name} {tuple(node.meta['val'].shape)}" for name, node in leaves[:6])
        raise BatchError(f"batch_dim={dim}, but no input has such a dim ({shapes}); give the number of the batch dim, or leave batch_dim='auto'")
    for atom in _voted(graph, dims, dim):
        cuts = _batch(graph, dims, atom).cuts
        here = [name for name, cut in cuts.items() if _at(graph, name, dim) == cut.dim]
        for name, cut in cuts.items():
            if _at(graph, name, dim) != cut.dim:
                raise BatchError(
                    f"batch_dim={dim}, but the way the model uses them, dim {dim} of {here[0]} is dim {cut.dim} of {name}; "
                    "leave batch_dim='auto', or give a tree like the inputs with the dim of each"
                )


def told(graph: Graph, dims: Dims, batch_dim: Mapping[str, int | None]) -> Batch | None:
    """The batch as the user says it: leaf path -> dim, or None where a leaf has no batch; a leaf that is not named is left to the graph.

    None where no leaf has a batch, or it is a single row. Raises BatchError where leaves contradict each other or the graph's own relations.
    """
    leaves = dict(_leaves(graph))
    wanted: dict[str, int | None] = {}
    for name, node in leaves.items():
        if name in batch_dim:
            said = batch_dim[name]
            wanted[name] = None if said is None else _at(graph, name, said)
            if said is not None and wanted[name] is None:
                raise BatchError(f"batch_dim says dim {said} of {name}, which has shape {tuple(node.meta['val'].shape)}; give a dim of it or None")
    anchors = [(name, at) for name, at in wanted.items() if at is not None and leaves[name].meta["val"].shape[at] != 1]
    if not anchors:
        return None
    first, at = anchors[0]
    problems = []
    for atom in (dims.shape(leaves[first]) or ())[at]:
        batch = _batch(graph, dims, atom)
        for name, dim in wanted.items():  # what the graph does not relate, the user may
            shape = dims.shape(leaves[name]) or ()
            if name not in batch.cuts and dim is not None and shape[dim] and dims.sizes(shape[dim][:1]) == batch.total:
                batch = _batch(graph, dims, *batch.atoms, shape[dim][0])
        wrong = next((name for name, dim in wanted.items() if dim != (batch.cuts[name].dim if name in batch.cuts else None)), None)
        if wrong is None:
            return _settled(batch, dims)
        problems.append((wrong, batch))
    wrong, batch = problems[0]
    if wrong in batch.cuts:
        has = f"the way the model uses it gives it the batch in dim {batch.cuts[wrong].dim}"
    else:
        has = f"it has shape {tuple(leaves[wrong].meta['val'].shape)} and shares no dim of {batch.total} rows with the others there"
    raise BatchError(
        f"batch_dim says {batch_dim[wrong]} for {wrong}, but {has}, where dim {at} of {first} is the batch ({batch.total} rows); "
        "leave batch_dim='auto' or correct it"
    )
