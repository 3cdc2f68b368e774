"""From one capture to functions: placed, cut into block classes, differentiated; split and emitted for each saved set that is asked for.

Graph → dims → batch → place → blocks → (per class, on demand) joint → (per saved set, on demand) BlockFunction
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from partitioner.errors import BatchError, PlanError
from partitioner.functions import Functions, Made
from partitioner.passes.batch import Batch, Fit, infer, told
from partitioner.passes.block import BlockClass, BlockFunction, Blocks, Port
from partitioner.passes.blocks import Homes
from partitioner.passes.blocks import cut as cut_blocks
from partitioner.passes.defer import OUTSIDE
from partitioner.passes.differentiate import Joint, differentiate
from partitioner.passes.dims import Cut, analyse
from partitioner.passes.emit import emit
from partitioner.passes.graph import Graph
from partitioner.passes.own_rows import pair_rows
from partitioner.passes.place import Placed, place, unplaced
from partitioner.passes.remat_encode import communications, draws, encode
from partitioner.passes.remat_problem import RematProblem
from partitioner.passes.rematerialize import Point, frontier, price
from partitioner.passes.split import split
from partitioner.runtime.program import Slice

AXIS = "dp"
FREE_KINDS = ("parameter", "buffer", "constant", "input", "prologue", "scalar")  # what backward may read again without its being saved
Seconds = Callable[[fx.Node, int | None, int | None], float]
"""Seconds of a node of a joint, forward or backward graph at so many rows, where its meta["val"] has so many."""


def slice_of(name: str, cut: Cut | None, value: Tensor) -> Slice:
    """A leaf of this global value, cut like that."""
    if cut is None:
        return Slice(name)
    return Slice(name, cut.dim, cut.outer, cut.inner, before=value.shape[: cut.dim].numel())


@dataclass(frozen=True)
class Once:
    """A block that runs once a step: the prologue, on this rank's whole share of the batch, or the epilogue, on what all micro-batches add up to."""

    function: BlockFunction
    reads: tuple[Port, ...]
    writes: tuple[str, ...]


