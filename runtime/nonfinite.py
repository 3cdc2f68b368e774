"""Where a loss that is not finite comes from: the forward of the step once more, looking at every value on the way.

An infinite value may be meant (a mask of -inf), a NaN never is: the first NaN is told, and the first infinite value only where there is no NaN. First
is what no other comes from: by micro-batch, then by block, whatever the order in which stages play them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.player import Player
from partitioner.runtime.program import Function, Instruction, Program, Ref
from partitioner.runtime.wire import guarded

_PLAYED = ("PROLOGUE", "REFRESH", "GATHER", "FREE", "FORWARD", "DROP", "SEND", "RECV")
_OUTSIDE = ("parameter", "buffer", "input", "constant")


class _Machine(Protocol):
    """What is asked of the machine that ran the step."""

    def begin(self, instruction: Instruction) -> None: ...

    def read(self, ref: Ref, number: int, mb: int | None) -> Any: ...

    def forward(self, function: Function, arguments: list[Any], rows: int) -> list[Tensor]: ...


class _Inspector:
    """The machine, with every value that it reads or computes looked at. `first`: kind ("nan", "infinite") -> (micro-batch, block), what it is."""

    def __init__(self, program: Program, machine: _Machine) -> None:
        self._program, self._machine = program, machine
        self._instruction: Instruction | None = None
        self.first: dict[str, tuple[tuple[int, int], str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def begin(self, instruction: Instruction) -> None:
        self._instruction = instruction
        self._machine.begin(instruction)

    def read(self, ref: Ref, number: int, mb: int | None) -> Any:
        value = self._machine.read(ref, number, mb)
        if ref.kind in _OUTSIDE:
            self._look(value, f"the {ref.kind} {ref.name}")
        return value

    def forward(self, function: Function, arguments: list[Any], rows: int) -> list[Tensor]:
        results = self._machine.forward(function, arguments, rows)
        for value in results[: function.writes]:
            self._look(value, "what it computes from values that are not")
        return results

    def _look(self, value: Any, what: str) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.isfinite().all():
            return
        instruction = self._instruction
        if instruction is None or instruction.block is None:
            return
        kind = "nan" if value.isnan().any() else "infinite"
        at = (-1 if instruction.mb is None else instruction.mb, instruction.block)
        if kind not in self.first or at < self.first[kind][0]:
            label = self._program.call_of[instruction.block].label
            mb = "" if instruction.mb is None else f", micro-batch {instruction.mb}"
            program = self._program
            place = f"rank {program.stage * program.ranks + program.rank}" + (f" (stage {program.stage})" if program.stages > 1 else "")
            self.first[kind] = (at, f"the first value that is {kind} is met in block {label}{mb} on {place}: {what}")


def find_origin(program: Program, machine: _Machine, group: dist.ProcessGroup | None) -> str:
    """The same words on every rank about the first value of any rank that is not finite. Plays the forward once more; changes nothing."""
    inspector = _Inspector(program, machine)
    player: Player[Tensor] = Player(program, inspector)
    for instruction in program.instructions:
        if instruction.op in _PLAYED and not _is_gone(instruction, player):
            player.play((instruction,))
            player.stash.clear()
            player.likes.clear()
    player.finish()
    seen: list[Any] = [inspector.first]
    if group is not None:
        seen *= group.size()
        guarded(lambda: dist.all_gather_object(seen, inspector.first, group=group), group, "where the loss stops being finite")
    for kind in ("nan", "infinite"):
        if found := [first[kind] for first in seen if kind in first]:
            return str(min(found)[1])
    return "what every block computes is finite, their sum is not"


def _is_gone(instruction: Instruction, player: Player[Tensor]) -> bool:
    """Whether a DROP speaks of values that are not there without the backward."""
    if instruction.op != "DROP":
        return False
    names: Sequence[Any] = instruction.drops if instruction.mb is None else [(name, instruction.mb) for name in instruction.drops]
    held: Any = player.prologue if instruction.mb is None else player.values
    return any(name not in held for name in names)
