"""When the instructions of several ranks run, played together: what waits for what, and whether all come to their end.

A `Tracer` notes of every instruction what it awaits, as the player asks for it. `play` then gives every instruction its time:

    compute  ──F0──────F1──┐waits──F2────
    gather   ──G1────G2────┘                with overlap=False all streams are one
    send       └─v0──┐                      a message leaves once it is computed and the stream to that stage is free, and
    stage 1    ──────┴─F0───                arrives once it is asked for; whoever reads it waits for that

Communication waits for the compute issued before it, because a collective reads what that compute wrote; the end of the step waits for all.
A message is a rendezvous: where nobody ever asks for it, whoever awaits it hangs, and `play` says who. So is what several stages do together (the sum
of the loss, of a tied gradient; results that one of them computes): it begins when the last of them has come to it.

Where ranks outnumber the cores of their machine, those that compute share them evenly: with 4 ranks on 2 cores one alone computes as fast as two, and
four at once half as fast. So all are played in one order of time, and what has been computed is counted in work, not in seconds.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from partitioner.errors import ProgramError
from partitioner.runtime.program import EVERYONE, Instruction, Program
from partitioner.runtime.text import instruction_text


class Route(NamedTuple):
    """Which message: of which value and micro-batch, between which stages."""

    source: int
    target: int
    name: str
    mb: int
    gradient: bool


class Meeting(NamedTuple):
    """What several stages do together: an instruction, and the number of its batch's first micro-batch."""

    stages: tuple[int, ...]
    text: str
    first: int


@dataclass
class Line:
    """An instruction in time. awaits: what must be there before it starts; brings: what it helps to be there, unless that is a message.

    meets: what it does together with other stages.
    """

    stream: str
    text: str
    seconds: float
    awaits: list[Hashable] = field(default_factory=list)
    brings: Hashable = None
    message: Route | None = None
    sends: bool = False
    meets: Meeting | None = None


@dataclass
class Times:
    """Of one rank: when each line was issued, (stream, instruction, start, end) of what takes time, and when all is done."""

    issued: list[float] = field(default_factory=list)
    events: list[tuple[str, str, float, float]] = field(default_factory=list)
    end: float = 0.0


def route_of(instruction: Instruction, program: Program, first: int = 0) -> Route:
    """The message of a SEND or RECV. first: the number of its batch's first micro-batch, which count on from step to step."""
    here, mb = program.stage, instruction.mb or 0
    other = here if instruction.stage is None else instruction.stage
    sends = instruction.op in ("SEND", "SEND_GRADIENT")
    source, target = (here, other) if sends else (other, here)
    return Route(source, target, instruction.value or "", first + mb % len(program.rows), instruction.op.endswith("GRADIENT"))


class Asked:
    """A message that a tracer handed out; awaiting it is noted on the line that is being played."""

    def __init__(self, tracer: "Tracer", route: Route, held: object = None) -> None:
        self._tracer, self._route, self._held = tracer, route, held

    def wait(self) -> None:
        self._tracer.wait(self._route)
        self._held = None


