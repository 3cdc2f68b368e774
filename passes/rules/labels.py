"""The workbench of a rule: labels with sizes, gathered into `OpDims`."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import sympy
import torch

from partitioner.passes.rules.call import Call, Spec
from partitioner.passes.rules.describe import Dim, OpDims

Dims = tuple[Dim, ...]
Entry = Dims | None
ZERO = sympy.Integer(0)


class Labels:
    """Makes labels and remembers their sizes and which are whole."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.whole: set[str] = set()

    def new(self, size: int, name: str = "d", whole: bool = False) -> Dim:
        """One tensor dim made of one new label: `name` and a number. Size 1 needs none; what is empty cannot be cut."""
        if size == 1:
            return ()
        label = f"{name}{len(self.sizes)}"
        return self.named(label, size, whole)

    def named(self, label: str, size: int, whole: bool = False) -> Dim:
        if size == 1:
            return ()
        self.sizes[label] = size
        if whole or size == 0:
            self.whole.add(label)
        return (label,)

    def of(self, shape: Sequence[int], name: str = "d", whole: bool | Iterable[int] = False) -> list[Dim]:
        """New labels for every dim; `whole` for all, none, or some dims."""
        wholes = set(range(len(shape))) if whole is True else set(whole or ())
        return [self.new(size, name, position in wholes) for position, size in enumerate(shape)]

    def keep(self, *dims: Dim) -> None:
        """Forbid to cut these dims."""
        self.whole.update(label for dim in dims for label in dim)

    def size(self, dim: Dim) -> int:
        return prod([self.sizes[label] for label in dim])


def describe_by(
    call: Call,
    labels: Labels,
    inputs: Mapping[str, Sequence[Dim] | None],
    outputs: Iterable[Sequence[Dim] | None],
    linear: Iterable[str] = (),
    linear_one: Iterable[str] = (),
    flops: sympy.Expr = ZERO,
    listed: Mapping[str, Sequence[Sequence[Dim]]] | None = None,
) -> OpDims | None:
    """Assemble OpDims from dims by argument name; `listed` holds those of tensor-list arguments, one entry per tensor of the list.

    None where the dims do not multiply to the shapes: the rule does not cover this instance.
    """
    entries: list[Entry] = []
    seen: dict[str, int] = {}
    for place in call.places:
        if place.index is None:
            dims = inputs[place.name]
        else:
            position = seen.get(place.name, 0)
            seen[place.name] = position + 1
            dims = (listed or {})[place.name][position]
        entry = None if dims is None else tuple(dims)
        if not _fits(labels, entry, place.spec):
            return None
        entries.append(entry)
    results: list[Entry] = [None if dims is None else tuple(dims) for dims in outputs]
    if len(results) != len(call.outputs) or not all(_fits(labels, dims, spec) for dims, spec in zip(results, call.outputs, strict=True)):
        return None
    used = {label for entry in (*entries, *results) if entry is not None for dim in entry for label in dim}
    return OpDims(
        tuple(entries),
        tuple(results),
        {label: size for label, size in labels.sizes.items() if label in used},
        frozenset(labels.whole & used),
        _positions(call, linear),
        _positions(call, linear_one),
        flops,
    )


def _fits(labels: Labels, dims: Entry, spec: Spec | None) -> bool:
    if dims is None or spec is None:
        return True
    return len(dims) == len(spec.shape) and all(labels.size(dim) == size for dim, size in zip(dims, spec.shape, strict=True))


def _positions(call: Call, names: Iterable[str]) -> tuple[int, ...]:
    wanted = set(names)
    return tuple([position for position, place in enumerate(call.places) if place.name in wanted and place.spec.dtype != torch.bool])


def product(factor: int, *dims: Dim) -> sympy.Expr:
    """factor times the sizes of the dims, as symbols named like the labels (no assumptions, so `subs({"b": 8})` works by name)."""
    return sympy.Mul(sympy.Integer(factor), *[sympy.Symbol(label) for dim in dims for label in dim])
