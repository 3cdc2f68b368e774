"""What an optimizer's step does to memory, measured on torch's own step with tensors that have shapes and no data (`meta`), under the Tracker.

So the figures are those of the installed torch, with its temporaries and its 0-dim step counters, and nothing large is allocated or computed.
On CPU torch steps parameter by parameter: a parameter's temporaries stand beside what is left of the one before it, so it is enough to measure
each distinct pair of neighbours. On other devices it steps on all of a dtype at once (foreach), where most optimizers make every temporary for
all parameters before the next: what one parameter takes then adds up. With several dtypes there, a figure may be off by what is left of one dtype
when the next is taken, as their order is that of a hash table.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from partitioner.errors import OptimizerError
from partitioner.runtime.memory import Tracker, storage_bytes

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
Kind = tuple[type[Optimizer], tuple[tuple[str, Any], ...]]
"""An optimizer class and the options that matter to memory."""

KINDS: dict[str, Kind] = {
    "sgd": (torch.optim.SGD, ()),
    "sgd_momentum": (torch.optim.SGD, (("momentum", 0.9),)),
    "adam": (torch.optim.Adam, ()),
    "adamw": (torch.optim.AdamW, ()),
    "nadam": (torch.optim.NAdam, ()),
    "radam": (torch.optim.RAdam, ()),
    "adagrad": (torch.optim.Adagrad, ()),
    "adadelta": (torch.optim.Adadelta, ()),
    "adamax": (torch.optim.Adamax, ()),
    "rmsprop": (torch.optim.RMSprop, ()),
    "rprop": (torch.optim.Rprop, ()),
}
"""optimizer= as users write it."""

_STEPS = 7  # RAdam takes its second path from the sixth step on


def state_bytes(optimizer: str, shapes: Shapes) -> int:
    """Bytes of the state that `optimizer` keeps between steps for parameters of these (shape, dtype) on one rank."""
    return _state(_kind(optimizer), shapes, "cpu")


def temporary_bytes(optimizer: str, shapes: Shapes, device: str = "cpu") -> int:
    """The most bytes beyond parameters, gradients and state that one `step()` holds at a time."""
    return _temporary(_kind(optimizer), shapes, device)


def planned_bytes(optimizer: str, shapes: Shapes, device: str) -> tuple[int, int]:
    """(state, temporary) bytes."""
    return _state(_kind(optimizer), shapes, device), _temporary(_kind(optimizer), shapes, device)


def instance_bytes(optimizer: Optimizer, shapes: Shapes, device: str) -> tuple[int, int]:
    """(state, temporary) bytes of an optimizer at hand, with the options of its defaults."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted and isinstance(value, bool | int | float | tuple)}
    for unmeasurable in ("capturable", "fused", "differentiable", "foreach"):
        options.pop(unmeasurable, None)
    kind = (type(optimizer), tuple(sorted(options.items())))
    try:
        return _state(kind, shapes, device), _temporary(kind, shapes, device)
    except RuntimeError:  # an optimizer that reads numbers back from the device (ASGD) cannot be measured without data
        state = storage_bytes(value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor))
        return state, 0


def prepared_step(optimizer: str, shapes: Shapes, device: str, where: str = "meta") -> Callable[[], None]:
    """`step` of an optimizer that has made its state, of parameters of these (shape, dtype) that lie on `where` and are stepped as on `device`."""
    step: Callable[[], None] = _stepped(_kind(optimizer), _flat(shapes), device, where).step
    return step


def _kind(optimizer: str) -> Kind:
    if optimizer not in KINDS:
        raise OptimizerError(f"optimizer={optimizer!r} is not one whose memory can be planned; write one of {', '.join(KINDS)}")
    return KINDS[optimizer]


def _state(kind: Kind, shapes: Shapes, device: str) -> int:
    return sum(_measure(kind, (shape,), device)[0] for shape in _flat(shapes))


def _temporary(kind: Kind, shapes: Shapes, device: str) -> int:
    flat = _flat(shapes)
    if len(flat) < 2:
        return _measure(kind, flat, device)[1] if flat else 0
    if device == "cpu":
        return max(_measure(kind, pair, device)[1] for pair in dict.fromkeys(pairwise(flat)))
    filled = [one for one in flat if one[0]]
    if filled and len({dtype for _, dtype in flat}) == 1 and _adds_up(kind, device):
        return sum(_measure(kind, (one,), device)[1] for one in filled)
    return _measure(kind, flat, device)[1]


@lru_cache
def _adds_up(kind: Kind, device: str) -> bool:
    """Whether the temporaries of a foreach step are the sum of those of its parameters. It is not so where the step loops within (Rprop's)."""
    probe = tuple((numel, torch.float32) for numel in (1000, 1, 64, 64, 300))
    return _measure(kind, probe, device)[1] == sum(_measure(kind, (one,), device)[1] for one in probe)


def _flat(shapes: Shapes) -> tuple[tuple[int, torch.dtype], ...]:
    """Only the number of elements matters: 0-dim parameters have one."""
    return tuple((prod(shape), dtype) for shape, dtype in shapes)


@lru_cache(maxsize=4096)
def _measure(kind: Kind, sizes: tuple[tuple[int, torch.dtype], ...], device: str) -> tuple[int, int]:
    """(state, temporary) bytes of parameters with these numbers of elements, stepped in this order."""
    optimizer = _stepped(kind, sizes, device)
    state = storage_bytes(value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor))
    most = 0
    for _ in range(_STEPS if isinstance(optimizer, torch.optim.RAdam) else 1):
        tracker = Tracker()
        with tracker:
            optimizer.step()
        most = max(most, tracker.peak_bytes)
    return state, most


def _stepped(kind: Kind, sizes: Sequence[tuple[int, torch.dtype]], device: str, where: str = "meta") -> Any:
    """An optimizer of parameters with these numbers of elements that has made its state."""
    cls, options = kind
    parameters = [torch.nn.Parameter(torch.ones(numel, dtype=dtype, device=where)) for numel, dtype in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    make: Any = cls
    optimizer = make(parameters, lr=0.001, foreach=device != "cpu", **{name: value for name, value in options if name != "lr"})
    optimizer.step()
    return optimizer
