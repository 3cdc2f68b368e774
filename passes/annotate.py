"""What every op of a captured graph costs, as formulas in the graph's free sizes (batch, length, …): one capture prices all sizes.

    facts = annotate(graph)
    print(facts)
    flops = facts.total("flops")                        # a Formula: prints itself, compiled on first use
    flops(batch=64, length=numpy.arange(128, 8193))     # thousands of candidates in one call

flops, backward_flops   as torch.utils.flop_counter counts them: products, convolutions, attention (as the fused kernels compute it)
bytes_read, _written    of the forward op: every tensor argument once, dims of stride 0 once; a gather reads no more than it writes; views are free
saved_bytes             of the storages that the op makes, those that backward reads when all are kept: each counted once, where it is made
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, get_args

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from partitioner.passes.annotate_formula import Formula, Least, Space
from partitioner.passes.annotate_saved import Keeping
from partitioner.passes.annotate_sizes import Sizes, sizes_of, where
from partitioner.passes.batch import Batch
from partitioner.passes.dims import Atoms, Dims, Shape, analyse
from partitioner.passes.flow import Flow, gradient_flow, numbers
from partitioner.passes.graph import Graph
from partitioner.passes.rules import backward_flops, describe, tensor_arguments
from partitioner.passes.rules.call import frozen
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.registry import words

Kind = Literal["flops", "backward_flops", "bytes_read", "bytes_written", "saved_bytes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Made = tuple[fx.Node, int]
ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class OpFacts:
    """One op's numbers as sympy expressions in the graph's symbols; plain integers where no size is free."""

    flops: sympy.Expr = ZERO
    backward_flops: sympy.Expr = ZERO
    bytes_read: sympy.Expr = ZERO
    bytes_written: sympy.Expr = ZERO
    saved_bytes: sympy.Expr = ZERO


@dataclass(frozen=True)
class Annotated:
    """Facts of every op, in the order of the graph, in the sizes of `space`."""

    ops: dict[fx.Node, OpFacts]
    space: Space

    @property
    def symbols(self) -> dict[str, int]:
        """The free sizes by name, as captured."""
        return dict(self.space.symbols)

    def total(self, kind: Kind, nodes: Iterable[fx.Node] | None = None) -> Formula:
        """The sum over some ops (default: all). Nodes that are no ops count nothing."""
        facts = self.ops.values() if nodes is None else [self.ops[node] for node in nodes if node in self.ops]
        return self.formula(_sum([getattr(one, kind) for one in facts]))

    def formula(self, expression: sympy.Expr) -> Formula:
        """Any expression in the graph's symbols, compiled."""
        return Formula(expression, self.space)

    def __str__(self) -> str:
        """Sizes, totals with their formulas, and the kinds of op by forward FLOPs."""
        lines = ["sizes"]
        for name, size in self.symbols.items():
            follows = self.space.follows.get(name)
            lines.append(f"  {name} = {size}" + (f" (follows {follows} unless given)" if follows else ""))
        lines += [f"  {name} = {size} always: {why}" for name, (size, why) in self.space.fixed.items()]
        lines += [f"  {one}: {one.why}" for one in self.space.conditions if one.relation == "<=" and one.left != 1]
        lines.append("totals")
        for kind in KINDS:
            formula = self.total(kind)
            lines.append(f"  {kind:<15}{formula.captured:>20,} = {formula}")
        by_kind: dict[str, list[fx.Node]] = {}
        for node in self.ops:
            by_kind.setdefault(str(node.target), []).append(node)
        lines.append(f"{'op':<44}{'times':>7}" + "".join(f"{kind:>18}" for kind in KINDS))
        table = [(name, len(nodes), [self.total(kind, nodes).captured for kind in KINDS]) for name, nodes in by_kind.items()]
        for name, times, values in sorted(table, key=lambda row: (-row[2][0], -row[2][2], row[0])):
            if any(values):
                lines.append(f"{name:<44}{times:>7}" + "".join(f"{value:>18,}" for value in values))
        return "\n".join(lines)


def annotate(graph: Graph, dims: Dims | None = None, batch: Batch | None = None, flow: Flow | None = None) -> Annotated:
    """Facts of every op of a captured graph.

    `dims`, `flow`: where they are at hand already. `batch`: which dim is called batch; None: the one that most inputs begin with.
    Linear in the number of ops; each kind of op is described, differentiated and translated once.
    """
    dims = dims if dims is not None else analyse(graph)
    return _Annotator(graph, dims, batch, flow if flow is not None else gradient_flow(graph)).run()