@dataclass
class Prepared:
    """One capture, ready to be priced and lowered. `total` is the number of rows of the global batch (None: it is not cut)."""

    graph: Graph
    placed: Placed
    batch: Batch | None
    blocks: Blocks
    prologue: Once | None
    epilogue: Once | None
    total: int | None
    typical_rows: int
    keyed: bool
    seconds: Seconds
    functions: Functions
    _joints: dict[str, Joint] = field(default_factory=dict)
    _made: dict[tuple[str, frozenset[str], bool], Made] = field(default_factory=dict)
    _named: dict[tuple[str, bool], Made] = field(default_factory=dict)
    _frontiers: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    _prices: dict[tuple[str, str, int], float] = field(default_factory=dict)
    _ops: dict[tuple[str, str, int], float] = field(default_factory=dict)

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """How every input leaf that some block reads is cut."""
        found: dict[str, Slice] = {}
        for graph in (self.placed.graph, self.placed.prologue):
            for described, node in zip(graph.inputs, graph.placeholders, strict=True) if graph is not None else ():
                if described.kind == "input":
                    found[described.name] = slice_of(described.name, node.meta.get("cut"), node.meta["val"])
        return tuple(found.values())

    def joint(self, cls: str) -> Joint:
        """The class's forward and backward in one graph."""
        if cls not in self._joints:
            self._joints[cls] = self.functions.joint(self.blocks.classes[cls])
        return self._joints[cls]

    def free(self, cls: str) -> frozenset[str]:
        """Names of the reads that backward reads again at no price."""
        block = next(block for block in self.blocks.blocks if block.cls == cls)
        placeholders = self.joint(cls).placeholders
        return frozenset(node.name for node, port in zip(placeholders, block.reads, strict=False) if port.kind in FREE_KINDS)

    def keep(self, cls: str) -> frozenset[str]:
        """Ops that must not run again: what communicates, and draws from a generator that advances in eager order."""
        joint = self.joint(cls)
        return communications(joint) | (frozenset() if self.keyed else draws(joint))

    def frontier(self, cls: str, limit: int) -> tuple[Point, ...]:
        """Pareto-optimal saved sets by ascending bytes; a single empty one where nothing is differentiated."""
        if cls not in self._frontiers:
            none = (Point(frozenset(), 0, 0.0),)
            self._frontiers[cls] = frontier(self._problem(cls), limit) if self.joint(cls).gradients else none
        return self._frontiers[cls]

    def point(self, cls: str, saved: frozenset[str], label: str) -> Point:
        """What a saved set costs. Raises PlanError where the class has no such values or they do not suffice."""
        joint = self.joint(cls)
        if not joint.gradients:
            return Point(frozenset(), 0, 0.0)
        if unknown := sorted(saved - set(joint.nodes)):
            raise PlanError(
                f"block {label!r} cannot save {unknown[0]!r}: it computes no such value; the plan was edited, or made with another version"
            )
        try:
            return price(self._problem(cls), saved)
        except ValueError as error:
            raise PlanError(f"block {label!r} cannot run its backward from the planned saved values: {error}") from error

    def nearest(self, cls: str, saved: frozenset[str], share: float, limit: int) -> frozenset[str]:
        """A saved set like one that was planned for another capture: the same names where they serve, else the frontier point that keeps no
        larger share of the bytes.
        """
        joint = self.joint(cls)
        if not joint.gradients:
            return frozenset()
        if saved <= set(joint.nodes):
            try:
                return price(self._problem(cls), saved).saved
            except ValueError:
                pass
        points = self.frontier(cls, limit)
        budget = share * points[-1].saved_bytes
        return max((p for p in points if p.saved_bytes <= budget), key=lambda p: p.saved_bytes, default=points[0]).saved

    def _problem(self, cls: str) -> RematProblem:
        """What to save of a class, at the typical row count."""
        joint = self.joint(cls)
        rows = None if joint.rows is None else self.typical_rows
        return encode(joint, lambda node: self._op(joint, node, self.typical_rows), self.free(cls), self.keep(cls), rows=rows)

    def price(self, function: BlockFunction, backward: bool, rows: int) -> float:
        """Seconds of a function's forward or backward on so many rows."""
        if any(once is not None and function is once.function for once in (self.prologue, self.epilogue)):
            return 0.0
        made = self._named[function.name, function.halves is not None]
        return self._price(made, "backward" if backward else "forward", made.backward if backward else made.forward, rows)

    def price_half(self, function: BlockFunction, weight: bool, rows: int) -> float:
        """Seconds of the input half or the weight half of a function that was made with halves; 0.0 where there is no such half."""
        if function.halves is None:
            return 0.0
        made = self._named[function.name, True]
        assert made.halves is not None
        if made.halves.weight is None and not weight:
            return self.price(function, True, rows)
        return self._price(made, "weight" if weight else "input", made.halves.weight if weight else made.halves.input, rows)

    def _price(self, made: Made, part: str, graph: fx.Graph | None, rows: int) -> float:
        key = (made.function.name, part, rows)
        if key not in self._prices:
            nodes = [] if graph is None else [node for node in graph.nodes if node.op == "call_function"]
            if part in ("forward", "backward"):  # whose ops are the joint graph's, under the same names
                self._prices[key] = sum(self._op(made.joint, made.joint.nodes[node.name], rows) for node in nodes)
            else:
                self._prices[key] = sum(self.seconds(node, None if made.joint.rows is None else rows, made.joint.rows) for node in nodes)
        return self._prices[key]

    def _op(self, joint: Joint, node: fx.Node, rows: int) -> float:
        """Seconds of an op of a joint graph."""
        key = (joint.name, node.name, rows)
        if key not in self._ops:
            self._ops[key] = self.seconds(node, None if joint.rows is None else rows, joint.rows)
        return self._ops[key]

    def function(self, cls: str, saved: frozenset[str], halves: bool = False) -> BlockFunction:
        """The class split for a saved set and emitted; with `halves` its backward in two functions as well."""
        key = (cls, saved, halves)
        if key not in self._made:
            made = self._made[key] = self.functions.made(self.blocks.classes[cls], saved, self.free(cls), self.keep(cls), halves)
            self._named[made.function.name, made.function.halves is not None] = made
        return self._made[key].function


