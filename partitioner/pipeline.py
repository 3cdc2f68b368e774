"""Which stage runs which blocks, in which turns; and from that, which values travel between stages.

A *chunk* is a run of consecutive blocks; a schedule gives every chunk a stage, and every stage its turns. What a block reads of another stage is sent
there once, straight from the stage that computes it, however far; its gradient comes back once the last reader there has given its share. A block
without parameters, gradients and draws (rotary tables, masks) is run anew by each stage that reads it where that is quicker than its messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from partitioner.passes.block import Block
from partitioner.runtime.program import Call, Function
from partitioner.schedules import ASYNCHRONOUS, Name, Turn, chunks_of, owed, schedule, stage_of


@dataclass(frozen=True)
class Pipeline:
    """`chunks[i]` is the chunk of block i, ascending. One stage: no pipeline."""

    stages: int
    chunks: tuple[int, ...]
    schedule: Name = "1f1b"

    @staticmethod
    def none(blocks: int) -> "Pipeline":
        """All blocks on one stage."""
        return Pipeline(1, (0,) * blocks)

    @property
    def halves(self) -> bool:
        """Whether a backward is run in halves."""
        return self.stages > 1 and self.schedule in ("zb-h1", "zb-v")

    @property
    def asynchronous(self) -> bool:
        """Whether backwards are left to the next step."""
        return self.stages > 1 and self.schedule in ASYNCHRONOUS

    def owed(self, stage: int) -> int:
        """How many backwards a stage leaves to its next step."""
        return owed(self.schedule, self.stages, stage)

    @property
    def count(self) -> int:
        """How many chunks the schedule takes."""
        return chunks_of(self.schedule, self.stages)

    def stage(self, block: int) -> int:
        return stage_of(self.schedule, self.chunks[block], self.stages)

    def blocks(self, chunk: int) -> tuple[int, ...]:
        return tuple(block for block, own in enumerate(self.chunks) if own == chunk)

    def turns(self, stage: int, micro_batches: int) -> tuple[Turn, ...]:
        """What a stage does, in order."""
        return schedule(self.schedule, self.stages, micro_batches)[stage]

    def holders(self, blocks: Sequence[Block]) -> dict[str, set[int]]:
        """Parameter -> the stages that hold it because a block there reads it."""
        stages: dict[str, set[int]] = {}
        for block in blocks:
            for port in block.reads:
                if port.kind == "parameter":
                    stages.setdefault(port.name, set()).add(self.stage(block.index))
        return stages

    def homes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
        """Parameter -> the chunks, ascending, on stages that hold it."""
        every = range(self.count)
        return {name: tuple(k for k in every if stage_of(self.schedule, k, self.stages) in held) for name, held in self.holders(blocks).items()}


@dataclass(frozen=True)
class Message:
    """A value of a micro-batch on its way to another stage, or its gradient on its way back. Both ends count from the step they are in."""

    name: str
    mb: int
    source: int
    target: int
    gradient: bool


@dataclass
class Routes:
    """Who needs what of whom. home: value -> its stage; readers: value -> other stages to which it is sent; givers: (value, stage) -> blocks of
    that stage whose backward gives a share of the value's gradient, for values that get one; copies: (stage, chunk) -> blocks of other stages that
    are run there anew; made: (stage, value) that are.
    """

    home: dict[str, int] = field(default_factory=dict)
    readers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    givers: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    copies: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    made: set[tuple[int, str]] = field(default_factory=set)

    @staticmethod
    def of(
        calls: Sequence[Call],
        functions: dict[str, Function],
        pipeline: Pipeline,
        loss: str | None,
        quicker: Callable[[Call], bool] = lambda call: False,
    ) -> "Routes":
        """quicker: whether a block that may be run anew on other stages should be."""
        routes = Routes(home={name: pipeline.stage(call.number) for call in calls for name in call.writes})
        if pipeline.stages > 1:
            routes._copy(calls, pipeline, {call.number for call in calls if _repeats(call, functions[call.function]) and quicker(call)})
        copied = [(calls[number], stage) for (stage, _), numbers in routes.copies.items() for number in numbers]
        readers: dict[str, set[int]] = {}
        for call, stage in [*((call, pipeline.stage(call.number)) for call in calls), *copied]:
            for ref in call.reads:
                if ref.kind == "value" and not routes._here(ref.name, stage):
                    readers.setdefault(ref.name, set()).add(stage)
        routes.readers = {name: tuple(sorted(stages)) for name, stages in readers.items()}
        reached = {loss}  # values that get a gradient
        givers: dict[tuple[str, int], list[int]] = {}
        for call in reversed(calls):
            function = functions[call.function]
            if function.backward is None or not reached.intersection(call.writes[index] for index in function.tangents):
                continue
            for name in dict.fromkeys(call.reads[index].name for index in function.gradients if call.reads[index].kind == "value"):
                reached.add(name)
                givers.setdefault((name, pipeline.stage(call.number)), []).append(call.number)
        routes.givers = {key: tuple(sorted(numbers)) for key, numbers in givers.items()}
        return routes

    def _copy(self, calls: Sequence[Call], pipeline: Pipeline, repeated: set[int]) -> None:
        """A stage runs a repeated block of another one in its first chunk that reads it, or in which another copy does."""
        chunk: dict[tuple[int, int], int] = {}  # (stage, block) -> where it is run
        read: dict[tuple[int, str], int] = {}  # (stage, value) -> the first chunk there that reads it
        for call in reversed(calls):
            own = pipeline.stage(call.number)
            if call.number in repeated:
                for stage in set(range(pipeline.stages)) - {own}:
                    first = [read[stage, name] for name in call.writes if (stage, name) in read]
                    if first:
                        chunk[stage, call.number] = min(first)
                        self.made.update((stage, name) for name in call.writes)
            at = {own: pipeline.chunks[call.number], **{stage: where for (stage, number), where in chunk.items() if number == call.number}}
            for stage, where in at.items():
                for ref in call.reads:
                    if ref.kind == "value":
                        read[stage, ref.name] = min(where, read.get((stage, ref.name), where))
        for (stage, number), where in sorted(chunk.items()):
            self.copies[stage, where] = (*self.copies.get((stage, where), ()), number)

    def _here(self, name: str, stage: int) -> bool:
        """Whether a stage computes a value itself."""
        return self.home[name] == stage or (stage, name) in self.made

    def walk(self, pipeline: Pipeline, turn: Turn) -> tuple[int, ...]:
        """The blocks of a turn in the order in which they run."""
        blocks = pipeline.blocks(turn.chunk)
        if turn.op != "F":
            return blocks[::-1]
        return (*self.copies.get((stage_of(pipeline.schedule, turn.chunk, pipeline.stages), turn.chunk), ()), *blocks)

    def runs(self, pipeline: Pipeline, number: int, stage: int) -> bool:
        """Whether a stage runs a block, as its own or anew."""
        return pipeline.stage(number) == stage or any(number in numbers for (where, _), numbers in self.copies.items() if where == stage)

    def returned(self, name: str) -> tuple[int, ...]:
        """The other stages that send a share of a value's gradient back."""
        return tuple(stage for stage in self.readers.get(name, ()) if (name, stage) in self.givers)

    def after_forward(self, call: Call, mb: int, stage: int) -> list[Message]:
        """What a block's stage sends once it has run; others that run it anew send nothing."""
        return [Message(name, mb, stage, to, False) for name in call.writes if self.home[name] == stage for to in self.readers.get(name, ())]

    def after_backward(self, call: Call, mb: int, stage: int) -> list[Message]:
        """The gradients that are complete on a stage once a block's backward has run: its givers run in reverse, so the first of them is the last."""
        names = dict.fromkeys(ref.name for ref in call.reads if ref.kind == "value")
        return [
            Message(name, mb, stage, self.home[name], True)
            for name in names
            if self.home[name] != stage and self.givers.get((name, stage), (None,))[0] == call.number
        ]

    def before(self, turn: Turn, calls: Sequence[Call], stage: int) -> list[Message]:
        """What a stage must have received before it runs a chunk's blocks forward, or backward."""
        if turn.op == "F":
            names = dict.fromkeys(ref.name for call in calls for ref in call.reads if ref.kind == "value" and not self._here(ref.name, stage))
            return [Message(name, turn.mb, self.home[name], stage, False) for name in names]
        if turn.op == "W":
            return []
        return [Message(name, turn.mb, other, stage, True) for call in calls for name in call.writes for other in self.returned(name)]

    def sent(self, pipeline: Pipeline, calls: Sequence[Call], micro_batches: int, forward_only: bool) -> dict[tuple[int, int], list[Message]]:
        """(source, target) -> the messages from one stage to another in the order in which they are sent, as the target counts micro-batches.

        The gradients of the backwards that a stage owes come first: they were sent in the step before.
        """
        found: dict[tuple[int, int], list[Message]] = {}
        for stage in range(pipeline.stages):
            for turn in turns_of(pipeline, stage, micro_batches, forward_only):
                for number in self.walk(pipeline, turn):
                    call = calls[number]
                    sent = self.after_forward(call, turn.mb, stage) if turn.op == "F" else self.after_backward(call, turn.mb, stage)
                    for message in sent if turn.op != "W" else ():
                        found.setdefault((message.source, message.target), []).append(message)
        for (_, target), messages in found.items():
            late = [message for message in messages if message.gradient and message.mb >= micro_batches - pipeline.owed(target)]
            messages[:] = [replace(message, mb=message.mb - micro_batches) for message in late] + [m for m in messages if m not in late]
        return found


def turns_of(pipeline: Pipeline, stage: int, micro_batches: int, forward_only: bool) -> tuple[Turn, ...]:
    """A stage's turns; of a forward program the forward ones."""
    turns = pipeline.turns(stage, micro_batches)
    return tuple(turn for turn in turns if turn.op == "F") if forward_only else turns


def _repeats(call: Call, function: Function) -> bool:
    """Whether a block gives the same wherever it is run, and nobody needs a gradient from it: no parameters, no draws, no backward."""
    same = all(ref.kind != "parameter" and (ref.kind != "scalar" or ref.name in ("rows", "start")) for ref in call.reads)
    return same and function.backward is None
