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
micro-batches, which cut the batch in time, see it as a constant. Micro-batches are legal where no other collective remains.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from partitioner.errors import BatchError
from partitioner.passes.batch import LOST, Batch
from partitioner.passes.collectives import collective_ops
from partitioner.passes.dims import Cut, Dims
from partitioner.passes.graph import Graph, Input, Output
from partitioner.passes.rules import decomposition, describe, localise, tensor_arguments
from partitioner.passes.rules.describe import Dim, OpDims

Where = Placement | Cut  # Replicate(), Partial(), or where the batch is cut
SCALARS = ("rows", "start", "key_local", "key_shared", "share")
_ops = torch.ops.partitioner
_REPLICATE, _PARTIAL = Replicate(), Partial()


@dataclass(frozen=True)
class Fallback:
    """An op that runs replicated although its inputs are cut, and why."""

    op: str
    module: str
    source: str
    why: str


@dataclass(frozen=True)
class Placed:
    """`graph` in local shapes. `cuts[i]` says how input i is cut (None: whole); `outputs[i]` where output i is placed.

    reaches_loss: whether the loss is a sum over what was cut (else every rank computes all of it and takes its share).
    `prologue` runs once on this rank's whole share of the batch; its outputs are inputs of kind "prologue" of `graph`.
    `collectives` counts those left in `graph`: with any, the batch cannot be cut in time.
    """

    graph: Graph
    prologue: Graph | None
    cuts: tuple[Cut | None, ...]
    outputs: tuple[Where, ...]
    fallbacks: tuple[Fallback, ...]
    collectives: tuple[str, ...]
    reaches_loss: bool

    @property
    def mixing(self) -> int:
        """How badly the cut fits the model: values gathered or summed before the loss; LOST and more where the loss does not see the cut."""
        return len(self.collectives) + len(self.fallbacks) + (0 if self.reaches_loss else LOST)


def unplaced(graph: Graph) -> Placed:
    """One rank, one micro-batch: nothing is cut."""
    whole: tuple[Cut | None, ...] = (None,) * len(graph.inputs)
    return Placed(graph, None, whole, (_REPLICATE,) * len(graph.outputs), (), (), True)


