"""What a rank tells the others about itself, and how it looks from there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.runtime.program import Instruction
from partitioner.runtime.text import instruction_text


class Place:
    """Where the main thread of this rank stands: in which play of a program, at which of its instructions; without one, in the user's code."""

    __slots__ = ("call", "instruction", "line")

    def __init__(self) -> None:
        self.call = self.line = 0
        self.instruction: Instruction | None = None

    def enter(self) -> None:
        self.call, self.line = self.call + 1, 0

    def leave(self) -> None:
        self.instruction = None

    def text(self) -> str:
        instruction = self.instruction  # another thread may change it
        if instruction is not None:
            return f"at {instruction_text(instruction)} of program run {self.call}"
        return f"in its own code after program run {self.call}" if self.call else "before its first step"


@dataclass(frozen=True)
class Beat:
    """What a rank wrote last. `left`: why it takes no further part; `follows`: because others are missing; `blames`: which, (rank, in words)."""

    number: int
    call: int
    line: int
    text: str
    left: str
    follows: bool
    blames: list[tuple[int, str]]

    @classmethod
    def of(cls, number: int, place: Place, left: str, follows: bool, blames: Sequence[tuple[int, str]]) -> "Beat":
        return cls(number, place.call, place.line, place.text(), left, follows, list(blames))

    @property
    def place(self) -> tuple[int, int]:
        return self.call, self.line

    def write(self) -> str:
        return json.dumps([self.number, self.call, self.line, self.text, self.left, self.follows, self.blames])

    @classmethod
    def read(cls, data: bytes) -> "Beat":
        number, call, line, text, left, follows, blames = json.loads(data)
        return cls(number, call, line, text, left, follows, [(rank, why) for rank, why in blames])


@dataclass
class Sight:
    """A peer as seen from here: its last beat, when that changed, and when its place changed (seconds of the monotonic clock)."""

    beat: Beat
    changed: float
    moved: float

    def update(self, beat: Beat, now: float) -> None:
        if beat.number != self.beat.number:
            self.changed = now
        if (beat.place, beat.text) != (self.beat.place, self.beat.text):
            self.moved = now
        self.beat = beat
