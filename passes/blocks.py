"""Cut the forward graph into blocks and fold equal ones into classes, so that depth costs nothing afterwards.

    graph ── order (a getitem behind its op) ── segment (segment.py) ── reads, writes, gradients (flow.py) ── structural key ── classes

Two blocks are of one class when their ops, arguments, the shapes and kinds of their reads, the tie pattern among the reads, and the gradients they
take and give are equal. Parameters, values and scalars are reads, so the key contains none of their names. Random draws are numbered from 0 in each
block: the block's own number is part of the key of a draw at run time.
"""

import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from partitioner.errors import CaptureError
from partitioner.passes.block import Block, BlockClass, Blocks, Port
from partitioner.passes.flow import Flow, gradient_flow, is_integer
from partitioner.passes.graph import Graph, Input, module_of
from partitioner.passes.layout import is_expanded
from partitioner.passes.randomness import random
from partitioner.passes.segment import Unit, finer, segment

_RANDOM = random._opoverload

_RANDOM_INDEX = 7  # position of `index` among the arguments of partitioner::random
_MOST_SUNK = 16  # ops moved into one unit: masks and constants, not a branch of the model
_CROSSING = ("value", "input", "prologue")


@dataclass
class _Draft:
    """A block while it is being cut."""

    index: int
    unit: Unit
    reads: dict[fx.Node, int] = field(default_factory=dict)
    writes: list[fx.Node] = field(default_factory=list)
    wants: tuple[bool, ...] = ()
    tangents: tuple[int, ...] = ()


Homes = Mapping[str, Sequence[int]]
"""Parameter name -> the groups, ascending, that may read it."""


def cut(graph: Graph, at_least: int = 1, homes: Homes | None = None) -> Blocks:
    """Cut and fold; linear in the number of ops. Ops that no result needs are left out (but for draws of random numbers).

    at_least: blocks that are wanted, however small, if there are as many ops. homes: groups that the blocks follow, so that none reads parameters
    of two. Raises CaptureError where no order of the ops allows that.
    """
    inputs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    order = _order(graph)
    weights = {n: _bytes(n) for n, i in inputs.items() if i.kind == "parameter"}
    groups: list[int] = []
    units: list[Unit] = []
    for number, ops in _grouped(order, inputs, homes):
        mine = [unit for unit in _sink(segment(ops, weights) if ops else [], inputs) if unit.ops]
        units += mine if homes is not None else finer(mine, at_least)
        groups += [number] * len(mine)
    flow = gradient_flow(graph)
    rows = next((n for n, i in inputs.items() if i.kind == "scalar" and i.name == "rows"), None)
    if rows is None:  # blocks of a graph that never asks for the rows may still see them in the shapes of their reads
        rows = fx.Graph().placeholder("rows")
        inputs[rows] = Input("scalar", "rows")
    results = graph.results
    home = {op: at for at, unit in enumerate(units) for op in unit.ops}
    folded: dict[Any, tuple[str, list[_Draft]]] = {}
    blocks = []
    for at, unit in enumerate(units):
        draft = _Draft(at, unit)
        key = _fold(draft, inputs, home, flow, rows, set(results))
        name = f"block_{len(folded)}"
        name, members = folded.setdefault(key, (name, []))
        members.append(draft)
        reads = tuple(_port(n, inputs) for n in draft.reads)
        blocks.append(Block(at, name, _title(unit), reads, tuple(n.name for n in draft.writes)))
    classes = {name: _class(name, key, members, inputs) for key, (name, members) in folded.items()}
    return Blocks(tuple(blocks), classes, tuple(_port(n, inputs) for n in results), tuple(groups) if homes is not None else ())


def _grouped(order: list[fx.Node], inputs: dict[fx.Node, Input], homes: Homes | None) -> list[tuple[int, list[fx.Node]]]:
    """The ops group by group. An op comes no earlier than what it reads, in the first group that may read all its parameters."""
    if homes is None:
        return [(0, order)]
    group: dict[fx.Node, int] = {}
    found: dict[int, list[fx.Node]] = {}
    for op in order:
        least = max((group[n] for n in _sources(op) if n in group), default=0)
        read = [inputs[n].name for n in op.all_input_nodes if n in inputs and inputs[n].kind == "parameter"]
        able = [number for number in homes[read[0]] if number >= least and all(number in homes[name] for name in read[1:])] if read else [least]
        if not able:
            where = f"{op.meta.get('source') or op.name}, module {op.meta.get('module') or 'model'}"
            raise CaptureError(
                f"{where}: the parameter {read[0]} is read behind the stage that holds it, unlike where the model was planned; plan with these "
                "inputs and in this mode, or with fewer stages"
            )
        group[op] = able[0]
        found.setdefault(able[0], []).append(op)
    return sorted(found.items())


