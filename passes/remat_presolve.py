"""A smaller problem with the same frontier.

1. `_represent`: a value that costs nothing to make from free values is free; one that costs nothing to make from a single value, and lies in its
   storage or in none, is available exactly when that one is. Views, sizes and constants vanish.
2. `_relevant`: what no needed value is made from is dropped.
3. `_contract`: let v be unneeded and used by one value w alone. Whoever saves v may save w instead at no more bytes if w's storage is no larger
   and serves nobody else: then neither is recomputed. So v is never saved, v is recomputed when w is, and the two become one. (If forward does not
   need w, its other inputs must be made by forward anyway, or saving w might compute them twice.)
"""

from dataclasses import dataclass, field

from partitioner.passes.remat_problem import RematProblem


@dataclass
class Item:
    """A value that is left. Unless `late`, forward makes it anyway; `seconds` to recompute it, `late_seconds` to make what forward would not."""

    name: str
    inputs: set[str]
    storage: str | None
    recomputable: bool
    late: bool
    seconds: float
    late_seconds: float
    users: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Reduced:
    """The values that are left, in topological order, and those that must be available."""

    items: dict[str, Item]
    needed: frozenset[str]


def reduce(problem: RematProblem) -> Reduced:
    """The same frontier over fewer values."""
    represent = _represent(problem)
    items: dict[str, Item] = {}
    for value in problem.values:
        if represent[value.name] == value.name:
            inputs = {r for name in value.inputs if (r := represent[name]) is not None}
            late_seconds = value.seconds if value.late else 0.0
            items[value.name] = Item(value.name, inputs, value.storage, value.recomputable, value.late, value.seconds, late_seconds)
    needed = frozenset(r for name in problem.needed if (r := represent[name]) is not None)
    items = _relevant(items, needed)
    _contract(items, needed, problem.storage_bytes)
    return Reduced(items, needed)


def _represent(problem: RematProblem) -> dict[str, str | None]:
    """The value whose availability decides each value's; None for free."""
    represent: dict[str, str | None] = {}
    for value in problem.values:
        represent[value.name] = None if value.free else value.name
        if value.free or value.seconds > 0 or not value.recomputable:
            continue
        sources = {r for name in value.inputs if (r := represent[name]) is not None}
        if not sources:
            represent[value.name] = None
        elif len(sources) == 1:
            source = problem.by_name[next(iter(sources))]
            if value.storage is None or value.storage == source.storage:
                represent[value.name] = source.name
    return represent


def _relevant(items: dict[str, Item], needed: frozenset[str]) -> dict[str, Item]:
    wanted = set(needed)
    for item in reversed(items.values()):
        if item.name in wanted and (item.recomputable or item.late):  # what is late and never recomputed is made by forward, from its inputs
            wanted.update(item.inputs)
    kept = {name: item for name, item in items.items() if name in wanted}
    for item in kept.values():
        if not (item.recomputable or item.late):
            item.inputs.clear()
        for name in item.inputs:
            kept[name].users.add(item.name)
    return kept


def _contract(items: dict[str, Item], needed: frozenset[str], storage_bytes: dict[str, int]) -> None:
    alone: dict[str, int] = {}
    for item in items.values():
        if item.storage is not None:
            alone[item.storage] = alone.get(item.storage, 0) + 1
    for v in list(items.values()):
        if v.name in needed or len(v.users) != 1 or not v.recomputable:
            continue
        w = items[next(iter(v.users))]
        if v.storage is not None:
            if w.storage is None or storage_bytes[w.storage] > storage_bytes[v.storage]:
                continue
            if alone[v.storage] > 1 or alone[w.storage] > 1:
                continue
            if w.late and any(items[name].late for name in w.inputs - {v.name}):
                continue
        w.inputs = (w.inputs - {v.name}) | v.inputs
        w.seconds += v.seconds
        w.late_seconds += v.late_seconds
        for name in v.inputs:
            items[name].users.discard(v.name)
            items[name].users.add(w.name)
        del items[v.name]
