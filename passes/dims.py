"""Dims analysis: every tensor dim of the graph is a product of *atoms*, found by unifying the named dims of all ops.

A rule names the dims of one op; two tensors that meet in an op share its labels. Unifying labels along the graph (union-find, where an
atom may also turn out to be the product of finer ones, as a view splits `hidden` into `heads × head_dim`) tells which dims are the same
dim everywhere. The batch is one atom; so

  - an input leaf has a batch dim exactly where one of its dims contains the batch atom (a (T, T) mask has none, though T equals the batch);
  - a merged dim such as (batch·time) is cut as (outer, batch, inner), and a view back finds the batch again;
  - sizes are products of atoms, so costs are formulas in them and another batch or sequence length needs no new capture.

Losing a relation (a view whose sizes do not factor, an op without rule) only makes fresh atoms: the analysis is conservative.
"""

import operator
from dataclasses import dataclass
from math import prod

import sympy
import torch
from torch import fx

from partitioner.passes.graph import Graph
from partitioner.passes.rules import describe, tensor_arguments
from partitioner.passes.rules.describe import Dim

Atoms = tuple[int, ...]
Shape = tuple[Atoms, ...]


@dataclass(frozen=True)
class Cut:
    """Where a tensor carries an atom: in dim `dim`, whose size is outer · atom · inner."""

    dim: int
    outer: int = 1
    inner: int = 1