def prepare(
    graph: Graph,
    *,
    batch_dim: Any,
    ranks: int,
    in_time: bool,
    keyed: bool,
    own_statistics: bool = False,
    at_least: int = 1,
    homes: Homes | None = None,
    seconds: Seconds,
    functions: Functions | None = None,
) -> Prepared:
    """Place the captured graph over `ranks`, and over micro-batches when `in_time`, and cut it into blocks, `at_least` so many if it can be.

    keyed: several ranks draw random numbers, by key. own_statistics: BatchNorm may normalise micro-batches by their own. homes: the stages that hold
    a parameter, for blocks that follow them. functions: what other preparations have made already.

    Raises BatchError where `batch_dim` contradicts the graph.
    """
    batch: Batch | None = None
    if ranks == 1 and not in_time:
        placed = unplaced(graph)
    else:
        pair_rows(graph)
        dims = analyse(graph)
        tried: dict[tuple[int, ...], Placed] = {}

        def fit(candidate: Batch) -> Fit:
            tried[candidate.atoms] = place(graph, dims, candidate, AXIS, own_statistics)
            return tried[candidate.atoms].fit

        if isinstance(batch_dim, Mapping):
            batch = told(graph, dims, batch_dim)
        else:
            batch = infer(graph, dims, fit, batch_dim if isinstance(batch_dim, int) else None)
        if batch is not None and batch.total < ranks:
            batch = None  # fewer rows than ranks: every rank computes all of them and counts its share
        placed = tried[batch.atoms] if batch is not None and batch.atoms in tried else place(graph, dims, batch, AXIS, own_statistics)
    total = None if batch is None else batch.total
    rows = 1 if total is None else -(-total // ranks)
    prologue = None if placed.prologue is None else _once(placed.prologue, rows, "prologue")
    epilogue = None if placed.epilogue is None else _once(placed.epilogue, None, "epilogue")
    blocks = cut_blocks(placed.graph, at_least, homes)
    return Prepared(graph, placed, batch, blocks, prologue, epilogue, total, rows, keyed, seconds, functions or Functions())


def most_micro_batches(prepared: Prepared, ranks: int) -> int:
    """How many micro-batches are legal: 1 where an op mixes the rows of the batch or nothing can be cut, else the fewest rows of a rank.

    A micro-batch that BatchNorm normalises by its own statistics needs two values of a channel, as torch asks for.
    """
    if prepared.placed.collectives or prepared.total is None:
        return 1
    return max(1, prepared.total // max(ranks, _rows_needed(prepared)))


def _rows_needed(prepared: Prepared) -> int:
    """The fewest rows that a micro-batch may have on all ranks together."""
    return 2 if prepared.placed.statistics and 1 in prepared.placed.batch_norms.values() else 1


def check_micro_batches(prepared: Prepared, ranks: int, micro_batches: int) -> None:
    """Raise BatchError where the batch cannot be cut in time as asked, saying why and what can."""
    most = most_micro_batches(prepared, ranks)
    if micro_batches <= most:
        return
    asked = f"{micro_batches} micro-batches were asked for, but"
    if prepared.total is None:
        raise BatchError(f"{asked} no batch dim was found, or it has fewer rows than there are ranks, so it cannot be cut; use micro_batches=1")
    if prepared.placed.collectives:
        norms = {f"all_reduce in {module or OUTSIDE}" for module in prepared.placed.batch_norms}
        found, *_ = [text for text in prepared.placed.collectives if text not in norms] or prepared.placed.collectives
        own = ""
        if found in norms and not prepared.placed.statistics:
            own = ', or constraints={"batch_statistics": "micro_batch"} to let BatchNorm normalise each micro-batch by its own statistics'
        raise BatchError(
            f"{asked} the model mixes the rows of the batch ({found}), so that parts of it cannot be computed in turn; use micro_batches=1{own}"
        )
    if prepared.total // ranks > most:
        raise BatchError(
            f"{asked} {prepared.total} rows leave a micro-batch with one, and BatchNorm needs two values of a channel for its statistics; "
            f"use micro_batches={most} or fewer, or a larger batch"
        )
    raise BatchError(
        f"{asked} {prepared.total} rows on {ranks} ranks leave a rank with {prepared.total // ranks}; use micro_batches={most} or fewer, "
        "or a larger batch"
    )


def _once(graph: Graph, rows: int | None, name: str) -> Once:
    nodes = graph.placeholders
    for node, described in zip(nodes, graph.inputs, strict=True):
        node.meta["kind"] = described.kind
    ports = [Port(described.kind, described.name) for described in graph.inputs]
    scalars = {index: port.name for index, port in enumerate(ports) if port.kind == "scalar"}
    cls = BlockClass(name, graph.module, (False,) * len(ports), (), scalars)
    ahead, _ = split(differentiate(cls, rows), ())
    return Once(emit(cls, ahead, None, name), tuple(ports), tuple(described.name for described in graph.outputs))
