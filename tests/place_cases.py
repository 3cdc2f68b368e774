"""Small losses of a batch, each written to break the cutting of the batch, captured and placed."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from torch import Tensor, fx

from partitioner.passes.batch import Batch
from partitioner.passes.place import Placed
from tests.cutting import CASES, F64, INPUTS, B, D, Given, T, beside, layouts, losses, ops, rows
from tests.lockstep import Captured, captured

__all__ = ["CASES", "F64", "INPUTS", "B", "D", "Given", "T", "nodes", "placed_of", "prepared"]
FAMILIES = (losses, layouts, rows, beside, ops)


@cache
def prepared(name: str) -> tuple[Captured, Batch | None, Placed]:
    """A case, captured and placed once."""
    given = captured(*CASES[name].call())
    batch = given.infer()
    return given, batch, given.place(batch)


def placed_of(function: Callable[..., Any], *inputs: Tensor, mode: Literal["loss", "forward"] = "loss") -> tuple[Captured, Batch, Placed]:
    """A function of (p, *inputs), which must have a batch."""
    made = captured(Given(function), inputs, mode=mode)
    batch = made.infer()
    assert batch is not None
    return made, batch, made.place(batch)


def nodes(placed: Placed, target: Any) -> list[fx.Node]:
    return [node for node in placed.graph.module.graph.nodes if node.target is target]