class Tracer:
    """The part of a player's machine that knows no values: it writes `lines`, the last of which is the end of the program.

    Of one asynchronous step after the other each batch has a tracer, and all of them write the same lines. before: that of the batch before.
    """

    def __init__(self, program: Program, before: "Tracer | None" = None) -> None:
        self.program = program
        self.lines: list[Line] = [] if before is None else before.lines
        self.first: int = 0 if before is None else before.first + len(program.rows)
        self._meetings: list[Meeting] = []

    def begin(self, instruction: Instruction) -> None:
        line = Line(instruction.stream, instruction_text(instruction), instruction.seconds)
        if instruction.op in ("GATHER", "REFRESH"):
            line.brings = instruction.unit
        elif instruction.op == "REDUCE" or (instruction.op == "LOSS" and self.program.stages == 1):
            line.brings = self._results
        elif together := self._together(instruction):
            line.meets = Meeting(together, line.text, self.first)
            awaited_by = self._meetings if instruction.op in ("LOSS", "TIE") else line.awaits
            awaited_by.append(line.meets)
        elif instruction.op in ("SEND", "RECV", "SEND_GRADIENT", "RECV_GRADIENT"):
            line.message, line.sends = self.route(instruction), instruction.op.startswith("SEND")
        self.lines.append(line)

    def _together(self, instruction: Instruction) -> tuple[int, ...]:
        """The stages that run an instruction together, those of this program included; none where it stays inside its stage."""
        program = self.program
        if instruction.op == "TIE" and instruction.unit is not None:
            return program.unit_numbered[instruction.unit].stages
        return tuple(range(program.stages)) if instruction.op in EVERYONE and program.stages > 1 else ()

    @property
    def _results(self) -> Hashable:
        return "results", self.first

    def route(self, instruction: Instruction) -> Route:
        """The message of a SEND or RECV of this batch."""
        return route_of(instruction, self.program, self.first)

    def wait(self, for_what: Hashable) -> None:
        self.lines[-1].awaits.append(for_what)

    def ended(self) -> None:
        """What comes now comes after the last instruction. An asynchronous step does not await what it has issued for the next."""
        self.lines.append(Line("compute" if self.program.asynchronous else "end", "FINISH", 0.0))

    def finish(self) -> None:
        """Await what this batch's reductions bring."""
        self.wait(self._results)
        for meeting in self._meetings:
            self.wait(meeting)


def play(ranks: Sequence[Sequence[Line]], overlap: bool, share: float = 1.0) -> list[Times]:
    """Times of ranks that exchange messages, one of each stage. Raises Hang where some wait for each other forever.

    share: how much of a core each rank has while all of them compute. Ranks that wait leave theirs to the others, each of which can use a whole one.
    """
    post = _Post()
    players = [_Rank(lines, overlap, post) for lines in ranks]
    runs = [player.run() for player in players]
    now = work = 0.0  # seconds, and the work that whoever computes has done in them: seconds at `share` of a core
    computing: list[tuple[float, int]] = []  # (work at its end, rank)
    waiting: list[tuple[float, int]] = []  # (time, rank)
    blocked: dict[Route | Meeting, list[int]] = {}
    ready = list(range(len(players)))
    while True:
        for index in ready:
            want = next(runs[index], None)
            if isinstance(want, Route | Meeting):
                blocked.setdefault(want, []).append(index)
            elif isinstance(want, _Compute):
                heapq.heappush(computing, (work + want.seconds, index))
            elif want is not None:
                heapq.heappush(waiting, (want, index))
        ready = [index for what in post.complete() for index in blocked.pop(what, ())]
        if ready:
            continue
        speed = min(1 / share, len(players) / max(1, len(computing)))
        done = now + (computing[0][0] - work) / speed if computing else inf
        if waiting and waiting[0][0] <= done:
            then, index = heapq.heappop(waiting)
            work += (then - now) * speed
        elif computing:
            then = done
            work, index = heapq.heappop(computing)
        else:
            break
        now = players[index].now = then
        ready = [index]
    if blocked:
        raise Hang({index: (players[index].at, what) for what, held in blocked.items() for index in held})
    return [player.times for player in players]


class Hang(ProgramError):
    """Ranks that wait for each other forever. stuck: index of the rank -> (line, what it awaits)."""

    def __init__(self, stuck: dict[int, tuple[int, Hashable]]) -> None:
        super().__init__(f"{len(stuck)} ranks wait for each other forever")
        self.stuck = stuck

    def __reduce__(self) -> tuple[type["Hang"], tuple[dict[int, tuple[int, Hashable]]]]:
        return Hang, (self.stuck,)


