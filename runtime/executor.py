"""Runs a rank program on tensors: the `Machine` of the player whose values are torch tensors.

Everything runs under no_grad; gradients come from BACKWARD instructions alone. Communication is issued where it stands in the program and
awaited by whoever needs it (`UnitStore.whole`, `UnitStore.finish`, the end of the step for the loss).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partitioner.errors import NonFiniteError, ProgramError
from partitioner.runtime.beat import Place
from partitioner.runtime.inputs import join, narrow
from partitioner.runtime.nonfinite import find_origin
from partitioner.runtime.pipe import Pipe
from partitioner.runtime.player import Message, Player
from partitioner.runtime.program import Function, Half, Instruction, Program, Ref, Slice, Unit, Wire
from partitioner.runtime.recorder import Recorder, Recording
from partitioner.runtime.watch import Playing
from partitioner.runtime.wire import Handle, all_reduce, guarded

EAGER_KEY = -1
_ODD = 0x9E3779B97F4A7C15


def mix(*numbers: int) -> int:
    """One 62-bit number from several (a multiply-xorshift hash); never EAGER_KEY."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & 0xFFFFFFFFFFFFFFFF)) * _ODD + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state >> 2


class Store(Protocol):
    """What a program asks of the parameters (`parameters.UnitStore`). batch: whose gradients, where several batches are under way."""

    def whole(self, name: str) -> Tensor: ...

    def refresh(self, unit: Unit) -> None: ...

    def gather(self, unit: Unit) -> None: ...

    def free(self, unit: Unit) -> None: ...

    def accumulate(self, name: str, gradient: Tensor, batch: int = 0) -> None: ...

    def reduce(self, unit: Unit, last: bool, batch: int = 0) -> None: ...

    def tie(self, unit: Unit, batch: int = 0) -> None: ...

    def finish(self, batch: int = 0) -> None: ...


