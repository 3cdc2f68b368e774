"""Einsum by its equation, and the pairs of products that torch makes of it."""

from dataclasses import dataclass

import sympy

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import ZERO, Labels, describe_by, product
from partitioner.passes.rules.registry import rule


@dataclass(frozen=True)
class Equation:
    """Subscripts of every operand and of the result, one name per dim; dims under an ellipsis are called ~0, ~1, … from the left."""

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    sizes: dict[str, int]


def read(call: Call) -> Equation | None:
    """None where the equation does not fit the operands."""
    specs = call.specs("tensors")
    left, arrow, right = str(call["equation"]).replace(" ", "").partition("->")
    subscripts = left.split(",")
    if len(subscripts) != len(specs):
        return None
    hidden = [len(spec.shape) - len(letters.replace("...", "")) for letters, spec in zip(subscripts, specs, strict=True)]
    most = max((count for count, letters in zip(hidden, subscripts, strict=True) if "..." in letters), default=0)

    def spelled(letters: str, count: int) -> tuple[str, ...]:
        before, dots, after = letters.partition("...")
        return (*before, *([f"~{position}" for position in range(most - count, most)] if dots else ()), *after)

    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    operands = tuple(spelled(letters, count) for letters, count in zip(subscripts, hidden, strict=True))
    sizes: dict[str, int] = {}
    for names, spec in zip(operands, specs, strict=True):
        if len(names) != len(spec.shape):
            return None
        for name, size in zip(names, spec.shape, strict=True):
            sizes[name] = sizes.get(name, 1) if size == 1 else size
    return Equation(operands, spelled(right, most), sizes)


def _labels(equation: Equation) -> tuple[Labels, dict[str, Dim]]:
    """A subscript repeated within one operand reads a diagonal: it is whole."""
    labels = Labels()
    repeated = {name for names in equation.operands for name in names if names.count(name) > 1}
    return labels, {name: labels.new(size, whole=name in repeated) for name, size in equation.sizes.items()}


def steps(call: Call) -> list[sympy.Expr]:
    """FLOPs of the products: operands are joined two at a time from the left, each pair by one bmm; a label that only one of the pair
    has and nothing later needs is summed before it."""
    equation = read(call)
    if equation is None:
        return []
    _, made = _labels(equation)
    rest = [set(names) for names in equation.operands]
    joined, products = rest[0], []
    for position in range(1, len(rest)):
        later = set(equation.result).union(*rest[position + 1 :])
        live = {name for name in joined | rest[position] if name in later or name in joined & rest[position]}
        products.append(product(2, *[made[name] for name in live]))
        joined = live & later
    return products


@rule("einsum")
def einsum(call: Call) -> OpDims | None:
    equation = read(call)
    if equation is None:
        return None
    labels, made = _labels(equation)
    listed = [
        [() if size == 1 else made[name] for name, size in zip(names, spec.shape, strict=True)]
        for names, spec in zip(equation.operands, call.specs("tensors"), strict=True)
    ]
    out = [made[name] for name in equation.result]
    return describe_by(call, labels, {}, [out], linear_one=("tensors",), flops=sum(steps(call), ZERO), listed={"tensors": listed})
