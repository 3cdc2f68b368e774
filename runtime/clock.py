"""When the instructions of several ranks run, played together: what waits for what, and whether all come to their end.

A `Tracer` notes of every instruction what it awaits, as the player asks for it. `play` then gives every instruction its time:

    compute  ──F0──────F1──┐waits──F2────
    gather   ──G1────G2────┘                with overlap=False all streams are one
    send       └─v0──┐                      a message leaves once it is computed and the stream to that stage is free, and
    stage 1    ──────┴─F0───                arrives once it is asked for; whoever reads it waits for that

Communication waits for the compute issued before it, because a collective reads what that compute wrote; the end of the step waits for all.
A message is a rendezvous: where nobody ever asks for it, whoever awaits it hangs, and `play` says who.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partitioner.errors import ProgramError
from partitioner.runtime.program import Instruction, Program
from partitioner.runtime.text import instruction_text


class Route(NamedTuple):
    """Which message: of which value and micro-batch, between which stages."""

    source: int
    target: int
    name: str
    mb: int
    gradient: bool


@dataclass
class Line:
    """An instruction in time. awaits: units and messages that must be there before it starts; unit: what it brings; message: what it moves."""

    stream: str
    text: str
    seconds: float
    awaits: list[Hashable] = field(default_factory=list)
    unit: int | None = None
    message: Route | None = None
    sends: bool = False


@dataclass
class Times:
    """Of one rank: when each line was issued, (stream, instruction, start, end) of what takes time, and when all is done."""

    issued: list[float] = field(default_factory=list)
    events: list[tuple[str, str, float, float]] = field(default_factory=list)
    end: float = 0.0


def route_of(instruction: Instruction, here: int) -> Route:
    """The message of a SEND or RECV that a stage plays."""
    other = here if instruction.stage is None else instruction.stage
    sends = instruction.op in ("SEND", "SEND_GRADIENT")
    source, target = (here, other) if sends else (other, here)
    return Route(source, target, instruction.value or "", instruction.mb or 0, instruction.op.endswith("GRADIENT"))


class Asked:
    """A message that a tracer handed out; awaiting it is noted on the line that is being played."""

    def __init__(self, tracer: "Tracer", route: Route, held: object = None) -> None:
        self._tracer, self._route, self._held = tracer, route, held

    def wait(self) -> None:
        self._tracer.wait(self._route)
        self._held = None


class Tracer:
    """The part of a player's machine that knows no values: it writes `lines`, the last of which is the end of the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[Line] = []
        self._open = Line("compute", "", 0.0)

    def begin(self, instruction: Instruction) -> None:
        line = self._open = Line(instruction.stream, instruction_text(instruction), instruction.seconds)
        if instruction.op in ("GATHER", "REFRESH"):
            line.unit = instruction.unit
        elif instruction.op in ("SEND", "RECV", "SEND_GRADIENT", "RECV_GRADIENT"):
            line.message, line.sends = route_of(instruction, self.program.stage), instruction.op.startswith("SEND")
        self.lines.append(line)

    def wait(self, for_what: Hashable) -> None:
        self._open.awaits.append(for_what)

    def ended(self) -> None:
        """What comes now comes after the last instruction."""
        self._open = Line("end", "FINISH", 0.0)
        self.lines.append(self._open)


def play(ranks: Sequence[Sequence[Line]], overlap: bool) -> list[Times]:
    """Times of ranks that exchange messages, one of each stage. Raises Hang where some wait for each other forever."""
    post = _Post()
    players = [_Rank(lines, overlap, post) for lines in ranks]
    waiting = {index: player.run() for index, player in enumerate(players)}
    while waiting:
        moved = False
        for index, run in list(waiting.items()):
            before = players[index].at
            if next(run, None) is None:
                del waiting[index]
                moved = True
            moved = moved or players[index].at != before
        if not moved:
            raise Hang({index: (players[index].at, players[index].wants) for index in waiting})
    return [player.times for player in players]


class Hang(ProgramError):
    """Ranks that wait for each other forever. stuck: index of the rank -> (line, what it awaits)."""

    def __init__(self, stuck: dict[int, tuple[int, Hashable]]) -> None:
        super().__init__(f"{len(stuck)} ranks wait for each other forever")
        self.stuck = stuck

    def __reduce__(self) -> tuple[type["Hang"], tuple[dict[int, tuple[int, Hashable]]]]:
        return Hang, (self.stuck,)


class _Post:
    """Messages: when they were offered, when they were asked for, and from both when they arrive."""

    def __init__(self) -> None:
        self.offered: dict[Route, tuple[float, float]] = {}  # start, seconds
        self.asked: dict[Route, float] = {}

    def arrival(self, route: Route) -> float | None:
        if route not in self.offered or route not in self.asked:
            return None
        start, seconds = self.offered[route]
        return max(start, self.asked[route]) + seconds


class _Rank:
    def __init__(self, lines: Sequence[Line], overlap: bool, post: _Post) -> None:
        self.lines, self.overlap, self.post = lines, overlap, post
        self.at = 0
        self.wants: Hashable = None
        self.times = Times()
        self._clock: dict[str, float] = {"compute": 0.0}
        self._units: dict[int, float] = {}

    def run(self) -> Iterator[int]:
        """Play on until a message is awaited that is not under way yet."""
        clock = self._clock
        for at, line in enumerate(self.lines):
            self.at, awaited = at, 0.0
            for what in line.awaits:
                if not isinstance(what, Route):
                    awaited = max(awaited, self._units.get(what, 0.0))  # type: ignore[call-overload]
                    continue
                while (arrival := self.post.arrival(what)) is None:
                    self.wants = what
                    yield self.at
                awaited = max(awaited, arrival)
            self.times.issued.append(max(clock.values()) if line.stream == "end" else clock["compute"])
            self._run(line, awaited)
        self.at = len(self.lines)
        self.times.end = max(clock.values())

    def _run(self, line: Line, awaited: float) -> None:
        clock = self._clock
        if line.message is not None:
            self._message(line, line.message, awaited)
            return
        stream = line.stream if self.overlap and line.stream != "end" else "compute"
        start = max(clock.get(stream, 0.0), clock["compute"], awaited)
        clock[stream] = start + line.seconds
        if line.unit is not None:
            self._units[line.unit] = clock[stream]
        if line.seconds:
            self.times.events.append((line.stream, line.text, start, clock[stream]))

    def _message(self, line: Line, route: Route, awaited: float) -> None:
        """Whoever sends goes on at once where streams overlap, else after the copy; whoever receives goes on at once."""
        clock = self._clock
        clock["compute"] = max(clock["compute"], awaited)
        if not line.sends:
            self.post.asked[route] = clock["compute"]
            return
        stream = f"send {route.target}" if self.overlap else "compute"
        start = max(clock.get(stream, 0.0), clock["compute"])
        clock[stream] = start + line.seconds
        self.post.offered[route] = (start, line.seconds)
        if line.seconds:
            self.times.events.append((line.stream, line.text, start, clock[stream]))
