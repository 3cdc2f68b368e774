"""torch optimizers on cut parameters: they step on the local tensors, and the user's code does not change.

A DTensor costs an optimizer three times the time of a plain tensor. So, for the length of a step, the DTensors in the optimizer's groups are
replaced by plain stand-ins that share their local memory. This is exact for optimizers that treat every element alone; others are refused by name.

    step() ─ before ─→ groups: DTensor → stand-in (grad: local rows), state keyed by stand-in
             torch's own step on plain tensors
           ─ after ──→ groups and state back under the DTensors, stand-ins' grad None, stores of what was stepped on are stale

The two hooks are global and installed once. Optimizers that hold none of our parameters pass through untouched.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from partitioner.errors import OptimizerError
from partitioner.runtime.optimizer_bytes import KINDS, Shapes, instance_bytes, planned_bytes
from partitioner.runtime.shards import local

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Each element's update reads that element's gradient and state alone, so stepping on rows equals stepping on the whole."""


class Store(Protocol):
    """Owner of parameters (`parameters.UnitStore`). `planned_optimizer` and `planned_device`: what memory was planned for, if it was."""

    planned_optimizer: str | None

    def mark_stale(self) -> None: ...


@dataclass
class Entry:
    """What the hooks know of one of our parameters; `stand_in` is None for one that is not cut."""

    name: str
    store: "weakref.ref[Store]"
    stand_in: nn.Parameter | None


@dataclass
class Swapped:
    """What an optimizer's groups hold in place of what during a step: (group, index, DTensor, stand-in)."""

    places: list[tuple[dict[str, Any], int, Tensor, nn.Parameter]] = field(default_factory=list)


_entries: Any = WeakTensorKeyDictionary()  # parameter -> Entry
_replaced: Any = WeakTensorKeyDictionary()  # the model's former parameter -> name
_swapped: "weakref.WeakKeyDictionary[Optimizer, Swapped]" = weakref.WeakKeyDictionary()
_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_user_elementwise: set[type] = set()
_installed = False


def elementwise(kind: type[Optimizer]) -> type[Optimizer]:
    """Declare (as a decorator or a call) that an optimizer class of the user's own treats every element alone and may step on rows."""
    _user_elementwise.add(kind)
    return kind


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether the class, or a base whose `step` it inherits, is known to treat every element alone."""
    if any(base in _user_elementwise for base in kind.__mro__):
        return True
    step = inspect.unwrap(kind.step)
    return issubclass(kind, ELEMENTWISE) and any(step is inspect.unwrap(known.step) for known in ELEMENTWISE)


def register(parameter: Tensor, name: str, store: Store) -> None:
    """Let the hooks know a parameter of a store; called by the store for each one it owns."""
    stand_in = None
    if isinstance(parameter, DTensor):
        stand_in = nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
    _entries[parameter] = Entry(name, weakref.ref(store), stand_in)
    _install()


def retire(parameter: Tensor, name: str) -> None:
    """Let the hooks know a parameter that the store has replaced, so that an optimizer which still holds it is found out."""
    _replaced[parameter] = name


def _install() -> None:
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        _installed = True


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if optimizer in _swapped:  # an earlier step raised halfway
        _swap_back(optimizer)
    ours: list[tuple[Tensor, Entry]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _entries.get(parameter)
            if entry is not None:
                ours.append((parameter, entry))
            elif parameter in _replaced:
                raise OptimizerError(
                    f"{type(optimizer).__name__} holds the parameter that was {_replaced[parameter]!r} before the model was parallelized; it is no "
                    "longer the model's, so stepping on it would change nothing. Make the optimizer afterwards: "
                    f"parallel = auto_parallelize(model, …); optimizer = torch.optim.{type(optimizer).__name__}(parallel.parameters(), …)"
                )
    if not ours:
        return None
    closure = kwargs.get("closure") if "closure" in kwargs else args[1] if len(args) > 1 else None
    if closure is None and _needs_closure(type(optimizer)):
        kind = type(optimizer).__name__
        raise OptimizerError(
            f"{kind}.step was called without the closure that it evaluates the model with, several times a step. Write "
            "optimizer.step(closure) with def closure(): optimizer.zero_grad(); return parallel.train_step(…), or use another optimizer"
        )
    if optimizer not in _seen:
        _seen.add(optimizer)
        _compare_with_plan(optimizer, ours)
    cut = [entry.name for _, entry in ours if entry.stand_in is not None]
    if not cut:
        return None
    if not is_elementwise(type(optimizer)):
        raise OptimizerError(
            f"{type(optimizer).__name__} was given {cut[0]!r}{f' and {len(cut) - 1} more parameters' if len(cut) > 1 else ''} of which this rank "
            "holds only some rows, and it is not known to treat every element alone, so its step on rows would differ from one device. Plan with "
            'constraints={"shard": "none"}, or use one of ' + ", ".join(known.__name__ for known in ELEMENTWISE)
        )
    _swap_in(optimizer)
    if closure is None:
        return None
    outside = _outside(optimizer, closure)
    return (args, {**kwargs, "closure": outside}) if "closure" in kwargs else ((args[0], outside, *args[2:]), kwargs)


def _needs_closure(kind: type[Optimizer]) -> bool:
    parameter = inspect.signature(kind.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer not in _swapped:
        return
    entries = [_entries[parameter] for _, _, parameter, _ in _swapped[optimizer].places]
    _swap_back(optimizer)
    for store in {id(store): store for entry in entries if (store := entry.store()) is not None}.values():
        store.mark_stale()


def _outside(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The user's closure, called with the user's parameters in the groups (it may zero gradients and train)."""

    def call() -> Any:
        _swap_back(optimizer)
        try:
            return closure()
        finally:
            _swap_in(optimizer)

    return call