class TensorMachine:
    """The player's machine on tensors. `seed` is this step's random seed, the same on every rank; None: nothing draws by key.

    own_rows: the leaves hold this rank's rows alone, not the global batch. group: the ranks of this stage; pipe: this stage among the others.
    batch: its number, where several are under way.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        store: Store,
        leaves: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        seed: int | None,
        place: Place,
        own_rows: bool = False,
        pipe: Pipe | None = None,
        batch: int = 0,
    ) -> None:
        self.program = program
        self.pipe = pipe
        self.batch = batch
        self.stashed: dict[str, Tensor] = {}
        self.module = module
        self.store = store
        self.leaves = leaves
        self.group = group
        self.seed = seed
        self.place = place
        own_rows = own_rows and program.total is not None
        self.first, self.held = (program.whole_start, program.whole_rows) if own_rows else (0, program.total)  # rows of the leaves
        self.cuts = {cut.name: cut for cut in program.inputs}
        self.total_loss: Tensor | None = None
        self._loss_handle: Handle | None = None
        self.recorder: Recorder | None = None

    def begin(self, instruction: Instruction) -> None:
        self.place.line += 1
        self.place.instruction = instruction
        if self.recorder is not None:
            self.recorder.begin(instruction)

    def end(self, instruction: Instruction) -> None:
        if self.recorder is not None:
            self.recorder.end()

    def read(self, ref: Ref, number: int, mb: int | None) -> Any:
        program = self.program
        match ref.kind:
            case "parameter":
                return self.stashed[ref.name] if ref.name in self.stashed else self.store.whole(ref.name)
            case "buffer":
                return self.module.get_buffer(ref.name)
            case "constant":
                return program.constants[ref.name]
            case "input":
                start, rows = (program.whole_start, program.whole_rows) if mb is None else (program.starts[mb], program.rows[mb])
                return narrow(self.leaves[ref.name], self.cuts[ref.name], start - self.first, rows, self.held)
            case "scalar":
                return self._scalar(ref.name, number, mb)
        raise ProgramError(f"a block reads {ref.name!r} of kind {ref.kind!r}, which no rank can provide")

    def _scalar(self, name: str, number: int, mb: int | None) -> int | float:
        program = self.program
        match name:
            case "rows":
                return program.whole_rows if mb is None else program.rows[mb]
            case "start":
                return program.whole_start if mb is None else program.starts[mb]
            case "part":
                return 1.0 if mb is None else program.parts[mb]
            case "share":
                return program.share * len(program.rows) if mb is None else program.share
            case "key_local":
                return EAGER_KEY if self.seed is None else mix(self.seed, number, 0 if mb is None else mb + 1, program.rank + 1)
            case "key_shared":
                return EAGER_KEY if self.seed is None else mix(self.seed, number, 0, 0)
        raise ProgramError(f"a block reads the scalar {name!r}; known are rows, start, share, part, key_local, key_shared")

    def forward(self, function: Function, arguments: list[Any], rows: int) -> list[Tensor]:
        if self.recorder is not None:
            self.recorder.run()
        return list(function.forward(arguments))

    def backward(self, function: Function, arguments: list[Any], rows: int, half: Half) -> list[Tensor]:
        run = function.backward_of(half)
        if run is None:
            raise ProgramError(f"function {function.name} has no backward ({half})")
        if self.recorder is not None:
            self.recorder.run()
        return list(run(arguments))

    def like(self, value: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
        return value.shape, value.dtype, value.device

    def fill(self, like: Any, number: float) -> Tensor:
        shape, dtype, device = like
        return torch.full(shape, number, dtype=dtype, device=device)

    def add(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def accumulate(self, name: str, gradient: Tensor) -> None:
        self.store.accumulate(name, gradient, self.batch)

    def unit(self, op: str, unit: Unit, last: bool) -> None:
        match op:
            case "REFRESH":
                self.store.refresh(unit)
            case "GATHER":
                self.store.gather(unit)
            case "FREE":
                self.store.free(unit)
            case _:
                self.store.reduce(unit, last, self.batch)

    def tie(self, unit: Unit) -> None:
        self.store.tie(unit, self.batch)

    def stash(self, unit: Unit, instruction: Instruction) -> None:
        for name in self.program.stashed[unit.number]:
            if instruction.op == "STASH":
                self.stashed[name] = self.store.whole(name).clone()
            else:
                del self.stashed[name]

    def send(self, value: Tensor, wire: Wire, gradient: bool, instruction: Instruction) -> Message:
        pipe, stage = self._between(instruction)
        return pipe.send(value, wire, gradient, stage)

    def receive(self, wire: Wire, gradient: bool, rows: int, instruction: Instruction) -> tuple[Tensor, Message]:
        pipe, stage = self._between(instruction)
        return pipe.receive(wire, gradient, rows, stage)

    def _between(self, instruction: Instruction) -> tuple[Pipe, int]:
        if self.pipe is None or instruction.stage is None:
            raise ProgramError(f"{instruction.op} speaks to another stage, but this program runs without a pipeline")
        return self.pipe, instruction.stage

    def loss(self, values: list[Tensor]) -> None:
        self.total_loss = _sum(values) if values else self.blank(self.program.loss or "").zero_()
        everyone = self.group if self.pipe is None else self.pipe.world.group
        if everyone is not None:
            self._loss_handle = all_reduce(self.total_loss, everyone, "the loss")

    def everywhere(self, totals: dict[str, Tensor | None]) -> dict[str, Tensor]:
        found = {name: self.blank(name) if total is None else total for name, total in totals.items()}
        if self.pipe is not None:
            homes = self.program.homes
            for stage in sorted({homes[name] for name in found}):
                self.pipe.share([total for name, total in found.items() if homes[name] == stage], stage)
        return found

    def commit(self, changes: list[tuple[str, Ref, Tensor | None]]) -> None:
        # A buffer may become another buffer's old value: take those aside before anything changes.
        ready = [(name, value.clone() if ref.kind == "buffer" else value) for name, ref, value in changes if value is not None]
        for name, value in ready:
            self.module.get_buffer(name).copy_(value)
        if self.pipe is not None:
            for stage in sorted(set(self.program.homes.values())):
                made = [name for name, ref, _ in changes if ref.kind == "value" and self.program.homes[ref.name] == stage]
                if made:
                    self.pipe.share([self.module.get_buffer(name) for name in made], stage)

    def output(self, ref: Ref, cut: Slice, placement: str, values: list[Tensor]) -> Any:
        program = self.program
        match ref.kind:
            case "literal":
                return program.literals[ref.name]
            case "input":
                return self.leaves[ref.name]
            case "value" | "prologue":
                rows = (program.total or 0) if placement == "shard" else 0
                joined = self._joined(ref, cut, placement, values) if values else self.blank(ref.name, rows)
                if self.pipe is not None and ref.kind == "value":
                    joined = joined.contiguous()
                    self.pipe.share([joined], program.homes[ref.name])
                return joined
            case _:
                return self.read(ref, -1, 0).clone()

    def blank(self, name: str, rows: int = 0) -> Tensor:
        """What a value that another stage computes comes into, at so many rows."""
        wire = self.program.wires[name]
        return torch.empty(wire.shape(rows), dtype=wire.dtype, device=self.pipe.world.device if self.pipe else None)

    def _joined(self, ref: Ref, cut: Slice, placement: str, values: list[Tensor]) -> Tensor:
        program = self.program
        if placement == "shard" and program.total is not None:
            rows = program.rows if ref.kind == "value" else (program.whole_rows,)
            if len(values) == program.ranks == 1:
                return values[0].clone() if program.keeps else values[0]
            return join(values, cut, rows, program.total, program.ranks, self.group)
        if placement == "partial":
            total = _sum(values)
            if self.group is not None:
                all_reduce(total, self.group, f"output {cut.name}").wait()
            return total
        # A saved value may be the same tensor: what the user does to the output must not reach backward.
        return values[-1].clone() if program.keeps else values[-1]

    def rest(self) -> None:
        self.leaves = {path: leaf for path, leaf in self.leaves.items() if ("input", path) in self.program.owed_reads}

    def finish(self) -> None:
        self.store.finish(self.batch)
        if self._loss_handle is not None:
            self._loss_handle.wait()
            self._loss_handle = None


def _sum(values: list[Tensor]) -> Tensor:
    """A new contiguous tensor: a value may be saved for backward, so it is not summed into."""
    total = values[0].clone(memory_format=torch.contiguous_format)
    for value in values[1:]:
        total.add_(value)
    return total


class Run:
    """One forward whose backward may still come. `outputs`: one per leaf of the user's output."""

    def __init__(self, player: Player[Tensor], playing: Playing) -> None:
        self._playing = playing
        self._player: Player[Tensor] | None = player
        self.program = player.program
        self.outputs: list[Any] = player.outputs
        if not self.program.keeps:
            self.close()

    def close(self) -> None:
        """Forget the saved values."""
        self._player = None

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Play `after` with the gradients of the outputs (None where none came); parameter gradients are in `.grad` afterwards.

        Gradients come back replicated: a sharded output's is sliced, a Partial's passed as it is, a replicated one's multiplied by
        `share`, so that over ranks and micro-batches each is counted once.
        """
        player, program = self._player, self.program
        if player is None:
            raise RuntimeError("backward ran through this output already and its saved values are gone; call the model again before another")
        self.close()
        with torch.no_grad(), self._playing():
            for (ref, cut), placement, gradient in zip(program.outputs, program.output_placements, gradients, strict=True):
                if gradient is None or ref.kind != "value" or ref.name not in program.differentiable:
                    continue
                for mb, (start, rows) in enumerate(zip(program.starts, program.rows, strict=True)):
                    if placement == "shard":
                        piece = narrow(gradient, cut, start, rows, program.total).contiguous()
                    elif placement == "partial":
                        piece = gradient.contiguous()
                    else:
                        piece = gradient.contiguous() * program.share
                    player.arrive(ref.name, mb, piece)
            player.play(program.after)
            player.finish()


class Executor:
    """Runs one program again and again. `module` holds the buffers, `store` the parameters.

    group: the ranks of this stage, None for one; pipe: this stage among the others, None without a pipeline.
    """

    def __init__(
        self, program: Program, module: nn.Module, store: Store, group: dist.ProcessGroup | None, device: torch.device, pipe: Pipe | None = None
    ) -> None:
        self.program = program
        self.module = module
        self.store = store
        self.group = group
        self.device = device
        self.pipe = pipe
        self.everyone = group if pipe is None else pipe.world.group
        self.playing = Playing(self.everyone)

    def _player(self, leaves: Mapping[str, Any], own_rows: bool = False) -> tuple[Player[Tensor], TensorMachine]:
        machine = self._machine(leaves, own_rows)
        return Player[Tensor](self.program, machine), machine

    def _machine(self, leaves: Mapping[str, Any], own_rows: bool, batch: int = 0) -> TensorMachine:
        seed = self._seed() if self.program.draws and self.program.keyed else None
        return TensorMachine(self.program, self.module, self.store, leaves, self.group, seed, self.playing.place, own_rows, self.pipe, batch)

    def _seed(self) -> int:
        """This step's seed: drawn from torch's default generator on every rank (their generators stay in step), rank 0's counts."""
        drawn = torch.randint(2**62, (), dtype=torch.int64).to(self.device)
        if self.everyone is not None:
            guarded(lambda: dist.broadcast(drawn, group=self.everyone, group_src=0), self.everyone, "the seed of this step")
        return int(drawn.item())

    def step(self, leaves: Mapping[str, Any], number: int = 0, recording: Recording | None = None, own_rows: bool = False) -> Tensor:
        """Forward and backward of the global batch; returns its loss, the same on every rank; gradients are in `.grad`.

        number: of this step. recording: where the times of its instructions go. own_rows: the leaves hold this rank's even share of rows alone.
        Raises NonFiniteError on every rank together (the summed loss is the same everywhere), PeerError where a peer is gone.
        """
        with torch.no_grad(), self.playing(), ExitStack() as stack:
            player, machine = self._player(leaves, own_rows)
            if recording is not None:
                machine.recorder = recording.recorder = Recorder(self.program, self.device)
                stack.enter_context(machine.recorder.step())
            player.play(self.program.instructions)
            player.finish()
            loss, value = self._total(machine)
        return self._finite(loss, value, number, machine)

    def _total(self, machine: TensorMachine) -> tuple[Tensor, float]:
        """The loss of the batch that a machine ran, and its value."""
        loss = machine.total_loss
        if loss is None:
            raise ProgramError("a step program must contain LOSS; this one has none")
        return loss, loss.item()

    def _finite(self, loss: Tensor, value: float, number: int, machine: TensorMachine) -> Tensor:
        if not math.isfinite(value):
            raise NonFiniteError(self._non_finite(value, number, machine))
        return loss

    def _non_finite(self, value: float, number: int, machine: TensorMachine) -> str:
        with torch.no_grad(), self.playing():
            origin = find_origin(self.program, machine, self.everyone)
        return (
            f"step {number}: the loss of this batch is {value}; {origin}. The parameters are unchanged; .grad holds gradients of this batch and "
            "buffers what its forward left. To go on, call optimizer.zero_grad() and take the next batch. Lower the learning rate, clip gradients, "
            "or look at the inputs"
        )

    def forward(self, leaves: Mapping[str, Any]) -> Run:
        """Forward of the global batch; outputs are whole on every rank."""
        with torch.no_grad(), self.playing():
            player, _ = self._player(leaves)
            player.play(self.program.instructions)
            return Run(player, self.playing)