def _sources(op: fx.Node) -> list[fx.Node]:
    """The ops that an op reads, through integers, which are computed anew in every block."""
    sources, stack = [], list(op.all_input_nodes)
    while stack:
        node = stack.pop()
        if is_integer(node):
            stack += node.all_input_nodes
        else:
            sources.append(node)
    return sources


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.itemsize)


def _port(node: fx.Node, inputs: dict[fx.Node, Input]) -> Port:
    described = inputs.get(node)
    return Port("value", node.name) if described is None else Port(described.kind, described.name)


def _order(graph: Graph) -> list[fx.Node]:
    """The ops that are needed, in topological order, a getitem right behind its op."""
    needed: set[fx.Node] = set(graph.results)
    ops = [n for n in graph.module.graph.nodes if n.op == "call_function"]
    for node in reversed(ops):
        if node in needed or node.target is _RANDOM:
            needed.add(node)
            needed.update(node.all_input_nodes)
    order = []
    for node in ops:
        if node not in needed or node.target is operator.getitem or is_integer(node):
            continue
        order.append(node)
        if not isinstance(node.meta["val"], Tensor):
            order += [user for user in node.users if user.target is operator.getitem and user in needed]
    return order


def _sink(units: list[Unit], inputs: dict[fx.Node, Input]) -> list[Unit]:
    """Move what is computed from inputs alone (a mask, a constant) from a unit outside of layers to the unit outside of layers that alone uses it.

    A value moves with all that it is made from, so that nothing new crosses a border.
    """
    home = {op: at for at, unit in enumerate(units) for op in unit.ops}
    fixed = {n for n, i in inputs.items() if i.kind in ("parameter", "buffer")}
    goal: dict[fx.Node, int] = {}
    for at in range(len(units) - 1, -1, -1):
        for op in reversed(units[at].ops) if units[at].family is None else ():
            users = {goal.get(user, home.get(user, at)) for user in op.users}  # a result stays
            if len(users) == 1 and op.target is not _RANDOM and isinstance(op.meta["val"], Tensor):
                (target,) = users
                if target > at and units[target].family is None:
                    goal[op] = target
    check = list(goal)
    while check:  # what stays makes others stay: those it is made from and those made from it
        op = check.pop()
        if op not in goal:
            continue
        inputs_move = all(n not in fixed and (n not in home or goal.get(n) == goal[op]) for n in op.all_input_nodes)
        if not inputs_move or any(goal.get(user, home.get(user)) != goal[op] for user in op.users):
            del goal[op]
            check += [n for n in (*op.all_input_nodes, *op.users) if n in goal]
    moved: dict[int, list[fx.Node]] = {}
    for unit in units:
        for op in unit.ops:
            if op in goal:
                moved.setdefault(goal[op], []).append(op)
    moved = {at: ops for at, ops in moved.items() if len(ops) <= _MOST_SUNK}
    gone = {op for ops in moved.values() for op in ops}
    for at, unit in enumerate(units):
        unit.ops = [*moved.get(at, []), *(op for op in unit.ops if op not in gone)]
    return units


