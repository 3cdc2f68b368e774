"""The stage on which a model is traced: fake tensors in its registries, its modes and caches set, everything put back afterwards."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import module as module_file

from partitioner.errors import CaptureError

_QUIET = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._subclasses.fake_tensor")
# Settings of Hugging Face configurations under which forward has no fixed graph, and what to trace instead: the same function of inputs and
# parameters without key-value caches, and with experts that are computed at fixed sizes.
_SETTINGS: dict[str, dict[object, object]] = {
    "use_cache": {True: False},
    "_experts_implementation_internal": {"grouped_mm": "batched_mm", "eager": "batched_mm"},
}


class Stopped(BaseException):
    """Carries an error of the user's code through torch.export, which would print the graph so far for an Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Fakes:
    """Fake stand-ins in one mode; a tensor that occurs twice has one."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)
        self.device = device
        self._known: dict[int, Tensor] = {}

    def new(self, tensor: Tensor) -> Tensor:
        device = self.device if tensor.device.type == "meta" else tensor.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad)

    def state(self, tensor: Tensor) -> Tensor:
        """The stand-in of a parameter or buffer."""
        if id(tensor) not in self._known:
            fake = self.new(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
            self._known[id(tensor)] = fake
        return self._known[id(tensor)]


class Root(nn.Module):
    """What is exported: takes the tensor leaves of a call, returns the loss or the tensor leaves of the output."""

    def __init__(self, model: nn.Module, criterion: Any, run: Callable[[nn.Module, list[Tensor]], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model = model
        if isinstance(criterion, nn.Module):
            self.criterion = criterion
        self.run = run
        self.finished: Callable[[], None] = lambda: None  # called at the end of every forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # A buffer that forward binds to a new tensor (self.ema = 0.9 * self.ema + …) is a write to the old one.
        before = [(module, name, buffer) for module in self.model.modules() for name, buffer in module._buffers.items()]
        try:
            with _without_registration_hooks():
                results = self.run(self.model, list(tensors))
        except Exception as error:
            raise Stopped(error) from error
        for module, name, old in before:
            new = module._buffers.get(name)
            if new is old:
                continue
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise Stopped(
                    CaptureError(
                        f"forward of {type(module).__qualname__} binds buffer {name} to a tensor of another shape or type; a buffer keeps both. "
                        "Update it in place, or register it with its final shape."
                    )
                )
            with torch.no_grad():
                old.copy_(new)
            module._buffers[name] = old
        self.finished()
        return results


@contextlib.contextmanager
def _without_registration_hooks() -> Iterator[None]:
    """torch.export's hook on buffer assignment only understands buffers of the root."""
    hooks = dict(module_file._global_buffer_registration_hooks)
    module_file._global_buffer_registration_hooks.clear()
    try:
        yield
    finally:
        module_file._global_buffer_registration_hooks.update(hooks)


@contextlib.contextmanager
def stand_ins(modules: list[nn.Module], fakes: Fakes) -> Iterator[None]:
    """Fake parameters and buffers in the modules' own registries."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in modules:
            for registry in (module._parameters, module._buffers):
                saved.append((registry, dict(registry)))
                for name, tensor in registry.items():
                    if tensor is not None:
                        registry[name] = fakes.state(tensor)  # type: ignore[assignment]
        yield
    finally:
        for registry, original in saved:
            registry.clear()
            registry.update(original)


@contextlib.contextmanager
def as_captured(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode as asked, key-value caches off, gradients on, no ambient autocast, quiet; everything put back."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules] if model.training != training else []
    configs = {id(c): c for module in modules if (c := module.__dict__.get("config")) is not None}
    settings = [
        (config, name, value)
        for config in configs.values()
        for name, others in _SETTINGS.items()
        if isinstance(value := getattr(config, name, None), (bool, str)) and value in others
    ]
    loggers = [logging.getLogger(name) for name in _QUIET]
    levels = [logger.level for logger in loggers]
    generator = torch.get_rng_state()
    try:
        with contextlib.ExitStack() as stack:
            if modes:
                model.train(training)
            for config, name, value in settings:
                setattr(config, name, _SETTINGS[name][value])
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device_type in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for config, name, value in settings:
            setattr(config, name, value)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        torch.set_rng_state(generator)


def device_of(model: nn.Module, leaves: list[tuple[str, Any]]) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *(leaf for _, leaf in leaves if isinstance(leaf, Tensor))]
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
