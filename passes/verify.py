"""The captured graph against eager: loss or outputs, every gradient, every new buffer value, under two seeds, on the example batch.

The same ops on the same data in the same order: differences beyond rounding mean that capture lost something. The model is left as it was:
parameters, buffers, gradients, Python attributes, and the states of all random generators.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.errors import CaptureError
from partitioner.passes.graph import Graph
from partitioner.passes.objective import objective
from partitioner.passes.randomness import EAGER_KEY
from partitioner.passes.refuse import explain
from partitioner.passes.refuse_state import Snapshot
from partitioner.passes.tree import map_tensors, named_leaves, outputs_of

SEEDS = (20240, 77)
_RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

Results = dict[str, Tensor | None]


@contextlib.contextmanager
def _preserved(model: nn.Module, training: bool) -> Iterator[dict[str, Tensor]]:
    """Yields the old values of the buffers; puts attributes, buffers, modes and generators back."""
    snapshot = Snapshot(model)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    holders = dict(model.named_buffers())
    modes = [(module, module.training) for module in model.modules()] if model.training != training else []
    numpy = sys.modules.get("numpy")
    states = (random.getstate(), numpy.random.get_state() if numpy else None)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
            if modes:
                model.train(training)
            yield buffers
    finally:
        snapshot.restore()
        _restore_buffers(holders, buffers)
        for module, mode in modes:
            module.training = mode
        random.setstate(states[0])
        if numpy and states[1] is not None:
            numpy.random.set_state(states[1])


def _restore_buffers(holders: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, old in values.items():
            holders[name].copy_(old)


class PlainDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout of fused kernels, which draw by an algorithm of their own, drawn as the captured graph draws it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            x, p = args[0], args[1]
            mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
            return x * (mask.to(x.dtype) / (1 - p)), mask
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _drawn_alike(graph: Graph) -> Iterator[None]:
    """On devices with fused random kernels, let eager draw as the graph does: attention by its formula, recurrent layers without cuDNN."""
    nodes = list(graph.module.graph.nodes)
    draws = [node for node in nodes if node.target is torch.ops.partitioner.random.default]
    with contextlib.ExitStack() as stack:
        if any(node.args[2].type != "cpu" for node in draws):
            stack.enter_context(PlainDraws())  # type: ignore[no-untyped-call]
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(str(node.target).startswith(("aten.lstm", "aten.gru", "aten.rnn")) for node in nodes):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)


def _gradients(results: list[tuple[str, Tensor]], parameters: dict[str, Tensor]) -> Results:
    """Gradients of the loss, or of the outputs weighted by fixed numbers, by parameter name; None where there is none."""
    ends = [(value, path) for path, value in results if value.requires_grad]
    if not ends or not parameters:
        return dict.fromkeys(parameters)
    weights = []
    for number, (value, _) in enumerate(ends):
        wave = torch.cos(torch.arange(value.numel(), device=value.device, dtype=torch.float32) + number).reshape(value.shape)
        weights.append(torch.ones_like(value) if value.ndim == 0 else wave.to(value.dtype))
    found = torch.autograd.grad([value for value, _ in ends], list(parameters.values()), weights, allow_unused=True)
    return {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in zip(parameters, found, strict=True)}


def _run_eager(model: nn.Module, graph: Graph, call: dict[str, Any], loss: Callable[..., Any] | None, has_targets: bool) -> Results:
    call = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), call)
    before = dict(model.named_buffers())
    with _drawn_alike(graph):
        if graph.out_spec is None:
            results = [("loss", objective(model, call["args"], call["kwargs"], loss, call.get("targets"), has_targets))]
        else:
            wanted = {output.name for output in graph.outputs}
            results = [(path, value) for path, value in outputs_of(model(*call["args"], **call["kwargs"]))[0] if path in wanted]
    found: Results = {path: value.detach().clone() for path, value in results}
    for name, value in _gradients(results, {n: p for n, p in model.named_parameters() if p.requires_grad}).items():
        found[f"gradient of {name}"] = value
    now = dict(model.named_buffers())
    for output in graph.outputs:
        if output.kind == "buffer":
            found[f"buffer {output.name}"] = now[output.name].detach().clone()
    changed = {n for n, b in now.items() if n in before} - {o.name for o in graph.outputs if o.kind == "buffer"}
    for name in sorted(changed):
        found[f"buffer {name}"] = now[name].detach().clone()
    return found


def _run_graph(graph: Graph, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor], leaves: dict[str, Any]) -> Results:
    values: list[Any] = []
    trained: dict[str, Tensor] = {}
    for given in graph.inputs:
        if given.kind == "parameter":
            value = parameters[given.name].detach().requires_grad_(parameters[given.name].requires_grad)
            if value.requires_grad:
                trained[given.name] = value
            values.append(value)
        elif given.kind == "buffer":
            values.append(buffers[given.name].clone())
        elif given.kind == "constant":
            values.append(graph.constants[given.name])
        elif given.kind == "input":
            values.append(leaves[given.name].detach().clone().requires_grad_(given.requires_grad))
        else:
            values.append(EAGER_KEY)
    results = fx.Interpreter(graph.module).run(*values)
    ends, found = [], Results()
    for output, value in zip(graph.outputs, results, strict=True):
        if output.kind == "buffer":
            found[f"buffer {output.name}"] = value.detach()
        else:
            name = output.name or "loss"
            ends.append((name, value))
            found[name] = value.detach()
    gradients = _gradients(ends, trained)
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            found[f"gradient of {name}"] = gradients.get(name)
    for name, buffer in buffers.items():
        found.setdefault(f"buffer {name}", buffer)
    return found


def _tolerance(graph: Graph) -> float:
    """Relative to the largest element: by the lowest precision in which the graph computes."""
    worst = 1e-10
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            worst = max(worst, _RELATIVE.get(value.dtype, 0.0))
    return worst


def _differences(want: Results, have: Results, tolerance: float) -> list[str]:
    """What differs, worst first; gradients are measured against the largest of all, so that rounding of a zero one does not count."""
    largest = max((float(v.abs().max()) for k, v in want.items() if k.startswith("gradient") and v is not None and v.numel()), default=0.0)
    found: list[tuple[float, str]] = []
    for name, expected in want.items():
        given = have.get(name)
        if expected is None or given is None:
            if (expected is None) != (given is None):
                missing = "in eager but captured" if expected is None else "captured but in eager"
                found.append((float("inf"), f"{name}: none {missing}"))
            continue
        if expected.shape != given.shape or expected.dtype != given.dtype:
            found.append((float("inf"), f"{name}: {tuple(expected.shape)} {expected.dtype} in eager, {tuple(given.shape)} {given.dtype} captured"))
            continue
        if not expected.numel() or torch.equal(expected, given):
            continue
        wide = torch.complex128 if expected.is_complex() else torch.float64
        a, b = expected.to(wide), given.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, torch.zeros((), dtype=torch.float64, device=a.device), (a - b).abs().nan_to_num(nan=float("inf"))).max().item()
        finite = a.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max().item()
        scale = max(finite, 1e-3 * largest if name.startswith("gradient") else 0.0, torch.finfo(torch.float32).tiny)
        if error > tolerance * scale:
            found.append((error / scale, f"{name}: off by {error:.2e} of {scale:.2e}"))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def verify(
    model: nn.Module,
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    has_targets: bool = False,
) -> str | None:
    """Raise CaptureError where the captured graph differs from eager on this batch; return why it could not be checked, or None."""
    has_targets = has_targets and graph.out_spec is None
    leaves, _ = named_leaves(tuple(args), dict(kwargs or {}), targets, has_targets)
    named = dict(leaves)
    parameters, holders = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = [*parameters.values(), *holders.values(), *(leaf for leaf in named.values() if isinstance(leaf, Tensor))]
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return "model or example batch has no data (meta or fake tensors), so the captured graph was not compared with eager"
    call = {"args": tuple(args), "kwargs": dict(kwargs or {})} | ({"targets": targets} if has_targets else {})
    tolerance = _tolerance(graph)
    bound = {(id(module), name): (module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()}
    for seed in SEEDS:
        with _preserved(model, graph.training) as buffers:
            _seed(seed)
            attributes = Snapshot(model)
            try:
                want = _run_eager(model, graph, call, loss, has_targets)
            except Exception as error:  # fake tensors took what real ones do not
                raise explain(error, model) from error
            changed = [
                c for c in (*attributes.changes(Snapshot(model)), *attributes.registered()) if (id(c.module), c.attribute) not in bound
            ]
            if changed:
                for module, name, buffer in bound.values():
                    module._buffers[name] = buffer
                _restore_buffers(holders, buffers)
                _seed(seed)
                second = _differences(want, _run_eager(model, graph, call, loss, has_targets), tolerance)
                if second:
                    raise CaptureError(
                        f"the second call of {type(model).__qualname__} differs from the first for the same seed and inputs ({second[0]}), because "
                        f"of what the first left on the model: {', '.join(c.name for c in changed[:4])}. A captured program repeats the first call. "
                        "Run the model once before planning if it initialises itself, or keep such state in buffers."
                    )
        _compare(model, graph, call, loss, has_targets, seed, want, parameters, buffers, named, tolerance)
    return None


def _compare(
    model: nn.Module,
    graph: Graph,
    call: dict[str, Any],
    loss: Callable[..., Any] | None,
    has_targets: bool,
    seed: int,
    want: Results,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    leaves: dict[str, Any],
    tolerance: float,
) -> None:
    with _preserved(model, graph.training):
        _seed(seed)
        have = _run_graph(graph, parameters, buffers, leaves)
    differences = _differences(want, have, tolerance)
    if not differences:
        return
    with _preserved(model, graph.training):
        _seed(seed)
        again = _run_eager(model, graph, call, loss, has_targets)
    if _differences(want, again, tolerance):
        cause = (
            "Eager itself gives two results for the same seed and inputs: forward reads something else that changes (a file, the time, a global, "
            "another generator). Pass it as an input."
        )
    else:
        cause = (
            "Probable causes: a backward that is not the derivative of the forward, state outside of parameters and buffers, "
            "a C++ or custom op that changes its arguments without saying so. Report it with the model, or switch the check off if you know why."
        )
    shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
    raise CaptureError(f"the captured graph of {type(model).__qualname__} differs from eager on the example batch (seed {seed}): {shown}. {cause}")
