"""Plays the programs of all ranks together before any process starts: nothing is read that is not there, and no order can hang.

| what | rule |
|---|---|
| values | written once, before they are read, not read after they were given up; every micro-batch in range |
| zero3 units | gathered before use, not gathered twice, freed before the program (of a forward program: the forward) ends |
| zero1 and zero2 units | refreshed before their first use |
| saved values | every FORWARD that saves for a backward has exactly one BACKWARD, after those of the blocks that read what it wrote |
| gradients | reduced after they were accumulated (zero2, zero3: each micro-batch's before the next one's), never without any |
| collectives | the same ones in the same order with the same bytes on every rank of the axis: then none can wait for another forever |
| rows | the ranks' rows are the batch, in rank order, each row once |
| stages | every SEND has its RECV, messages from one stage to another in one order; the stages come to their end together (check_stages.py) |
| steps | of an asynchronous program: what a step leaves is what the next one and the drain find; parameters are stashed that owed backwards read |

An asynchronous program is walked as it is played: a first step with nothing owed, another one, and what that owes.
"""

from collections.abc import Callable, Sequence

from partitioner.errors import ProgramError
from partitioner.runtime.check_ranks import check_ranks, excerpt
from partitioner.runtime.program import OPS, Call, Function, Instruction, Program, Ref
from partitioner.runtime.text import FIELDS


def check(programs: Sequence[Program]) -> None:
    """Raise ProgramError, with the line and an arrow at the fault, unless the programs of an axis can be played to their end together."""
    if not programs:
        raise ProgramError("there is no program to check; lower one per rank first")
    for program in programs:
        _Walk(program).run()
    check_ranks(programs)


