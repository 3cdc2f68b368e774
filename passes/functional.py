"""From the exported training graph to one flat functional graph, in a single walk without tracing anything again.

    regions without gradients    inlined; what leaves them goes through aten.detach
    autocast regions             inlined; casts are explicit (functional_autocast.py)
    in-place and out= ops        their functional twins; views of what changed are made again (functional_views.py)
    batch and instance norm      running statistics in, new running statistics out (functional_norm.py)
    random ops                   partitioner::random with a running index (functional_random.py)
    guards, assertions           dropped

Composite ops stay whole. A random draw whose result is unused is kept only before a draw that is used, because it moves eager's generator.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.errors import CaptureError
from partitioner.passes.functional_autocast import Autocast
from partitioner.passes.functional_builder import Builder, aten, first_value
from partitioner.passes.functional_norm import NORMS
from partitioner.passes.functional_random import FORMS, IN_PLACE_FORMS, draws_nothing, is_random, refuse_random
from partitioner.passes.functional_schema import FOREIGN_NAMES, bind, functional_twin, module_of, source_of, written_arguments
from partitioner.passes.functional_views import Values, plain_view

_DROPPED = frozenset(
    (
        "aten._assert_tensor_metadata",
        "aten._assert_async",
        "aten._assert_scalar",
        "aten._functional_assert_scalar",
        "aten._functional_assert_async",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
        "aten._print",
        "profiler._record_function_enter",
        "profiler._record_function_enter_new",
        "profiler._record_function_exit",
    )
)
_SPARSE = frozenset((aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx))
_NEW_MEMORY = frozenset(("aten.set_", "aten.resize_", "aten.resize_as_"))


@dataclass(frozen=True)
class Functional:
    """The walk's result, before outputs are chosen.

    `value` maps an old node to its final value, `written` tells whether an old placeholder changed, `writers` on which source line.
    """

    builder: Builder
    placeholders: dict[fx.Node, fx.Node]
    value: Callable[[fx.Node], fx.Node]
    written: Callable[[fx.Node], bool]
    writers: dict[fx.Node, str]


def refuse_new_memory(node: fx.Node) -> NoReturn:
    raise CaptureError(
        f"{source_of(node)}: {node.target} gives a tensor other memory, which no functional op expresses. "
        "Build a new tensor instead, for example with reshape or torch.zeros."
    )


class _Walk:
    def __init__(self, mode: FakeTensorMode, prefix: str) -> None:
        self.builder = Builder(mode)
        self.values = Values(self.builder)
        self.autocast = Autocast(self.builder)
        self.prefix = prefix
        self.many: dict[fx.Node, list[Any]] = {}  # results of inlined regions and multi-output forms, by position
        self.writers: dict[fx.Node, str] = {}  # root -> the source line of its first write

    def body(self, module: fx.GraphModule) -> list[Any]:
        """Walk a graph whose placeholders are bound; return its output nodes."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.call(module, node)
            elif node.op == "get_attr":
                held = operator.attrgetter(str(node.target))(module)
                if isinstance(held, Tensor):
                    raise CaptureError(f"the traced graph holds a tensor {node.target} that was not lifted to an input")
            elif node.op == "output":
                out = node.args[0]
                return list(out) if isinstance(out, (tuple, list)) else [out]
        return []

    def call(self, module: fx.GraphModule, node: fx.Node) -> None:
        target: Any = node.target
        self.builder.where = {"module": module_of(node, self.prefix), "source": source_of(node)}
        if target is operator.getitem:
            self.item(node)
        elif isinstance(target, HigherOrderOperator):
            self.region(module, node)
        elif target is torch._C._set_grad_enabled:
            self.builder.grad = bool(node.args[0])
        elif target is torch.amp.autocast_mode._enter_autocast:
            device_type, dtype, enabled, _ = node.args
            self.autocast.enter(device_type, dtype, bool(enabled))  # type: ignore[arg-type]
        elif target is torch.amp.autocast_mode._exit_autocast:
            self.autocast.leave()
        elif not isinstance(target, OpOverload):
            self.values.define(node, self.builder.copy(node, self.values.args(node.args), self.values.args(node.kwargs)))
        elif str(target._overloadpacket) not in _DROPPED:
            self.op(node)

    def item(self, node: fx.Node) -> None:
        many = self.values.resolve(node.args[0])  # type: ignore[arg-type]
        if many in self.many:
            result = self.many[many][node.args[1]]  # type: ignore[index]
            kind, found = result
            if kind == "old":
                self.values.same[node] = self.values.resolve(found)
            else:
                self.values.define(node, found)
        else:
            self.values.define(node, self.builder.copy(node, (self.values.value(many), node.args[1]), {}))

    def region(self, module: fx.GraphModule, node: fx.Node) -> None:
        """Inline the body of a region without gradients or with autocast."""
        name = node.target.name()  # type: ignore[union-attr]
        args = list(node.args)
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            raise CaptureError(
                f"{source_of(node)}: torch.ops.higher_order.{name} cannot be captured: what runs would depend on data, or is opaque. "
                "Compute all branches and choose with torch.where, and unroll loops."
            )
        split = 1 if name == "wrap_with_set_grad_enabled" else 4
        settings, (attribute, *operands) = args[:split], args[split:]
        body = operator.attrgetter(str(attribute.target))(module)  # type: ignore[union-attr]
        holes = [n for n in body.graph.nodes if n.op == "placeholder"]
        for hole, operand in zip(holes, operands, strict=True):
            self.values.same[hole] = self.values.resolve(operand)  # type: ignore[arg-type]
        grad = self.builder.grad
        if name == "wrap_with_set_grad_enabled":
            self.builder.grad = bool(settings[0])
        else:
            device_type, dtype, enabled, _ = settings
            self.autocast.enter(device_type, dtype, bool(enabled))  # type: ignore[arg-type]
        try:
            self.many[node] = [("old", result) for result in self.body(body)]
        finally:
            self.builder.grad = grad
            if name == "wrap_with_autocast":
                self.autocast.leave()

    def op(self, node: fx.Node) -> None:
        target: Any = node.target
        writes = written_arguments(target)
        if target in NORMS:
            self.norm(node)
        elif torch.Tag.inplace_view in target.tags:
            self.in_place_view(node)
        elif writes:
            self.write(node, writes)
        else:
            self.pure(node)

    def pure(self, node: fx.Node) -> None:
        values, builder = self.values, self.builder
        args, kwargs = values.args(node.args), values.args(node.kwargs)
        if self.autocast.regions:
            args, kwargs, written_out = self.autocast.apply(node, args, kwargs)
            if written_out is not None:
                self.define(node, written_out)
                return
        if node.args and isinstance(node.args[0], fx.Node):
            view = plain_view(builder, node, args[0])
            if view is not None:
                values.define(node, view)
                return
        if node.target in _SPARSE:  # a gradient with rows left out equals the dense one, which can be reduced
            given = bind(node, args, kwargs) | {"sparse": False}
            args, kwargs = tuple(given[a.name] for a in node.target._schema.arguments), {}
        if node.target in FORMS or is_random(node):
            given = bind(node, args, kwargs)
            form = FORMS.get(node.target)
            if given.get("generator") is not None or (form is None and not draws_nothing(node, given)):
                refuse_random(node)
            made = form(builder, node, given) if form is not None else None
            if made is not None:
                self.define(node, made)
                return
        target: Any = FOREIGN_NAMES.get(node.target, node.target)
        if target is node.target:
            values.define(node, builder.copy(node, args, kwargs))
        else:
            values.define(node, builder.emit(target, *args, **kwargs))

    def define(self, node: fx.Node, made: Any) -> None:
        """The value of a node: one node, or a tuple for a multi-output op."""
        if isinstance(made, fx.Node):
            if made is not node and isinstance(first_value(node), Tensor) and self._is_argument(node, made):
                self.values.same[node] = self.values.resolve(node.args[0])  # type: ignore[arg-type]  # dropout that drops nothing returns its argument
                return
            self.values.define(node, made)
        else:
            self.many[node] = [("new", part) for part in made]

    def _is_argument(self, node: fx.Node, made: fx.Node) -> bool:
        return bool(node.args) and isinstance(node.args[0], fx.Node) and self.values.read(node.args[0]) is made

    def norm(self, node: fx.Node) -> None:
        values = self.values
        args, kwargs = values.args(node.args), values.args(node.kwargs)
        if self.autocast.regions:
            args, kwargs, _ = self.autocast.apply(node, args, kwargs)
        target: Any = node.target
        made = NORMS[target](self.builder, bind(node, args, kwargs))
        if made is None:
            values.define(node, self.builder.copy(node, args, kwargs))
            return
        out, changed = made
        values.define(node, out)
        old = bind(node)
        for name, new in changed.items():
            self.assign(old[name], new)

    def in_place_view(self, node: fx.Node) -> None:
        """`t_`, `squeeze_`, `detach_`: the result is a view of self that later code sees under the same name."""
        name = str(node.target._overloadpacket)  # type: ignore[union-attr]
        if name in _NEW_MEMORY:
            refuse_new_memory(node)
        old = self.values.resolve(node.args[0])  # type: ignore[arg-type]
        self.values.define(node, self.values._view(node, old, self.values.read(old)))

    def assign(self, old: fx.Node, new: fx.Node) -> None:
        self.writers.setdefault(self.values.root(self.values.resolve(old)), self.builder.where["source"])
        self.values.write(old, new)

    def write(self, node: fx.Node, writes: tuple[str, ...]) -> None:
        """An op that changes arguments: compute what it leaves in them, then let them be that."""
        builder, values = self.builder, self.values
        target: Any = node.target
        args, kwargs = values.args(node.args), values.args(node.kwargs)
        given, old = bind(node, args, kwargs), bind(node)
        if str(target._overloadpacket) in _NEW_MEMORY:
            refuse_new_memory(node)
        if target in IN_PLACE_FORMS:
            if given.get("generator") is not None:
                refuse_random(node)
            results = [IN_PLACE_FORMS[target](builder, node, given)]
        elif is_random(node) and not draws_nothing(node, given):
            refuse_random(node)
        elif target in (aten.copy_.default, aten.fill_.Tensor):
            source = given["src"] if "src" in given else given["value"]
            results = [self._as(source, first_value(given["self"]))]
        elif target is aten.fill_.Scalar:
            results = [builder.emit(aten.full_like.default, given["self"], given["value"])]
        elif target is aten.zero_.default:
            results = [builder.emit(aten.zeros_like.default, given["self"])]
        else:
            results = self._twin(node, given, writes)
        for name, result in zip(writes, results, strict=True):
            olds, news = (old[name], result) if isinstance(old[name], (list, tuple)) else ([old[name]], [result])
            for one, new in zip(olds, news, strict=True):
                self.assign(one, new)
        if isinstance(first_value(node), Tensor):
            values.same[node] = values.resolve(old[writes[0]])
        else:
            self.many[node] = [("old", old[name]) for name in writes]

    def _as(self, source: fx.Node, like: Tensor) -> fx.Node:
        """`source` with dtype, device and shape of the tensor that it is copied into."""
        value = first_value(source)
        changes: dict[str, Any] = {}
        if value.dtype != like.dtype:
            changes["dtype"] = like.dtype
        if value.device != like.device:
            changes["device"] = like.device
        return self.builder.expand(self.builder.emit(aten._to_copy.default, source, **changes) if changes else source, like.shape)

    def _twin(self, node: fx.Node, given: dict[str, Any], writes: tuple[str, ...]) -> list[Any]:
        """The results of the functional twin, one per written argument; lists for list arguments."""
        builder = self.builder
        target: Any = node.target
        twin = functional_twin(target)
        if twin is None:
            raise CaptureError(
                f"{source_of(node)}: {target} changes its argument in place and has no functional form. Use an op that returns a new tensor."
            )
        twin = FOREIGN_NAMES.get(twin, twin)
        positional = [given[a.name] for a in twin._schema.arguments if not a.kwarg_only]
        named = {a.name: given[a.name] for a in twin._schema.arguments if a.kwarg_only}
        made = builder.emit(twin, *positional, **named)
        value = first_value(made)
        if isinstance(value, Tensor):
            return [made]
        parts = [builder.emit(operator.getitem, made, i) for i in range(len(value))]
        return [parts] if len(writes) == 1 else parts