def place(graph: Graph, dims: Dims, batch: Batch | None, axis: str) -> Placed:
    """Cut `batch` over `axis` (None: every rank computes the whole batch and takes its share of the loss)."""
    return _Placer(graph, dims, batch, axis).run()


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _locate(cut: Cut, names: tuple[Dim, ...], sizes: dict[str, int]) -> tuple[str, int, int] | None:
    """The label that a cut falls into, with outer and inner sizes inside that label; None where it straddles labels."""
    outer, inner = cut.outer, cut.inner
    dim = names[cut.dim]
    before = 1
    for position, label in enumerate(dim):
        after = 1
        for later in dim[position + 1 :]:
            after *= sizes[later]
        if outer % before == 0 and inner % after == 0:
            rest = (outer // before) * (inner // after)
            if sizes[label] % rest == 0 and sizes[label] > rest:
                return label, outer // before, inner // after
        before *= sizes[label]
    return None


def _carried(label: str, outer: int, inner: int, names: tuple[Dim, ...], sizes: dict[str, int]) -> Cut | None:
    """Where a tensor with these named dims carries a cut of the label."""
    for position, dim in enumerate(names):
        if label in dim:
            at = dim.index(label)
            before = after = 1
            for other in dim[:at]:
                before *= sizes[other]
            for other in dim[at + 1 :]:
                after *= sizes[other]
            return Cut(position, before * outer, inner * after)
    return None


class _Placer:
    def __init__(self, graph: Graph, dims: Dims, batch: Batch | None, axis: str) -> None:
        self.graph, self.dims, self.batch, self.axis = graph, dims, batch, axis
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}  # old value -> new node
        self.where: dict[fx.Node, Where | tuple[Where, ...]] = {}  # new node -> placement
        self.converted: dict[tuple[fx.Node, Where], fx.Node] = {}
        self.scalars: dict[str, fx.Node] = {}
        self.sizes: dict[int, fx.Node] = {}
        self.fallbacks: list[Fallback] = []
        self.reaches_loss = True
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
            self._record(new, node.meta.get("val"), cut or _REPLICATE)
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
        self.new.eliminate_dead_code()
        inputs = list(kept)
        for name in SCALARS:
            if self.scalars[name].users or name == "rows" and any(cuts):
                inputs.append(Input("scalar", name))
                cuts.append(None)
            else:
                self.new.erase_node(self.scalars[name])
        main = graph.with_module(fx.GraphModule(torch.nn.Module(), self.new), inputs=tuple(inputs))
        prologue, main, cuts = _hoist(main, cuts)
        remaining = tuple(
            f"{str(n.target).removeprefix('partitioner.').removesuffix('.default')} in {n.meta.get('module') or 'the loss'}"
            for n in main.module.graph.nodes
            if n.target in collective_ops()
        )
        return Placed(main.check(), prologue, tuple(cuts), tuple(where), tuple(self.fallbacks), remaining, self.reaches_loss)

    def _results(self) -> tuple[list[fx.Node], list[Where]]:
        results, where = [], []
        for node, described in zip(self.graph.results, self.graph.outputs, strict=True):
            new = self.env[node]
            if described.kind == "loss" and self._of(new) == _REPLICATE:
                self.reaches_loss = False
                new = self._call(_ops.share.default, (new, self.scalars["share"]), {}, node.meta.get("val"), _PARTIAL)
            elif described.kind == "loss" and isinstance(self._of(new), Cut):
                raise BatchError(f"the loss has shape {tuple(node.meta['val'].shape)}; it must be a scalar: reduce it over the batch")
            elif described.kind == "buffer":
                new = self._to(new, _REPLICATE)
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
            self.env[node] = self._call(node.target, map_arg(node.args, self.env.__getitem__), {}, node.meta.get("val"), _REPLICATE)
            return
        self.env[node] = self._op(node, [self.env[a] for a in tensor_arguments(node)])

    def _op(self, node: fx.Node, arguments: list[fx.Node]) -> fx.Node:
        """Place one op whose tensor arguments are these new nodes (in any placement)."""
        rule = describe(node)
        places = [self._of(a) for a in arguments]
        if not arguments:
            return self._factory(node, rule)
        if any(p == _PARTIAL for p in places):
            if rule is not None and (passed := self._linear(rule, places)) is not None:
                arguments = [self._to(a, _PARTIAL if i in passed else _REPLICATE) for i, a in enumerate(arguments)]
                return self._emit(node, arguments, self._like(node, _PARTIAL))
            arguments = [self._to(a, _REPLICATE) if p == _PARTIAL else a for a, p in zip(arguments, places, strict=True)]
            places = [self._of(a) for a in arguments]
        if not any(isinstance(p, Cut) for p in places):
            return self._emit(node, arguments, self._like(node, _REPLICATE))
        if rule is None:
            return self._replicated(node, arguments, "it has no sharding rule")
        found = self._choose(rule, places)
        if found is None:
            return self._replicated(node, arguments, "the batch is merged with other dims in a way that the op cannot keep apart")
        label, outer, inner = found
        if label in rule.whole:
            finer = decomposition(node)
            if finer is not None:
                return self._decomposed(node, arguments, finer)
            return self._replicated(node, arguments, "it mixes the rows of the batch")
        wanted = [_carried(label, outer, inner, names, rule.sizes) if names is not None else None for names in rule.inputs]
        arguments = [self._to(a, cut or _REPLICATE) for a, cut in zip(arguments, wanted, strict=True)]
        after: list[Where] = []
        for names in rule.outputs:
            cut = _carried(label, outer, inner, names, rule.sizes) if names is not None else None
            after.append(_REPLICATE if names is None else cut or _PARTIAL)
        return self._emit(node, arguments, tuple(after) if isinstance(node.meta["val"], (tuple, list)) else after[0])

    def _choose(self, rule: OpDims, places: Sequence[Where]) -> tuple[str, int, int] | None:
        """The label to cut: preferably one that may be cut and that an output keeps; ties go to the first argument."""
        found = []
        for place, names in zip(places, rule.inputs, strict=True):
            if isinstance(place, Cut) and names is not None and (label := _locate(place, names, rule.sizes)) is not None:
                found.append(label)
        kept = {name for names in rule.outputs for dim in names or () for name in dim}
        return min(found, key=lambda f: (f[0] in rule.whole, f[0] not in kept, found.index(f)), default=None)

    def _linear(self, rule: OpDims, places: list[Where]) -> set[int] | None:
        """Arguments to hand over as Partial so that the result is Partial; None where a Partial must be summed first."""
        partial = {i for i, p in enumerate(places) if p == _PARTIAL}
        if rule.linear and partial <= set(rule.linear) and not any(isinstance(p, Cut) for p in places):
            return set(rule.linear)
        alone = sorted(partial & set(rule.linear_one))
        if alone and not any(isinstance(p, Cut) for p in places):
            return {alone[0]}
        return None

    def _factory(self, node: fx.Node, rule: OpDims | None) -> fx.Node:
        """An op without tensor inputs: made in local size where its elements do not depend on their position."""
        cut = self.dims.cut(node, self.batch.atom) if self.batch and rule is not None and node in self.dims else None
        if cut is not None and node.target in _UNIFORM:
            return self._emit(node, [], cut)
        return self._emit(node, [], _REPLICATE)

    def _replicated(self, node: fx.Node, arguments: list[fx.Node], why: str) -> fx.Node:
        at = self.at or node
        self.fallbacks.append(Fallback(str(node.target), at.meta.get("module") or "", at.meta.get("source") or "", why))
        return self._emit(node, [self._to(a, _REPLICATE) for a in arguments], self._like(node, _REPLICATE))

    def _decomposed(self, node: fx.Node, arguments: list[fx.Node], finer: Any) -> fx.Node:
        """Trace the finer ops at global shapes and place each."""
        originals = tensor_arguments(node)
        flat, spec = tree_flatten((node.args, node.kwargs))
        tensors = [at for at, leaf in enumerate(flat) if isinstance(leaf, fx.Node)]

        def on_tensors(*values: torch.Tensor) -> Any:
            leaves = list(flat)
            for at, value in zip(tensors, values, strict=True):
                leaves[at] = value
            args, kwargs = tree_unflatten(leaves, spec)
            return finer(*args, **kwargs)

        traced = make_fx(on_tensors, pre_dispatch=True)(*[a.meta["val"] for a in originals])
        local: dict[fx.Node, fx.Node] = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), arguments, strict=True))
        outer_env, self.env = self.env, local
        try:
            for inner in traced.graph.nodes:
                if inner.op == "call_function":
                    self._visit(inner)
                elif inner.op == "get_attr":
                    raise BatchError(f"the decomposition of {node.target} holds a constant tensor; write it with scalars")
            (result,) = (n for n in traced.graph.nodes if n.op == "output")
            value = result.args[0]
            if isinstance(value, (tuple, list)):
                parts = [local[v] for v in value]
                whole = self._call(_tuple, tuple(parts), {}, node.meta.get("val"), tuple(self._of(p) for p in parts))
                return whole
            return local[value]  # type: ignore[index]
        finally:
            self.env = outer_env

    # --- new nodes ---------------------------------------------------------------------------------------------

    def _like(self, node: fx.Node, place: Where) -> Where | tuple[Where, ...]:
        value = node.meta["val"]
        return (place,) * len(value) if isinstance(value, (tuple, list)) else place

    def _of(self, node: fx.Node) -> Where:
        place = self.where[node]
        return place[0] if isinstance(place, tuple) else place

    def _record(self, node: fx.Node, value: object, place: Where | tuple[Where, ...]) -> None:
        self.where[node] = place
        node.meta["val"] = value
        if isinstance(place, Cut):
            node.meta["cut"] = place
        if self.at is not None:
            node.meta["module"] = self.at.meta.get("module")
            node.meta["source"] = self.at.meta.get("source")

    def _call(self, target: Any, args: Any, kwargs: Any, value: object, place: Where | tuple[Where, ...]) -> fx.Node:
        if target is operator.getitem and args[0].target is _tuple:  # results of a decomposition are separate nodes
            return args[0].args[args[1]]  # type: ignore[no-any-return]
        node = self.new.call_function(target, args, kwargs)
        self._record(node, value, place)
        return node

    def _emit(self, node: fx.Node, arguments: list[fx.Node], place: Where | tuple[Where, ...]) -> fx.Node:
        """The same op on converted arguments, its size arguments in local sizes."""
        queue = iter(arguments)
        places = place if isinstance(place, tuple) else (place,)
        random_key = self.scalars["key_local"] if isinstance(places[0], Cut) else self.scalars["key_shared"]

        def convert(old: fx.Node) -> fx.Node:
            if isinstance(old.meta.get("val"), torch.Tensor):
                return next(queue)
            new = self.env[old]
            return random_key if new is self.scalars["key_shared"] else new

        args, kwargs = map_arg(node.args, convert), map_arg(node.kwargs, convert)
        if any(isinstance(p, Cut) for p in places):
            value = node.meta["val"]
            values = value if isinstance(value, (tuple, list)) else (value,)
            shapes = [self._local(v, p) if isinstance(v, torch.Tensor) else [] for v, p in zip(values, places, strict=True)]
            args, kwargs = localise(node.target, args, kwargs, shapes)
        elif any(isinstance(self._of(a), Cut) for a in arguments):
            value = node.meta["val"]
            values = value if isinstance(value, (tuple, list)) else (value,)
            args, kwargs = localise(node.target, args, kwargs, [list(v.shape) for v in values if isinstance(v, torch.Tensor)])
        return self._call(node.target, args, kwargs, node.meta["val"], place)

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
        if isinstance(now, Cut) and isinstance(place, Cut) or now == _PARTIAL and isinstance(place, Cut):
            new = self._to(self._to(node, _REPLICATE), place)
        elif isinstance(now, Cut) and place == _PARTIAL:
            new = self._to(self._to(node, _REPLICATE), _PARTIAL)
        elif isinstance(now, Cut):
            assert self.batch is not None
            args = (node, self.axis, now.dim, now.outer, now.inner, self.batch.total)
            new = self._call(_ops.all_gather.default, args, {}, value, _REPLICATE)
        elif now == _PARTIAL:
            new = self._call(_ops.all_reduce.default, (node, self.axis), {}, value, _REPLICATE)
        elif isinstance(place, Cut):
            args = (node, place.dim, place.outer, place.inner, self.scalars["start"], self.scalars["rows"])  # type: ignore[assignment]
            new = self._call(_ops.shard.default, args, {}, value, place)
        else:
            new = self._call(_ops.share.default, (node, self.scalars["share"]), {}, value, _PARTIAL)
        self.converted[key] = new
        return new


