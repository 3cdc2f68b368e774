"""A small text language for rules, after einsum and einops.

    linear     b.. i, o i, o? -> b.. o
    conv2d     n i h! w!, o i y! x!, o? -> n o p! q!

Left of the arrow: one entry per tensor argument in schema order, absent optional ones marked by a final `?`, `_` for one that is not
read. Right: one entry per result. Within an entry, dims are separated by spaces:

    name        one dim          name..      any number of dims (right-aligned between entries)
    1           a dim of size 1  (g i)       a dim that merges labels, major first
    name!       a label that no shard may cut

A dim of size 1 where the label is larger is a broadcast: it becomes (). Sizes come from the shapes; in a merged dim at most one label may
have no size elsewhere. A label with no size on the left takes it from the result.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

from partitioner.passes.rules.call import Call, Spec
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by, product

_TOKEN = re.compile(r"\(([^)]*)\)|([a-z]\w*)(\.\.)?(!)?(\.\.)?|(1)|(_)")


@dataclass(frozen=True)
class Item:
    """One dim of an entry, or a run of dims."""

    names: tuple[str, ...]  # () for a dim of size 1
    whole: frozenset[str] = frozenset()
    dots: bool = False


@dataclass(frozen=True)
class Pattern:
    """One entry; `items` is None for `_`."""

    items: tuple[Item, ...] | None
    optional: bool = False


@dataclass(frozen=True)
class Text:
    inputs: tuple[Pattern, ...]
    outputs: tuple[Pattern, ...]


def _pattern(text: str) -> Pattern:
    text = text.strip()
    optional = text.endswith("?")
    text = text.rstrip("? ")
    if text == "_":
        return Pattern(None, optional)
    items, end = [], 0
    for match in _TOKEN.finditer(text):
        if text[end : match.start()].strip():
            raise ValueError(f"cannot read {text[end : match.start()]!r} in the rule entry {text!r}; write labels such as `b..`, `c!` or `(g i)`")
        end = match.end()
        merged, name, dots, bang, dots_after, one, _ = match.groups()
        if merged is not None:
            parts = merged.split()
            names = tuple(part.rstrip("!") for part in parts)
            items.append(Item(names, frozenset(part.rstrip("!") for part in parts if part.endswith("!"))))
        elif one:
            items.append(Item(()))
        else:
            items.append(Item((name,), frozenset((name,)) if bang else frozenset(), bool(dots or dots_after)))
    if text[end:].strip():
        raise ValueError(f"cannot read {text[end:]!r} in the rule entry {text!r}; write labels such as `b..`, `c!` or `(g i)`")
    return Pattern(tuple(items), optional)


@cache
def parse(text: str) -> Text:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"the rule {text!r} has no `->`; write `inputs -> outputs`")
    inputs = tuple(_pattern(entry) for entry in left.split(",")) if left.strip() else ()
    return Text(inputs, tuple(_pattern(entry) for entry in right.split(",")))


class _Mismatch(Exception):
    """The shapes are not those that the text describes."""


def _rest(pattern: Pattern, rank: int) -> int:
    """How many dims the run of dims of an entry stands for."""
    items = pattern.items or ()
    runs = sum(item.dots for item in items)
    count = rank - len(items) + runs
    if runs > 1 or count < 0 or (runs == 0 and count != 0):
        raise _Mismatch
    return count


def _spell(pattern: Pattern, rank: int, longest: dict[str, int]) -> list[tuple[str, ...]]:
    """The label names of every dim, runs of dims written out as name0, name1, …"""
    dims: list[tuple[str, ...]] = []
    for item in pattern.items or ():
        if item.dots:
            count, (name,) = _rest(pattern, rank), item.names
            first = longest[name] - count
            dims.extend((f"{name}{first + position}",) for position in range(count))
        else:
            dims.append(item.names)
    return dims


def _solve(sizes: dict[str, int], spelled: Iterable[tuple[list[tuple[str, ...]], Spec]]) -> None:
    """Find the size of every label; merged dims once all but one of their labels are known."""
    merged = []
    for dims, spec in spelled:
        for names, size in zip(dims, spec.shape, strict=True):
            if len(names) == 1:
                known = sizes.get(names[0], 1)
                if known != 1 and size not in (1, known):
                    raise _Mismatch
                sizes[names[0]] = size if known == 1 else known
            elif names:
                merged.append((names, size))
            elif size != 1:
                raise _Mismatch
    for names, size in merged:
        unknown = [name for name in names if name not in sizes]
        known = prod([sizes[name] for name in names if name in sizes])
        if len(unknown) > 1 or known == 0 or size % known:
            raise _Mismatch
        if unknown:
            sizes[unknown[0]] = size // known


def apply(
    call: Call,
    text: str,
    linear: Iterable[str] = (),
    linear_one: Iterable[str] = (),
    flops: str | None = None,
    keep: Iterable[str] = (),
    sizes: dict[str, int] | None = None,
) -> OpDims | None:
    """Describe a call by a rule text; None where its shapes do not match.

    `flops` is an integer and labels, multiplied: "2 b.. i o". `keep` names labels that are whole in this instance. `sizes` presets label sizes.
    `linear` and `linear_one` are argument names (see OpDims).
    """
    parsed = parse(text)
    try:
        return _apply(call, parsed, tuple(linear), tuple(linear_one), flops, set(keep), dict(sizes or {}))
    except _Mismatch:
        return None


def _apply(
    call: Call, parsed: Text, linear: tuple[str, ...], linear_one: tuple[str, ...], flops: str | None, keep: set[str], sizes: dict[str, int]
) -> OpDims | None:
    patterns = dict(zip(call.tensor_names, parsed.inputs, strict=False))
    for name in call.tensor_names:
        value = call[name]
        if isinstance(value, Spec) and name not in patterns:
            raise _Mismatch
        if value is None and name in patterns and not patterns[name].optional:
            raise _Mismatch
    entries = [(patterns[place.name], place.spec) for place in call.places]
    results = [(pattern, spec) for pattern, spec in zip(parsed.outputs, call.outputs, strict=False) if spec is not None]
    if len(parsed.outputs) != len(call.outputs):
        raise _Mismatch
    longest: dict[str, int] = {}
    for pattern, spec in (*entries, *results):
        for item in pattern.items or ():
            if item.dots:
                longest[item.names[0]] = max(longest.get(item.names[0], 0), _rest(pattern, len(spec.shape)))
            keep |= item.whole
    left = [(_spell(pattern, len(spec.shape), longest), spec) for pattern, spec in entries if pattern.items is not None]
    right = [(_spell(pattern, len(spec.shape), longest), spec) for pattern, spec in results]
    if any(len(dims) != len(spec.shape) for dims, spec in (*left, *right)):
        raise _Mismatch
    _solve(sizes, left)
    new = [(dims, spec) for dims, spec in right if any(name not in sizes for names in dims for name in names)]
    _solve(sizes, new)

    labels = Labels()
    made: dict[str, Dim] = {}
    runs = {f"{name}{position}": name for name, count in longest.items() for position in range(count)}
    for name, size in sizes.items():
        made[name] = labels.named(name, size, name in keep or runs.get(name) in keep)

    def written(pattern: Pattern, spec: Spec) -> list[Dim]:
        dims: list[Dim] = []
        for names, size in zip(_spell(pattern, len(spec.shape), longest), spec.shape, strict=True):
            dim = tuple([label for name in names for label in made[name]])
            dims.append(() if size == 1 else dim)  # a broadcast, or size 1 throughout
        return dims

    inputs = {}
    listed: dict[str, list[list[Dim]]] = {}
    for place in call.places:
        pattern = patterns[place.name]
        if place.index is not None:
            listed.setdefault(place.name, []).append(written(pattern, place.spec))
        else:
            inputs[place.name] = None if pattern.items is None else written(pattern, place.spec)
    outputs = [None if spec is None else written(pattern, spec) for pattern, spec in zip(parsed.outputs, call.outputs, strict=True)]
    expression = None
    if flops is not None:
        factor, *names = flops.split()
        written_out = [f"{name[:-2]}{position}" for name in names if name.endswith("..") for position in range(longest[name[:-2]])]
        single = [name for name in names if not name.endswith("..")]
        expression = product(int(factor), *[made[name] for name in (*written_out, *single)])
    if expression is None:
        return describe_by(call, labels, inputs, outputs, linear, linear_one, listed=listed)
    return describe_by(call, labels, inputs, outputs, linear, linear_one, expression, listed)
