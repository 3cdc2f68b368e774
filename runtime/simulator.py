"""Plays a rank program without running it: memory to the byte, and from the notes of that play the time of the step.

The same `Player` as the executor's decides what is alive; values are `Storage`s and functions are replayed from their footprints. What an
instruction awaits is noted on the way, and `clock.play` makes times of it, over all stages of a pipeline together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from partitioner.errors import ProgramError
from partitioner.runtime.clock import Asked, Line, Times, Tracer, play
from partitioner.runtime.inputs import narrow_copies
from partitioner.runtime.player import Player
from partitioner.runtime.program import Function, Half, Instruction, Program, Ref, Replay, Slice, Unit, Wire
from partitioner.runtime.replay import Compiled, Kind, Ledger, Storage, compile_replay
from partitioner.runtime.steps import STEPS, Steps

OPTIMIZER = "optimizer.step"
"""The name of the optimizer's step, which is no instruction, in events and memory."""


class Events(Protocol):
    """What a unit's store allocates and frees (`unit_bytes.UnitBytes`). Keys are unique over all units, whose events may drop each other's."""

    def persistent(self) -> int: ...

    def events(self, op: str) -> Sequence[tuple[str, str, int]]: ...

    def following(self) -> "Events":
        """The same unit for the next batch of an asynchronous pipeline."""


class Moment(NamedTuple):
    """Memory around an instruction that was issued at `seconds`: the most bytes while it runs, bytes after it, and what the most is held for."""

    instruction: str
    peak_bytes: int
    after_bytes: int
    seconds: float
    held: dict[Kind, int]

    @property
    def by_kind(self) -> dict[str, int]:
        """The most bytes by kind, temporaries included; they sum to `peak_bytes`."""
        return {**dict[str, int](self.held.items()), "temporaries": self.peak_bytes - sum(self.held.values())}


@dataclass(frozen=True)
class Simulation:
    """What a rank does with its step.

    events: (stream, instruction, start seconds, end seconds) of everything that takes time. memory: a moment for every instruction, for the
    end of the program (FINISH) and for the optimizer's step.
    """

    step_seconds: float
    peak_bytes: int
    events: tuple[tuple[str, str, float, float], ...]
    memory: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment of the highest memory."""
        return max(self.memory, key=lambda moment: moment.peak_bytes)

    @property
    def peak_at(self) -> str:
        """The instruction during which memory is highest."""
        return self.peak.instruction


def storage_bytes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of each tensor's storage, a storage shared by several counted once (the others are 0). Fake and meta tensors will do."""
    seen: set[Any] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        result[name] = 0 if storage._cdata in seen else storage.nbytes()
        seen.add(storage._cdata)
    return result


