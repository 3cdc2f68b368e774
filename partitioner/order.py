"""The order of a rank program: which instruction stands where. Prefetch, buckets and overlap are this order and nothing else.

    forward    REFRESH u?  GATHER u?  FORWARD b mb  FREE u?        in block order; a zero3 unit is gathered per use and freed after, unless the
                                                                     next block uses it or it is kept until its backward
    backward   GATHER u?   BACKWARD b mb  FREE u?  REDUCE u         in reverse; a unit is reduced as soon as its last gradient is there:
                                                                     zero2 and zero3 in every micro-batch, none and zero1 in the last

With `prefetch`, the next block's communication is issued before the current block runs, so that it travels beside the computation.

In a pipeline a stage has turns (pipeline.py): a chunk's forward or backward on a micro-batch. What a turn needs of other stages is asked for one
turn earlier, for messages travel beside computation on any backend, and what it gives is sent behind the block that computes it. Messages from one
stage to another are asked for in the order in which they are sent. Kept units stay gathered from their first use to their last; TIE comes last.

In an asynchronous pipeline (runtime/steps.py) the batch before is reduced: after its last backward, or where none is owed beside this batch's first
forward (and TIE soon after). Parameters that owed backwards read again are copied at the end of the step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from partitioner.pipeline import Message, Pipeline, Routes, turns_of
from partitioner.runtime.program import Call, Function, Instruction, Unit
from partitioner.schedules import Turn

_OPS = {"F": "FORWARD", "B": "BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}
EACH_MICRO_BATCH = ("zero2", "zero3")


@dataclass(frozen=True)
class Order:
    """What the order is made from. `kept` units stay gathered from a forward to its backward; `held` values are needed at the end (the loss, outputs,
    new buffers); price(op, call, micro-batch) and communication(op, bytes, unit) are seconds. With a `stage`, `calls` are the blocks of all stages.
    """

    calls: Sequence[Call]
    functions: dict[str, Function]
    units: Sequence[Unit]
    kept: frozenset[int]
    micro_batches: int
    prefetch: bool
    bytes_of: dict[int, int]  # unit -> bytes of its whole parameters
    held: frozenset[str]
    joined: bool  # False in a forward program: its backward comes later, if at all, so that nothing stays gathered in between
    price: Callable[[str, Call, int], float]
    communication: Callable[[str, int, int | None], float]
    stage: "Stage | None" = None
    stash: dict[int, tuple[int, float]] = field(default_factory=dict)  # unit -> bytes to be copied for owed backwards, and seconds of that


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline. A message has weigh(message) bytes; sent: (source, target) -> messages in the order of their sending
    (`Routes.sent`); tied: units of several stages, at least one of which has a gradient for them.
    """

    pipeline: Pipeline
    number: int
    routes: Routes
    sent: dict[tuple[int, int], list[Message]]
    weigh: Callable[[Message], int]
    tied: frozenset[int]


@dataclass(frozen=True)
class _Use:
    call: Call
    mb: int
    op: str
    units: tuple[int, ...]  # whose whole parameters it reads
    turn: int  # of this stage

    @property
    def backward(self) -> bool:
        return self.op != "FORWARD"


def arrange(order: Order, *, backward: bool) -> tuple[list[Instruction], list[Instruction]]:
    """All forwards and (when `backward`) backwards in the order of execution, as what stands before the first backward and from it on."""
    return _Writer(order, backward).write()


