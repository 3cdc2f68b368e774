"""Cut a topological order into consecutive runs, guided by the module tree.

    1. label   every op belongs to a layer (a path that ends in an index, `model.layers.3`) or to no layer; equal neighbours form a unit
    2. attach  what stands between two layers of one list (residual adds) joins the layer before it, also behind the last layer
    3. group   layers of very few ops are grouped, in step with their period so that equal groups stay equal; other units are merged while small;
               no group of large parameters takes in more of them: what a block reads is gathered at once
    4. divide  a unit of very many ops is cut at deeper indices, where it repeats itself, or where few bytes are live; a unit without its equal is cut
               at deeper indices where it holds equal layers

All steps are linear in the number of ops.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise
from math import prod

from torch import Tensor, fx

MANY_OPS = 300  # a unit of more ops is divided
ENOUGH_OPS = 16  # a group of layers stops growing here,
FEW_OPS = 4  # and never stops before this
SMALL_LAYER = 8  # layers of fewer ops on average are grouped
LOOSE_OPS = 64  # units outside of layers are merged up to this
LARGE_BYTES = 1 << 24  # parameters that a collective of their own moves about as fast as one of more


@dataclass
class Unit:
    """A run of ops. `family` is the path of the list that the layer `label` is in; None outside of layers."""

    label: str
    family: str | None
    ops: list[fx.Node] = field(default_factory=list)
    repeated: bool = False  # the same layer was entered again


@cache
def _label(path: str, depth: int) -> tuple[str, str | None]:
    """The path up to its depth-th index, and the path of the list: ("model.layers.3", "model.layers")."""
    parts = path.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    if depth < len(indices):
        at = indices[depth]
        return ".".join(parts[: at + 1]), ".".join(parts[:at])
    return path, None


def segment(order: Sequence[fx.Node], weights: dict[fx.Node, int]) -> list[Unit]:
    """Consecutive units that cover `order`; `weights` are the bytes of each parameter placeholder. A getitem stands right behind its op."""
    shape = _Signatures()
    share = sum(weights.values())
    units = _divide(_at_depth(order, 0, shape, weights, share), 0, shape, weights, share)
    return _join_crumbs(units, shape, weights, share)


class _Signatures:
    """A small number for each kind of op with its result's shape, so that runs are compared as lists of numbers."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._nodes: dict[fx.Node, int] = {}

    def op(self, node: fx.Node) -> int:
        found = self._nodes.get(node)
        if found is None:
            val = node.meta.get("val")
            key: object = (node.target, tuple(val.shape), val.dtype) if isinstance(val, Tensor) else node.target
            found = self._nodes[node] = self._numbers.setdefault(key, len(self._numbers))
        return found

    def run(self, ops: Sequence[fx.Node]) -> int:
        return self._numbers.setdefault(tuple(self.op(node) for node in ops), len(self._numbers))


def _weight(units: Sequence[Unit], weights: dict[fx.Node, int]) -> int:
    return sum(weights[p] for p in {i for unit in units for op in unit.ops for i in op.all_input_nodes if i in weights})


def _is_full(units: Sequence[Unit], unit: Unit, weights: dict[fx.Node, int]) -> bool:
    """Whether units with large parameters should not be joined by one that adds more than a norm's to them."""
    weight = _weight(units, weights)
    return weight >= LARGE_BYTES and (_weight([*units, unit], weights) - weight) * 16 >= LARGE_BYTES


