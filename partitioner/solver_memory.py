"""The peak of given choices, in exact integers, where it is reached, and of what it is made."""

from dataclasses import dataclass
from typing import Literal

from partitioner.solver_problem import Choices, Problem


@dataclass(frozen=True)
class Breakdown:
    """A peak taken apart. `block` counts over all runs in forward order; -1 where there are no blocks."""

    base_bytes: int
    persistent_bytes: int
    saved_bytes: int
    transient_bytes: int
    block: int
    phase: Literal["forward", "backward"]

    @property
    def peak_bytes(self) -> int:
        return self.base_bytes + self.persistent_bytes + self.saved_bytes + self.transient_bytes

    def where(self) -> str:
        return f"during the {self.phase} of block {self.block}" if self.block >= 0 else "with no block at all"

    def parts(self) -> str:
        return (
            f"{describe_bytes(self.base_bytes)} that no choice changes, {describe_bytes(self.persistent_bytes)} of parameters, gradients and "
            f"optimizer state, {describe_bytes(self.saved_bytes)} saved for backward and {describe_bytes(self.transient_bytes)} of temporaries"
        )


def breakdown(problem: Problem, choices: Choices) -> Breakdown:
    """The largest left side of the memory constraints of `choices` (see solver.py), the first of several."""
    taken = [problem.runs[r].options[o] for r, indices in enumerate(choices) for o in indices]
    persistent = sum(option.persistent_bytes for option in taken)
    worst = Breakdown(problem.base_bytes, persistent, 0, 0, -1, "forward")
    saved = 0
    for block, option in enumerate(taken):
        forward = Breakdown(problem.base_bytes, persistent, saved, option.forward_bytes, block, "forward")
        saved += option.saved_bytes
        backward = Breakdown(problem.base_bytes, persistent, saved, option.backward_bytes, block, "backward")
        for peak in (forward, backward):
            if worst.block < 0 or peak.peak_bytes > worst.peak_bytes:
                worst = peak
    return worst


def describe_bytes(count: int) -> str:
    """12345678 -> '12.35 MB'."""
    if abs(count) < 1000:
        return f"{count} bytes"
    value, symbols = count / 1000, ["kB", "MB", "GB", "TB"]
    while abs(value) >= 999.995 and len(symbols) > 1:
        value, symbols = value / 1000, symbols[1:]
    return f"{value:.2f} {symbols[0]}"
