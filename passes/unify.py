"""Merge two recordings of one block, made at `rows` and `rows + 1`, into one graph that is right for any number of rows.

Both list the same ops in the same order. An integer that differs grows with the rows: from v(r) and v(r+1) follow a and b of a·rows + b.
Scalars other than rows were passed as numbers that no model contains (sentinels) and are found again by value; `start` may also occur as
c·start + a·rows + b. Anything else that differs has no form in which the program could use it.

    first   view(x, [2, 10, 32])        second  view(x, [3, 10, 32])        merged  view(x, [rows, 10, 32])
    first   view(x, [20, 32])           second  view(x, [30, 32])           merged  view(x, [rows*10, 32])
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.errors import CaptureError
from partitioner.passes.block import Bytes
from partitioner.passes.randomness import random
from partitioner.passes.record import Recording

_RANDOM = random._opoverload

START = 1_000_000_000_039
SHARE = 0.739_085_133_215_160_64
PART = 1.303_577_269_034_296_39
_KEYS = (2_305_843_009_213_693_921, 1_152_921_504_606_846_883, 576_460_752_303_423_433)
_MOST_STARTS, _LARGEST_OFFSET = 4096, 1 << 32


@dataclass(frozen=True)
class Linear:
    """A size: fixed + per_row * rows."""

    fixed: int
    per_row: int = 0

    def at(self, rows: int) -> int:
        return self.fixed + self.per_row * rows

    def __str__(self) -> str:
        if not self.per_row:
            return str(self.fixed)
        term = "rows" if self.per_row == 1 else f"rows*{self.per_row}"
        return term + (f" + {self.fixed}" if self.fixed > 0 else f" - {-self.fixed}" if self.fixed else "")


_TYPICAL = {"rows": Linear(0, 1), "start": Linear(0), "share": 0.5, "part": 2.0, "key_local": 1, "key_shared": 1}
"""What the scalars are where ops are priced: meta["number"] of the nodes that compute numbers."""

Storage = Bytes | tuple[str, int] | None
"""Where a result lies: in a new storage of so many bytes, in that of the i-th input node ("input", i) or of the i-th result ("output", i)."""


def sentinels(scalars: dict[int, str]) -> dict[int, int | float]:
    """The number that stands for each scalar but `rows` while a block is traced, by index of the read."""
    keys = iter(_KEYS)
    known: dict[str, int | float] = {"start": START, "share": SHARE, "part": PART}
    return {i: known[name] if name in known else next(keys) for i, name in scalars.items() if name != "rows"}


def _storages(node: fx.Node, out: Any, field: str) -> tuple[Storage, ...]:
    """Where each result of a recorded node lies; `node.meta[field]` of its inputs are their (fake) values."""
    if node.op == "placeholder":
        return (Bytes(out.untyped_storage().nbytes()),) if isinstance(out, Tensor) else ()
    seen: dict[int, tuple[str, int]] = {}
    for index, source in enumerate(node.all_input_nodes):
        value = source.meta.get(field)
        if isinstance(value, Tensor):
            seen.setdefault(value.untyped_storage()._cdata, ("input", index))
    found: list[Storage] = []
    for index, one in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
        if not isinstance(one, Tensor):
            found.append(None)
            continue
        storage = one.untyped_storage()
        place = seen.get(storage._cdata)
        if place is None:
            seen[storage._cdata] = ("output", index)
            place = Bytes(storage.nbytes())  # type: ignore[assignment]
        found.append(place)
    return tuple(found)


def _identity(value: Tensor) -> object:
    """Equal for two tensors that are one value: the same elements of the same storage."""
    view = (value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
    return (value.untyped_storage()._cdata, *view)


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["out"].dtype  # type: ignore[no-any-return]


class Numbers:
    """Integer expressions over the scalar placeholders of the merged graph, each made once, right behind the placeholders."""

    def __init__(self, graph: fx.Graph, rows: int | None, nodes: dict[str, fx.Node], sentinel: dict[str, int | float]) -> None:
        self._graph, self._rows, self._nodes = graph, rows, nodes
        self._by_value = {value: nodes[name] for name, value in sentinel.items()}
        self._made: dict[tuple[int, int, int], Any] = {}
        self._last = next(iter(reversed(graph.nodes)), None)

    def number(self, a: int | float, b: int | float, where: str) -> Any:
        """What stands for a number that was `a` in the first recording and `b` in the second."""
        if a == b or (a != a and b != b):
            if a in self._by_value:
                return self._by_value[a]
            if isinstance(a, float) or "start" not in self._nodes:
                return a
        if isinstance(a, float) or isinstance(b, float):
            raise CaptureError(f"{where} uses the number {a} for {self._rows} rows but {b} for one more; only sizes may depend on the rows")
        slope = b - a if self._rows is not None else 0
        rest = a - slope * (self._rows or 0)
        starts = 0
        if "start" in self._nodes:
            starts = round(rest / START)
            if abs(starts) > _MOST_STARTS or abs(rest - starts * START) > _LARGEST_OFFSET:
                starts = 0
            rest -= starts * START
        if not slope and not starts:
            return a
        return self._expression(slope, starts, rest)

    def _expression(self, slope: int, starts: int, rest: int) -> Any:
        key = (slope, starts, rest)
        if key not in self._made:
            total: Any = None
            for name, times in (("rows", slope), ("start", starts)):
                if times:
                    term = self._nodes[name] if times == 1 else self._call(operator.mul, self._nodes[name], times)
                    total = term if total is None else self._call(operator.add, total, term)
            self._made[key] = self._call(operator.add, total, rest) if rest else total
            self._made[key].meta["number"] = Linear(rest, slope)  # start is 0 where ops are priced
        return self._made[key]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        assert self._last is not None
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args)
        return self._last


class Unifier:
    """The merge of one class. `second` is None where the block does not see the rows."""

    def __init__(self, name: str, first: Recording, second: Recording | None, rows: int | None, scalars: dict[int, str]) -> None:
        self.name, self.first, self.second, self.rows = name, first, second, rows
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}  # node of the first recording -> merged
        self._pair: dict[fx.Node, fx.Node] = {}
        self._values: dict[object, fx.Node] = {}
        self._scalars = scalars

    def run(self) -> fx.Graph:
        """The merged graph without output: dead ops left out, views that equal an earlier value (detach, a transpose undone) seen through."""
        mine = list(self.first.graph.nodes)
        theirs = list(self.second.graph.nodes) if self.second else mine
        if len(mine) != len(theirs):
            raise self._branches(f"block {self.name} runs {len(mine)} ops", f"{len(theirs)}")
        self._pair = dict(zip(mine, theirs, strict=True))
        live = self._live(mine)
        nodes: dict[str, fx.Node] = {}
        for index, source in enumerate(self.first.reads):
            if source is None:
                name = self._scalars[index]
                nodes[name] = self.graph.placeholder(name)
                nodes[name].meta["number"] = _TYPICAL[name]
            else:
                self._argument_of(source)
        for source in self.first.tangents:
            self._argument_of(source)
        sentinel = {self._scalars[i]: value for i, value in sentinels(self._scalars).items()}
        self.numbers = Numbers(self.graph, self.rows, nodes, sentinel)
        for node in mine:
            if node.op == "call_function" and node in live:
                self._visit(node)
        return self.graph

    def _argument_of(self, source: fx.Node) -> None:
        self._place(source, self.graph.placeholder(source.name))
        self._values.setdefault(_identity(source.meta["out"]), source)

    def _branches(self, first: str, second: str) -> CaptureError:
        return CaptureError(f"{first} for {self.rows} rows but {second} for one more; ops must not depend on the size of the batch, only sizes may")

    def _live(self, nodes: list[fx.Node]) -> set[fx.Node]:
        wanted = {*self.first.writes, *(g for g in self.first.gradients if g is not None)}
        for node in reversed(nodes):
            if node in wanted or node.target is _RANDOM:  # an eager draw advances the generator: never dead
                wanted.add(node)
                wanted.update(node.all_input_nodes)
        return wanted

    def _visit(self, node: fx.Node) -> None:
        other = self._pair[node]
        if node.target is not other.target:
            raise self._branches(f"block {self.name} runs {node.target}", f"{other.target}")
        same = self._same(node, other)
        if same is not None:
            self.env[node] = same
            return
        where = f"{node.target} in {node.meta.get('module') or 'the model'}"
        args = tuple(self._argument(a, b, where) for a, b in zip(node.args, other.args, strict=True))
        kwargs = {k: self._argument(v, other.kwargs[k], where) for k, v in node.kwargs.items()}
        target: Any = node.target
        name = f"{args[0].name}_{args[1]}" if target is operator.getitem else target._schema.name.split("::")[-1].lstrip("_")
        self._place(node, self.graph.create_node("call_function", node.target, args, kwargs, name=name))

    def _same(self, node: fx.Node, other: fx.Node) -> fx.Node | None:
        """An earlier merged node with the same elements in the same storage."""
        out, source = node.meta["out"], node.args[0] if node.args else None
        if node.target is torch.ops.aten.pow.Tensor_Scalar and node.args[1] == 1 and isinstance(source, fx.Node) and out.dtype == _dtype(source):
            return self.env[source]  # the derivative of a square copies what it squared
        if not isinstance(out, Tensor):
            return None
        key = _identity(out)
        first = self._values.setdefault(key, node)
        if first is node or _identity(self._pair[first].meta["out"]) != _identity(other.meta["out"]):
            return None
        return self.env[first]

    def _argument(self, a: Any, b: Any, where: str) -> Any:
        if isinstance(a, fx.Node):
            if self._pair[a] is not b:
                raise self._branches(f"{where} reads {a}", f"{b}")
            return self.env[a]
        if isinstance(a, (list, tuple)):
            if len(a) != len(b):
                raise self._branches(f"{where} takes {len(a)} numbers", f"{len(b)}")
            return [self._argument(x, y, where) for x, y in zip(a, b, strict=True)]
        if isinstance(a, (int, float)) and not isinstance(a, bool) and type(a) is type(b):
            return self.numbers.number(a, b, where)
        if a != b:
            raise self._branches(f"{where} takes {a}", f"{b}")
        return a

    def _place(self, source: fx.Node, node: fx.Node) -> None:
        """Carry over what was recorded: values at `rows`, sizes and bytes as functions of the rows."""
        self.env[source] = node
        out, other = source.meta["out"], self._pair[source].meta["out"]
        one_or_more = out if isinstance(out, (list, tuple)) else (out,)
        values = tuple(one.detach() if isinstance(one, Tensor) else one for one in one_or_more)
        value = values if isinstance(out, (list, tuple)) else values[0]
        node.meta.update(val=value, module=source.meta["module"], source=source.meta["source"])
        if "kind" in source.meta:
            node.meta["kind"] = source.meta["kind"]
        if isinstance(out, Tensor):
            node.meta["sizes"] = tuple(self.linear(int(a), int(b)) for a, b in zip(out.shape, other.shape, strict=True))
        if node.target is operator.getitem:
            return
        first, second = _storages(node, node.meta["val"], "val"), _storages(self._pair[source], other, "out")
        node.meta["storages"] = tuple(self._storage(a, b, node) for a, b in zip(first, second, strict=True))

    def _storage(self, a: Storage, b: Storage, node: fx.Node) -> Storage:
        if isinstance(a, Bytes) and isinstance(b, Bytes):
            size = self.linear(a.fixed, b.fixed)
            return Bytes(size.fixed, size.per_row)
        if isinstance(a, Bytes) != isinstance(b, Bytes):
            raise self._branches(f"{node.target} makes {a}", f"{b}")
        return a

    def linear(self, a: int, b: int) -> Linear:
        if self.rows is None or a == b:
            return Linear(a)
        return Linear(a - (b - a) * self.rows, b - a)


def is_number(node: fx.Node) -> bool:
    """Whether a node computes an integer from scalar placeholders (sizes), not a tensor."""
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem


def evaluate(value: Any, env: dict[fx.Node, Any]) -> Any:
    """An argument with its nodes replaced by what `env` holds for them."""
    if isinstance(value, fx.Node):
        return env[value]
    if isinstance(value, (list, tuple)):
        return [evaluate(item, env) for item in value]
    return value


def byte_count(sizes: tuple[Linear, ...], itemsize: int, rows: int | None) -> Bytes:
    """Bytes of a contiguous tensor of these sizes."""
    if rows is None:
        return Bytes(math.prod(s.fixed for s in sizes) * itemsize)
    at, after = (math.prod(s.at(r) for s in sizes) * itemsize for r in (rows, rows + 1))
    return Bytes(at - (after - at) * rows, after - at)