def _at_depth(order: Sequence[fx.Node], depth: int, shape: _Signatures, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    units: list[Unit] = []
    for node in order:
        if node.target is operator.getitem and units:
            units[-1].ops.append(node)
            continue
        label, family = _label(node.meta.get("module") or "", depth)
        if not units or units[-1].label != label or units[-1].family != family:
            units.append(Unit(label, family))
        units[-1].ops.append(node)
    return _group(_attach(units, shape), shape, weights, share)


def _attach(units: list[Unit], shape: _Signatures) -> list[Unit]:
    """Give the ops between two layers of one list to the layer before them."""
    done: list[Unit] = []
    pending: list[Unit] = []
    between: dict[str, list[int]] = {}
    for unit in [*units, None]:
        if unit is not None and unit.family is None:
            pending.append(unit)
            continue
        last = done[-1] if done and done[-1].family is not None else None
        loose = [op for one in pending for op in one.ops]
        if last is not None and unit is not None and last.family == unit.family and len(loose) <= max(8, len(last.ops) // 2):
            if loose:
                last.ops += loose
                between[last.family or ""] = [shape.op(op) for op in loose]
        elif pending:
            usual = between.get(last.family or "", []) if last is not None else []
            if last is not None and usual and [shape.op(op) for op in loose[: len(usual)]] == usual:
                last.ops += loose[: len(usual)]
                pending = _behind(pending, len(usual))
            done += pending
        pending = []
        if unit is None:
            break
        if done and done[-1].label == unit.label and done[-1].family == unit.family:
            done[-1].ops += unit.ops
            done[-1].repeated = True
        else:
            done.append(unit)
    return done


def _behind(units: list[Unit], count: int) -> list[Unit]:
    """The units without their first `count` ops."""
    left: list[Unit] = []
    for unit in units:
        if count < len(unit.ops):
            left.append(Unit(unit.label, unit.family, unit.ops[count:]))
        count = max(0, count - len(unit.ops))
    return left


def _group(units: list[Unit], shape: _Signatures, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    done: list[Unit] = []
    start = 0
    while start < len(units):
        end = start + 1
        while end < len(units) and units[end].family == units[start].family:
            end += 1
        stretch = units[start:end]
        if stretch[0].family is None:
            done += _merge_loose(stretch, weights, share)
        elif sum(len(u.ops) for u in stretch) >= SMALL_LAYER * len(stretch):
            done += stretch
        else:
            done += _merge_layers(stretch, shape, weights, share)
        start = end
    return done


def _joined(units: Sequence[Unit]) -> Unit:
    if len(units) == 1:
        return units[0]
    labels = [unit.label for unit in units]
    label = labels[0] if units[0].family is not None else max(units, key=lambda u: len(u.ops)).label
    return Unit(label, units[0].family, [op for unit in units for op in unit.ops])


def _merge_loose(units: list[Unit], weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Units outside of layers: merged while they are small in ops, or in bytes of parameters where a unit with parameters follows."""
    done: list[Unit] = []
    current: list[Unit] = []
    for unit in units:
        count = sum(len(u.ops) for u in current)
        enough = count >= FEW_OPS and (count >= LOOSE_OPS or (_weight(current, weights) * 8 >= share and _weight([unit], weights)))
        if enough or (current and _is_full(current, unit, weights)):
            done.append(_joined(current))
            current = []
        current.append(unit)
    return [*done, _joined(current)]


def _merge_layers(units: list[Unit], shape: _Signatures, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Layers of few ops: the longest periodic stretch in groups of whole periods, the rest one after the other."""
    first, last, period = _periodic([shape.run(unit.ops) for unit in units])
    if not period:
        return _merge_each(units, weights, share)
    head, tail = units[:first], units[last:]
    groups = _merge_periods(units[first:last], period, weights, share)
    return [*(_merge_each(head, weights, share) if head else []), *groups, *(_merge_each(tail, weights, share) if tail else [])]


def _is_enough(units: Sequence[Unit], weights: dict[fx.Node, int], share: int) -> bool:
    count = sum(len(u.ops) for u in units)
    weight = _weight(units, weights)
    return count >= ENOUGH_OPS or weight >= LARGE_BYTES or (count >= FEW_OPS and weight * 48 >= share)


def _merge_periods(units: list[Unit], period: int, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Groups of equally many periods, as many as make the first one large enough; of parts of a period where it is too large itself."""
    size = period
    while size < len(units) and not _is_enough(units[:size], weights, share):
        size += period
    groups = []
    for at in range(0, len(units), size):
        group = [units[at]]
        for unit in units[at + 1 : at + size]:
            if _is_full(group, unit, weights):
                groups.append(_joined(group))
                group = []
            group.append(unit)
        groups.append(_joined(group))
    return groups


def _merge_each(units: list[Unit], weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Groups that grow until each is large enough; a last one that stays too small joins the one before."""
    groups: list[list[Unit]] = [[]]
    for unit in units:
        few = sum(len(u.ops) for u in groups[-1]) < FEW_OPS  # ends only where more large parameters come
        if _is_full(groups[-1], unit, weights) if few else _is_enough(groups[-1], weights, share):
            groups.append([])
        groups[-1].append(unit)
    if len(groups) > 1 and sum(len(u.ops) for u in groups[-1]) < FEW_OPS and not _is_full(groups[-2], _joined(groups[-1]), weights):
        last = groups.pop()
        groups[-1] += last
    return [_joined(group) for group in groups]


def _periodic(kinds: Sequence[int]) -> tuple[int, int, int]:
    """The longest stretch [first, last) in which every kind recurs after `period`."""
    best = (0, 0, 0)
    for period in range(1, min(8, len(kinds) // 2) + 1):
        first = 0
        for at in range(period, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - period]:
                length = (at - first) // period * period
                if length >= 2 * period and length > best[1] - best[0]:
                    best = (first, first + length, period)
                first = at - period + 1
    return best


def _divide(units: list[Unit], depth: int, shape: _Signatures, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Divide what is too large, what repeats itself, and what has no equal but holds equal layers (a stage of a convolutional network)."""
    count = Counter(shape.run(unit.ops) for unit in units)
    done: list[Unit] = []
    for unit in units:
        large = len(unit.ops) > MANY_OPS
        pieces = _repeats(unit, shape) if large or unit.repeated else [unit]
        if len(pieces) > 1:
            done += _divide(pieces, depth, shape, weights, share)
            continue
        if large or (unit.family is not None and count[shape.run(unit.ops)] == 1):
            pieces = _deeper(unit, depth, large, shape, weights, share)
        if len(pieces) > 1:
            done += _divide(pieces, depth + 1, shape, weights, share)
        else:
            done += _at_few_bytes(unit) if large else [unit]
    return done


def _deeper(unit: Unit, depth: int, large: bool, shape: _Signatures, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Cut a unit at the next index of its paths: always where it is large, else only where this gives equal layers that are not small."""
    if not any(_label(op.meta.get("module") or "", depth + 1)[1] is not None for op in unit.ops):
        return [unit]
    pieces = _at_depth(unit.ops, depth + 1, shape, weights, share)
    kinds = Counter(shape.run(piece.ops) for piece in pieces if piece.family is not None and len(piece.ops) >= SMALL_LAYER)
    return pieces if large or any(times > 1 for times in kinds.values()) else [unit]


def _repeats(unit: Unit, shape: _Signatures) -> list[Unit]:
    """Cut a unit that consists of equal runs (a layer called many times) into them, or into groups of them."""
    kinds = [shape.op(op) for op in unit.ops]
    border = [0] * len(kinds)  # Knuth, Morris, Pratt: the longest proper border of each prefix
    for at in range(1, len(kinds)):
        k = border[at - 1]
        while k and kinds[at] != kinds[k]:
            k = border[k - 1]
        border[at] = k + (kinds[at] == kinds[k])
    period = len(kinds) - border[-1]
    if period == len(kinds) or len(kinds) % period:
        return [unit]
    size = period * -(-ENOUGH_OPS // period)
    return [Unit(unit.label, unit.family, unit.ops[at : at + size]) for at in range(0, len(kinds), size)]


def _at_few_bytes(unit: Unit) -> list[Unit]:
    """Cut into pieces of about half of MANY_OPS, each at the place near its end where the fewest bytes are live."""
    return _pieces(unit, -(-len(unit.ops) * 2 // MANY_OPS))


def finer(units: Sequence[Unit], at_least: int) -> list[Unit]:
    """Halve the units of most ops, where few bytes are live, until there are so many as are asked for, or none can be halved."""
    done = list(units)
    while len(done) < at_least:
        at = max(range(len(done)), key=lambda number: len(done[number].ops), default=None)
        pieces = [] if at is None else _pieces(done[at], 2)
        if at is None or len(pieces) < 2:
            break
        done[at : at + 1] = pieces
    return done


def _pieces(unit: Unit, count: int) -> list[Unit]:
    """About equal pieces, each cut at the place near its end where the fewest bytes are live."""
    ops = unit.ops
    place = {op: at for at, op in enumerate(ops)}
    live = [0] * (len(ops) + 1)  # live[i]: bytes made before op i and used at or after it
    for at, op in enumerate(ops):
        val = op.meta.get("val")
        last = max((place.get(user, len(ops)) for user in op.users), default=at)
        if isinstance(val, Tensor) and last > at:
            size = prod(val.shape) * val.itemsize
            live[at + 1] += size
            if last + 1 <= len(ops):
                live[last + 1] -= size
    for at in range(1, len(live)):
        live[at] += live[at - 1]
    target = len(ops) / count
    cuts, begin = [], 0
    for piece in range(1, count):
        low, high = max(begin + 1, int(target * (piece - 0.35))), int(target * (piece + 0.35))
        allowed = [at for at in range(low, min(high, len(ops) - 1) + 1) if ops[at].target is not operator.getitem]
        if allowed:
            begin = min(allowed, key=lambda at: live[at])
            cuts.append(begin)
    borders = [0, *cuts, len(ops)]
    return [Unit(unit.label, unit.family, ops[a:b]) for a, b in pairwise(borders)]


def _join_crumbs(units: list[Unit], shape: _Signatures, weights: dict[fx.Node, int], share: int) -> list[Unit]:
    """Neighbours of a few ops each are grouped like small layers; one that stays alone joins a neighbour, unless that makes equal units unequal."""
    joined: list[Unit] = []
    for small, run in groupby(units, key=lambda u: len(u.ops) < FEW_OPS):
        members = list(run)
        joined += _merge_layers(members, shape, weights, share) if small else members
    count = Counter(shape.run(unit.ops) for unit in joined)
    done: list[Unit] = []
    held: list[fx.Node] = []
    for at, unit in enumerate(joined):
        kind = shape.run(unit.ops)
        crumb = len(unit.ops) < FEW_OPS and count[kind] == 1
        unit.ops, held = held + unit.ops, []
        after = joined[at + 1] if at + 1 < len(joined) else None
        if crumb and after is not None and count[shape.run(after.ops)] == 1 and not _is_full([unit], after, weights):
            held = unit.ops
        elif crumb and done and count[shape.run(done[-1].ops)] <= 1 and not _is_full([done[-1]], unit, weights):
            done[-1].ops += unit.ops
        else:
            done.append(unit)
    return done
