"""Capture: model and loss as one functional graph, under fake tensors, so that nothing is allocated and the model is not touched.

 1. refuse what can be seen at once (refuse.check_model)
 2. stand fake tensors in for parameters, buffers and inputs, meta ones on the device that will run
 3. torch.export(strict=False) of a root that holds model and loss, with tripwires set
 4. judge Python state and Python randomness; put everything back
 5. walk the exported graph once (functional.functionalize)
 6. name inputs and outputs: ties merged, what is unused dropped
"""

import gc
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind as ExportKind
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from partitioner.errors import CaptureError
from partitioner.passes.functional import Functional, functionalize, sweep
from partitioner.passes.functional_builder import first_value
from partitioner.passes.functional_schema import source_of
from partitioner.passes.graph import Graph, Input, InputKind, Output, module_of
from partitioner.passes.objective import objective
from partitioner.passes.refuse import PythonRandomness, check_model, explain, tripwires
from partitioner.passes.refuse_state import Snapshot, judge
from partitioner.passes.stage import Fakes, Root, Stopped, as_captured, device_of, stand_ins
from partitioner.passes.tree import named_leaves, outputs_of


def _place(tensor: Tensor) -> Any:
    """Where a tensor lies in memory: torch lifts a tensor that it finds in a closure as an alias."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass
class _State:
    """Names of the model's parameters and buffers; tensors listed under several names go by the first."""

    names: dict[int, str] = field(default_factory=dict)
    places: dict[Any, str] = field(default_factory=dict)
    kinds: dict[str, InputKind] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "_State":
        state = cls()
        named: list[tuple[InputKind, Iterator[tuple[str, Tensor]]]] = [
            ("parameter", iter(model.named_parameters(remove_duplicate=False))),
            ("buffer", iter(model.named_buffers(remove_duplicate=False))),
        ]
        for kind, tensors in named:
            for name, tensor in tensors:
                if id(tensor) in state.names:
                    state.ties[name] = state.names[id(tensor)]
                else:
                    state.names[id(tensor)] = state.places[_place(tensor)] = name
                    state.kinds[name], state.requires_grad[name] = kind, tensor.requires_grad
        return state


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    has_targets: bool = False,
    mode: Literal["loss", "forward"] = "loss",
    training: bool = True,
    device: torch.device | str | None = None,
) -> Graph:
    """The functional graph of one call of the model, on the shapes of the example.

    mode "loss": output 0 is the loss, of shape (). mode "forward": one output per tensor leaf of the model's output; loss and targets are not used.
    New values of buffers that forward changes follow. Inputs: parameters, buffers, constants, tensor leaves, then `key_shared` if it draws.
    Model and inputs may be real, fake or on meta; `device` is where meta tensors are taken to be (default: where the others are, else CPU).
    Raises CaptureError.
    """
    has_targets = has_targets and mode == "loss"
    check_model(model, has_targets)
    leaves, in_spec = named_leaves(tuple(args), dict(kwargs or {}), targets, has_targets)
    fakes = Fakes(torch.device(device) if device is not None else device_of(model, leaves))
    state = _State.of(model)
    out: dict[str, Any] = {}

    def run(module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        given = iter(tensors)
        call = pytree.tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for _, leaf in leaves], in_spec)
        if mode == "loss":
            return (objective(module, call["args"], call["kwargs"], loss, call.get("targets"), has_targets),)
        results, out["spec"] = outputs_of(module(*call["args"], **call["kwargs"]))
        out["paths"] = [path for path, _ in results]
        return tuple(tensor for _, tensor in results)

    root = Root(model, loss, run)
    inputs = tuple(fakes.new(leaf) for _, leaf in leaves if isinstance(leaf, Tensor))
    with as_captured(model, training):
        exported = _export(root, model, inputs, fakes)
    graph_module = exported.graph_module
    labels = _label_inputs(exported, model, loss, state, [path for path, leaf in leaves if isinstance(leaf, Tensor)])
    functional, results = functionalize(graph_module, fakes.mode, "model", _merged(labels))
    outputs = [Output("loss")] if mode == "loss" else [Output("output", path) for path in out["paths"]]
    literals = {path: leaf for path, leaf in leaves if not isinstance(leaf, Tensor)}
    graph = _assemble(functional, results, outputs, labels, state, in_spec, out.get("spec"), literals, training)
    del exported, graph_module, labels, functional, results, root
    gc.collect(0)  # export leaves cycles of many times the graph's size, which a caller without the collector would keep
    return graph


