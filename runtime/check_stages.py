"""Plays the stages of a pipeline together before any process starts: every message has its other end, in one order, and nobody waits forever.

    stage 0   F0  F1  S(v0)  S(v1) ……… R(v0')          of each stage what it did; at the fault an arrow
    stage 1       R(v0)  -->  R(v2)

The messages from one stage to another are matched one by one in the order of the programs, as the backends match them. Then all programs are
played as the executor plays them, each instruction awaiting what the player awaits (`clock.play`).
"""

from collections.abc import Sequence
from typing import Any

from partitioner.errors import ProgramError
from partitioner.runtime.clock import Asked, Hang, Line, Meeting, Route, Tracer, play, route_of
from partitioner.runtime.player import Player
from partitioner.runtime.program import Function, Half, Instruction, Program, Ref, Slice, Unit, Wire
from partitioner.runtime.steps import STEPS, Steps, unrolled
from partitioner.runtime.text import instruction_text

_SHOWN = 3  # instructions before and after a fault


class _NoValues(Tracer):
    """A machine on which every value is None."""

    def end(self, instruction: Instruction) -> None: ...

    def read(self, ref: Ref, number: int, mb: int | None) -> None: ...

    def forward(self, function: Function, arguments: list[Any], rows: int) -> list[None]:
        arguments.clear()
        return [None] * (function.writes + sum(kind == "own" for kind, _ in function.saved))

    def backward(self, function: Function, arguments: list[Any], rows: int, half: Half) -> list[None]:
        arguments.clear()
        halves = function.halves
        if half == "whole" or halves is None:
            return [None] * len(function.gradients)
        return [None] * (len(halves.parameters) if half == "weight" else len(halves.values) + halves.carried)

    def like(self, value: None) -> None: ...

    def fill(self, like: Any, number: float) -> None: ...

    def add(self, one: None, other: None) -> None: ...

    def accumulate(self, name: str, gradient: None) -> None: ...

    def unit(self, op: str, unit: Unit, last: bool) -> None: ...

    def tie(self, unit: Unit) -> None: ...

    def stash(self, unit: Unit, instruction: Instruction) -> None: ...

    def send(self, value: None, wire: Wire, gradient: bool, instruction: Instruction) -> Asked:
        return Asked(self, self.route(instruction))

    def receive(self, wire: Wire, gradient: bool, rows: int, instruction: Instruction) -> tuple[None, Asked]:
        return None, Asked(self, self.route(instruction))

    def loss(self, values: list[None]) -> None: ...

    def everywhere(self, totals: dict[str, None]) -> dict[str, None]:
        return totals

    def commit(self, changes: list[tuple[str, Ref, None]]) -> None: ...

    def output(self, ref: Ref, cut: Slice, placement: str, values: list[None]) -> None: ...

    def rest(self) -> None: ...


def check_stages(programs: Sequence[Program]) -> None:
    """The programs of one place in all stages, by stage. Raises ProgramError with a picture of the stages and an arrow at the fault."""
    _check_messages(programs)
    try:
        play([_traced(program) for program in programs], overlap=True)
    except Hang as hang:
        lines = {at: _line(programs[at], traced) for at, (traced, _) in hang.stuck.items()}
        waits = "; ".join(f"stage {at} at line {lines[at]} for {_route(what)}" for at, (_, what) in sorted(hang.stuck.items()))
        raise ProgramError(
            f"the stages would wait for each other forever: {waits}; put what is awaited before what waits for it\n" + grid(programs, lines)
        ) from None


def _traced(program: Program) -> list[Line]:
    """What a program awaits, line by line: an asynchronous one's in STEPS steps and the drain, each ended by a line of its own."""
    machine = _NoValues(program)
    if not program.asynchronous:
        player = Player[None](program, machine)
        player.play(program.instructions)
        machine.ended()
        player.finish()
        return machine.lines
    steps = Steps[None](program)
    for step in range(STEPS):
        machine = _NoValues(program, machine if step else None)
        player = steps.player(machine)
        steps.play(player)
        machine.ended()
        steps.end(player)
    steps.drain()
    return machine.lines


def _line(program: Program, traced: int) -> int:
    """The line of the program that stands behind a traced one."""
    if not program.asynchronous:
        return traced
    each = len(program.instructions)
    found = [line for line, _, _ in unrolled(program)]
    for step in range(STEPS):  # behind each step stands the line of its end
        found.insert(step * (each + 1) + each - len(program.owed), each)
    return found[traced]


def _check_messages(programs: Sequence[Program]) -> None:
    ends: dict[tuple[int, int], tuple[list[tuple[Route, int]], list[tuple[Route, int]]]] = {}
    for program in programs:
        for line, first, instruction in unrolled(program):
            if instruction.op not in ("SEND", "RECV", "SEND_GRADIENT", "RECV_GRADIENT"):
                continue
            route = route_of(instruction, program, first)
            if not (0 <= route.source < len(programs) and 0 <= route.target < len(programs)) or route.source == route.target:
                raise ProgramError(
                    f"stage {program.stage}, line {line}: {instruction_text(instruction)} names a stage that is not there, or its own; stages are "
                    f"0 to {len(programs) - 1}\n{grid(programs, {program.stage: line})}"
                )
            ends.setdefault((route.source, route.target), ([], []))[not instruction.op.startswith("SEND")].append((route, line))
    for (source, target), (sent, taken) in sorted(ends.items()):
        for position in range(max(len(sent), len(taken))):
            left = sent[position] if position < len(sent) else None
            right = taken[position] if position < len(taken) else None
            if left is not None and right is not None and left[0] == right[0]:
                continue
            offered = f"sends {_route(left[0])} (line {left[1]})" if left else "sends nothing more"
            asked = f"receives {_route(right[0])} (line {right[1]})" if right else "receives nothing more"
            at = {source: left[1] if left else len(programs[source].instructions), target: right[1] if right else len(programs[target].instructions)}
            raise ProgramError(
                f"message {position} from stage {source} to stage {target}: stage {source} {offered}, but stage {target} {asked}; every SEND needs "
                f"its RECV, in the same order\n{grid(programs, at)}"
            )


def grid(programs: Sequence[Program], at: dict[int, int]) -> str:
    """The stages' instructions side by side in words, around the lines `at`, to which arrows point."""
    shown = []
    for program in programs:
        line = at.get(program.stage)
        if line is None:
            continue
        for number in range(max(0, line - _SHOWN), min(len(program.instructions), line + _SHOWN + 1)):
            shown.append(f"stage {program.stage} {'-->' if number == line else '   '} {number:4d}  {instruction_text(program.instructions[number])}")
        if line >= len(program.instructions):
            shown.append(f"stage {program.stage} --> {line:4d}  (its end)")
    return "\n".join(shown)


def _route(route: Any) -> str:
    if isinstance(route, Meeting):
        return f"the others at {route.text}"
    if not isinstance(route, Route):
        return str(route)
    return f"{'the gradient of ' if route.gradient else ''}{route.name} of micro-batch {route.mb} from stage {route.source} to {route.target}"
