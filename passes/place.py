"""Cut the batch over an axis: every value becomes Replicate, Partial, or cut, ops are localised, collectives inserted.

Forward, op by op, by the op's named dims (see rules/describe.py). Let L be the label that the cut inputs carry:

    L also in an output            that output is cut there; whole inputs that carry L are sliced (`shard`, no communication)
    L only in inputs               outputs are Partial sums
    L may not be cut (`whole`)     the op is written by finer ops where a decomposition exists (means by the *global* count, BatchNorm by the
                                   statistics of the whole batch), else its inputs are gathered and it runs replicated, reported by name
    no rule                        gathered, replicated, reported

A Partial passes through ops that are linear in it and is summed (`all_reduce`) before any other. Gradients need no second analysis:
collectives.py fixes the gradient placement by the forward one.

A sum over the batch that depends on inputs alone (the count of valid tokens) is hoisted into a *prologue* graph over the whole batch, so that
micro-batches, which cut the batch in time, see it as a constant. Where BatchNorm may take the statistics of a micro-batch, what moves its running
statistics goes to an *epilogue* graph (defer.py). Micro-batches are legal where no other collective remains.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from partitioner.errors import BatchError
from partitioner.passes.batch import Batch
from partitioner.passes.check_place import check_placed
from partitioner.passes.defer import defer
from partitioner.passes.dims import Cut, Dims
from partitioner.passes.finer import finer
from partitioner.passes.functional import sweep
from partitioner.passes.graph import Graph, Input, module_of
from partitioner.passes.hoist import hoist
from partitioner.passes.placement import PARTIAL, REPLICATE, SCALARS, Fallback, Placed, Places, Where, carried, locate, unplaced
from partitioner.passes.rules import DIMS, describe, localise, normalises_by_batch, tensor_arguments
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.work import whole_share

__all__ = ["Fallback", "Placed", "Where", "place", "unplaced"]

_ops = torch.ops.partitioner


def place(graph: Graph, dims: Dims, batch: Batch | None, axis: str, own_statistics: bool = False) -> Placed:
    """Cut `batch` over `axis` (None: every rank computes the whole batch and takes its share of the loss).

    own_statistics: BatchNorm normalises every micro-batch by its own statistics, over all ranks, and running ones move once, after all (`defer.py`).
    """
    return _Placer(graph, dims, batch, axis, own_statistics).run()


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


_Known = tuple[int, tuple[Where, ...]]
"""An op by its rule, which equal ops of a deep model share, and the placements of its arguments: decided once."""


class _Placer:
    def __init__(self, graph: Graph, dims: Dims, batch: Batch | None, axis: str, own_statistics: bool) -> None:
        self.graph, self.dims, self.batch, self.axis, self.own_statistics = graph, dims, batch, axis, own_statistics
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}  # old value -> new node
        self.where: dict[fx.Node, Places] = {}  # new node -> placement
        self.converted: dict[tuple[fx.Node, Where], fx.Node] = {}
        self.scalars: dict[str, fx.Node] = {}
        self.sizes: dict[int, fx.Node] = {}
        self.made: dict[fx.Node, tuple[fx.Node, list[fx.Node]]] = {}  # new node made in local size -> the old node and the new arguments
        self.decided: dict[_Known, tuple[list[Where] | None, Places]] = {}  # placements wanted where they are others than those given, those made
        self.local: dict[_Known, tuple[dict[int, Any], dict[str, Any]]] = {}  # arguments and keywords that are local sizes
        self.fallbacks: list[Fallback] = []
        self.batch_norms: dict[str, int] = {}  # module -> values of a channel in a row of the batch
        self.at: fx.Node | None = None  # the old node being placed: gives new nodes their module and source

    # --- the walk ----------------------------------------------------------------------------------------------

    def run(self) -> Placed:
        graph, kept = self.graph, []
        cuts: list[Cut | None] = []
        for node, described in zip(graph.placeholders, graph.inputs, strict=True):
            if described.kind == "scalar":
                continue
            new = self.env[node] = self.new.placeholder(node.name)
            cut = self.batch.cuts.get(described.name) if self.batch and described.kind == "input" else None
            self._record(new, node.meta.get("val"), cut or REPLICATE)
            kept.append(described)
            cuts.append(cut)
        for name in SCALARS:
            self.scalars[name] = self.new.placeholder(name)
        for node, described in zip(graph.placeholders, graph.inputs, strict=True):
            if described.kind == "scalar":
                self.env[node] = self.scalars[described.name]
        for node in graph.module.graph.nodes:
            if node.op == "call_function":
                self.at = node
                self._visit(node)
        self.at = None
        results, where = self._results()
        self.new.output(results)
        sweep(self.new)
        inputs = list(kept)
        for name in SCALARS:
            if self.scalars[name].users or (name == "rows" and any(cuts)):
                inputs.append(Input("scalar", name))
                cuts.append(None)
            else:
                self.new.erase_node(self.scalars[name])
        main = graph.with_module(module_of(self.new), inputs=tuple(inputs))
        whole = whole_share(main)
        prologue, main, cuts = hoist(main, cuts)
        main, deferred = defer(main.check())
        placed = Placed(
            graph=main,
            prologue=prologue,
            epilogue=deferred.epilogue,
            cuts=tuple(cuts),
            outputs=(*(w for w, kept in zip(where, deferred.kept, strict=True) if kept), *[REPLICATE] * len(deferred.totals)),
            fallbacks=tuple(self.fallbacks),
            collectives=deferred.mixing,
            statistics=deferred.statistics,
            batch_norms=self.batch_norms,
            whole=whole,
        )
        check_placed(placed)
        return placed

    def _results(self) -> tuple[list[fx.Node], list[Where]]:
        results, where = [], []
        for node, described in zip(self.graph.results, self.graph.outputs, strict=True):
            new = self.env[node]
            if described.kind == "loss" and self._of(new) == REPLICATE:
                new = self._call(_ops.share.default, (new, self.scalars["share"]), {}, node.meta.get("val"), PARTIAL)
            elif described.kind == "loss" and isinstance(self._of(new), Cut):
                raise BatchError(f"the loss has shape {tuple(node.meta['val'].shape)}; it must be a scalar: reduce it over the batch")
            elif described.kind == "buffer":
                self.at = node
                new = self._to(new, REPLICATE)
                self.at = None
            results.append(new)
            where.append(self._of(new))
        return results, where

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = self.env[node.args[0]], node.args[1]  # type: ignore[index]
            places = self.where[source]
            place = places[index] if isinstance(places, tuple) else places  # type: ignore[index]
            self.env[node] = self._call(operator.getitem, (source, index), {}, node.meta.get("val"), place)
            return
        if not _is_tensor(node):
            self.env[node] = self._call(node.target, map_arg(node.args, self.env.__getitem__), {}, node.meta.get("val"), REPLICATE)
            return
        self.env[node] = self._op(node, [self.env[a] for a in tensor_arguments(node)])

    def _op(self, node: fx.Node, arguments: list[fx.Node]) -> fx.Node:
        """Place one op whose tensor arguments are these new nodes (in any placement)."""
        rule = describe(node)
        known = id(rule), tuple([self._of(a) for a in arguments])
        if known in self.decided:
            wanted, after = self.decided[known]
            return self._emit(node, arguments if wanted is None else self._all_to(arguments, wanted), after, known)
        read = [rule is None or names is not None for names in (rule.inputs if rule else arguments)]  # what an op does not read may lie anywhere
        places = [place if r else REPLICATE for place, r in zip(known[1], read, strict=True)]
        if PARTIAL in places:
            if rule is not None and (passed := self._linear(rule, places)) is not None:
                return self._emit(node, self._all_to(arguments, [PARTIAL if i in passed else REPLICATE for i in range(len(read))], read), PARTIAL)
            places = [REPLICATE if p == PARTIAL else p for p in places]
            arguments = self._all_to(arguments, places, read)
        if not any(isinstance(p, Cut) for p in places):
            return self._whole(node, arguments, rule)
        if rule is None:
            return self._replicated(node, arguments, read, "it has no sharding rule")
        found = self._choose(rule, places)
        if found is None:
            return self._replicated(node, arguments, read, "the batch is merged with other dims in a way that the op cannot keep apart")
        if found[0] in rule.whole:
            by_batch = normalises_by_batch(node)
            if (inside := finer(node, by_batch and self.own_statistics)) is not None:
                if by_batch and self.batch is not None:
                    self._note_norm(node, self.batch.total)
                return self._decomposed(node, arguments, inside)
            return self._replicated(node, arguments, read, "it mixes the rows of the batch")
        wanted = [
            given if names is None else carried(found, names, rule.sizes) or REPLICATE
            for given, names in zip(map(self._of, arguments), rule.inputs, strict=True)
        ]
        results = [carried(found, names, rule.sizes) or PARTIAL if names is not None else REPLICATE for names in rule.outputs]
        after = tuple(results) if isinstance(node.meta["val"], (tuple, list)) else results[0]
        self.decided[known] = None if tuple(wanted) == known[1] else wanted, after
        return self._emit(node, self._all_to(arguments, wanted), after, known)

    def _all_to(self, arguments: list[fx.Node], places: Sequence[Where], read: Sequence[bool] | None = None) -> list[fx.Node]:
        """The arguments so placed; those that are not read as they are."""
        return [self._to(a, place) if r else a for a, place, r in zip(arguments, places, read or (True,) * len(places), strict=True)]

    def _choose(self, rule: OpDims, places: Sequence[Where]) -> tuple[str, int, int] | None:
        """The label to cut: preferably one that may be cut and that an output keeps; ties go to the first argument."""
        cuts = [(place, names) for place, names in zip(places, rule.inputs, strict=True) if isinstance(place, Cut) and names is not None]
        found = [label for place, names in cuts if (label := locate(place, names, rule.sizes)) is not None]
        kept = {name for names in rule.outputs for dim in names or () for name in dim}
        return min(found, key=lambda f: (f[0] in rule.whole, f[0] not in kept, found.index(f)), default=None)

    def _linear(self, rule: OpDims, places: list[Where]) -> set[int] | None:
        """Arguments to hand over as Partial so that the result is Partial; None where a Partial must be summed first."""
        partial = {i for i, p in enumerate(places) if p == PARTIAL}
        if rule.linear and partial <= set(rule.linear) and not any(isinstance(p, Cut) for p in places):
            return set(rule.linear)
        alone = sorted(partial & set(rule.linear_one))
        if alone and not any(isinstance(p, Cut) for p in places):
            return {alone[0]}
        return None

    def _whole(self, node: fx.Node, arguments: list[fx.Node], rule: OpDims | None) -> fx.Node:
        """An op of whole values: in local size where it makes the rows itself (a fill, an expand), else as it is."""
        atoms = self.batch.atoms if self.batch and node in self.dims else ()
        cut = next((cut for atom in atoms if (cut := self.dims.cut(node, atom)) is not None), None)
        if cut is not None and rule is not None and len(rule.outputs) == 1 and rule.outputs[0] is not None:
            found = locate(cut, rule.outputs[0], rule.sizes)
            if found is not None and found[0] not in rule.whole and not any(found[0] in dim for names in rule.inputs for dim in names or ()):
                new = self._emit(node, arguments, cut)
                self.made[new] = node, arguments
                return new
        return self._emit(node, arguments, REPLICATE)

    def _replicated(self, node: fx.Node, arguments: list[fx.Node], read: list[bool], why: str) -> fx.Node:
        at = self.at or node
        self.fallbacks.append(Fallback(str(node.target), at.meta.get("module") or "", at.meta.get("source") or "", why))
        return self._emit(node, self._all_to(arguments, [REPLICATE] * len(read), read), REPLICATE)

    def _note_norm(self, node: fx.Node, total: int) -> None:
        value, module = tensor_arguments(node)[0].meta["val"], (self.at or node).meta.get("module") or ""
        self.batch_norms[module] = value.numel() // value.shape[1] // total

    def _decomposed(self, node: fx.Node, arguments: list[fx.Node], inside: fx.Graph) -> fx.Node:
        """Place each of the finer ops."""
        holes = [n for n in inside.nodes if n.op == "placeholder"]
        local = dict(zip(holes, [*arguments, self.scalars["part"]][: len(holes)], strict=True))
        outer_env, self.env = self.env, local
        try:
            for inner in inside.nodes:
                if inner.op == "call_function":
                    self._visit(inner)
            (result,) = (n for n in inside.nodes if n.op == "output")
            value = result.args[0]
            if not isinstance(value, (tuple, list)):
                return local[value]  # type: ignore[no-any-return]
            parts = tuple(local[v] for v in value)
            return self._call(_tuple, parts, {}, node.meta.get("val"), tuple(self._of(p) for p in parts))
        finally:
            self.env = outer_env

    # --- new nodes ---------------------------------------------------------------------------------------------

    def _of(self, node: fx.Node) -> Where:
        place = self.where[node]
        return place[0] if isinstance(place, tuple) else place

    def _record(self, node: fx.Node, value: object, place: Places) -> None:
        self.where[node] = node.meta["placement"] = place
        node.meta["val"] = value
        if isinstance(place, Cut):
            node.meta["cut"] = place
        if self.at is not None:
            node.meta["module"] = self.at.meta.get("module")
            node.meta["source"] = self.at.meta.get("source")

    def _call(self, target: Any, args: Any, kwargs: Any, value: object, place: Places) -> fx.Node:
        if target is operator.getitem and args[0].target is _tuple:  # results of a decomposition are separate nodes
            return args[0].args[args[1]]  # type: ignore[no-any-return]
        node = self.new.call_function(target)
        node.args = args  # given at once, fx would search them, entry by entry, for symbolic numbers
        if kwargs:
            node.kwargs = kwargs
        self._record(node, value, place)
        return node

    def _emit(self, node: fx.Node, arguments: list[fx.Node], place: Places, known: _Known | None = None) -> fx.Node:
        """The same op on converted arguments, its size arguments in local sizes. One place stands for all results."""
        queue, value = iter(arguments), node.meta["val"]
        many = isinstance(value, (tuple, list))
        places = place if isinstance(place, tuple) else (place,) * (len(value) if many else 1)

        def convert(old: fx.Node) -> fx.Node:
            if isinstance(old.meta.get("val"), torch.Tensor):
                return next(queue)
            new = self.env[old]
            return self.scalars["key_local"] if new is self.scalars["key_shared"] and isinstance(places[0], Cut) else new

        args: Any = map_arg(node.args, convert)
        kwargs: Any = map_arg(node.kwargs, convert) if node.kwargs else {}
        found = None if known is None else self.local.get(known)
        if found is None:
            found = self._sizes(node, args, kwargs, value if many else (value,), places, arguments)
            if known is not None:
                self.local[known] = found
        if found[0]:
            args = tuple([found[0].get(at, entry) for at, entry in enumerate(args)])
        new = self._call(node.target, args, kwargs | found[1] if found[1] else kwargs, value, places if many else places[0])
        new.meta[DIMS] = describe(node)  # named dims do not depend on where the op is placed
        return new

    def _sizes(
        self, node: fx.Node, args: Any, kwargs: Any, values: Sequence[Any], places: tuple[Where, ...], arguments: list[fx.Node]
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """Which arguments, by position, and which keywords speak of local sizes, and those sizes."""
        if not any(isinstance(p, Cut) for p in (*places, *map(self._of, arguments))):
            return {}, {}
        shapes = [self._local(v, p) if isinstance(v, torch.Tensor) else None for v, p in zip(values, places, strict=True)]
        local, named = localise(node.target, args, kwargs, shapes)  # type: ignore[arg-type]
        return {at: new for at, (old, new) in enumerate(zip(args, local, strict=True)) if new is not old}, {
            name: new for name, new in named.items() if new is not kwargs.get(name)
        }

    def _local(self, value: torch.Tensor, place: Where) -> list[object]:
        shape: list[object] = [int(s) for s in value.shape]
        if isinstance(place, Cut):
            shape[place.dim] = self._rows(place.outer * place.inner)
        return shape

    def _rows(self, times: int) -> fx.Node:
        if times == 1:
            return self.scalars["rows"]
        if times not in self.sizes:
            with self.new.inserting_after(self.scalars[SCALARS[-1]]):
                self.sizes[times] = self.new.call_function(operator.mul, (self.scalars["rows"], times))
        return self.sizes[times]

    def _to(self, node: fx.Node, place: Where) -> fx.Node:
        """The same value in another placement."""
        now = self._of(node)
        if now == place:
            return node
        key = (node, place)
        if key in self.converted:
            return self.converted[key]
        value = node.meta["val"]
        if isinstance(place, Cut) and now != REPLICATE:
            new = self._to(self._to(node, REPLICATE), place)
        elif isinstance(now, Cut) and place == PARTIAL:
            new = self._to(self._to(node, REPLICATE), PARTIAL)
        elif isinstance(now, Cut) and node in self.made and node.target is not _ops.random.default:
            new = self._emit(*self.made[node], REPLICATE)
        elif isinstance(now, Cut):
            assert self.batch is not None
            args = (node, self.axis, now.dim, now.outer, now.inner, self.batch.total)
            new = self._call(_ops.all_gather.default, args, {}, value, REPLICATE)
        elif now == PARTIAL:
            new = self._call(_ops.all_reduce.default, (node, self.axis), {}, value, REPLICATE)
        elif isinstance(place, Cut):
            args = (node, place.dim, place.outer, place.inner, self.scalars["start"], self.scalars["rows"])  # type: ignore[assignment]
            new = self._call(_ops.shard.default, args, {}, value, place)
        else:
            new = self._call(_ops.share.default, (node, self.scalars["share"]), {}, value, PARTIAL)
        self.converted[key] = new
        return new


def _tuple(*parts: object) -> tuple[object, ...]:
    """Stands for the results of a decomposed multi-output op while placing; dead afterwards."""
    return parts