class StorageMachine(Tracer):
    """The player's machine on storages. memory: (instruction, most bytes, bytes after, most by kind) line by line.

    before: the machine of the batch before, of an asynchronous program: one rank's memory holds both.
    """

    def __init__(
        self, program: Program, bytes_of: Mapping[str, int], unit_bytes: Mapping[int, Events], before: "StorageMachine | None" = None
    ) -> None:
        super().__init__(program, before)
        self.bytes_of = bytes_of
        self.unit_bytes = unit_bytes
        self.cuts = {cut.name: cut for cut in program.inputs}
        self.total_loss: Storage | None = None
        self._pending: set[str] = set()
        self._reduced: list[int] = []
        self._mine: set[str] = set()  # keys of storages that are this batch's
        self._stashed: dict[int, Storage] = {}
        self._leaves: list[Storage] = []  # inputs of this batch, once the next one has come with its own
        if before is None:
            self.ledger = Ledger()
            self.memory: list[tuple[str, int, int, dict[Kind, int]]] = []
            self._held: dict[str, Storage] = {}  # storages of units, by their keys
            self._replays: dict[tuple[str, str, int], Compiled] = {}
        else:
            self.ledger, self.memory, self._held, self._replays = before.ledger, before.memory, before._held, before._replays
            before._another()

    def begin(self, instruction: Instruction) -> None:
        super().begin(instruction)
        self.ledger.mark()

    def end(self, instruction: Instruction) -> None:
        self.note(self.lines[-1].text)

    def ended(self) -> None:
        super().ended()
        self.ledger.mark()

    def note(self, text: str) -> None:
        self.memory.append((text, self.ledger.recent, self.ledger.now, self.ledger.recent_held))

    def moments(self, issued: Sequence[float]) -> tuple[Moment, ...]:
        return tuple(Moment(text, most, after, seconds, held) for (text, most, after, held), seconds in zip(self.memory, issued, strict=True))

    # Memory

    def read(self, ref: Ref, number: int, mb: int | None) -> Storage | None:
        """Persistent storages are counted once at the start, so reading them is free; only a slice that has to be copied is new."""
        if ref.kind == "parameter":
            self.wait(self.program.unit_of[ref.name].number)
        if ref.kind == "input":
            rows = self.program.whole_rows if mb is None else self.program.rows[mb]
            if narrow_copies(self.cuts[ref.name], rows, self.program.total) and self.program.total:
                copied = Storage(self.ledger, self.bytes_of[ref.name] * rows // self.program.total)
                copied.become("inputs, buffers and constants")
                return copied
        return None

    def forward(self, function: Function, arguments: list[Any], rows: int) -> list[Storage]:
        keeps = self.program.keeps
        _keep(arguments[index] for kind, index in function.saved if keeps and kind == "read")
        results = self._compiled(function.name, "forward", function.forward_replay, rows).play(self.ledger, arguments)
        _keep(results[function.writes + index] for kind, index in function.saved if keeps and kind == "own")
        return results

    def backward(self, function: Function, arguments: list[Any], rows: int, half: Half) -> list[Storage]:
        replay = function.replay_of(half)
        if replay is None:
            raise ProgramError(f"function {function.name} has no backward ({half})")
        return self._compiled(function.name, f"backward {half}", replay, rows).play(self.ledger, arguments)

    def _compiled(self, name: str, half: str, replay: Replay, rows: int) -> Compiled:
        key = (name, half, rows)
        if key not in self._replays:
            self._replays[key] = compile_replay(replay, rows)
        return self._replays[key]

    def like(self, value: Storage) -> int:
        return value.bytes

    def fill(self, like: Any, number: float) -> Storage:
        return Storage(self.ledger, like)

    def add(self, one: Storage, other: Storage) -> Storage:
        return Storage(self.ledger, one.bytes)

    def accumulate(self, name: str, gradient: Storage) -> None:
        turn = "next" if name in self._pending else "first"
        self._pending.add(name)
        self._unit_events(self.program.unit_of[name].number, f"ACCUMULATE:{name}:{turn}", gradient)

    def unit(self, op: str, unit: Unit, last: bool) -> None:
        if op != "REDUCE":
            self._unit_events(unit.number, op)
        elif last or unit.shard in ("zero2", "zero3"):
            self._unit_events(unit.number, op)
            self._pending.difference_update(unit.parameters)
            self._reduced.append(unit.number)

    def _unit_events(self, number: int, op: str, given: Storage | None = None) -> None:
        """Follow the store. A first gradient is kept as it was given: its storage changes hands, nothing is allocated."""
        for kind, key, count in self.unit_bytes[number].events(op):
            if kind != "make":
                del self._held[key]
                continue
            self._held[key] = given if given is not None and given.bytes == count else Storage(self.ledger, count)
            self._held[key].become("gathered parameters" if op == "GATHER" else "gradients")
            self._mine.add(key)

    def tie(self, unit: Unit) -> None:
        self._unit_events(unit.number, "TIE")

    def stash(self, unit: Unit, instruction: Instruction) -> None:
        if instruction.op == "UNSTASH":
            del self._stashed[unit.number]
        else:
            self._stashed[unit.number] = Storage(self.ledger, instruction.bytes)
            self._stashed[unit.number].become("parameters")

    def send(self, value: Storage, wire: Wire, gradient: bool, instruction: Instruction) -> Asked:
        return Asked(self, self.route(instruction), value)

    def receive(self, wire: Wire, gradient: bool, rows: int, instruction: Instruction) -> tuple[Storage, Asked]:
        storage = Storage(self.ledger, wire.whole_bytes(rows) if gradient else wire.bytes(rows))
        return storage, Asked(self, self.route(instruction))

    def loss(self, values: list[Storage]) -> None:
        self.total_loss = Storage(self.ledger, values[0].bytes if values else self.program.wires[self.program.loss or ""].whole_bytes(0))

    def everywhere(self, totals: dict[str, Storage | None]) -> dict[str, Storage]:
        program = self.program
        found = {name: Storage(self.ledger, program.wires[name].whole_bytes(0)) if total is None else total for name, total in totals.items()}
        for stage in sorted({program.homes[name] for name in found}) if program.stages > 1 else ():
            Storage(self.ledger, sum(total.bytes for name, total in found.items() if program.homes[name] == stage))
        return found

    def commit(self, changes: list[tuple[str, Ref, Storage | None]]) -> None:
        copies = [Storage(self.ledger, self.bytes_of[ref.name]) for _, ref, _ in changes if ref.kind == "buffer"]
        copies.clear()
        if self.program.stages > 1:
            Storage(self.ledger, sum(self.bytes_of[name] for name, ref, _ in changes if ref.kind == "value"))

    def output(self, ref: Ref, cut: Slice, placement: str, values: list[Storage]) -> Storage | None:
        program = self.program
        if not values:
            here = ref.kind != "value"
            return None if here else Storage(self.ledger, program.wires[ref.name].whole_bytes((program.total or 0) if placement == "shard" else 0))
        mine = sum(value.bytes for value in values)
        if placement == "shard" and program.total and program.whole_rows and len(values) * program.ranks > 1:
            whole = mine * program.total // program.whole_rows
            gathered = Storage(self.ledger, whole)
            return Storage(self.ledger, gathered.bytes)
        return Storage(self.ledger, values[-1].bytes) if program.keeps or placement == "partial" else values[-1]

    def rest(self) -> None: ...

    def finish(self) -> None:
        super().finish()
        for number in dict.fromkeys(self._reduced):
            self._unit_events(number, "FINISH")
        self._leaves.clear()

    def zero_grad(self) -> None:
        """The user drops the gradients of this batch, and its loss."""
        for key in self._mine & self._held.keys():
            del self._held[key]
        self.total_loss = None

    def optimizer(self, lasting: "Lasting") -> None:
        """The optimizer's step, on the gradients that are in place."""
        self.lines.append(Line("compute", OPTIMIZER, lasting.optimizer_seconds))
        self.ledger.mark()
        self.ledger.grow(lasting.optimizer_temporary_bytes, 0)
        self.note(OPTIMIZER)

    def _another(self) -> None:
        """The next batch comes, in storages of its own: what owed backwards read of this one's inputs is held beside them."""
        for kind, name in sorted(self.program.owed_reads):
            if kind == "input":
                self._leaves.append(Storage(self.ledger, self.bytes_of[name]))
                self._leaves[-1].become("inputs, buffers and constants")


def _keep(storages: Iterable[Any]) -> None:
    """Backward will read these; parameters and inputs among them (None, or of a kind of their own) are not held for it."""
    for storage in storages:
        if isinstance(storage, Storage) and storage.kind is None:
            storage.become("saved values")


@dataclass(frozen=True)
class Lasting:
    """What a rank holds and does besides its program.

    bytes_of: storage bytes of every input leaf, buffer and constant (see `storage_bytes`); all count from the start, read or not.
    unit_bytes: per unit number, what its store holds between steps and allocates when (`unit_bytes.UnitBytes.of(…)`, made anew for every play).
    optimizer_state_bytes count throughout, optimizer_temporary_bytes during `optimizer.step`, which comes after the last instruction with
    the gradients in place and takes optimizer_seconds.
    """

    bytes_of: Mapping[str, int]
    unit_bytes: Mapping[int, Events]
    optimizer_state_bytes: int = 0
    optimizer_temporary_bytes: int = 0
    optimizer_seconds: float = 0.0


def simulate(program: Program, lasting: Lasting, *, overlap: bool = True) -> Simulation:
    """Play `program` as if its functions ran; seconds are those of its instructions."""
    (only,) = simulate_together([(program, lasting)], overlap=overlap)
    return only


def simulate_together(stages: Sequence[tuple[Program, Lasting]], *, overlap: bool = True, share: float = 1.0) -> list[Simulation]:
    """Simulate the programs of all stages of a pipeline, which wait for each other's messages. Raises clock.Hang where they would forever.

    share: how much of a core each has while all compute (see `clock.play`).
    """
    machines = [(_played_on if program.asynchronous else _played)(program, lasting) for program, lasting in stages]
    return [
        _steady(machine, times) if machine.program.asynchronous else _timed(machine, lasting, times)
        for machine, (_, lasting), times in zip(machines, stages, play([machine.lines for machine in machines], overlap, share), strict=True)
    ]


def _machine(program: Program, lasting: Lasting) -> StorageMachine:
    """With what is held throughout."""
    machine = StorageMachine(program, lasting.bytes_of, lasting.unit_bytes)
    held: dict[Kind, int] = {
        "parameters": sum(unit.persistent() for unit in lasting.unit_bytes.values()),
        "optimizer state": lasting.optimizer_state_bytes,
        "inputs, buffers and constants": sum(lasting.bytes_of.values()),
    }
    machine.ledger.held.update(held)
    machine.ledger.grow(sum(held.values()), sum(held.values()))
    return machine


def _played(program: Program, lasting: Lasting) -> StorageMachine:
    machine = _machine(program, lasting)
    player = Player[Storage](program, machine)
    player.play(program.instructions)
    if program.after:
        for (ref, _), value in zip(program.outputs, list(player.outputs), strict=True):
            if ref.kind == "value" and ref.name in program.differentiable and value is not None:
                for mb in range(len(program.rows)):
                    player.arrive(ref.name, mb, Storage(machine.ledger, player.likes[ref.name, mb]))
        player.play(program.after)
    machine.ended()
    player.finish()
    machine.note("FINISH")
    return machine


def _played_on(program: Program, lasting: Lasting) -> StorageMachine:
    """One asynchronous step after the other, the optimizer's behind each."""
    machine = _machine(program, lasting)
    before: StorageMachine | None = None
    steps = Steps[Storage](program)
    for step in range(STEPS):
        if step:
            before, units = machine, {number: unit.following() for number, unit in machine.unit_bytes.items()}
            machine = StorageMachine(program, lasting.bytes_of, units, before)
        machine.memory.clear()  # of the last step alone it is told
        player = steps.player(machine)
        steps.play(player)
        machine.ended()
        steps.end(player)
        machine.note("FINISH")
        machine.optimizer(lasting)
        if before is not None:
            before.zero_grad()
    machine.lines.append(Line("compute", "", 0.0))  # so that the clock tells when the next step begins
    return machine


def _steady(machine: StorageMachine, times: Times) -> Simulation:
    """The last of several steps, as every further one is, in seconds from its start."""
    issued = times.issued[-1 - len(machine.memory) :]
    start, end = issued[0], issued[-1]
    memory = machine.moments([seconds - start for seconds in issued[:-1]])
    events = tuple(
        (stream, text, max(begun, start) - start, min(done, end) - start)
        for stream, text, begun, done in times.events
        if done > start and begun < end  # what a step issues for the next runs at the start of each
    )
    return Simulation(end - start, max(moment.peak_bytes for moment in memory), events, memory)


def _timed(machine: StorageMachine, lasting: Lasting, times: Times) -> Simulation:
    memory, end = machine.moments(times.issued), times.end
    if machine.program.mode == "step":
        machine.ledger.mark()
        machine.ledger.grow(lasting.optimizer_temporary_bytes, 0)
        memory = (*memory, Moment(OPTIMIZER, machine.ledger.recent, machine.ledger.now, end, machine.ledger.recent_held))
        if lasting.optimizer_seconds:
            times.events.append(("compute", OPTIMIZER, end, end + lasting.optimizer_seconds))
            end += lasting.optimizer_seconds
    return Simulation(end, machine.ledger.peak, tuple(times.events), memory)