def _export(root: Root, model: nn.Module, inputs: tuple[Tensor, ...], fakes: Fakes) -> Any:
    """Trace with tripwires; judge what it did to Python's state."""

    def rehearse() -> None:
        with fakes.mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root(*inputs)

    modules = list(root.modules())
    snapshot = Snapshot(model)  # before the stand-ins, so that restoring it never brings one back
    try:
        with stand_ins(modules, fakes), tripwires():
            before, randomness, after = Snapshot(model), PythonRandomness(), list[Snapshot]()
            root.finished = lambda: after.append(Snapshot(model)) if not after else None
            with warnings.catch_warnings(), tracing(TracingContext(fakes.mode)):
                warnings.simplefilter("ignore")
                exported = torch.export.export(root, inputs, strict=False)
            randomness.refuse(rehearse)
            judge(model, before, after[0], rehearse)
            return exported
    except Stopped as stopped:
        raise explain(stopped.error, model) from stopped.error
    except CaptureError:
        raise
    except Exception as error:
        raise explain(error, model) from error
    finally:
        snapshot.restore()


@dataclass(frozen=True)
class _Label:
    """What an old placeholder is, and the constant it holds."""

    kind: InputKind
    name: str
    constant: Tensor | None = None


def _label_inputs(exported: Any, model: nn.Module, loss: Any, state: _State, paths: list[str]) -> dict[fx.Node, _Label]:
    """Name every tensor placeholder of the exported graph."""
    labels: dict[fx.Node, _Label] = {}
    own = dict(loss.named_parameters()) | dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}
    remaining = iter(paths)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind == ExportKind.USER_INPUT:
            labels[node] = _Label("input", next(remaining))
            continue
        target = spec.target
        if target.startswith("model.") and state.ties.get(target[6:], target[6:]) in state.kinds:
            name = state.ties.get(target[6:], target[6:])
            labels[node] = _Label(state.kinds[name], name)
            continue
        tensor = own.get(target.removeprefix("criterion."), exported.constants.get(target))
        used = next((source_of(user) for user in node.users if source_of(user)), "forward")
        labels[node] = _constant(target, tensor, state, used)
    return labels


def _constant(target: str, tensor: Any, state: _State, used: str) -> _Label:
    """A tensor that the code holds: a parameter or buffer reached by another way, or a constant."""
    name = target.removeprefix("model.")
    known = state.names.get(id(tensor)) or (state.places.get(_place(tensor)) if isinstance(tensor, Tensor) else None)
    if known is not None:
        return _Label(state.kinds[known], known)
    if isinstance(tensor, torch.Generator):
        raise CaptureError(
            f"{used}: draws from a torch.Generator of its own, whose state the captured program does not hold. Draw from the default generator."
        )
    if not isinstance(tensor, Tensor):
        raise CaptureError(f"{used}: uses {name}, a {type(tensor).__qualname__}; a graph holds tensors only. Pass it as an input.")
    if isinstance(tensor, FakeTensor):
        raise CaptureError(
            f"{used}: uses a tensor that tracing lost sight of, as it does inside torch.autograd.grad and where a tensor is taken apart outside of "
            "torch ops. Write that part with torch ops on the tensors of forward."
        )
    if tensor.device.type == "meta":
        raise CaptureError(f"{used}: uses {name}, a tensor on meta that is neither parameter nor buffer, so that nothing fills it. Register it.")
    if tensor.requires_grad:
        raise CaptureError(
            f"{used}: forward or loss trains the tensor {name}, which is not a parameter of the model, so that no optimizer of its parameters would "
            "see it. Make it an nn.Parameter of the model; put a loss with parameters inside the model."
        )
    return _Label("constant", name, tensor.detach())


