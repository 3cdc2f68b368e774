"""Which sizes of a captured graph are free, and every other size as a formula in them.

Each atom of the dims analysis (see dims.py) is one of

    bound      a dim of a parameter, a buffer, a constant, or a number of tensors: a number for good
    free       a dim of an input that nothing binds: a symbol (batch, length, height, …)
    derived    made by an op from other sizes (length - 1): an expression, see annotate_relations.py
    a number   made by an op from numbers among its arguments only

An atom that is found in two of these ways gives a condition (length + 1 == 17, which a position table has): it holds at the captured sizes and is
checked at all others. So a formula is either exact at the sizes it is asked for or refuses them.
"""

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal

import sympy
import torch
from torch import fx

from partitioner.passes.annotate_formula import Condition, FloorDiv, Space, symbol
from partitioner.passes.annotate_relations import SIZED, Unknown, arguments, counts, demands, kind, made, made_size, ranged, vanished
from partitioner.passes.batch import Batch, candidates
from partitioner.passes.dims import Atoms, Dims, Shape
from partitioner.passes.graph import Graph, Input
from partitioner.passes.rules import describe
from partitioner.passes.rules.describe import OpDims

_AFTER_BATCH = {2: ("length",), 3: ("length", "features"), 4: ("channels", "height", "width"), 5: ("channels", "depth", "height", "width")}
Rules = Mapping[fx.Node, OpDims | None]
_BOUND = ("parameter", "buffer", "constant")


def where(node: fx.Node) -> str:
    """The op and the user's line it comes from."""
    source = node.meta.get("source")
    return f"{node.target} ({source})" if source else str(node.target)


def _leaf(path: str) -> str:
    """A short name of an input: kwargs['input_ids'] is input_ids, args[0] is arg0."""
    words = re.findall(r"\w+", path)
    if words[0] == "kwargs" and len(words) > 1:
        words = words[1:]
    elif words[0] == "args" and len(words) > 1:
        words = [f"arg{words[1]}", *words[2:]]
    return "_".join(word if word.isidentifier() or at else f"input{word}" for at, word in enumerate(words))


