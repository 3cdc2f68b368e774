"""One op instance by argument name: shapes and dtypes in place of tensors, so that equal instances are described once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Spec:
    """What a rule may know about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


@lru_cache(maxsize=65536)
def _spec(shape: torch.Size, dtype: torch.dtype) -> Spec:
    """One object for equal tensors, which compare at once."""
    return Spec(tuple(shape), dtype)


_PLAIN = frozenset((int, float, bool, str, type(None)))


class Late(Enum):
    """Stands for a scalar that is known at run time only (a random key, a number of rows)."""

    SCALAR = 0


def frozen(value: Any) -> Any:
    """A hashable copy of an op argument: tensors (real, fake, or nodes that hold one) as Spec, lists as tuples, scalar nodes as Late."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return Late.SCALAR
    if isinstance(value, torch.Tensor):
        return _spec(value.shape, value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple([frozen(entry) for entry in value])
    if isinstance(value, dict):
        return tuple([(key, frozen(entry)) for key, entry in value.items()])
    return value


def results_of(value: Any) -> tuple[Spec | None, ...]:
    """The Specs of an op's results: one for a single tensor, one per entry of a tuple or list."""
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple([frozen(entry) if isinstance(entry, torch.Tensor) else None for entry in entries])


@dataclass(frozen=True)
class Place:
    """Where a tensor argument stands: its schema name, and its index where the argument is a list of tensors."""

    name: str
    index: int | None
    spec: Spec


class Call:
    """An op overload with its arguments bound to the schema.

    `call["dim"]` is the argument or its default, tensors as `Spec`; `places` lists the tensor arguments in the order of flattening
    args then kwargs; `outputs` holds one Spec per result, None for a result that is no tensor.
    """

    def __init__(self, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: tuple[Spec | None, ...]) -> None:
        self.target = target
        self.outputs = outputs
        schema = target._schema.arguments
        self.values: dict[str, Any] = {argument.name: frozen(argument.default_value) for argument in schema}
        self.tensor_names = [argument.name for argument in schema if "Tensor" in str(argument.type)]
        self.places: list[Place] = []
        given = [(schema[position].name, value) for position, value in enumerate(args)]
        for name, value in (*given, *kwargs.items()):
            self.values[name] = value
            self.places.extend(self._tensors(name, value))

    @staticmethod
    def _tensors(name: str, value: Any) -> Iterator[Place]:
        if isinstance(value, Spec):
            yield Place(name, None, value)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if isinstance(entry, Spec):
                    yield Place(name, index, entry)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def is_tensor(self, name: str) -> bool:
        return isinstance(self.values.get(name), Spec)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor argument; TypeError when it is absent."""
        value = self.values[name]
        if not isinstance(value, Spec):
            raise TypeError(f"argument {name!r} of {self.target} is {value!r}, not a tensor")
        return value.shape

    def specs(self, name: str) -> list[Spec]:
        """The tensors of a list argument."""
        return [entry for entry in self.values[name] if isinstance(entry, Spec)]

    @property
    def out(self) -> Spec:
        """The only, or the first, result."""
        first = self.outputs[0]
        if first is None:
            raise TypeError(f"{self.target} does not return a tensor")
        return first

    def dim(self, name: str, rank: int) -> int:
        """A dim argument, counted from the front."""
        return int(self.values[name]) % max(rank, 1)

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """A list-of-dims argument counted from the front; None and, as reductions mean it, the empty list stand for all dims."""
        value = self.values[name]
        if value is None or value == ():
            return tuple(range(rank))
        if isinstance(value, int):
            value = (value,)
        return tuple([int(dim) % max(rank, 1) for dim in value])