def _fold(
    draft: _Draft, inputs: dict[fx.Node, Input], home: dict[fx.Node, int], flow: Flow, rows: fx.Node, results: set[fx.Node]
) -> tuple[Any, ...]:
    """Fill in what the block reads, writes, and takes and gives as gradients; return its structural key."""
    here, at = {op: k for k, op in enumerate(draft.unit.ops)}, draft.index
    reads, draws = draft.reads, 0

    def code(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in here:
                return ("op", here[value])
            if is_integer(value):
                return (value.target, *(code(a) for a in value.args))
            return ("read", reads.setdefault(value, len(reads)))
        if isinstance(value, (list, tuple)):
            return ("list", *(code(item) for item in value))
        if isinstance(value, slice):
            return ("slice", code(value.start), code(value.stop), code(value.step))
        return value if value is None else (type(value), value if value == value else "nan")

    ops: list[Any] = []
    for op in draft.unit.ops:
        args = tuple(op.args)
        if op.target is _RANDOM:
            args = (*args[:_RANDOM_INDEX], draws)
            draws += 1
        ops.append((op.target, tuple([code(a) for a in args]), tuple([(k, code(v)) for k, v in op.kwargs.items()]) if op.kwargs else ()))
        if op in results or any(home.get(user, at) != at for user in op.users):
            draft.writes.append(op)
    if rows not in reads and any("cut" in n.meta and n.meta["cut"] is not None for n in reads):
        reads[rows] = len(reads)
    back, ends, requires = flow.back, flow.ends, flow.requires
    draft.wants = tuple(n in requires and any(home[use] == at for use in back.get(n, ())) for n in reads)
    draft.tangents = tuple(
        k for k, n in enumerate(draft.writes) if n in requires and (n in ends or any(home[use] != at for use in back.get(n, ())))
    )
    if not draft.tangents:
        draft.wants = (False,) * len(reads)
    ports = tuple([_read_key(n, inputs.get(n)) for n in reads])
    return tuple(ops), ports, tuple([here[n] for n in draft.writes]), draft.wants, draft.tangents


def _read_key(node: fx.Node, described: Input | None) -> tuple[Any, ...]:
    if described is not None and described.kind == "scalar":
        return ("scalar", described.name)
    val, kind = node.meta["val"], "value" if described is None else described.kind
    plain = kind in _CROSSING and not is_expanded(val)
    return (kind, tuple(val.shape), val.dtype, val.device, node.meta.get("cut"), None if plain else tuple(val.stride()))


def _title(unit: Unit) -> str:
    return unit.label or "model"


def _class(name: str, key: Hashable, members: Sequence[_Draft], inputs: dict[fx.Node, Input]) -> BlockClass:
    """Build the module of a class from its first member; paths that differ between members show N instead of the layer's index."""
    draft = members[0]
    changing = _changing([m.unit.label for m in members])
    graph, env = fx.Graph(), {}
    scalars: dict[int, str] = {}
    for index, node in enumerate(draft.reads):
        described = inputs.get(node)
        kind = "value" if described is None else described.kind
        placeholder = env[node] = graph.placeholder(_read_name(node, described, draft.unit.label))
        placeholder.target = placeholder.name  # fx makes the name unique, but not the argument of the module
        placeholder.meta.update({k: node.meta[k] for k in ("val", "cut") if k in node.meta}, kind=kind)
        if described is not None and described.kind == "scalar":
            scalars[index] = described.name

    def inside(node: fx.Node) -> fx.Node:
        if node not in env:  # an integer, computed anew in each block that uses it
            env[node] = graph.call_function(node.target, fx.node.map_arg(node.args, inside))  # type: ignore[arg-type]
        return env[node]

    draws = 0
    for op in draft.unit.ops:
        args = tuple(op.args)
        if op.target is _RANDOM:
            args = (*args[:_RANDOM_INDEX], draws)
            draws += 1
        new = env[op] = graph.call_function(op.target, fx.node.map_arg(args, inside), fx.node.map_arg(op.kwargs, inside))  # type: ignore[arg-type]
        path = ".".join("N" if at in changing else part for at, part in enumerate((op.meta.get("module") or "").split(".")))
        new.meta.update(val=op.meta["val"], module=path, source=op.meta.get("source"))
        if op.meta.get("cut") is not None:
            new.meta["cut"] = op.meta["cut"]
    graph.output(tuple(env[n] for n in draft.writes))
    return BlockClass(name, module_of(graph), draft.wants, draft.tangents, scalars, key)


def _changing(labels: Sequence[str]) -> set[int]:
    """Positions of the paths' parts that differ between the members of a class and are indices."""
    parts = [label.split(".") for label in labels]
    first = parts[0]
    return {at for at, part in enumerate(first) if part.isdigit() and any(at < len(other) and other[at] != part for other in parts)}


def _read_name(node: fx.Node, described: Input | None, label: str) -> str:
    """A readable name that equal blocks agree on: a parameter's path inside its layer, `x` for a value."""
    if described is None:
        return "x"
    if described.kind == "scalar":
        return described.name
    name = described.name.removeprefix(label + ".") if label else described.name
    return re.sub(r"\W+", "_", name).strip("_") or "x"
