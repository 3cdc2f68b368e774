"""A joint graph as numbers: what backward needs, what it may be made from, and at what price."""

import operator
from collections.abc import Callable

import torch
from torch import fx

from partitioner.passes.block import Bytes
from partitioner.passes.collectives import collective_ops
from partitioner.passes.differentiate import Joint, after_tangents, root
from partitioner.passes.remat_problem import RematProblem, Value
from partitioner.passes.unify import is_number


def encode(joint: Joint, seconds: Callable[[fx.Node], float], free: frozenset[str], keep: frozenset[str], *, rows: int | None = None) -> RematProblem:
    """The problem of choosing what to save, values named as the nodes of `joint.module`.

    seconds: of one op; asked for ops that allocate only (views and picked results cost nothing).
    free: names of placeholders that backward can read again (parameters, constants, the user's inputs); scalars always are.
    keep: names of ops that must not be recomputed (see `draws` and `communications`); ops that torch itself makes random never are.
    rows: the row count at which bytes are counted, joint.rows by default.
    """
    rows = rows if rows is not None else joint.rows or 0
    placeholders = joint.placeholders
    tangents = set(placeholders[joint.reads :])
    scalars = {placeholders[index] for index in joint.scalars}
    tied = after_tangents(joint.module.graph, joint.reads)
    early = _ancestors(joint.results[: joint.writes])
    values: list[Value] = []
    storage_bytes: dict[str, int] = {}
    needed: set[str] = set()
    for node in joint.module.graph.nodes:
        if node.op == "output" or node in tangents:
            continue
        if node in tied:
            needed.update(source.name for source in node.all_input_nodes if source not in tied and source not in tangents)
            continue
        storage = _storage(node, rows, storage_bytes)
        makes = node.op == "call_function" and node.target is not operator.getitem and not is_number(node) and _allocates(node)
        values.append(
            Value(
                node.name,
                tuple(dict.fromkeys(source.name for source in node.all_input_nodes)),
                float(seconds(node)) if makes else 0.0,
                storage,
                free=node.op == "placeholder" and (node in scalars or node.name in free),
                recomputable=node.op != "placeholder" and node.name not in keep and not _random(node),
                late=node.op != "placeholder" and not is_number(node) and node not in early,
            )
        )
    needed.update(node.name for node in joint.results[joint.writes :] if node not in tied and node not in tangents)
    return RematProblem(tuple(values), storage_bytes, frozenset(needed))


def draws(joint: Joint) -> frozenset[str]:
    """Names of the random draws: to be kept where they advance a generator in eager order (key -1)."""
    return frozenset(node.name for node in joint.module.graph.nodes if node.target is torch.ops.partitioner.random.default)


def communications(joint: Joint) -> frozenset[str]:
    """Names of the ops that communicate: to be kept unless recomputing may communicate again."""
    return frozenset(node.name for node in joint.module.graph.nodes if node.target in collective_ops())


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and everything they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _storage(node: fx.Node, rows: int, storage_bytes: dict[str, int]) -> str | None:
    """The storage a tensor lies in; None for numbers and for the tuple of a multi-output op."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    maker, index = root(node)
    name = f"{maker.name}.{index}"
    place = maker.meta["storages"][index]
    storage_bytes[name] = place.at(rows) if isinstance(place, Bytes) else 0
    return name


def _allocates(node: fx.Node) -> bool:
    return any(isinstance(place, Bytes) for place in node.meta["storages"])


def _random(node: fx.Node) -> bool:
    """Whether torch marks the op as random and no argument switches that off (attention without dropout is marked too)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = {a.name: a.default_value for a in target._schema.arguments} | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    chance = next((given[name] for name in ("dropout_p", "dropout", "p") if name in given), None)
    return not (chance == 0 or given.get("train") is False)
