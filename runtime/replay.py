"""Memory at storage level without tensors: a ledger, storages that give their bytes back when the last reference goes, and functions replayed.

A function's own storages live and die inside it, so between two of its argument drops only two numbers matter: how high memory rises and
what it ends at. `compile_replay` reduces the events to those; playing a function then costs its arguments, not its ops.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from partitioner.runtime.program import Replay

Kind = Literal["parameters", "optimizer state", "inputs, buffers and constants", "gathered parameters", "gradients", "saved values"]
"""What bytes are held for. The rest are temporaries: what functions make inside, values between blocks and the gradients of those."""


class Ledger:
    """Bytes that are alive, the most that ever were, and the most since `mark`; by kind (`held`) now and when that most was reached."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.recent = 0
        self.held: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self.recent_held = self.held

    def grow(self, rise: int, net: int) -> None:
        """Memory rises by `rise` bytes and ends `net` bytes above where it was."""
        if self.now + rise > self.recent:
            self.recent = self.now + rise
            self.recent_held = self.held.copy()
            self.peak = max(self.peak, self.recent)
        self.now += net

    def mark(self) -> None:
        self.recent = self.now
        self.recent_held = self.held.copy()


class Storage:
    """A live storage: counted in its ledger as long as something refers to it."""

    __slots__ = ("bytes", "kind", "ledger")

    def __init__(self, ledger: Ledger, count: int, counted: bool = False) -> None:
        self.ledger = ledger
        self.bytes = count
        self.kind: Kind | None = None
        if not counted:
            ledger.grow(count, count)

    def become(self, kind: Kind) -> None:
        """From now on these bytes are held for this."""
        if self.kind is not None:
            self.ledger.held[self.kind] -= self.bytes
        self.kind = kind
        self.ledger.held[kind] += self.bytes

    def __del__(self) -> None:
        self.ledger.now -= self.bytes
        if self.kind is not None:
            self.ledger.held[self.kind] -= self.bytes


@dataclass(frozen=True)
class Compiled:
    """A replay at given rows. steps: (rise, net, argument to give up after it or -1); results: (argument or -1, own storage, bytes)."""

    steps: tuple[tuple[int, int, int], ...]
    results: tuple[tuple[int, int, int], ...]

    def play(self, ledger: Ledger, arguments: list[Any]) -> list[Storage]:
        """Move the ledger as the function would; takes the arguments boxed and returns the storages of the results."""
        held = list(arguments)
        arguments.clear()
        passed = {argument: held[argument] for argument, _, _ in self.results if argument >= 0}
        for rise, net, argument in self.steps:
            ledger.grow(rise, net)
            if argument >= 0:
                held[argument] = None
        made: dict[int, Storage] = {}
        results: list[Storage] = []
        for argument, own, count in self.results:
            if argument >= 0:
                given = passed[argument]
                # Parameters and the like are counted elsewhere; a result that lies in one weighs nothing of its own.
                results.append(given if isinstance(given, Storage) else Storage(ledger, 0))
                continue
            if own not in made:
                made[own] = Storage(ledger, count, counted=True)
            results.append(made[own])
        return results


def compile_replay(replay: Replay, rows: int) -> Compiled:
    """The replay with its bytes at `rows` rows; own storages that nothing drops and no result names go when the function returns."""
    steps: list[tuple[int, int, int]] = []
    alive: dict[int, int] = {}
    rise = net = 0
    for event in replay.events:
        if event.make:
            alive[event.storage] = event.fixed + event.per_row * rows
            net += alive[event.storage]
            rise = max(rise, net)
        elif event.storage >= replay.arguments:
            net -= alive.pop(event.storage)
        else:
            steps.append((rise, net, event.storage))
            rise = net = 0
    results = tuple((s, -1, 0) if s < replay.arguments else (-1, s, alive[s]) for s in replay.results)
    net -= sum(count for storage, count in alive.items() if storage not in replay.results)
    steps.append((rise, net, -1))
    return Compiled(tuple(steps), results)
