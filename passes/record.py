"""Record a block forward and backward as post-autograd ATen ops on fake tensors: the raw material of the joint graph.

A dispatch mode under autograd sees every op that really runs, forward and then backward, and writes it down as an fx node. This is what
`make_fx` does, without what is not needed here (symbolic shapes, decomposition tables, module tracking); a Llama layer takes a tenth of a second.

    placeholders: the tensor reads, then (standing where the backward begins) the tangents
    output:       (writes, gradients), a gradient None where none arrives
    node.meta:    "out" the fake result, "module" and "source" of the op it stems from, in the backward of the op that it differentiates
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.errors import CaptureError
from partitioner.passes.block import BlockClass
from partitioner.passes.layout import is_expanded
from partitioner.passes.recurrent import opaque


@dataclass(frozen=True)
class Recording:
    """What one trace saw. `tangents` are the placeholders of the tangents; entries of `gradients` are None where no gradient arrives."""

    graph: fx.Graph
    reads: tuple[fx.Node | None, ...]  # None for scalars
    tangents: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]  # of the reads that want one


def map_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of an argument of an op (lists and tuples are the only containers there)."""
    if isinstance(value, (list, tuple)):
        return [map_arguments(item, change) for item in value]
    return change(value)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.module, self.source = "", None
        self.active, self.mutated = True, False
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []  # ids stay unique while the tensors live

    def placeholder(self, name: str, value: Tensor, kind: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["kind"] = kind
        self.bind(node, value)
        return node

    def bind(self, node: fx.Node, value: Any) -> None:
        node.meta.update(out=value, module=self.module, source=self.source)
        self._alive.append(value)
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node

    def node(self, value: Any) -> Any:
        """The node of a tensor; other values are constants of the graph."""
        if not isinstance(value, Tensor):
            return value
        node = self._nodes.get(id(value))
        if node is not None:
            return node
        constant = getattr(value, "constant", None)
        if constant is None or constant.numel() != 1:
            raise CaptureError(
                f"an op in {self.module or 'the model'} makes a constant tensor {list(value.shape)} while it is differentiated; "
                "only single numbers can be written into the program: make it a buffer of the module instead"
            )
        node = self.graph.call_function(
            torch.ops.aten.full.default, (list(value.shape), constant.item()), {"dtype": value.dtype, "device": value.device}
        )
        self.bind(node, value)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.active:
            return out
        outs = out if isinstance(out, (list, tuple)) else (out,)
        if not any(isinstance(one, Tensor) for one in outs):
            return out
        if func is torch.ops.aten.lift_fresh.default and id(args[0]) not in self._nodes:
            return out  # a number on its way to becoming a constant: written down where it is used
        self.mutated |= func._schema.is_mutable
        given = {k: map_arguments(v, self.node) for k, v in kwargs.items()}
        node = self.graph.call_function(func, tuple(map_arguments(list(args), self.node)), given)
        self.bind(node, out)
        if out is not outs[0] or isinstance(out, (list, tuple)):
            for index, one in enumerate(outs):
                if isinstance(one, Tensor):
                    self.bind(self.graph.call_function(operator.getitem, (node, index)), one)
        return out


def _run(module: fx.GraphModule, values: Sequence[Any], recorder: _Recorder, want_backward: bool) -> list[Any]:
    """Interpret a block; every autograd node it makes will, when it runs, name the module it came from."""
    env: dict[fx.Node, Any] = {}
    seen: set[Any] = set()
    given = iter(values)

    def hook(out: Any, module: str, source: Any) -> None:
        def enter(_: Any) -> None:
            recorder.module, recorder.source = module, source

        todo = [one.grad_fn for one in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(one, Tensor) and one.grad_fn is not None]
        while todo:
            function = todo.pop()
            if function in seen:
                continue
            seen.add(function)
            function.register_prehook(enter)
            todo += [f for f, _ in function.next_functions if f is not None and f not in seen and f.name() != "torch::autograd::AccumulateGrad"]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "call_function":
            recorder.module, recorder.source = node.meta.get("module", ""), node.meta.get("source")
            look = lambda leaf: env[leaf] if isinstance(leaf, fx.Node) else leaf  # noqa: E731
            args, kwargs = map_arguments(list(node.args), look), {k: map_arguments(v, look) for k, v in node.kwargs.items()}
            out = opaque(node.target, args, kwargs)
            env[node] = out = node.target(*args, **kwargs) if out is None else out
            if want_backward:
                hook(out, recorder.module, recorder.source)
        else:
            return [_crossing(leaf, env[leaf]) for leaf in node.args[0]]
    raise CaptureError("a block has no output node")


def _crossing(node: fx.Node, out: Tensor) -> Tensor:
    """A write, laid out as the blocks that read it expect it."""
    return out if is_expanded(node.meta["val"]) else out.contiguous()


def record(cls: BlockClass, reads: Sequence[tuple[tuple[int, ...], tuple[int, ...]] | int | float]) -> Recording:
    """Trace `cls` with its reads at the given (shape, stride) or scalar values, and its derivative where a read wants one."""
    try:
        recording, mutated = _record(cls, reads, functional=False)
        if mutated:  # a kernel's derivative works in place: make it functional as it is traced (slower, rare)
            recording, mutated = _record(cls, reads, functional=True)
    except (RuntimeError, NotImplementedError) as error:
        raise CaptureError(f"block {cls.name} cannot be differentiated: {error}") from error
    if mutated:
        raise CaptureError(f"block {cls.name}: the derivative of an op changes a tensor in place and has no functional form")
    return recording


def _record(cls: BlockClass, reads: Sequence[Any], functional: bool) -> tuple[Recording, bool]:
    placeholders = [node for node in cls.module.graph.nodes if node.op == "placeholder"]
    recorder = _Recorder()
    backward = bool(cls.tangents) and any(cls.wants)
    wrap: Callable[[Any], Any] = torch._to_functional_tensor if functional else lambda value: value

    def unwrap(value: Any) -> Any:
        if functional and isinstance(value, Tensor) and torch._is_functional_tensor(value):
            torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
            return torch._from_functional_tensor(value)
        return value

    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), FakeTensorMode(), recorder:
        nodes: list[fx.Node | None] = []
        values: list[Any] = []
        for node, read, want in zip(placeholders, reads, cls.wants, strict=True):
            if not isinstance(read, tuple):
                nodes.append(None)
                values.append(read)
                continue
            recorder.active = False
            val = node.meta["val"]
            value = torch.empty_strided(*read, dtype=val.dtype, device=val.device)
            nodes.append(recorder.placeholder(node.name, value, node.meta.get("kind", "value")))
            values.append(wrap(value).requires_grad_(want and backward))
        recorder.active = True
        if functional:
            torch._enable_functionalization(reapply_views=True)
        try:
            outs = _run(cls.module, values, recorder, backward)
            writes = [recorder.node(unwrap(out)) for out in outs]
            recorder.module, recorder.source = "", None
            tangents, gradients = [], []
            if backward:
                given = []
                for index in cls.tangents:
                    recorder.active = False
                    inner = unwrap(outs[index])
                    value = unwrap(torch.empty(inner.shape, dtype=inner.dtype, device=inner.device))
                    tangents.append(recorder.placeholder(f"tangent_{index}", value, "tangent"))
                    given.append(wrap(value))
                recorder.active = True
                leaves = [value for value, want in zip(values, cls.wants, strict=True) if want]
                found = torch.autograd.grad([outs[i] for i in cls.tangents], leaves, given, allow_unused=True)
                gradients = [None if one is None else recorder.node(unwrap(one)) for one in found]
        finally:
            if functional:
                torch._disable_functionalization()  # type: ignore[no-untyped-call]
    return Recording(recorder.graph, tuple(nodes), tuple(tangents), tuple(writes), tuple(gradients)), recorder.mutated