class Sizes:
    """`size(atoms)` as an expression in the symbols of `space`. Build with `sizes_of`."""

    def __init__(self, graph: Graph, dims: Dims, batch: Batch | None, rules: Rules) -> None:
        self._graph, self._dims = graph, dims
        self._users: dict[object, Input] = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self._values: dict[int, sympy.Expr] = {}
        self._reduced: dict[Atoms, tuple[int, Atoms]] = {}
        self._known: dict[tuple[int, Atoms], sympy.Expr] = {}
        self._symbols: dict[str, int] = {}
        self._dim_of: dict[str, int] = {}  # the dim of an input that a symbol was first met in
        self._follows: dict[str, str] = {}
        self._fixed: dict[str, tuple[int, str]] = {}
        self._conditions: dict[tuple[str, sympy.Expr, sympy.Expr], Condition] = {}
        self._captured: dict[sympy.Expr, int] = {}
        self._made: dict[int, list[tuple[fx.Node, OpDims, int, int]]] = {}
        self._ranges: dict[int, tuple[fx.Node, int]] = {}  # a dim that an arange counts, and the arange's
        self._busy: set[int] = set()
        self._bound = dict(self._bind(rules))
        self._name(batch)
        self._relate(rules)
        self._eliminate()

    @property
    def space(self) -> Space:
        """The free sizes, and the conditions found so far."""
        return Space(self._symbols, self._follows, self._fixed, tuple(self._conditions.values()))

    # --- what cannot change ------------------------------------------------------------------------------------

    def _bind(self, rules: Rules) -> Iterator[tuple[int, str]]:
        """Atoms that are numbers for good, and why. Of several reasons a parameter's is told."""
        taken: dict[Atoms, list[tuple[int, int]]] = {}
        for node, rule in rules.items():
            if rule is None:
                continue
            fixed = counts(node, rule)
            if fixed:
                labels = self._dims.labels(node)
                for label in sorted(fixed):
                    for atom in labels.get(label, ()):
                        yield atom, f"{where(node)} takes or makes a fixed number of tensors"
            self._take(node, taken)
        for atoms, parts in taken.items():
            parts = sorted(set(parts))
            ends = [0, *[end for _, end in parts]]
            if len(parts) > 1 and ends[-1] == self._dims.sizes(atoms) and all(start == end for (start, _), end in zip(parts, ends, strict=False)):
                for atom in atoms:
                    yield atom, f"the model reads it at {len(parts)} fixed places one by one, as a Python loop does"
        for node, described in zip(self._graph.placeholders, self._graph.inputs, strict=True):
            if described.kind in _BOUND:
                for dim, atoms in enumerate(self._dims.shape(node) or ()):
                    for atom in atoms:
                        yield atom, f"{described.kind} {described.name!r} has {int(node.meta['val'].shape[dim])} elements in dim {dim}"

    def _take(self, node: fx.Node, taken: dict[Atoms, list[tuple[int, int]]]) -> None:
        """Note what select and slice read at places that are numbers counted from the front."""
        name = kind(node)
        if name not in ("aten::select", "aten::slice"):
            return
        given = arguments(node)
        start, end = (given["index"], None) if name == "aten::select" else (given["start"] or 0, given["end"])
        if name == "aten::select" and isinstance(start, int):
            end = start + 1
        dim = given["dim"] % given["self"].meta["val"].dim()
        size = int(given["self"].meta["val"].shape[dim])
        shape = self._dims.shape(given["self"])
        if shape is not None and isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= size:
            taken.setdefault(shape[dim], []).append((start, end))

    # --- what is free ------------------------------------------------------------------------------------------

    def _name(self, batch: Batch | None) -> None:
        """Symbols for the free dims of the inputs. Tokens that carry the batch come first: their other dim is the length."""
        if batch is None:
            likely = [one for one in candidates(self._graph, self._dims) if any(cut.dim == 0 for cut in one.cuts.values())]
            batch = likely[0] if likely else None
        root = self._dims.roots((batch.atom,))[:1] if batch is not None else ()
        leaves = [
            (described.name, node, self._dims.shape(node) or ())
            for node, described in zip(self._graph.placeholders, self._graph.inputs, strict=True)
            if described.kind == "input" and node.users and isinstance(node.meta.get("val"), torch.Tensor)
        ]

        def later(leaf: tuple[str, fx.Node, Shape]) -> tuple[bool, bool, bool]:
            path, node, shape = leaf
            return not any(root[0] in dim for dim in shape if root), path.startswith("targets"), node.meta["val"].is_floating_point()

        for path, node, shape in sorted(leaves, key=later):
            carries = [dim for dim, atoms in enumerate(shape) if root and root[0] in atoms]
            position = carries[0] if carries else None if root else 0
            names = iter(_AFTER_BATCH.get(len(shape), ()) if position is not None else ())
            if len(shape) == 2 and node.meta["val"].is_floating_point():
                names = iter(("features",) if position is not None else ())
            for dim, atoms in enumerate(shape):
                wanted = "batch" if dim == position else next(names, f"dim{dim}")
                self._name_dim(_leaf(path), wanted, dim, atoms, root)

    def _name_dim(self, leaf: str, wanted: str, dim: int, atoms: Atoms, root: Atoms) -> None:
        free = [atom for atom in atoms if atom not in self._bound and atom not in self._values]
        if root and root[0] in free:
            self._symbol("batch", root[0], self._dims.sizes(root), dim)
            free.remove(root[0])
        elif not free:
            name = self._fresh(leaf, wanted)
            told = any(atom in self._values for atom in atoms) or (wanted == "batch" and name != "batch")
            if not told:
                bound = [atom for atom in atoms if atom in self._bound]
                why = self._bound[bound[0]] if bound else "it was captured at 1, where a dim is a broadcast"
                self._fixed[name] = (self._dims.sizes(atoms), why)
        elif len(free) == 1 and all(atom in self._bound or atom == free[0] for atom in atoms):
            self._symbol(self._fresh(leaf, wanted, self._dims.sizes(atoms), dim), free[0], self._dims.sizes(atoms), dim)
            return
        for atom in free:
            self._symbol(self._fresh(leaf, "length" if wanted == "batch" else wanted), atom, self._dims.sizes((atom,)), dim)

    def _fresh(self, leaf: str, wanted: str, size: int = 0, dim: int = -1) -> str:
        """The wanted name if it is not taken, else behind the input's name, else with a number; targets do not take the short names."""
        followed = self._followed(size, dim)
        if wanted == f"dim{dim}" and followed is not None:
            wanted = followed
        short = [] if wanted.startswith("dim") or (leaf.startswith("targets") and wanted != "batch") else [wanted]
        for name in (*short, f"{leaf}_{wanted}", *[f"{leaf}_{wanted}_{number}" for number in range(2, 66)]):
            if name not in self._symbols and name not in self._fixed:
                return name
        return f"{leaf}_{wanted}_{len(self._symbols)}"

    def _followed(self, size: int, dim: int) -> str | None:
        """A symbol of this captured size that was met in this dim of another input."""
        return next((other for other, value in self._symbols.items() if value == size and self._dim_of[other] == dim), None)

    def _symbol(self, name: str, atom: int, size: int, dim: int) -> None:
        """A symbol for a size of which the atom is the only free factor."""
        rest = size // self._dims.sizes((atom,))
        one = symbol(name)
        self._values[atom] = FloorDiv(one, sympy.Integer(rest))
        followed = self._followed(size, dim)
        if followed is not None:
            self._follows[name] = self._follows.get(followed, followed)
        self._symbols[name], self._dim_of[name] = size, dim
        self._condition(one, "==", rest * self._values[atom], f"the model groups it by {rest}")

    # --- what follows ------------------------------------------------------------------------------------------

    def size(self, atoms: Atoms) -> sympy.Expr:
        """The product of some atoms, which are roots."""
        return self._product(*self.reduced(atoms))

    def reduced(self, atoms: Atoms) -> tuple[int, Atoms]:
        """The same product as a number and the atoms that may change: equal for equal layers, whose weights have atoms of their own."""
        found = self._reduced.get(atoms)
        if found is None:
            free = tuple([atom for atom in atoms if self._value(atom).free_symbols])
            found = self._reduced[atoms] = (prod([int(self._value(atom)) for atom in atoms if atom not in free]), tuple(sorted(free)))
        return found

    def _product(self, number: int, free: Atoms) -> sympy.Expr:
        key = (number, free)
        if key not in self._known:
            self._known[key] = sympy.Mul(sympy.Integer(number), *[self._value(atom) for atom in free])
        return self._known[key]

    def dim(self, node: fx.Node, dim: int) -> sympy.Expr:
        """The size of a dim of a tensor."""
        shape = self._dims.shape(node)
        return sympy.Integer(int(node.meta["val"].shape[dim])) if shape is None else self.size(shape[dim])

    def _value(self, atom: int) -> sympy.Expr:
        if atom in self._values:
            return self._values[atom]
        size = self._dims.sizes((atom,))
        value: sympy.Expr = sympy.Integer(size)
        if atom not in self._bound:
            if atom in self._busy:
                raise Unknown("it depends on itself")
            self._busy.add(atom)
            for node, rule, result, dim in self._made.get(atom, ()):
                found = self._made_by(node, rule, result, dim)
                if found is not None and self.at_capture(found) == size:
                    value = found
                    break
            else:
                value = self._counted(atom, value)
            self._busy.discard(atom)
        self._values[atom] = value
        return value

    def _counted(self, atom: int, size: sympy.Expr) -> sympy.Expr:
        """The size of what an arange counts, or is counted by one."""
        try:
            return self.dim(*self._ranges[atom]) if atom in self._ranges else size
        except Unknown:
            return size

    def _made_by(self, node: fx.Node, rule: OpDims, result: int, dim: int) -> sympy.Expr | None:
        try:
            return made_size(node, rule, result, dim, self.dim)
        except Unknown:
            return None

    def at_capture(self, expression: sympy.Expr) -> int:
        """The value of an expression at the captured sizes."""
        if expression not in self._captured:
            self._captured[expression] = int(expression.xreplace({symbol(name): sympy.Integer(size) for name, size in self._symbols.items()}))
        return self._captured[expression]

    def _condition(self, left: sympy.Expr, relation: Literal["==", "<="], right: sympy.Expr, why: str) -> None:
        if left != right and (left - right).free_symbols:
            self._conditions.setdefault((relation, left, right), Condition(left, relation, right, why))

    def _freeze(self, size: sympy.Expr, why: str) -> None:
        self._condition(size, "==", sympy.Integer(self.at_capture(size)), why)

    def _relate(self, rules: Rules) -> None:
        """Values of all derived sizes, in the order of the graph, then the conditions that they give."""
        dims = self._dims
        todo = []
        for node, rule in rules.items():
            makes = [] if rule is None else list(made(rule))
            if makes:
                labels = dims.labels(node)
                for result, dim, label in makes:
                    atoms = labels[label]
                    assert rule is not None
                    todo.append((node, rule, result, dim, label, atoms))
                    if len(atoms) == 1 and rule.outputs[result][dim] == (label,):  # type: ignore[index]
                        self._made.setdefault(atoms[0], []).append((node, rule, result, dim))
            for positions, source, dim in ranged(node):
                mine, theirs = (dims.shape(positions) or ((),))[0], (dims.shape(source) or ((),) * (dim + 1))[dim]
                if len(mine) == len(theirs) == 1:
                    self._ranges.setdefault(mine[0], (source, dim))
                    self._ranges.setdefault(theirs[0], (positions, 0))
        for *_, atoms in todo:
            for atom in atoms:
                self._value(atom)
        for node, rule, result, dim, label, atoms in todo:
            if rule.outputs[result][dim] == (label,):  # type: ignore[index]
                self._check_made(node, rule, result, dim, atoms)
        for node, rule in rules.items():
            if rule is None:
                self.freeze(node, f"there is no rule for {where(node)}")
            for left, relation, right, why in demands(node, self.dim):
                self._condition(left, relation, right, why.format(source=self._users_name(node.args[0])))

    def _check_made(self, node: fx.Node, rule: OpDims, result: int, dim: int, atoms: Atoms) -> None:
        size, captured = self.size(atoms), self._dims.sizes(atoms)
        try:
            expected = made_size(node, rule, result, dim, self.dim)
            if expected is not None and self.at_capture(expected) != captured:
                raise Unknown(f"{where(node)} makes it in a way that is not known")
        except Unknown as unknown:
            labels = self._dims.labels(node)
            for label in sorted(vanished(rule)):
                self._freeze(self.size(labels[label]), str(unknown))
            return
        if expected is None:
            same = [name for name, value in self._symbols.items() if value == captured]
            if same and not size.free_symbols and kind(node) in SIZED and not any(atom in self._bound for atom in atoms):
                why = f"{where(node)} makes {captured} elements, and nothing tells whether these are {same[0]}"
                self._condition(symbol(same[0]), "==", sympy.Integer(captured), why)
            return
        why = next((self._bound[atom] for atom in atoms if atom in self._bound), f"{where(node)} makes a dim that meets one of that size")
        self._condition(expected, "==", size, why)
        if expected.free_symbols and not expected.is_Symbol:
            self._condition(sympy.Integer(1), "<=", expected, f"{where(node)} makes a dim of that size")

    def _users_name(self, node: object) -> str:
        """What the user calls a tensor."""
        described = self._users.get(node)
        if described is not None:
            return f"{described.kind} {described.name!r}"
        return f"what {where(node)} makes" if isinstance(node, fx.Node) else str(node)

    def freeze(self, node: fx.Node, why: str) -> None:
        """What the op reads stays at the captured sizes."""
        for source in node.all_input_nodes:
            for atoms in self._dims.shape(source) or ():
                self._freeze(self.size(atoms), why)

    def _eliminate(self) -> None:
        """A symbol that a condition gives by others is none: targets are as long as length - 1, or as long as a loop has steps."""
        for name in reversed(list(self._symbols)):
            for condition in self._conditions.values():
                by = _solved(condition, symbol(name))
                if by is not None:
                    self._replace(name, by, condition.why)
                    break

    def _replace(self, name: str, by: sympy.Expr, why: str) -> None:
        table = {symbol(name): by}
        self._fixed[name] = (self._symbols.pop(name), f"it is {by}: {why}" if by.free_symbols else why)
        self._values = {atom: value.xreplace(table) for atom, value in self._values.items()}
        self._reduced, self._known = {}, {}
        old, self._conditions = self._conditions, {}
        for condition in old.values():
            self._condition(condition.left.xreplace(table), condition.relation, condition.right.xreplace(table), condition.why)
        followed = self._follows.pop(name, None)
        for other in [key for key, value in self._follows.items() if value == name]:
            del self._follows[other]
            if followed is not None:
                self._follows[other] = followed


def _solved(condition: Condition, one: sympy.Symbol) -> sympy.Expr | None:
    """The symbol by the others, where the condition is symbol + (others) == 0."""
    if condition.relation != "==":
        return None
    zero = condition.left - condition.right
    for by in (one - zero, one + zero):
        if one not in by.free_symbols:
            return by
    return None


def sizes_of(graph: Graph, dims: Dims, batch: Batch | None, rules: Rules | None = None) -> Sizes:
    """Symbols, derived sizes and conditions of a captured graph; linear in the number of ops. `rules`: the ops' descriptions, if at hand."""
    if rules is None:
        rules = {node: describe(node) for node in graph.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return Sizes(graph, dims, batch, rules)
