"""Tables from ops to rules and to decompositions, by name.

"linear" is every overload of aten.linear, "max.dim" one overload, "namespace::op" an op that is not ATen's. Names may be listed in one string.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch._ops import OpOverload

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.language import apply, parse

Rule = Callable[[Call], OpDims | None]
Decomposer = Callable[[Call], Callable[..., Any] | None]

RULES: dict[str, Rule] = {}
DECOMPOSERS: dict[str, Decomposer] = {}


def words(text: str) -> list[str]:
    """The names in a list that is written as one string."""
    return text.split()


def _full(names: Iterable[str]) -> list[str]:
    return [name if "::" in name else f"aten::{name}" for listed in names for name in words(listed)]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a Python rule for ops."""

    def register(function: Rule) -> Rule:
        for name in _full(names):
            RULES[name] = function
        return function

    return register


def text(names: str, pattern: str, linear: Iterable[str] = (), linear_one: Iterable[str] = (), flops: str | None = None) -> None:
    """Register a text rule for the ops named in a space-separated list."""
    parse(pattern)
    linear, linear_one = tuple(linear), tuple(linear_one)
    for name in _full((names,)):
        RULES[name] = lambda call: apply(call, pattern, linear, linear_one, flops)


def decomposer(*names: str) -> Callable[[Decomposer], Decomposer]:
    """Register a function that writes ops by finer ones."""

    def register(function: Decomposer) -> Decomposer:
        for name in _full(names):
            DECOMPOSERS[name] = function
        return function

    return register


def find(table: dict[str, Any], target: OpOverload) -> Any:
    """The entry of an overload: its own, else that of all overloads, else None."""
    name = str(target._schema.name)
    overload = target._overloadname
    found = table.get(f"{name}.{overload}")
    return table.get(name) if found is None else found