class _Post:
    """Messages: when they were offered, when they were asked for, and from both when they arrive. Meetings: when they are over."""

    def __init__(self) -> None:
        self.arrivals: dict[Route | Meeting, float] = {}
        self._offered: dict[Route, tuple[float, float]] = {}  # start, seconds
        self._asked: dict[Route, float] = {}
        self._joined: dict[Meeting, list[float]] = {}
        self._fresh: list[Route | Meeting] = []

    def offer(self, route: Route, start: float, seconds: float) -> None:
        self._offered[route] = (start, seconds)
        self._meet(route)

    def ask(self, route: Route, at: float) -> None:
        self._asked[route] = at
        self._meet(route)

    def join(self, meeting: Meeting, start: float, seconds: float) -> None:
        came = self._joined.setdefault(meeting, [])
        came.append(start)
        if len(came) == len(meeting.stages):
            self.arrivals[meeting] = max(came) + seconds
            self._fresh.append(meeting)

    def complete(self) -> list[Route | Meeting]:
        """The messages that have both ends, and the meetings that all have come to, since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _meet(self, route: Route) -> None:
        if route in self._offered and route in self._asked:
            start, seconds = self._offered[route]
            self.arrivals[route] = max(start, self._asked[route]) + seconds
            self._fresh.append(route)


class _Compute(NamedTuple):
    """Work that is shared out among cores, in seconds at the rank's share of them."""

    seconds: float


class _Rank:
    """`now`: until when its compute stream is taken."""

    def __init__(self, lines: Sequence[Line], overlap: bool, post: _Post) -> None:
        self.lines, self.overlap, self.post = lines, overlap, post
        self.at, self.now = 0, 0.0
        self.times = Times()
        self._streams: dict[str, float] = {}
        self._there: dict[Hashable, float] = {}
        self._later: dict[Hashable, Line] = {}  # meetings under way that are awaited later

    def run(self) -> Iterator["_Compute | Route | Meeting | float"]:
        """Play line by line. Yields work to do, a message or meeting to await, or a time; whoever plays sets `now` and comes back."""
        for at, line in enumerate(self.lines):
            self.at, awaited = at, 0.0
            if line.meets is not None:
                self._meet(line, line.meets)
            for what in line.awaits:
                if not isinstance(what, Route | Meeting):
                    awaited = max(awaited, self._there.get(what, 0.0))
                    continue
                while what not in self.post.arrivals:
                    yield what
                there = self.post.arrivals[what]
                awaited = max(awaited, there)
                if (later := self._later.pop(what, None)) and later.seconds:
                    self.times.events.append((later.stream, later.text, there - later.seconds, there))
            self.times.issued.append(max(self.now, *self._streams.values(), 0.0) if line.stream == "end" else self.now)
            here = line.stream in ("compute", "end") or not self.overlap
            if awaited > self.now and (here or line.message is not None):
                yield awaited
            start = self.now
            if line.meets in self._later:
                continue
            if line.message is not None and not line.sends:
                self.post.ask(line.message, self.now)
                continue
            if not here:
                stream = line.stream if line.message is None else f"send {line.message.target}"
                start = max(self._streams.get(stream, 0.0), self.now, awaited)
                end = self._streams[stream] = start + line.seconds
            if line.message is not None:
                self.post.offer(line.message, start, line.seconds)
            if here:
                if line.seconds:
                    yield _Compute(line.seconds) if line.stream == "compute" else self.now + line.seconds
                end = self.now
            if line.brings is not None:
                self._there[line.brings] = max(end, self._there.get(line.brings, 0.0))
            if line.seconds:
                self.times.events.append((line.stream, line.text, start, end))
        self.times.end = max(self.now, *self._streams.values(), 0.0)

    def _meet(self, line: Line, meeting: Meeting) -> None:
        """Come to a meeting, which takes the line's time where it is awaited later: else that is what is computed from its results."""
        if meeting in line.awaits:
            self.post.join(meeting, self.now, 0.0)
        else:
            self._later[meeting] = line
            self.post.join(meeting, max(self.now, self._streams.get(line.stream, 0.0)), line.seconds)