class _Walk:
    """One rank's program, instruction by instruction."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines = (*program.instructions, *program.after)
        self.index = 0
        self.values: set[tuple[str, int]] = set()
        self.gone: dict[tuple[str, int], int] = {}
        self.prologue: set[str] = set()  # and what the epilogue wrote
        self.whole: set[int] = set()
        self.saved: dict[tuple[int, int], int] = {}
        self.halfway: dict[tuple[int, int], int] = {}
        self.done: set[tuple[int, int]] = set()
        self.accumulated: dict[tuple[int, bool], tuple[int, int]] = {}  # (unit, whether of the batch before)
        self.stashed: dict[int, bool] = {}  # unit -> whether of the batch before
        self.readers = self._gradient_readers()
        self.seen: set[str] = set()

    def _gradient_readers(self) -> dict[str, list[int]]:
        """Value -> blocks whose backward returns a gradient of it."""
        readers: dict[str, list[int]] = {}
        for call in self.program.calls:
            function = self.program.functions.get(call.function)
            if function is None or function.backward is None:
                continue
            for index in function.gradients:
                if index < len(call.reads) and call.reads[index].kind == "value":
                    readers.setdefault(call.reads[index].name, []).append(call.number)
        return readers

    def fail(self, what: str, way: str) -> ProgramError:
        stage = f"stage {self.program.stage}, " if self.program.stages > 1 else ""
        place = (
            f"{stage}rank {self.program.rank}, line {self.index}" if self.index < len(self.lines) else f"{stage}rank {self.program.rank}, at its end"
        )
        return ProgramError(f"{place}: {what}; {way}\n{excerpt(self.lines, min(self.index, len(self.lines) - 1))}")

    def run(self) -> None:
        if self.program.asynchronous:
            for index, instruction in enumerate(self.lines):
                self.index = index
                self._fields(instruction)
            self._walk(lambda instruction: not instruction.owed)
            self._next_step()
            self._walk(lambda instruction: True)
            self._next_step()
            self._walk(lambda instruction: instruction.owed)
        else:
            self._walk(lambda instruction: True)
        if not self.program.after:
            self._between()
        self._end()

    def _walk(self, played: Callable[[Instruction], bool]) -> None:
        for index, instruction in enumerate(self.lines):
            self.index = index
            if self.index == len(self.program.instructions):
                self._between()
            if not played(instruction):
                continue
            self._fields(instruction)
            self.seen.add(instruction.op)
            getattr(self, f"_{instruction.op.lower()}")(instruction)
        self.index = len(self.lines)

    def _next_step(self) -> None:
        """This batch becomes the one before, and the optimizer changes the parameters."""
        count = len(self.program.rows)
        if self.values:
            raise self.fail(f"{min(self.values)[0]} is still held when the step is over", "give it up with its last reader")
        for unit in (unit for unit, owed in self.stashed.items() if owed):
            raise self.fail(f"unit {unit} is still stashed from the step before", f"add UNSTASH unit {unit} mb -1")
        for unit in (unit for unit, owed in self.accumulated if owed):
            raise self.fail(f"unit {unit}'s gradients of the batch before are not summed", f"add REDUCE unit {unit} mb -1")
        self.saved = {(block, mb - count): line for (block, mb), line in self.saved.items()}
        self.accumulated = {(unit, True): (mb - count, line) for (unit, _), (mb, line) in self.accumulated.items()}
        self.stashed = dict.fromkeys(self.stashed, True)
        self.done, self.gone, self.whole, self.prologue = set(), {}, set(), set()

    def _fields(self, instruction: Instruction) -> None:
        if instruction.op not in OPS:
            raise ProgramError(f"rank {self.program.rank}, line {self.index}: {instruction.op!r} is no instruction; known are {', '.join(OPS)}")
        required, optional = FIELDS[instruction.op]
        present = {name for name in ("block", "unit", "mb", "value", "stage") if getattr(instruction, name) is not None}
        if instruction.drops:
            present.add("values" if instruction.op == "DROP" else "drops")
        if instruction.bytes:
            present.add("bytes")
        if wrong := (required - present) | (present - required - optional):
            needs = ", ".join(sorted(required)) or "nothing"
            raise self.fail(f"{instruction.op} lacks or must not have {', '.join(sorted(wrong))}", f"it needs {needs}")
        if instruction.block is not None and instruction.block not in self.program.call_of:
            raise self.fail(f"there is no block {instruction.block}", f"blocks are {', '.join(map(str, self.program.call_of))}")
        if instruction.unit is not None and instruction.unit not in self.program.unit_numbered:
            raise self.fail(f"there is no unit {instruction.unit}", f"units are {', '.join(map(str, self.program.unit_numbered))}")
        count = len(self.program.rows)
        if instruction.mb is not None and not (-count if self.program.asynchronous else 0) <= instruction.mb < count:
            raise self.fail(f"there is no micro-batch {instruction.mb}", f"there are {count}, counted from 0")

    def _call(self, instruction: Instruction) -> tuple[Call, Function]:
        call = self.program.call_of[instruction.block or 0]
        if call.function not in self.program.functions:
            raise self.fail(f"block {call.number} runs function {call.function!r}, which the program does not hold", "add it to Program.functions")
        return call, self.program.functions[call.function]

    def _read(self, ref: Ref, mb: int | None) -> None:
        if mb is not None and mb < 0:
            self._read_late(ref)
        elif ref.kind == "value":
            if mb is None:
                raise self.fail(f"a prologue reads the value {ref.name}, which has micro-batches", "let it read what is there before any FORWARD")
            if (ref.name, mb) in self.gone:
                line = self.gone[ref.name, mb]
                raise self.fail(f"{ref.name} of micro-batch {mb} is read, but line {line} gave it up", "move the drop to the last reader")
            if (ref.name, mb) not in self.values:
                raise self.fail(f"{ref.name} of micro-batch {mb} is read before anything wrote it", "run the block that writes it first")
        elif ref.kind in ("prologue", "epilogue") and ref.name not in self.prologue:
            raise self.fail(f"the {ref.kind} value {ref.name} is read before the {ref.kind.upper()} wrote it", f"put {ref.kind.upper()} first")
        elif ref.kind == "parameter":
            self._parameter(ref.name)
        elif ref.kind == "input" and ref.name not in {cut.name for cut in self.program.inputs}:
            raise self.fail(f"the input {ref.name} is read, but Program.inputs does not say how it is cut", "list it there")
        elif ref.kind == "constant" and ref.name not in self.program.constants:
            raise self.fail(f"the constant {ref.name} is read, but the program does not hold it", "add it to Program.constants")

    def _read_late(self, ref: Ref) -> None:
        """What an owed backward fetches: of its own batch, which keeps its inputs and prologue values, but the parameters have changed."""
        unit = self.program.unit_of.get(ref.name) if ref.kind == "parameter" else None
        if unit is not None and ref.name in self.program.stashed.get(unit.number, ()) and not self.stashed.get(unit.number):
            what = f"an owed backward reads the parameter {ref.name}, but its unit {unit.number} was not stashed, or is no longer"
            raise self.fail(what, f"put STASH unit {unit.number} at the end of the program and UNSTASH behind the last backward that reads it")

    def _parameter(self, name: str) -> None:
        unit = self.program.unit_of.get(name)
        if unit is None:
            raise self.fail(f"the parameter {name} belongs to no unit", "put every parameter in one unit")
        if unit.shard != "none" and unit.number not in self.whole:
            op = "GATHER" if unit.shard == "zero3" else "REFRESH"
            what = f"the parameter {name} is read, but its {unit.shard} unit {unit.number} is not whole here"
            raise self.fail(what, f"put {op} unit {unit.number} before")

    def _give_up(self, names: tuple[str, ...], mb: int) -> None:
        for name in names:
            self._read(Ref("value", name), mb)
            self.values.discard((name, mb))
            self.gone[name, mb] = self.index

    def _forward(self, instruction: Instruction) -> None:
        call, function = self._call(instruction)
        mb = instruction.mb or 0
        if (call.number, mb) in self.done:
            raise self.fail(f"block {call.number} runs on micro-batch {mb} a second time", "run it once")
        self.done.add((call.number, mb))
        for ref in call.reads:
            self._read(ref, mb)
        for name in instruction.drops:
            if Ref("value", name) not in call.reads:
                raise self.fail(f"{name} is dropped by a block that does not read it", f"write DROP values {name} mb {mb}")
        self._give_up(instruction.drops, mb)
        for name in call.writes:
            if (name, mb) in self.values or (name, mb) in self.gone:
                raise self.fail(f"{name} of micro-batch {mb} is written twice", "give every value one writer")
            self.values.add((name, mb))
        if function.backward is not None and self.program.keeps:
            self.saved[call.number, mb] = self.index

    def _backward(self, instruction: Instruction) -> None:
        call, function = self._call(instruction)
        mb = instruction.mb or 0
        if self.saved.pop((call.number, mb), None) is None:
            what = f"nothing is saved for the backward of block {call.number} on micro-batch {mb}"
            raise self.fail(what, "run its FORWARD first and its BACKWARD once")
        for kind, index in function.saved:
            if kind == "read" and call.reads[index].kind != "value":
                self._read(call.reads[index], mb)
        for index in function.tangents:
            for reader in self.readers.get(call.writes[index], ()):
                if (reader, mb) in self.saved:
                    raise self.fail(
                        f"the gradient of {call.writes[index]} is not complete: block {reader} reads it and has its BACKWARD later",
                        f"put BACKWARD block {reader} mb {mb} before",
                    )
        halves = function.halves
        if instruction.op == "BACKWARD_INPUT":
            if halves is None:
                raise self.fail(f"block {call.number} has no backward in halves", f"write BACKWARD block {call.number} mb {mb}")
            if halves.weight is not None:
                self.halfway[call.number, mb] = self.index
            return
        self._gives(call, function.gradients, mb)

    _backward_input = _backward

    def _backward_weight(self, instruction: Instruction) -> None:
        call, function = self._call(instruction)
        mb, halves = instruction.mb or 0, function.halves
        if halves is None or self.halfway.pop((call.number, mb), None) is None:
            what = f"the backward of block {call.number} on micro-batch {mb} is not half done"
            raise self.fail(what, f"put BACKWARD_INPUT block {call.number} mb {mb} before, once")
        for at in halves.handed:
            if at < len(function.saved) and function.saved[at][0] == "read" and call.reads[function.saved[at][1]].kind != "value":
                self._read(call.reads[function.saved[at][1]], mb)
        self._gives(call, halves.parameters, mb)

    def _gives(self, call: Call, gradients: tuple[int, ...], mb: int) -> None:
        """A backward gives gradients of parameters."""
        for index in gradients:
            ref = call.reads[index]
            if ref.kind != "parameter":
                continue
            if ref.name not in self.program.unit_of:
                self._parameter(ref.name)
            unit = self.program.unit_of[ref.name]
            other = self.accumulated.get((unit.number, mb < 0))
            if other is not None and other[0] != mb and unit.shard in ("zero2", "zero3"):
                raise self.fail(
                    f"unit {unit.number} ({unit.shard}) still holds the gradients of micro-batch {other[0]} from line {other[1]}",
                    f"put REDUCE unit {unit.number} mb {other[0]} before",
                )
            self.accumulated[unit.number, mb < 0] = (mb, self.index)

    def _prologue(self, instruction: Instruction) -> None:
        call, _ = self._call(instruction)
        for ref in call.reads:
            self._read(ref, None)
        totals = {ref.name: None for ref in call.reads if ref.kind == "total" and self.program.computes(ref.name)}
        for mb in range(len(self.program.rows)):
            self._give_up(tuple(totals), mb)
        self.prologue.update(call.writes)

    _epilogue = _prologue

    def _drop(self, instruction: Instruction) -> None:
        if instruction.mb is not None:
            self._give_up(instruction.drops, instruction.mb)
            return
        for name in instruction.drops:
            self._read(Ref("prologue", name), None)
            self.prologue.discard(name)

    def _refresh(self, instruction: Instruction) -> None:
        unit = self.program.unit_numbered[instruction.unit or 0]
        if unit.shard not in ("zero1", "zero2"):
            raise self.fail(f"unit {unit.number} is {unit.shard}; only zero1 and zero2 units keep a whole buffer to refresh", "remove the line")
        self.whole.add(unit.number)

    def _gather(self, instruction: Instruction) -> None:
        unit = self.program.unit_numbered[instruction.unit or 0]
        if unit.shard != "zero3":
            raise self.fail(f"unit {unit.number} is {unit.shard}; only zero3 units are gathered", "write REFRESH, or nothing for shard none")
        if unit.number in self.whole:
            raise self.fail(f"unit {unit.number} is gathered already", "remove the line, or FREE it before")
        self.whole.add(unit.number)

    def _free(self, instruction: Instruction) -> None:
        unit = self.program.unit_numbered[instruction.unit or 0]
        if unit.shard != "zero3" or unit.number not in self.whole:
            raise self.fail(f"unit {unit.number} is not gathered here", "FREE follows the last use after a GATHER")
        self.whole.discard(unit.number)

    def _reduce(self, instruction: Instruction) -> None:
        number = instruction.unit or 0
        if (number, instruction.owed) not in self.accumulated:
            raise self.fail(f"unit {number} has no gradient to sum here", "remove the line, or put it after the BACKWARDs of its parameters")
        mb, line = self.accumulated.pop((number, instruction.owed))
        if instruction.mb is not None and instruction.mb != mb:
            raise self.fail(f"the gradients of unit {number} come from micro-batch {mb} (line {line}), not {instruction.mb}", f"write mb {mb}")

    def _tie(self, instruction: Instruction) -> None:
        unit = self.program.unit_numbered[instruction.unit or 0]
        if len(unit.stages) < 2:
            raise self.fail(f"unit {unit.number} is held by this stage alone", "remove the line")
        if (unit.number, instruction.owed) in self.accumulated:
            raise self.fail(f"the gradients of unit {unit.number} are not summed over the ranks yet", f"put REDUCE unit {unit.number} before")

    def _stash(self, instruction: Instruction) -> None:
        unit = self.program.unit_numbered[instruction.unit or 0]
        names = self.program.stashed.get(unit.number, ())
        if not names or unit.number in self.stashed:
            raise self.fail(f"unit {unit.number} has nothing to stash, or is stashed already", "remove the line")
        for name in names:
            self._parameter(name)
        self.stashed[unit.number] = False

    def _unstash(self, instruction: Instruction) -> None:
        if not self.stashed.pop(instruction.unit or 0, False):
            raise self.fail(f"unit {instruction.unit} is not stashed from the step before", "remove the line")

    def _wired(self, instruction: Instruction) -> tuple[str, int]:
        name = instruction.value or ""
        if self.program.stages < 2 or name not in self.program.wires:
            raise self.fail(f"{name} does not cross stages here", "list it in Program.wires, or remove the line")
        return name, instruction.mb or 0

    def _send(self, instruction: Instruction) -> None:
        self._read(Ref("value", self._wired(instruction)[0]), instruction.mb)

    def _recv(self, instruction: Instruction) -> None:
        name, mb = self._wired(instruction)
        if (name, mb) in self.values or (name, mb) in self.gone:
            raise self.fail(f"{name} of micro-batch {mb} is received, but it is or was here already", "receive every value once")
        self.values.add((name, mb))

    def _send_gradient(self, instruction: Instruction) -> None:
        name, mb = self._wired(instruction)
        for reader in self.readers.get(name, ()):
            if (reader, mb) in self.saved:
                raise self.fail(
                    f"the gradient of {name} is not complete: block {reader} reads it and has its BACKWARD later",
                    f"put BACKWARD block {reader} mb {mb} before",
                )

    def _recv_gradient(self, instruction: Instruction) -> None:
        self._wired(instruction)

    def _loss(self, instruction: Instruction) -> None:
        if self.program.loss is None:
            raise self.fail("LOSS stands in a program that names no loss value", "set Program.loss, or remove the line")
        if not self.program.computes(self.program.loss):
            return
        for mb in range(len(self.program.rows)):
            self._give_up((self.program.loss,), mb)

    def _commit(self, instruction: Instruction) -> None:
        mb = len(self.program.rows) - 1
        mine = [ref for _, ref in self.program.buffers if ref.kind != "value" or self.program.computes(ref.name)]
        for ref in mine:
            self._read(ref, mb)
        self._give_up(tuple(dict.fromkeys(ref.name for ref in mine if ref.kind == "value")), mb)

    def _output(self, instruction: Instruction) -> None:
        if self.program.mode != "forward":
            raise self.fail("OUTPUT stands in a step program, which returns its loss alone", "remove the line")
        names = dict.fromkeys(ref.name for ref, _ in self.program.outputs if ref.kind == "value" and self.program.computes(ref.name))
        for ref, _ in self.program.outputs:
            if ref.kind not in ("value", "literal", "input"):
                self._read(ref, 0)
        for mb in range(len(self.program.rows)):
            self._give_up(tuple(names), mb)

    def _between(self) -> None:
        """What a program must have done by the end of its instructions."""
        needed = {"LOSS" if self.program.mode == "step" else "OUTPUT", *(("COMMIT",) if self.program.buffers else ())}
        if missing := needed - self.seen:
            raise self.fail(f"the program has no {' and no '.join(sorted(missing))}", "add it")
        # Between a forward and its backward the user's code runs, other forwards included, whose FREE would take the parameters away.
        for number in self.whole:
            if self.program.mode == "forward" and self.program.unit_numbered[number].shard == "zero3":
                what = f"unit {number} is still gathered when the forward is over"
                raise self.fail(what, f"add FREE unit {number} and gather it again in the backward")

    def _end(self) -> None:
        if self.saved:
            (block, mb), line = next(iter(self.saved.items()))
            what = f"block {block} saved values of micro-batch {mb} at line {line} that no BACKWARD uses"
            raise self.fail(what, f"add BACKWARD block {block} mb {mb}")
        if self.halfway:
            (block, mb), line = next(iter(self.halfway.items()))
            raise self.fail(f"the backward of block {block} on micro-batch {mb} from line {line} is left half done", "add its BACKWARD_WEIGHT")
        if self.accumulated:
            (number, _), (mb, line) = next(iter(self.accumulated.items()))
            raise self.fail(f"the gradients of unit {number} from line {line} are never summed", f"add REDUCE unit {number}")
        for number in self.whole:
            if self.program.unit_numbered[number].shard == "zero3":
                raise self.fail(f"unit {number} is still gathered at the end", f"add FREE unit {number}")