class Dims:
    """Atoms of every value. Build with `analyse`."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._link: list[Atoms | None] = []  # None: a root; otherwise what this atom stands for
        self._shapes: dict[fx.Node, tuple[Shape | None, ...]] = {}
        self._labels: dict[fx.Node, dict[str, Atoms]] = {}

    # --- atoms -------------------------------------------------------------------------------------------------

    def fresh(self, size: int) -> Atoms:
        """A new atom of this size; size 1 needs none."""
        if size == 1:
            return ()
        self._size.append(size)
        self._link.append(None)
        return (len(self._size) - 1,)

    def roots(self, atoms: Atoms) -> Atoms:
        """`atoms` in terms of those that stand for nothing else."""
        links = self._link
        if all(links[a] is None for a in atoms):
            return atoms
        out: list[int] = []
        left = [*reversed(atoms)]
        while left:
            a = self._last(left.pop())
            link = links[a]
            if link is None:
                out.append(a)
            else:
                left.extend(reversed(link))
        return tuple(out)

    def _last(self, a: int) -> int:
        """The end of a run of atoms that each stand for the next one; the run then points to it."""
        links, passed = self._link, []
        while (link := links[a]) is not None and len(link) == 1:
            passed.append(a)
            a = link[0]
        for b in passed:
            links[b] = (a,)
        return a

    @property
    def atoms(self) -> Atoms:
        """All atoms that stand for nothing else."""
        return tuple(atom for atom, link in enumerate(self._link) if link is None)

    def sizes(self, atoms: Atoms) -> int:
        return prod(self._size[a] for a in atoms)

    def unify(self, left: Atoms, right: Atoms) -> bool:
        """Make two products equal, factor by factor from the left; False where the sizes do not factor (nothing more is learnt)."""
        if left == right:
            return True
        a, b = list(self.roots(left)), list(self.roots(right))
        while a and b:
            x, y = a[0], b[0]
            if x == y:
                a, b = a[1:], b[1:]
                continue
            sx, sy = self._size[x], self._size[y]
            if sx == sy:
                self._link[max(x, y)] = (min(x, y),)
                a, b = list(self.roots(tuple(a[1:]))), list(self.roots(tuple(b[1:])))
            elif sx % sy == 0:
                self._link[x] = (y, *self.fresh(sx // sy))
                a, b = list(self.roots(tuple(a))), list(self.roots(tuple(b)))
            elif sy % sx == 0:
                self._link[y] = (x, *self.fresh(sy // sx))
                a, b = list(self.roots(tuple(a))), list(self.roots(tuple(b)))
            else:
                return False
            if len(a) > 64 or len(b) > 64:  # an atom that contains itself would unfold for ever
                return False
        return not a and not b

    # --- values ------------------------------------------------------------------------------------------------

    def shape(self, node: fx.Node, result: int = 0) -> Shape | None:
        """Atoms of each dim of a value (of the `result`-th tensor of a multi-output op)."""
        shapes = self._shapes.get(node)
        if shapes is None or result >= len(shapes) or shapes[result] is None:
            return None
        return tuple(self.roots(dim) for dim in shapes[result])  # type: ignore[union-attr]

    def labels(self, node: fx.Node) -> dict[str, Atoms]:
        """The labels of the op's description (see rules/describe.py) as products of atoms; empty for an op without rule."""
        return {label: self.roots(atoms) for label, atoms in self._labels.get(node, {}).items()}

    def cut(self, node: fx.Node, atom: int, result: int = 0) -> Cut | None:
        """Where this value carries the atom; None if it does not."""
        shape = self.shape(node, result)
        for position, dim in enumerate(shape or ()):
            if atom in dim:
                at = dim.index(atom)
                return Cut(position, self.sizes(dim[:at]), self.sizes(dim[at + 1 :]))
        return None

    def formula(self, node: fx.Node, symbols: dict[int, sympy.Symbol], result: int = 0) -> tuple[sympy.Expr, ...] | None:
        """Sizes of a value's dims as products of the given atoms' symbols; atoms without a symbol are numbers."""
        shape = self.shape(node, result)
        if shape is None:
            return None
        return tuple(sympy.Mul(*(symbols.get(a, sympy.Integer(self._size[a])) for a in dim)) for dim in shape)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._shapes

    def visit(self, node: fx.Node) -> None:
        """Take in one node; its inputs come first."""
        values = node.meta.get("val")
        results = tuple(values) if isinstance(values, (tuple, list)) else (values,)
        if node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            shapes = self._shapes.get(source)  # type: ignore[arg-type]
            self._shapes[node] = (shapes[index],) if shapes else self._fresh_shapes(results)  # type: ignore[index]
            return
        rule = describe(node) if node.op == "call_function" else None
        if rule is None:
            self._shapes[node] = self._fresh_shapes(results)
            return
        labels: dict[str, Atoms] = {}
        arguments = tensor_arguments(node)
        for argument, names in zip(arguments, rule.inputs, strict=True):
            shape = self._shapes[argument][0]
            if names is None or shape is None:
                continue
            for dim, name in zip(shape, names, strict=True):
                if len(name) == 1 and name[0] not in labels:
                    labels[name[0]] = dim
                elif name:
                    for label in name:
                        if label not in labels:
                            labels[label] = self.fresh(rule.sizes[label])
                    self.unify(dim, self._product(name, labels))
        made: list[Shape | None] = []
        for names in rule.outputs:
            if names is None:
                made.append(None)
                continue
            for name in names:
                for label in name:
                    if label not in labels:
                        labels[label] = self.fresh(rule.sizes[label])
            made.append(tuple([self._product(name, labels) for name in names]))
        self._shapes[node] = tuple(made)
        self._labels[node] = labels

    @staticmethod
    def _product(name: Dim, labels: dict[str, Atoms]) -> Atoms:
        if len(name) == 1:
            return labels[name[0]]
        return tuple([atom for label in name for atom in labels[label]])

    def _fresh_shapes(self, results: tuple[object, ...]) -> tuple[Shape | None, ...]:
        return tuple(tuple(self.fresh(int(s)) for s in r.shape) if isinstance(r, torch.Tensor) else None for r in results)


def analyse(graph: Graph) -> Dims:
    """Unify the named dims of all ops of the graph; linear in the number of ops."""
    dims = Dims()
    for node in graph.module.graph.nodes:
        if node.op != "output":
            dims.visit(node)
    return dims