def functionalize(
    module: fx.GraphModule, mode: FakeTensorMode, prefix: str, merged: dict[fx.Node, fx.Node]
) -> tuple[Functional, list[Any]]:
    """Walk an exported graph module; return the functional graph under construction and the old output nodes.

    Placeholders whose example value is a tensor become placeholders of the same name, in order, and a last one is `key_shared`.
    The traced root holds the user's model as attribute `prefix`; `merged` maps placeholders to the one that is the same tensor.
    """
    walk = _Walk(mode, prefix)
    walk.values.same.update(merged)
    placeholders = {}
    for node in module.graph.nodes:
        if node not in merged and node.op == "placeholder" and isinstance(first_value(node), Tensor):
            placeholders[node] = walk.builder.placeholder(node.name, first_value(node))
            walk.values.define(node, placeholders[node])
    walk.builder.add_key()
    outputs = walk.body(module)
    walk.builder.where = {}
    return Functional(walk.builder, placeholders, walk.values.read, walk.values.written, walk.writers), outputs


def sweep(graph: fx.Graph) -> None:
    """Erase what no output needs, but for random draws that precede a needed one."""
    needed, drawn = set[fx.Node](), False
    for node in reversed(graph.nodes):
        random = node.target is torch.ops.partitioner.random.default
        if node.op in ("output", "placeholder") or node in needed or (random and drawn):
            needed.add(node)
            needed.update(node.all_input_nodes)
            drawn = drawn or random
        else:
            graph.erase_node(node)