class _Writer:
    def __init__(self, order: Order, backward: bool) -> None:
        self.order = order
        self.out: list[Instruction] = []
        self.unit_of = {name: unit.number for unit in order.units for name in unit.parameters}
        self.shard = {unit.number: unit.shard for unit in order.units}
        self.here: set[int] = set()  # gathered zero3 units
        self.fresh: set[int] = set()  # refreshed zero1 and zero2 units
        stage = self.stage = order.stage
        own = [call for call in order.calls if stage is None or stage.routes.runs(stage.pipeline, call.number, stage.number)]
        self.last_reader = {ref.name: call.number for call in own for ref in call.reads if ref.kind == "value"}
        self.late = backward and stage is not None and stage.pipeline.asynchronous
        self.turns = self._turns(backward)
        self.owes = any(turn.mb < 0 for turn in self.turns)
        self.needs = [stage.routes.before(turn, self._calls(turn), stage.number) if stage else [] for turn in self.turns]
        self.asked: dict[int, int] = defaultdict(int)  # source stage -> how many of its messages were asked for
        self.has: set[Message] = set()
        self.uses = self._sequence()
        self.positions: dict[int, list[int]] = defaultdict(list)  # unit -> positions of its uses
        for position, use in enumerate(self.uses):
            for unit in use.units:
                self.positions[unit].append(position)
        self.completes = self._completions()

    def _turns(self, backward: bool) -> tuple[Turn, ...]:
        if self.stage is not None:
            return turns_of(self.stage.pipeline, self.stage.number, self.order.micro_batches, not backward)
        return tuple(Turn(op, 0, mb) for mb in range(self.order.micro_batches) for op in (("F", "B") if backward else ("F",)))

    def _calls(self, turn: Turn) -> list[Call]:
        if self.stage is not None:
            return [self.order.calls[number] for number in self.stage.routes.walk(self.stage.pipeline, turn)]
        return list(self.order.calls if turn.op == "F" else reversed(self.order.calls))

    def _completions(self) -> dict[int, list[int]]:
        """Position -> units whose gradients are summed after it: zero2 and zero3 where no further one comes of the micro-batch, others at the end."""
        givers: dict[int, list[int]] = defaultdict(list)  # unit -> positions of what gives it a gradient
        for position, use in enumerate(self.uses):
            if use.op in ("BACKWARD", "BACKWARD_WEIGHT"):
                gradients = (use.call.reads[index] for index in self.order.functions[use.call.function].gradients)
                for unit in self._units(ref.name for ref in gradients if ref.kind == "parameter"):
                    givers[unit].append(position)
        completes: dict[int, list[int]] = defaultdict(list)
        for unit, given in sorted(givers.items()):
            if self.late:
                completes[self._late(given)].append(unit)
                continue
            for position, after in zip(given, [*given[1:], None], strict=True):
                if after is None or (self.shard[unit] in EACH_MICRO_BATCH and self.uses[after].mb != self.uses[position].mb):
                    completes[position].append(unit)
        return completes

    def _late(self, given: Sequence[int]) -> int:
        """Where the gradients that these uses give are summed, of the batch before."""
        owed = [position for position in given if self.uses[position].mb < 0]
        return owed[-1] if owed else next(position for position, use in enumerate(self.uses) if use.call is self.uses[given[0]].call)

    def _sequence(self) -> list[_Use]:
        uses = []
        for number, turn in enumerate(self.turns):
            for call in self._calls(turn):
                function = self.order.functions[call.function]
                if turn.op != "F" and (function.backward is None or (turn.op == "W" and (function.halves is None or function.halves.weight is None))):
                    continue
                read = call.reads
                if turn.op != "F":
                    again = function.saved
                    if turn.op == "W" and function.halves is not None:
                        again = tuple(function.saved[at] for at in function.halves.handed if at < len(function.saved))
                    read = tuple(call.reads[index] for kind, index in again if kind == "read")
                units = self._units(ref.name for ref in read if ref.kind == "parameter")
                uses.append(_Use(call, turn.mb, _OPS[turn.op], units, number))
        return uses

    def _units(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.unit_of[name] for name in names))

    def write(self) -> tuple[list[Instruction], list[Instruction]]:
        split: int | None = None
        turn = -1
        for position, use in enumerate(self.uses):
            if use.backward and split is None:
                split = len(self.out)
            if use.turn != turn:
                turn = use.turn
                if turn == 2 and self.late and not self.owes:
                    self._tie()
                for number in range(turn, min(turn + 2, len(self.turns))):
                    for message in self.needs[number]:
                        self._ask(message)
            self._use(use, position)
        if not self.late or self.owes:
            self._tie()
        for unit, (size, seconds) in self.order.stash.items():
            self._say(Instruction("STASH", unit=unit, bytes=size, seconds=seconds))
        at = len(self.out) if split is None else split
        return self.out[:at], self.out[at:]

    def _tie(self) -> None:
        for unit in self.order.units:
            if self.stage is not None and unit.number in self.stage.tied:
                size, mb = self.order.bytes_of[unit.number], -1 if self.late else None
                seconds = self.order.communication("TIE", size, None)
                self._say(Instruction("TIE", unit=unit.number, mb=mb, stream="reduce", bytes=size, seconds=seconds))

    def _say(self, instruction: Instruction) -> None:
        self.out.append(instruction)

    def _ask(self, message: Message) -> None:
        """Ask for a message, and before it for all that its stage sends earlier."""
        assert self.stage is not None
        coming = self.stage.sent[message.source, message.target]
        while message not in self.has:
            following = coming[self.asked[message.source]]
            self.asked[message.source] += 1
            self.has.add(following)
            self._say(self._transfer("RECV", following, following.source))

    def _transfer(self, op: str, message: Message, stage: int) -> Instruction:
        assert self.stage is not None
        size = self.stage.weigh(message)
        seconds = self.order.communication("SEND", size, None) if op == "SEND" else 0.0
        name = f"{op}_GRADIENT" if message.gradient else op
        return Instruction(name, mb=message.mb, value=message.name, stage=stage, stream="send", bytes=size, seconds=seconds)

    def _use(self, use: _Use, position: int) -> None:
        self._bring(use)
        following = self.uses[position + 1] if position + 1 < len(self.uses) else None
        # not across the turn from forward to backward: in forward programs the backward is a list of its own
        if self.order.prefetch and following is not None and following.backward == use.backward:
            self._bring(following)
        call = use.call
        seconds = self.order.price(use.op, call, use.mb)
        self._say(Instruction(use.op, block=call.number, mb=use.mb, drops=() if use.backward else self._drops(call), seconds=seconds))
        if self.stage is not None and use.op != "BACKWARD_WEIGHT":
            routes, here = self.stage.routes, self.stage.number
            leaving = routes.after_backward(call, use.mb, here) if use.backward else routes.after_forward(call, use.mb, here)
            for message in leaving:
                self._say(self._transfer("SEND", message, message.target))
        unread = tuple(name for name in call.writes if name not in self.last_reader and name not in self.order.held)
        if unread and not use.backward:
            self._say(Instruction("DROP", mb=use.mb, drops=unread))
        self._free(use, position)
        for unit in use.units if use.mb < 0 else ():
            if unit in self.order.stash and not any(self.uses[later].mb < 0 for later in self.positions[unit] if later > position):
                self._say(Instruction("UNSTASH", unit=unit, mb=-1, bytes=self.order.stash[unit][0]))
        for unit in self.completes.get(position, ()):
            self._reduce(unit, use.mb)

    def _drops(self, call: Call) -> tuple[str, ...]:
        names = dict.fromkeys(ref.name for ref in call.reads if ref.kind == "value")
        return tuple(name for name in names if self.last_reader[name] == call.number and name not in self.order.held)

    def _bring(self, use: _Use) -> None:
        for unit in use.units:
            size = self.order.bytes_of[unit]
            if self.shard[unit] in ("zero1", "zero2") and unit not in self.fresh:
                self.fresh.add(unit)
                op = "REFRESH"
            elif self.shard[unit] == "zero3" and unit not in self.here:
                self.here.add(unit)
                op = "GATHER"
            else:
                continue
            self._say(Instruction(op, unit=unit, stream="gather", bytes=size, seconds=self.order.communication(op, size, unit)))

    def _free(self, use: _Use, position: int) -> None:
        for unit in use.units:
            if unit not in self.here:
                continue
            uses = self.positions[unit]
            at = bisect_right(uses, position)
            later = uses[at] if at < len(uses) else None
            turn = later is not None and self.uses[later].backward and not use.backward
            soon = later == position + 1 and (self.order.joined or self.uses[later].backward == use.backward)
            kept = unit in self.order.kept and (self.stage is not None or (turn and later is not None and self.uses[later].mb == use.mb))
            if later is not None and (soon or kept):
                continue
            self.here.discard(unit)
            self._say(Instruction("FREE", unit=unit, bytes=self.order.bytes_of[unit]))

    def _reduce(self, unit: int, mb: int) -> None:
        each, size = self.shard[unit] in EACH_MICRO_BATCH, self.order.bytes_of[unit]
        of = -1 if self.late else mb if each else None
        seconds = self.order.communication(f"REDUCE {self.shard[unit]}", size, unit)
        self._say(Instruction("REDUCE", unit=unit, mb=of, stream="reduce", bytes=size, seconds=seconds))
