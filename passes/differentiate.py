"""A block class and its derivative as one graph of post-autograd ATen ops: the joint graph.

    reads (tensors and scalars) ──┐
                                  ├── forward ops ── writes
    tangents ─────────────────────┴── backward ops ── gradients of the reads that want one

Recorded below autograd on fake tensors (record.py), at two row counts where the class takes `rows`, and merged (unify.py), so that `rows` is an
argument and never a constant. Conventions that make any two blocks fit together:

    - reads of kind value, input and prologue are contiguous (or expanded as the graph says), so writes are made so;
    - tangents and gradients are contiguous;
    - every gradient owns its storage: none lies in an argument, in a forward value, or in another gradient.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.errors import CaptureError
from partitioner.passes.block import BlockClass, Bytes
from partitioner.passes.graph import module_of
from partitioner.passes.layout import at_rows, of_read
from partitioner.passes.record import Recording, record
from partitioner.passes.unify import Linear, Unifier, byte_count, evaluate, is_number, sentinels


@dataclass(frozen=True)
class Joint:
    """`module`: placeholders are the reads in order (tensors and scalars), then the tangents; the output is the writes, then the gradients.

    tangents: indices of the writes through which a gradient comes back; gradients: indices of the reads that get one.
    rows: the row count of meta["val"] (None: the class does not see the batch). forward: names of the tensor ops that depend on no tangent, those
    that only backward uses included: what a saved set may name. Tensor nodes carry meta "val", "sizes" (Linear per dim), "storages" (unify.Storage
    per result; not on a getitem), "module", "source". Integer nodes (operator.mul, add over scalars) stand behind the placeholders, without meta.
    """

    name: str
    module: fx.GraphModule
    reads: int
    writes: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    rows: int | None
    forward: frozenset[str]
    scalars: dict[int, str]

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def bytes(self) -> dict[str, Bytes]:
        """New storage that each tensor node allocates (a getitem: its share of it); 0 for views and placeholders."""
        found = {}
        for node in self.module.graph.nodes:
            if node.op != "call_function" or is_number(node):
                continue
            if "storages" in node.meta:
                made = [s for s in node.meta["storages"] if isinstance(s, Bytes)]
            else:
                place = node.args[0].meta["storages"][node.args[1]]
                made = [place] if isinstance(place, Bytes) else []
            found[node.name] = Bytes(sum(s.fixed for s in made), sum(s.per_row for s in made))
        return found

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        """The writes, then the gradients."""
        return list(next(iter(reversed(self.module.graph.nodes))).args[0])


def differentiate(cls: BlockClass, rows: int | None) -> Joint:
    """The joint graph of a class; `rows` is a typical row count of the local batch, used for meta["val"] (at least 2).

    Raises CaptureError where the class branches on the number of rows or an op has no derivative.
    """
    names = set(cls.scalars.values())
    at = max(2, rows if rows is not None else 2) if "rows" in names else None
    if at is not None:
        _check_numbers(cls, at)
    first = record(cls, _reads(cls, at))
    second = record(cls, _reads(cls, at + 1)) if at is not None else None
    unifier = Unifier(cls.name, first, second, at, cls.scalars)
    graph = unifier.run()
    writes = [unifier.env[node] for node in first.writes]
    gradients = _gradients(cls, first, unifier)
    graph.output(tuple(writes + gradients))
    late = after_tangents(graph, len(cls.wants))
    forward = frozenset(n.name for n in graph.nodes if n.op == "call_function" and n not in late and not is_number(n))
    wanted = tuple(i for i, want in enumerate(cls.wants) if want) if cls.tangents else ()
    tangents = cls.tangents if wanted else ()
    module = module_of(graph)
    joint = Joint(cls.name, module, len(cls.wants), len(writes), tangents, wanted, at, forward, dict(cls.scalars))
    if at is not None:
        _check(joint, at + 3)
    return joint


def after_tangents(graph: fx.Graph, reads: int) -> set[fx.Node]:
    """The nodes that depend on a tangent, the tangents included; placeholders behind the first `reads` are tangents."""
    late = set([n for n in graph.nodes if n.op == "placeholder"][reads:])
    for node in graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _reads(cls: BlockClass, rows: int | None) -> list[Any]:
    known = sentinels(cls.scalars)
    placeholders = [node for node in cls.module.graph.nodes if node.op == "placeholder"]
    reads: list[Any] = []
    for index, node in enumerate(placeholders):
        if index in cls.scalars:
            reads.append(rows if cls.scalars[index] == "rows" else known[index])
        else:
            reads.append(of_read(node, rows))
    return reads


def _check_numbers(cls: BlockClass, rows: int) -> None:
    """Two recordings tell a size a*rows + b only if it is of this form: the integers that the class computes must be."""
    numbers = [node for node in cls.module.graph.nodes if is_number(node)]
    if not numbers:
        return
    found: list[dict[fx.Node, Any]] = []
    for count in (rows, rows + 1, rows + 3):
        env: dict[fx.Node, Any] = dict(zip((n for n in cls.module.graph.nodes if n.op == "placeholder"), _reads(cls, count), strict=True))
        for node in numbers:
            env[node] = node.target(*evaluate(list(node.args), env))
        found.append(env)
    for node in numbers:
        a, b, c = (env[node] for env in found)
        if c - a != 3 * (b - a):
            counts = f"{rows}, {rows + 1} and {rows + 3} rows"
            raise CaptureError(f"block {cls.name} uses a size that is {a}, {b} and {c} for {counts}: it is no a*rows + b")


def _gradients(cls: BlockClass, first: Recording, unifier: Unifier) -> list[fx.Node]:
    """The gradients, each in a contiguous storage of its own."""
    graph, taken, found = unifier.graph, set[tuple[fx.Node, int]](), list[fx.Node]()
    wanted = [node for node, want in zip(first.reads, cls.wants, strict=True) if want] if first.tangents else []
    late = after_tangents(graph, len(cls.wants))
    for read, source in zip(wanted, first.gradients, strict=True):
        assert read is not None
        like = unifier.env[read]
        val, name = like.meta["val"], f"{like.name}_gradient"
        if source is None:  # autograd found no path (a derivative that is zero by definition): the gradient is zero
            rows = unifier.rows or 0
            sizes = [unifier.numbers.number(s.at(rows), s.at(rows + 1), name) for s in like.meta["sizes"]]
            anchor = unifier.env[first.tangents[0]]
            options = {"dtype": val.dtype, "device": val.device}
            node = graph.create_node("call_function", torch.ops.aten.new_zeros.default, (anchor, sizes), options, name=name)
            _describe(node, like, unifier)
        else:
            node = unifier.env[source]
            val = node.meta["val"]
            dense = val.is_contiguous() and val.numel() * val.itemsize == val.untyped_storage().nbytes()
            maker, _ = root(node)
            if maker.op == "placeholder" or maker not in late or root(node) in taken or not dense:
                options = {"memory_format": torch.contiguous_format}
                copied = graph.create_node("call_function", torch.ops.aten.clone.default, (node,), options, name=name)
                _describe(copied, node, unifier)
                node = copied
        taken.add(root(node))
        found.append(node)
    return found


def _describe(node: fx.Node, like: fx.Node, unifier: Unifier) -> None:
    """Meta of a new backward node that makes a contiguous tensor of the sizes of `like`."""
    old, sizes = like.meta["val"], like.meta["sizes"]
    with old.fake_mode:
        val = torch.empty(old.shape, dtype=old.dtype, device=old.device)
    storage = byte_count(sizes, old.itemsize, unifier.rows)
    node.meta.update(val=val, sizes=sizes, storages=(storage,), module=like.meta["module"], source=like.meta["source"])


def root(node: fx.Node) -> tuple[fx.Node, int]:
    """The node and result index whose storage a tensor node lies in."""
    index = 0
    while node.op != "placeholder":
        if "storages" not in node.meta:  # getitem
            node, index = node.args[0], node.args[1]  # type: ignore[assignment]
        place = node.meta["storages"][index]
        if not isinstance(place, tuple):
            return node, index
        kind, which = place
        if kind == "input":
            node, index = node.all_input_nodes[which], 0
        else:
            index = which
    return node, index


def _check(joint: Joint, rows: int) -> None:
    """Run the merged graph on fake tensors of a third row count; sizes and bytes must be those that the two recordings foretell."""
    env: dict[fx.Node, Any] = {}
    known = sentinels(joint.scalars)
    with FakeTensorMode(), torch.no_grad():
        for index, node in enumerate(joint.placeholders):
            if index in joint.scalars:
                env[node] = rows if joint.scalars[index] == "rows" else known[index]
            else:
                env[node] = torch.empty_strided(*at_rows(node, rows), dtype=node.meta["val"].dtype, device=node.meta["val"].device)
        for node in joint.module.graph.nodes:
            if node.op != "call_function":
                continue
            where = f"{node.target} in {node.meta.get('module') or 'the model'}"
            try:
                out = env[node] = node.target(*evaluate(list(node.args), env), **{k: evaluate(v, env) for k, v in node.kwargs.items()})
            except (RuntimeError, ValueError) as error:
                raise CaptureError(f"{where} depends on the rows of the batch in a way that is no a*rows + b: {error}") from error
            if is_number(node):
                continue
            expected: tuple[Linear, ...] | None = node.meta.get("sizes")
            if expected is not None and tuple(out.shape) != tuple(s.at(rows) for s in expected):
                sizes = ", ".join(map(str, expected))
                raise CaptureError(f"{where} makes {list(out.shape)} for {rows} rows, expected [{sizes}]: its size is no a*rows + b")
            for one, place in zip(out if isinstance(out, (list, tuple)) else (out,), node.meta.get("storages", (None,)), strict=False):
                if isinstance(place, Bytes) and one.untyped_storage().nbytes() != place.at(rows):
                    raise CaptureError(f"{where} allocates {one.untyped_storage().nbytes()} bytes for {rows} rows, expected {place.at(rows)}")