def _sum(expressions: Sequence[sympy.Expr]) -> sympy.Expr:
    """Equal terms are counted before sympy sees them."""
    counted: dict[sympy.Expr, int] = {}
    for one in expressions:
        counted[one] = counted.get(one, 0) + 1
    return sympy.Add(*[times * one for one, times in counted.items()])


def _results(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass
class _Annotator:
    graph: Graph
    dims: Dims
    batch: Batch | None
    flow: Flow
    _bytes: dict[tuple[fx.Node, int], sympy.Expr] = field(default_factory=dict)
    _scaled: dict[tuple[int, Atoms], sympy.Expr] = field(default_factory=dict)
    _moved: dict[Any, tuple[sympy.Expr, sympy.Expr]] = field(default_factory=dict)
    _labelled: dict[Any, tuple[sympy.Expr, tuple[str, ...]]] = field(default_factory=dict)
    _flops: dict[Any, sympy.Expr] = field(default_factory=dict)
    _free: dict[fx.Node, tuple[tuple[Atoms, ...] | None, ...]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.graph, self.dims, self.batch, self.rules)

    @cached_property
    def rules(self) -> dict[fx.Node, OpDims | None]:
        """The description of every op; equal ops share one object, so that its id stands for the op, its arguments and its results."""
        nodes = self.graph.module.graph.nodes
        return {node: describe(node) for node in nodes if node.op == "call_function" and isinstance(node.target, OpOverload)}

    @cached_property
    def shapes(self) -> dict[fx.Node, tuple[Shape | None, ...]]:
        """Atoms of every result."""
        nodes = self.graph.module.graph.nodes
        return {node: tuple([self.dims.shape(node, at) for at in range(len(_results(node.meta.get("val"))))]) for node in nodes if node in self.dims}

    def run(self) -> Annotated:
        ops = [node for node in self.rules if any(isinstance(one, Tensor) for one in _results(node.meta["val"]))]
        back: dict[fx.Node, set[fx.Node]] = {}  # op -> the arguments that get a gradient through it
        for source, users in self.flow.back.items():
            for user in users:
                back.setdefault(user, set()).add(source)
        saved = self._saved([node for node in ops if node in back], back)
        facts = {}
        for node in ops:
            read, written = self._traffic(node)
            flops, backward = self._products(node, back.get(node, set()))
            facts[node] = OpFacts(flops, backward, read, written, saved.get(node, ZERO))
        return Annotated(facts, self.sizes.space)

    # --- bytes -------------------------------------------------------------------------------------------------

    def _tensor_bytes(self, node: fx.Node, result: int = 0) -> sympy.Expr:
        """Bytes that reading or writing a value touches: an expanded dim (of stride 0) counts once."""
        key = (node, result)
        if key not in self._bytes:
            value = _results(node.meta["val"])[result]
            shape = self.shapes[node][result]
            if shape is None:
                self._bytes[key] = sympy.Integer(value.numel() * value.element_size())
            else:
                atoms = tuple([atom for dim, stride in zip(shape, value.stride(), strict=True) if stride for atom in dim])
                self._bytes[key] = self._times(atoms, value.element_size() if value.numel() else 0)
        return self._bytes[key]

    def _times(self, atoms: Atoms, factor: int) -> sympy.Expr:
        number, free = self.sizes.reduced(atoms)
        key = (number * factor, free)
        if key not in self._scaled:
            self._scaled[key] = factor * self.sizes.size(atoms)
        return self._scaled[key]

    def _traffic(self, node: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
        """Bytes read and written."""
        outs = _results(node.meta["val"])
        inputs = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
        target = node.target
        assert isinstance(target, OpOverload)
        if target.overloadpacket in _UNTOUCHED or all(maker is not node for maker, _ in self.makers[node]):
            return ZERO, ZERO
        reads = tuple([self._tensor_bytes(one) for one in inputs])
        writes = tuple([self._tensor_bytes(node, at) for at, out in enumerate(outs) if isinstance(out, Tensor)])
        key = (target.overloadpacket in _GATHERS, reads, writes)
        if key not in self._moved:
            written = sympy.Add(*writes)
            if key[0] and reads:
                reads = (Least(reads[0], written), *reads[1:])
            self._moved[key] = (sympy.Add(*reads), written)
        return self._moved[key]

    # --- FLOPs -------------------------------------------------------------------------------------------------

    def _products(self, node: fx.Node, wanting: set[fx.Node]) -> tuple[sympy.Expr, sympy.Expr]:
        """FLOPs forward and backward."""
        rule = self.rules[node]
        if rule is None or rule.flops is ZERO:
            return ZERO, ZERO
        labels = self.dims.labels(node)
        flops = rule.flops
        forward = self._translate(id(rule), lambda: flops, labels)
        if not wanting:
            return forward, ZERO
        needs = tuple(one in wanting for one in tensor_arguments(node))
        return forward, self._translate((id(rule), needs), lambda: backward_flops(node, needs), labels)

    def _translate(self, which: Any, expression: Callable[[], sympy.Expr], labels: dict[str, Atoms]) -> sympy.Expr:
        """An expression in labels as one in the graph's symbols; `which` stands for the expression."""
        if which not in self._labelled:
            found = expression()
            self._labelled[which] = (found, tuple(sorted(str(one) for one in found.free_symbols)))
        found, names = self._labelled[which]
        key = (which, tuple([self.sizes.reduced(labels[name]) for name in names]))
        if key not in self._flops:
            self._flops[key] = found.xreplace({sympy.Symbol(name): self.sizes.size(labels[name]) for name in names})
        return self._flops[key]

    # --- saved values ------------------------------------------------------------------------------------------

    def _saved(self, ops: list[fx.Node], back: dict[fx.Node, set[fx.Node]]) -> dict[fx.Node, sympy.Expr]:
        """Saved bytes by the op that makes them. What the caller holds anyway (parameters, buffers, inputs) is not counted."""
        keeping = Keeping(self.dims, self._free_atoms(), numbers(self.graph))
        kept: set[Made] = set()
        private: dict[fx.Node, sympy.Expr] = {}
        for node in ops:
            inputs = node.all_input_nodes
            rule = self.rules[node]
            op = id(rule) if rule is not None else (node.target, frozen(node.args), frozen(node.kwargs))
            tensors = tensor_arguments(node)
            layout = tuple([(inputs.index(one), one.meta["val"].stride()) for one in tensors])
            key = (op, layout, tuple([self._free_dims(one) for one in tensors]))
            found = keeping.of(key, node, frozenset(at for at, one in enumerate(inputs) if one in back[node]))
            kept.update(self.makers[inputs[at]][0] for at in found.arguments)
            kept.update(self.makers[node][at] for at in found.results)
            if not found.certain:
                self.sizes.freeze(node, f"what {where(node)} keeps for its backward is known for these only")
            if found.private:
                private[node] = sympy.Add(*[self._times(atoms, factor) for factor, atoms in found.private])
        saved = dict(private)
        for node, result in kept:
            if node.op == "call_function":
                saved[node] = saved.get(node, ZERO) + self._tensor_bytes(node, result)
        return saved

    @cached_property
    def makers(self) -> dict[fx.Node, tuple[Made, ...]]:
        """By node, for each result: the op (and which result of it) that made the storage it lies in, or the input that holds it."""
        found: dict[fx.Node, tuple[Made, ...]] = {}
        for node in self.graph.module.graph.nodes:
            results = _results(node.meta.get("val"))
            if node.target is operator.getitem:
                found[node] = (found[node.args[0]][node.args[1]],)
                continue
            sources = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)] if node.op == "call_function" else []
            if sources and _is_view(node.target):
                found[node] = found[sources[0]] * len(results)
                continue
            held = {_storage(one.meta["val"]): found[one][0] for one in sources}
            own = [(node, at) for at in range(len(results))]
            found[node] = tuple(held.get(_storage(one), mine) if isinstance(one, Tensor) else mine for one, mine in zip(results, own, strict=True))
        return found

    def _free_dims(self, node: fx.Node) -> tuple[tuple[Atoms, ...] | None, ...]:
        """The free atoms of every dim."""
        if node not in self._free:
            shapes = self.shapes.get(node, ())
            self._free[node] = tuple([None if shape is None else tuple([self.sizes.reduced(dim)[1] for dim in shape]) for shape in shapes])
        return self._free[node]

    def _free_atoms(self) -> list[int]:
        """Atoms whose size changes with a symbol."""
        return [atom for atom in self.dims.atoms if self.sizes.reduced((atom,))[1]]


_aten: Any = torch.ops.aten
_UNTOUCHED = frozenset((_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.sym_size))
_MAYBE_VIEWS = frozenset(
    getattr(_aten, name) for name in words("reshape contiguous flatten ravel to type_as reshape_as resolve_conj resolve_neg pin_memory")
)
_GATHERS = frozenset((_aten.embedding, _aten.index, _aten.gather, _aten.index_select, _aten._unsafe_index, _aten.take))


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


@cache
def _is_view(target: Any) -> bool:
    """Whether every result always lies in the storage of the first tensor argument."""
    if not isinstance(target, OpOverload):
        return False
    returns = target._schema.returns
    always = target.overloadpacket not in _MAYBE_VIEWS
    return always and bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
