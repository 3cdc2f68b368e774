"""Plays a rank program on a machine. One player, two machines: tensors (executor) and storages (simulator).

What is alive when is decided here, by Python's own references, and nowhere else; so the memory that the simulator counts is the memory that
the executor uses.

    values[(name, mb)]     what FORWARD wrote or RECV received     given up by drops, DROP, LOSS, EPILOGUE, COMMIT, OUTPUT
    prologue[name]         what PROLOGUE wrote                     given up by a DROP without mb
    epilogue[name]         what EPILOGUE wrote                     given up by COMMIT
    stash[(block, mb)]     saved values, in the order of Function.saved; None where the value is fetched again     given up by BACKWARD
    halfway[(block, mb)]   what BACKWARD_INPUT leaves to do                                                       given up by BACKWARD_WEIGHT
    tangents[(name, mb)]   gradients of values, summed as they come                                                given up by BACKWARD
    sent[(name, stage)]    messages under way by number of the micro-batch, awaited where the gradient comes back

A message is awaited where its value is first read. Whoever sends a value to another stage awaits it where the value's gradient comes back, and where
one is sent that is as many micro-batches later as there are stages between; not so where stages have several runs of blocks, for there a stage
may have to run on before the other one reads.

A negative micro-batch counts from the batch's end: of an asynchronous program two players play the instructions, each those of its batch (steps.py).
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from partitioner.errors import ProgramError
from partitioner.runtime.program import Call, Function, Half, Instruction, Program, Ref, Slice, Unit, Wire
from partitioner.runtime.text import instruction_text

V = TypeVar("V")


class Message(Protocol):
    """A value on its way between stages. It holds what it sends or fills until it is awaited."""

    def wait(self) -> None: ...


Sent = dict[tuple[str, int], dict[int, Message]]
"""(value, other stage) -> by number of the micro-batch, what was sent and is not awaited yet."""


class Machine(Protocol[V]):
    """What a player needs done. `mb` None means this rank's whole share of the batch (prologue)."""

    def begin(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None: ...

    def read(self, ref: Ref, number: int, mb: int | None) -> Any:
        """A block argument that no block wrote: parameter, buffer, constant, input or scalar."""

    def forward(self, function: Function, arguments: list[Any], rows: int) -> list[V]: ...

    def backward(self, function: Function, arguments: list[Any], rows: int, half: Half) -> list[V]: ...

    def like(self, value: V) -> Any:
        """What `fill` needs to know of a value that may be gone by then."""

    def fill(self, like: Any, number: float) -> V: ...

    def add(self, one: V, other: V) -> V: ...

    def accumulate(self, name: str, gradient: V) -> None: ...

    def unit(self, op: str, unit: Unit, last: bool) -> None:
        """REFRESH, GATHER, FREE or REDUCE (`last`: of this unit in this step)."""

    def tie(self, unit: Unit) -> None:
        """Sum the reduced gradient of a unit over the stages that hold it."""

    def stash(self, unit: Unit, instruction: Instruction) -> None:
        """STASH or UNSTASH: keep the parameters that `Program.stashed` names as they are now, or no longer."""

    def send(self, value: V, wire: Wire, gradient: bool, instruction: Instruction) -> Message: ...

    def receive(self, wire: Wire, gradient: bool, rows: int, instruction: Instruction) -> tuple[V, Message]: ...

    def loss(self, values: list[V]) -> None:
        """No values: another stage computes them."""

    def everywhere(self, totals: dict[str, V | None]) -> dict[str, V]:
        """The totals on every stage; None where another stage computes the values."""

    def commit(self, changes: list[tuple[str, Ref, V | None]]) -> None:
        """None where another stage computes the new value."""

    def output(self, ref: Ref, cut: Slice, placement: str, values: list[V]) -> Any:
        """No values of a ref to a value: another stage computes them."""

    def rest(self) -> None:
        """The step is over, but not this batch: give up what its owed backwards do not read."""

    def finish(self) -> None: ...


class Player(Generic[V]):
    """One run of a program: `play(program.instructions)`, for a forward program `arrive` and `play(program.after)`, then `finish`.

    Of one asynchronous step after the other: first, the number of this one's first micro-batch; sent, the messages under way of all of them.
    """

    def __init__(self, program: Program, machine: Machine[V], first: int = 0, sent: Sent | None = None) -> None:
        self.program = program
        self.machine = machine
        self.first = first
        self.values: dict[tuple[str, int], V] = {}
        self.prologue: dict[str, V] = {}
        self.epilogue: dict[str, V] = {}
        self.stash: dict[tuple[int, int], list[Any]] = {}
        self.halfway: dict[tuple[int, int], list[Any]] = {}
        self.tangents: dict[tuple[str, int], V] = {}
        self.likes: dict[tuple[str, int], Any] = {}
        self.outputs: list[Any] = []
        self.sent: Sent = {} if sent is None else sent
        self._coming: dict[tuple[str, int], Message] = {}
        self._returning: dict[tuple[str, int], list[tuple[V, Message, int]]] = {}
        self._accumulated: set[int] = set()

    def play(self, instructions: Sequence[Instruction]) -> None:
        """Run the instructions in order. An error keeps its type and gains a note naming rank, instruction and block."""
        last = {instruction.unit: index for index, instruction in enumerate(instructions) if instruction.op == "REDUCE"}
        for index, instruction in enumerate(instructions):
            try:
                self.machine.begin(instruction)
                self._run(instruction, index == last.get(instruction.unit))
                self.machine.end(instruction)
            except Exception as error:
                error.add_note(self.place(instruction))
                raise

    def place(self, instruction: Instruction) -> str:
        """Where an instruction stands, for errors."""
        label = "" if instruction.block is None else f" ({self.program.call_of[instruction.block].label})"
        return f"on {self.program.place}, at {instruction_text(instruction)}{label}"

    def arrive(self, name: str, mb: int, gradient: V) -> None:
        """A gradient of a value from outside the program."""
        self._tangent(name, mb, gradient)

    def finish(self) -> None:
        """Give up whatever no instruction dropped, then let the machine await what is under way."""
        for messages in self.sent.values():
            for number in range(self.first, self.first + len(self.program.rows)):
                if message := messages.pop(number, None):
                    message.wait()
        for held in (self.values, self.prologue, self.epilogue, self.stash, self.halfway, self.tangents, self.likes):
            held.clear()
        self.machine.finish()

    def rest(self) -> None:
        """The step is over and backwards of this batch are left to the next: give up what they do not read."""
        self.prologue = {name: value for name, value in self.prologue.items() if ("prologue", name) in self.program.owed_reads}
        self.machine.rest()

    def _run(self, instruction: Instruction, last: bool) -> None:
        match instruction.op:
            case "FORWARD":
                self._forward(_number(instruction.block), self._mb(instruction), instruction.drops)
            case "BACKWARD":
                self._backward(_number(instruction.block), self._mb(instruction), "whole")
            case "BACKWARD_INPUT":
                self._backward(_number(instruction.block), self._mb(instruction), "input")
            case "BACKWARD_WEIGHT":
                self._backward_weight(_number(instruction.block), self._mb(instruction))
            case "PROLOGUE":
                self._prologue(_number(instruction.block))
            case "DROP":
                for name in instruction.drops:
                    if instruction.mb is None:
                        del self.prologue[name]
                    else:
                        self._take(name, instruction.mb)
            case "REFRESH" | "GATHER" | "FREE":
                self.machine.unit(instruction.op, self.program.unit_numbered[_number(instruction.unit)], last)
            case "REDUCE":
                # Where no gradient arrived (a forward program whose output was not used) there is nothing to sum, on no rank.
                number = _number(instruction.unit)
                if number in self._accumulated:
                    self._accumulated.discard(number)
                    self.machine.unit("REDUCE", self.program.unit_numbered[number], last)
            case "TIE":
                self.machine.tie(self.program.unit_numbered[_number(instruction.unit)])
            case "STASH" | "UNSTASH":
                self.machine.stash(self.program.unit_numbered[_number(instruction.unit)], instruction)
            case "SEND" | "SEND_GRADIENT":
                self._send(instruction, self._mb(instruction))
            case "RECV" | "RECV_GRADIENT":
                self._receive(instruction, self._mb(instruction))
            case "LOSS":
                if self.program.loss is None:
                    raise ProgramError("LOSS in a program that names no loss value")
                here = range(len(self.program.rows)) if self.program.computes(self.program.loss) else ()
                self.machine.loss([self.values.pop((self.program.loss, mb)) for mb in here])
            case "EPILOGUE":
                self._epilogue(_number(instruction.block))
            case "COMMIT":
                self._commit()
            case "OUTPUT":
                self._output()
            case _:
                raise ProgramError(f"{instruction.op} is no instruction that a rank can play")

    def _mb(self, instruction: Instruction) -> int:
        """The micro-batch, counted from this batch's first."""
        mb = _number(instruction.mb)
        return mb + len(self.program.rows) if mb < 0 else mb

    def _read(self, ref: Ref, number: int, mb: int | None) -> Any:
        if ref.kind == "value" and mb is not None:
            self._arrived(ref.name, mb)
            return self.values[ref.name, mb]
        if ref.kind == "prologue":
            return self.prologue[ref.name]
        if ref.kind == "epilogue":
            return self.epilogue[ref.name]
        return self.machine.read(ref, number, mb)

    def _arrived(self, name: str, mb: int) -> None:
        """Await a value that is being received."""
        if message := self._coming.pop((name, mb), None):
            message.wait()

    def _take(self, name: str, mb: int) -> V:
        self._arrived(name, mb)
        return self.values.pop((name, mb))

    def _send(self, instruction: Instruction, mb: int) -> None:
        name, stage = _name(instruction.value), _number(instruction.stage)
        gradient = instruction.op == "SEND_GRADIENT"
        under_way = self.sent.setdefault((name, stage), {})
        while not self.program.chunked and len(under_way) >= abs(stage - self.program.stage):
            under_way.pop(next(iter(under_way))).wait()
        if not gradient:
            self._arrived(name, mb)
        value = self.tangents.pop((name, mb)) if gradient else self.values[name, mb]
        under_way[self.first + mb] = self.machine.send(value, self.program.wires[name], gradient, instruction)

    def _receive(self, instruction: Instruction, mb: int) -> None:
        name, gradient = _name(instruction.value), instruction.op == "RECV_GRADIENT"
        value, message = self.machine.receive(self.program.wires[name], gradient, self.program.rows[mb], instruction)
        if gradient:
            self._returning.setdefault((name, mb), []).append((value, message, _number(instruction.stage)))
        else:
            self.values[name, mb] = value
            self._coming[name, mb] = message

    def _forward(self, block: int, mb: int, drops: tuple[str, ...]) -> None:
        call = self.program.call_of[block]
        function = self.program.functions[call.function]
        arguments = [self._read(ref, block, mb) for ref in call.reads]
        for name in drops:
            self._take(name, mb)
        keeps = self.program.keeps and function.backward is not None
        saved: list[Any] = []
        if keeps:
            saved = [arguments[index] if kind == "read" and call.reads[index].kind == "value" else None for kind, index in function.saved]
        results = self.machine.forward(function, arguments, self.program.rows[mb])
        for name, result in zip(call.writes, results[: function.writes], strict=True):
            self.values[name, mb] = result
        if keeps:
            for position, (kind, index) in enumerate(function.saved):
                if kind == "own":
                    saved[position] = results[function.writes + index]
            self.stash[block, mb] = saved
            for index in function.tangents:
                self.likes[call.writes[index], mb] = self.machine.like(results[index])

    def _backward(self, block: int, mb: int, half: Half) -> None:
        call = self.program.call_of[block]
        function = self.program.functions[call.function]
        arguments = self.stash.pop((block, mb))
        names = [call.writes[index] for index in function.tangents]
        for name in names:
            self._collect(name, mb)
        if self.program.loss not in names and not any((name, mb) in self.tangents for name in names):
            return  # nothing behind this block was used: its parameters keep the gradient they have, None included
        for position, (kind, index) in enumerate(function.saved):
            if kind == "read" and call.reads[index].kind != "value":
                arguments[position] = self._read(call.reads[index], block, mb)
        for name in names:
            arguments.append(self._take_tangent(name, mb))
        gradients = function.gradients
        if half == "input" and function.halves is not None:
            gradients = function.halves.values
            fetched = {at for at, (kind, index) in enumerate(function.saved) if kind == "read" and call.reads[index].kind != "value"}
            rest = [None if at in fetched else arguments[at] for at in function.halves.handed]
        results = self.machine.backward(function, arguments, self.program.rows[mb], half)
        if half == "input" and function.halves is not None and function.halves.weight is not None:
            self.halfway[block, mb] = rest + results[len(gradients) :]
            del results[len(gradients) :]
        self._give(call, gradients, results, mb)

    def _backward_weight(self, block: int, mb: int) -> None:
        call = self.program.call_of[block]
        function = self.program.functions[call.function]
        arguments = self.halfway.pop((block, mb), None)
        if arguments is None or function.halves is None:
            return  # its other half had nothing to do
        for position, at in enumerate(function.halves.handed):
            if at < len(function.saved):
                kind, index = function.saved[at]
                if kind == "read" and call.reads[index].kind != "value":
                    arguments[position] = self._read(call.reads[index], block, mb)
        results = self.machine.backward(function, arguments, self.program.rows[mb], "weight")
        self._give(call, function.halves.parameters, results, mb)

    def _give(self, call: Call, gradients: Sequence[int], results: list[V], mb: int) -> None:
        """Hand the gradients of a block's reads on."""
        results.reverse()
        for index in gradients:
            ref = call.reads[index]
            if ref.kind == "parameter":
                self._accumulated.add(self.program.unit_of[ref.name].number)
                self.machine.accumulate(ref.name, results.pop())
            elif ref.kind == "value":
                self._tangent(ref.name, mb, results.pop())
            else:
                results.pop()

    def _tangent(self, name: str, mb: int, gradient: V) -> None:
        if (name, mb) in self.tangents:
            gradient = self.machine.add(self.tangents.pop((name, mb)), gradient)
        self.tangents[name, mb] = gradient

    def _collect(self, name: str, mb: int) -> None:
        """Add the gradients that other stages sent."""
        for gradient, message, stage in self._returning.pop((name, mb), ()):
            message.wait()
            if sent := self.sent.get((name, stage), {}).pop(self.first + mb, None):
                sent.wait()
            self._tangent(name, mb, gradient)

    def _take_tangent(self, name: str, mb: int) -> V:
        like = self.likes.pop((name, mb))
        if name == self.program.loss:
            self._tangent(name, mb, self.machine.fill(like, 1.0))
        if (name, mb) in self.tangents:
            return self.tangents.pop((name, mb))
        return self.machine.fill(like, 0.0)

    def _prologue(self, block: int) -> None:
        call = self.program.call_of[block]
        arguments = [self._read(ref, block, None) for ref in call.reads]
        results = self.machine.forward(self.program.functions[call.function], arguments, self.program.whole_rows)
        for name, result in zip(call.writes, results, strict=True):
            self.prologue[name] = result

    def _epilogue(self, block: int) -> None:
        call = self.program.call_of[block]
        names = dict.fromkeys(ref.name for ref in call.reads if ref.kind == "total")
        totals = self.machine.everywhere({name: self._total(name) if self.program.computes(name) else None for name in names})
        arguments = [totals[ref.name] if ref.kind == "total" else self._read(ref, block, None) for ref in call.reads]
        totals.clear()
        results = self.machine.forward(self.program.functions[call.function], arguments, 0)
        self.epilogue.update(zip(call.writes, results, strict=True))

    def _total(self, name: str) -> V:
        total = self.values.pop((name, 0))
        for mb in range(1, len(self.program.rows)):
            total = self.machine.add(total, self.values.pop((name, mb)))
        return total

    def _commit(self) -> None:
        # All micro-batches read the old buffers; the last one's new values stay. Every new value is read before any buffer changes.
        mb = len(self.program.rows) - 1
        program = self.program
        mine = {ref.name for _, ref in program.buffers if ref.kind == "value" and program.computes(ref.name)}
        changes = [(name, ref, self._read(ref, -1, mb) if ref.kind != "value" or ref.name in mine else None) for name, ref in program.buffers]
        for name in mine:
            del self.values[name, mb]
        self.epilogue.clear()
        self.machine.commit(changes)

    def _output(self) -> None:
        for (ref, cut), placement in zip(self.program.outputs, self.program.output_placements, strict=True):
            values: list[V] = []
            if ref.kind == "value" and self.program.computes(ref.name):
                values = [self.values[ref.name, mb] for mb in range(len(self.program.rows))]
            elif ref.kind == "prologue":
                values = [self.prologue[ref.name]]
            self.outputs.append(self.machine.output(ref, cut, placement, values))
        for name in dict.fromkeys(ref.name for ref, _ in self.program.outputs if ref.kind == "value" and self.program.computes(ref.name)):
            for mb in range(len(self.program.rows)):
                del self.values[name, mb]


def _number(value: int | None) -> int:
    if value is None:
        raise ProgramError("an instruction lacks its block, unit or micro-batch; check(programs) names the line")
    return value


def _name(value: str | None) -> str:
    if value is None:
        raise ProgramError("a message lacks the value that it carries; check(programs) names the line")
    return value