def _tuple(*parts: object) -> tuple[object, ...]:
    """Stands for the results of a decomposed multi-output op while placing; dead afterwards."""
    return parts


_aten = torch.ops.aten
# factories whose elements do not depend on their position
_UNIFORM = frozenset((_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format, _ops.random.default))


def _hoist(graph: Graph, cuts: list[Cut | None]) -> tuple[Graph | None, Graph, list[Cut | None]]:
    """Move collectives of values that depend on inputs alone, with what they need, into a graph of their own."""
    described = dict(zip(graph.placeholders, graph.inputs, strict=True))
    placeholder_cut = dict(zip(graph.placeholders, cuts, strict=True))
    alone: set[fx.Node] = set()
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            if described[node].kind in ("input", "constant") or described[node].name in ("rows", "start"):
                alone.add(node)
        elif node.op == "call_function" and node.target is not _ops.random.default and all(a in alone for a in node.all_input_nodes):
            alone.add(node)
    chosen = [n for n in graph.module.graph.nodes if n in alone and n.target in collective_ops()]
    if not chosen:
        return None, graph, cuts
    needed: set[fx.Node] = set()
    stack = list(chosen)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    needed.update(node for node, what in described.items() if what.name == "rows")
    early, env = fx.Graph(), {}
    early_inputs, early_cuts = [], []
    for node in graph.module.graph.nodes:
        if node in needed:
            env[node] = early.node_copy(node, env.__getitem__)
            if node.op == "placeholder":
                early_inputs.append(described[node])
                early_cuts.append(placeholder_cut[node])
    early.output([env[n] for n in chosen])
    names = [f"prologue.{i}" for i in range(len(chosen))]
    outputs = tuple(Output("prologue", name) for name in names)
    prologue = graph.with_module(fx.GraphModule(torch.nn.Module(), early), inputs=tuple(early_inputs), outputs=outputs)
    scalars = [n for n in graph.placeholders if described[n].kind == "scalar"]
    first = next(n for n in graph.module.graph.nodes if n.op != "placeholder" or n in scalars)
    order = dict(described)
    for name, node in zip(names, chosen, strict=True):
        with graph.module.graph.inserting_before(first):
            value = graph.module.graph.placeholder(name.replace(".", "_"))
        value.meta.update(val=node.meta["val"])
        node.replace_all_uses_with(value)
        order[value] = Input("prologue", name)
        placeholder_cut[value] = None
    graph.module.graph.eliminate_dead_code()
    for node in [n for n in graph.placeholders if not n.users and order[n].kind in ("input", "constant", "scalar")]:
        graph.module.graph.erase_node(node)
    graph.module.recompile()
    main = replace(graph, inputs=tuple(order[n] for n in graph.placeholders))
    return prologue.check(), main, [placeholder_cut[n] for n in graph.placeholders]

