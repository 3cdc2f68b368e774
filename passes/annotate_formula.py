"""Numbers of a graph as formulas in its free sizes, compiled for thousands of candidates at once.

A formula is a sympy expression in the symbols of a `Space`: batch, length, height, … Given sizes are checked against the conditions under which a
capture at those sizes would be the same graph (a position table of fixed length, a factor that must divide): what breaks one is refused, and why.
Whole numbers are computed exactly; arrays as int64 where the results fit, else as float64 (relative error below 1e-15).
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import sympy

from partitioner.errors import SizeError

LARGEST = 2**62  # results up to here are computed in int64, with room for the sums on the way


class FloorDiv(sympy.Function):  # type: ignore[misc]
    """a // b for whole numbers, b > 0."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if b == 1:
            return a
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) // int(b))
        if isinstance(a, FloorDiv):
            return cls(a.args[0], a.args[1] * b)
        whole = [term for term in sympy.Add.make_args(a) if term.as_coeff_Mul()[0] % b == 0] if b.is_Integer else []
        if whole:  # (b x + y) // b is x + y // b
            return sympy.Add(*[term / b for term in whole]) + cls(a - sympy.Add(*whole), b)
        return None


class Least(sympy.Function):  # type: ignore[misc]
    """The smaller of two numbers (sympy.Min would try to order them)."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if a == b:
            return a
        return min(a, b) if a.is_Integer and b.is_Integer else None


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


_FUNCTIONS = {"FloorDiv": operator.floordiv, "Least": _least}


def compiled(names: list[str], expression: Any) -> Callable[..., Any]:
    """An expression, or a list of them, as a function of the named sizes, positionally."""
    made = sympy.lambdify([symbol(name) for name in names], expression, modules=[_FUNCTIONS, "numpy"], cse=True)
    return cast(Callable[..., Any], made)


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a size."""
    return sympy.Symbol(name, integer=True, positive=True)


@dataclass(frozen=True)
class Condition:
    """What sizes must fulfil for the captured graph to stand for them; `why` completes "…, because"."""

    left: sympy.Expr
    relation: Literal["==", "<="]
    right: sympy.Expr
    why: str

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"

    def holds(self, left: Any, right: Any) -> Any:
        return left == right if self.relation == "==" else left <= right


@dataclass(frozen=True)
class Space:
    """The free sizes of a graph.

    symbols: name -> captured size. follows: a size that nothing ties to another, but that was captured equal to it in the same dim of another input:
    where it is not given, it takes the other's value. fixed: names of input dims that cannot change -> (size, why).
    """

    symbols: Mapping[str, int]
    follows: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    @cached_property
    def _check(self) -> Callable[..., Any]:
        return compiled(list(self.symbols), [side for one in self.conditions for side in (one.left, one.right)])

    def sizes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A value for every symbol: those given, checked, the others as captured. Raises SizeError."""
        for name, value in given.items():
            if name in self.fixed:
                size, why = self.fixed[name]
                array = np.asarray(value)
                if np.any(array != size):
                    raise SizeError(f"{name} cannot be {_first(array, array != size)}: it is fixed at {size}, because {why}; leave it out")
            elif name not in self.symbols:
                known = ", ".join(f"{known}={size}" for known, size in self.symbols.items()) or "none"
                raise SizeError(f"no size of the graph is called {name!r}; the sizes that may change are, as captured: {known}")
            else:
                _check_whole(name, value)
        found: dict[str, Any] = {}
        for name, captured in self.symbols.items():
            value = given.get(name)
            found[name] = _plain(value) if value is not None else found.get(self.follows.get(name, ""), captured)
        if given:
            self._refuse(found)
        return found

    def _refuse(self, found: dict[str, Any]) -> None:
        sides = self._check(*found.values())
        for which, condition in enumerate(self.conditions):
            left, right = sides[2 * which], sides[2 * which + 1]
            good = condition.holds(left, right)
            if not np.all(good):
                names = sorted(str(one) for one in (condition.left - condition.right).free_symbols)
                said = ", ".join(f"{name}={_first(np.asarray(found[name]), ~np.asarray(good))}" for name in names)
                captured = ", ".join(f"{name}={self.symbols[name]}" for name in names)
                raise SizeError(
                    f"{said} cannot be computed from this capture: it needs {condition}, because {condition.why}; "
                    f"it was captured at {captured}: stay within that, or capture the model anew at other sizes"
                )


def _check_whole(name: str, value: Any) -> None:
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer) or array.size == 0 or np.any(array < 1):
        raise SizeError(f"{name} is {value!r}, but a size is a whole number of at least 1; give an int or an array of integers")


def _first(values: Any, bad: Any) -> int:
    """The first of the values that is bad."""
    values, bad = np.broadcast_arrays(values, bad)
    return int(values.reshape(-1)[int(np.argmax(bad.reshape(-1)))])


def _plain(value: Any) -> Any:
    """Python's own integers, which never overflow, for single numbers."""
    return int(value) if np.ndim(value) == 0 else np.asarray(value, dtype=np.int64)


@dataclass(frozen=True)
class Formula:
    """One quantity. `formula(batch=64, length=[512, 1024])` computes it; sizes left out are as captured. Raises SizeError."""

    expression: sympy.Expr
    space: Space

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return compiled(list(self.space.symbols), self.expression)

    def __call__(self, **sizes: Any) -> Any:
        """An int for numbers, an array for arrays (which broadcast against each other)."""
        values = self.space.sizes(sizes)
        arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
        if not arrays:
            return int(self._function(*values.values()))
        largest = int(self._function(*[int(value.max()) if isinstance(value, np.ndarray) else value for value in values.values()]))
        if abs(largest) >= LARGEST:
            values = {name: value.astype(np.float64) if isinstance(value, np.ndarray) else value for name, value in values.items()}
        shape = np.broadcast_shapes(*[array.shape for array in arrays])
        return np.broadcast_to(np.asarray(self._function(*values.values())), shape)

    @property
    def captured(self) -> int:
        """The value at the captured sizes."""
        return self()  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return str(sympy.factor_terms(self.expression))