def _swap_in(optimizer: Optimizer) -> None:
    swapped = _swapped[optimizer] = Swapped()
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            entry = _entries.get(parameter)
            if entry is None or entry.stand_in is None:
                continue
            stand_in = entry.stand_in
            stand_in.grad = None if parameter.grad is None else local(parameter.grad)
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[stand_in] = {key: local(value) for key, value in state.items()}
            parameters[index] = stand_in
            swapped.places.append((group, index, parameter, stand_in))


def _swap_back(optimizer: Optimizer) -> None:
    for group, index, parameter, stand_in in _swapped.pop(optimizer).places:
        group["params"][index] = parameter
        stand_in.grad = None
        if stand_in in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(stand_in)


def _compare_with_plan(optimizer: Optimizer, ours: list[tuple[Tensor, Entry]]) -> None:
    """Warn where this optimizer needs more memory on this rank than the planned one."""
    store = ours[0][1].store()
    planned = None if store is None else store.planned_optimizer
    if planned is None or not is_elementwise(type(optimizer)):
        return
    locals_ = [local(parameter) for parameter, _ in ours if parameter.requires_grad]
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in locals_)
    device = locals_[0].device.type if locals_ else "cpu"
    expected, actual = planned_bytes(planned, shapes, device), instance_bytes(optimizer, shapes, device)
    more = sum(actual) - sum(expected)
    if more > 0:
        warnings.warn(
            f"{type(optimizer).__name__} holds {actual[0]:,} bytes of state and {actual[1]:,} bytes of temporaries on this rank, {more:,} more than "
            f'optimizer="{planned}", which memory was planned for; plan with {_kind_of(optimizer, actual[0], shapes, device)}',
            stacklevel=4,
        )


def _kind_of(optimizer: Optimizer, state: int, shapes: Shapes, device: str) -> str:
    """What to write for `optimizer=` to have so many bytes of state planned for."""
    alike = (name for name, (cls, _) in KINDS.items() if cls is type(optimizer) and planned_bytes(name, shapes, device)[0] >= state)
    return next((f'optimizer="{name}"' for name in alike), "the optimizer that you use")