def _merged(labels: dict[fx.Node, _Label]) -> dict[fx.Node, fx.Node]:
    """Placeholders that are one parameter or buffer."""
    first: dict[tuple[str, str], fx.Node] = {}
    merged = {}
    for node, label in labels.items():
        if label.kind in ("parameter", "buffer"):
            held = first.setdefault((label.kind, label.name), node)
            if held is not node:
                merged[node] = held
    return merged


def _assemble(
    functional: Functional,
    results: list[Any],
    outputs: list[Output],
    labels: dict[fx.Node, _Label],
    state: _State,
    in_spec: TreeSpec,
    out_spec: TreeSpec | None,
    literals: dict[str, Any],
    training: bool,
) -> Graph:
    builder = functional.builder
    values = [functional.value(result) for result in results]
    for old, label in labels.items():
        if old in functional.placeholders and functional.written(old):
            _check_write(label, functional.writers.get(old, ""))
            if label.kind == "buffer":
                outputs.append(Output("buffer", label.name))
                values.append(builder.detached(functional.value(old)))
    builder.graph.output(values)
    sweep(builder.graph)
    order: dict[InputKind, int] = {"parameter": 0, "buffer": 1, "constant": 2, "input": 3, "scalar": 4}
    described = {new: labels[old] for old, new in functional.placeholders.items()}
    if builder.key is not None:
        described[builder.key] = _Label("scalar", "key_shared")
    inputs, constants = [], {}
    used = []
    for node in [n for n in builder.graph.nodes if n.op == "placeholder"]:
        if node.users:
            used.append(node)
        else:
            builder.graph.erase_node(node)
    used.sort(key=lambda n: order[described[n].kind])
    for node in reversed(used):
        next(iter(builder.graph.nodes)).prepend(node)
    for node in used:
        label = described[node]
        inputs.append(Input(label.kind, label.name, bool(getattr(first_value(node), "requires_grad", False))))
        if label.constant is not None:
            constants[label.name] = label.constant
    _refuse_unknown(builder.graph)
    module = module_of(builder.graph)
    return Graph(
        module,
        tuple(inputs),
        tuple(outputs),
        ties=dict(state.ties),
        in_spec=in_spec,
        out_spec=out_spec,
        literals=literals,
        constants=constants,
        training=training,
    ).check()


def _check_write(label: _Label, source: str) -> None:
    if label.kind == "parameter":
        raise CaptureError(
            f"{source}: forward changes parameter {label.name} in place, which only the optimizer may do here. "
            "Compute a new tensor from it (for an embedding with max_norm: normalise the looked-up rows), or make it a buffer."
        )
    if label.kind == "constant":
        raise CaptureError(
            f"{source}: forward changes {label.name} in place, a tensor that is neither parameter nor buffer, so that its state would be lost. "
            f"Register it: self.register_buffer({label.name.split('.')[-1]!r}, tensor)."
        )
    if label.kind == "input":
        warnings.warn(
            f"{source}: forward changes its input {label.name} in place; the captured program leaves the caller's tensor as it is.", stacklevel=4
        )


def _refuse_unknown(graph: fx.Graph) -> None:
    """What reached the outputs must be tensor ops, of sizes that are known."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            name = getattr(node.target, "__name__", str(node.target))
            raise CaptureError(
                f"{node.meta.get('source', '')}: {name} is no tensor op (torch.func transforms such as vmap leave such calls, and arithmetic with "
                "numbers read from tensors). Write it with batched tensor ops."
            )
        value = first_value(node)
        parts = value if isinstance(value, (tuple, list)) else [value]
        for part in parts:
            unknown = isinstance(part, Tensor) and not all(isinstance(size, int) for size in part.shape)
            if unknown or isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise CaptureError(
                    f"{node.meta.get('source', '')}: {node.target} gives a size or number that depends on the data. One graph must serve every "
                    "batch: use a mask and torch.where instead of boolean indexing or nonzero, and keep numbers as tensors instead of .item()."
                )
