"""Liveness at storage level: when each storage of a function is made and when the last reference to it is dropped.

Views are free: a storage lives as long as any name for it does. A name is deleted right behind the line of its last use, which is what the emitted
source (emit.py) does from the same schedule; so what is foretold here is what happens.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from partitioner.passes.block import Bytes, Footprint
from partitioner.passes.unify import is_number


@dataclass(frozen=True)
class Line:
    """One emitted line: the op, the names its results are bound to (None for a result nobody reads), and the names deleted behind it.

    `op` is None for the first line, which unpacks the arguments.
    """

    op: fx.Node | None
    bound: tuple[fx.Node | None, ...]
    deleted: tuple[fx.Node, ...]


def schedule(graph: fx.Graph) -> list[Line]:
    """The lines of a function in order; the results of a multi-output op are bound where it stands."""
    nodes = list(graph.nodes)
    results = set(nodes[-1].all_input_nodes)
    tensors = [n for n in nodes if n.op == "call_function" and not is_number(n)]
    ops = [n for n in tensors if n.target is not operator.getitem]
    position = {op: at + 1 for at, op in enumerate(ops)}
    last: dict[fx.Node, int] = {}
    for at, op in enumerate(ops):
        for source in op.all_input_nodes:
            last[source] = at + 1
    deleted: list[list[fx.Node]] = [[] for _ in range(len(ops) + 1)]
    arguments = [n for n in nodes if n.op == "placeholder"]
    numbers_last = _numbers_last(nodes, last)
    for node in [*arguments, *tensors]:
        if node in results or (node in position and isinstance(node.meta["val"], tuple)):
            continue
        made = position.get(node, 0) if node.target is not operator.getitem else position[node.args[0]]
        deleted[max(last.get(node, made), numbers_last.get(node, 0))].append(node)
    lines = [Line(None, tuple(arguments), tuple(deleted[0]))]
    for at, op in enumerate(ops):
        bound: tuple[fx.Node | None, ...] = (op,)
        if isinstance(op.meta["val"], tuple):
            by_index = {user.args[1]: user for user in op.users if user.target is operator.getitem}
            bound = tuple(by_index.get(index) for index in range(len(op.meta["val"])))
        lines.append(Line(op, bound, tuple(deleted[at + 1])))
    return lines


def _numbers_last(nodes: list[fx.Node], last: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """The last use of each scalar argument through the integer expressions made from it."""
    found: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        if is_number(node):
            used = max(last.get(node, 0), found.get(node, 0))
            for source in node.all_input_nodes:
                found[source] = max(found.get(source, 0), used)
    return found


def footprint(graph: fx.Graph) -> Footprint:
    """What the function does to memory. Nodes carry meta["storages"] (see unify.Storage)."""
    lines = schedule(graph)
    arguments = len(lines[0].bound)
    storage: dict[fx.Node, int] = {n: at for at, n in enumerate(lines[0].bound) if n is not None}
    names: list[int] = [1] * arguments
    events: list[tuple[str, int, Bytes | None]] = []

    def drop(which: int) -> None:
        names[which] -= 1
        if not names[which]:
            events.append(("drop", which, None))

    for line in lines:
        if line.op is not None:
            held: list[int | None] = []
            for place in line.op.meta["storages"]:
                if isinstance(place, Bytes):
                    names.append(0)
                    events.append(("make", len(names) - 1, place))
                    held.append(len(names) - 1)
                elif place is None:
                    held.append(None)
                else:
                    held.append(storage[line.op.all_input_nodes[place[1]]] if place[0] == "input" else held[place[1]])
            for name, which in zip(line.bound, held, strict=True):
                if which is not None:
                    names[which] += 1
                    if name is not None:
                        storage[name] = which
            for name, which in zip(line.bound, held, strict=True):
                if which is not None and name is None:
                    drop(which)
        for name in line.deleted:
            if name in storage:
                drop(storage[name])
    output = next(iter(reversed(graph.nodes)))
    return Footprint(arguments, tuple(events), tuple(storage[n] for n in output.args[0]))


def peak(function: Footprint, rows: int, argument_bytes: Callable[[int], int]) -> int:
    """The most bytes the function's arguments and own storages take at once, if it holds the only references to its arguments."""
    size = {at: argument_bytes(at) for at in range(function.arguments)}
    now = most = sum(size.values())
    for kind, which, made in function.events:
        if kind == "make":
            assert made is not None
            size[which] = made.at(rows)
            now += size[which]
            most = max(most, now)
        else:
            now -= size[which]
    return most
