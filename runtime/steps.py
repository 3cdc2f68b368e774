"""One asynchronous step after the other: PipeDream-2BW (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training").

A synchronous pipeline is empty when its step ends, and fills again in the next. Here every stage goes on with the next batch meanwhile, and runs the
backwards that it still owes to this one between the next one's forwards. What is trained is therefore another rule, the same on every stage:

    step t      .grad is the gradient of batch t-1 at the weights W(t-1) that its forwards had, so  W(t+1) = opt(W(t), grad f(W(t-1), batch t-1))

    stage 0     t: F0 B-2 F1 B-1 F2 B0 F3 B1 | t+1: F0 B-2 F1 …         -1 is the last micro-batch of the batch before; 4 micro-batches, 3 stages
    stage 1     t: F0 B-1 F1 B0  F2 B1 F3 B2 | t+1: F0 B-1 F1 …         STASH at the end of t: W(t) as B-2 and B-1 of t+1 will read it
    stage 2     t: F0 B0  F1 B1  F2 B2 F3 B3 | t+1: F0 B0  F1 …

With as many micro-batches as stages, or more, no backward is later than the next step, so two versions of the weights suffice. The gradients of
a batch are reduced and given out in the step after it, on the last stage as well, and so is its loss, whose sum is under way meanwhile: nobody waits
for it. In the first step there is no batch before, and parameters get no gradient. `Program.owed`, played alone, empties the pipeline.

Each batch has a player and a machine of its own, hence its own inputs, random keys, saved values and gradients; that of the batch before lives on
until its step is over. Micro-batches are numbered on from step to step, so that messages cannot be taken for those of another batch.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Generic, TypeVar

from partitioner.runtime.player import Machine, Player, Sent
from partitioner.runtime.program import Instruction, Program

V = TypeVar("V")
STEPS = 3
"""So many are played to see what every further one does: the first owes nothing, the second is full, and the third begins as the second ended."""


class Steps(Generic[V]):
    """Plays step after step. older: the player of the batch that is under way between steps; None: the pipeline is empty."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.older: Player[V] | None = None
        self._sent: Sent = {}
        self._runs = [(owed, tuple(run)) for owed, run in groupby(program.instructions, key=lambda instruction: instruction.owed)]
        self._steps = 0

    @property
    def first(self) -> int:
        """The number of the next step's first micro-batch."""
        return self._steps * len(self.program.rows)

    def player(self, machine: Machine[V]) -> Player[V]:
        """The player of the next batch."""
        return Player[V](self.program, machine, self.first, self._sent)

    def play(self, newer: Player[V]) -> None:
        """The instructions of a step; those of the batch before, where there is one, by its own player."""
        self._steps += 1
        for owed, run in self._runs:
            player = self.older if owed else newer
            if player is not None:
                player.play(run)

    def end(self, newer: Player[V]) -> Player[V] | None:
        """The batch before is done, this one waits for the next step. Returns the player of the batch before, finished."""
        done, self.older = self.older, newer
        if done is not None:
            done.finish()
        newer.rest()
        return done

    def drain(self) -> Player[V] | None:
        """Run what is owed. Returns the player that did, finished; None: the pipeline was empty."""
        done, self.older = self.older, None
        if done is not None:
            done.play(self.program.owed)
            done.finish()
        return done


def unrolled(program: Program, steps: int = STEPS) -> Iterator[tuple[int, int, Instruction]]:
    """(line, number of its batch's first micro-batch, instruction) of so many steps and the drain after them; of a synchronous program once."""
    count = len(program.rows)
    for step in range(steps if program.asynchronous else 1):
        for line, instruction in enumerate(program.instructions):
            if not instruction.owed:
                yield line, step * count, instruction
            elif step:
                yield line, (step - 1) * count, instruction
    for line, instruction in enumerate(program.instructions) if program.asynchronous else ():
        if instruction.owed:
            yield line, (steps - 1) * count, instruction
