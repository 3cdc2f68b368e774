"""The rank program: what is priced, simulated, drawn and run. Text both ways, one instruction a line.

    REFRESH unit 2 on gather bytes 4096            all-gather what optimizer.step changed in a zero1/zero2 unit into its whole buffer
    GATHER unit 3 on gather bytes 8192             all-gather a zero3 unit's parameters
    FREE unit 3 on compute bytes 8192              drop the gathered parameters
    PROLOGUE block 0 on compute                    run a prologue block on this rank's whole share of the batch
    FORWARD block 3 mb 1 on compute drops v4 v7    run a block on a micro-batch; the named values are given up to it
    DROP values v4 mb 1 on compute                 forget values that no later instruction reads
    BACKWARD block 3 mb 1 on compute
    BACKWARD_INPUT block 3 mb 1 on compute         its half that other blocks wait for: gradients of values
    BACKWARD_WEIGHT block 3 mb 1 on compute        the other half, at any later time: gradients of parameters
    REDUCE unit 3 mb 1 on reduce bytes 8192        sum the unit's gradients over the axis (zero2/zero3: once a micro-batch, else mb is absent)
    TIE unit 5 on reduce bytes 8192                sum the reduced gradient of a parameter that several stages read over those stages
    SEND value v4 mb 1 stage 1 on send bytes 64    send a value to a later stage that reads it
    RECV value v4 mb 1 stage 0 on send bytes 64    receive it from the stage that computes it
    SEND_GRADIENT value v4 mb 1 stage 0 on send    send the gradient of a value back (and forget it); RECV_GRADIENT adds it to the others
    LOSS on reduce bytes 4                         sum the loss over micro-batches and ranks
    STASH unit 3 on compute bytes 8192             copy parameters that backwards of this batch read in the next step, as they are now
    UNSTASH unit 3 mb -1 on compute bytes 8192     forget the copy
    EPILOGUE block 9 on compute                    run a block on totals: values of all micro-batches, summed (new running statistics)
    COMMIT on compute                              put the new buffer values in place, once a step
    OUTPUT on gather bytes 640                     gather the leaves of the output by their placements (forward programs)

Communication is issued where its instruction stands and awaited by the first consumer: prefetch, buckets and overlap are the order of this list.
A negative micro-batch is one of the batch before, in an asynchronous program (runtime/steps.py): -1 is its last.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

from torch import Tensor, dtype

Stream = Literal["compute", "gather", "reduce", "send", "copy"]
Shard = Literal["none", "zero1", "zero2", "zero3"]
Mode = Literal["step", "forward"]
OPS = (
    *("REFRESH", "GATHER", "FREE", "PROLOGUE", "FORWARD", "DROP", "BACKWARD", "REDUCE", "TIE"),
    *("BACKWARD_INPUT", "BACKWARD_WEIGHT"),
    *("SEND", "RECV", "SEND_GRADIENT", "RECV_GRADIENT", "LOSS", "EPILOGUE", "COMMIT", "OUTPUT", "STASH", "UNSTASH"),
)


EVERYONE = ("LOSS", "EPILOGUE", "COMMIT", "OUTPUT")
"""What all stages run together."""

KEYS = ("key_local", "key_shared")
"""Scalars that are random keys."""


@dataclass(frozen=True)
class Instruction:
    """One line of a program. Absent fields are None; `stage` is the other end of a message; `seconds` is the price, not part of the text."""

    op: str
    block: int | None = None
    unit: int | None = None
    mb: int | None = None
    value: str | None = None
    stage: int | None = None
    stream: Stream = "compute"
    bytes: int = 0
    drops: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def owed(self) -> bool:
        """Whether it belongs to the batch before."""
        return self.mb is not None and self.mb < 0


@dataclass(frozen=True)
class Ref:
    """A block argument. kind: parameter, buffer, constant, input, prologue, scalar (as in passes), value (another block's write), total (the sum
    of such a value over micro-batches; only an epilogue reads it) or epilogue (what that wrote; only COMMIT reads it).

    An output leaf that is no tensor is of kind "literal": `name` is its key in Program.literals.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Slice:
    """How this rank and micro-batch cut an input or output leaf: dim None means whole. Local size of dim is outer * rows * inner.

    before: elements of the dims before `dim`; with before * outer > 1 the rows of a rank do not lie together.
    """

    name: str
    dim: int | None = None
    outer: int = 1
    inner: int = 1
    before: int = 1


@dataclass(frozen=True)
class Event:
    """A footprint step: make (bytes at these rows) or drop of a storage of a function."""

    make: bool
    storage: int
    fixed: int = 0
    per_row: int = 0


@dataclass(frozen=True)
class Replay:
    """What a function does to memory: storages 0 … arguments-1 are its arguments', the rest its own; results name storages."""

    arguments: int
    events: tuple[Event, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Halves:
    """A backward in two functions; fields as in passes.block.Halves."""

    input: Callable[[list[object]], tuple[Tensor, ...]]
    weight: Callable[[list[object]], tuple[Tensor, ...]] | None
    values: tuple[int, ...]
    parameters: tuple[int, ...]
    handed: tuple[int, ...]
    carried: int
    input_replay: Replay
    weight_replay: Replay | None


Half = Literal["whole", "input", "weight"]


@dataclass(frozen=True)
class Function:
    """A block class as the executor sees it; fields as in passes.block.BlockFunction (saved: ("read" | "own", index))."""

    name: str
    source: str
    forward: Callable[[list[object]], tuple[Tensor, ...]]
    backward: Callable[[list[object]], tuple[Tensor, ...]] | None
    writes: int
    saved: tuple[tuple[str, int], ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    forward_replay: Replay
    backward_replay: Replay | None
    halves: Halves | None = None

    def backward_of(self, half: Half) -> Callable[[list[object]], tuple[Tensor, ...]] | None:
        if half == "whole" or self.halves is None:
            return self.backward if half == "whole" else None
        return self.halves.input if half == "input" else self.halves.weight

    def replay_of(self, half: Half) -> Replay | None:
        if half == "whole" or self.halves is None:
            return self.backward_replay if half == "whole" else None
        return self.halves.input_replay if half == "input" else self.halves.weight_replay


@dataclass(frozen=True)
class Call:
    """A block instance: which function, what it reads (in argument order) and writes, and where it stands in the user's model.

    `number` is the block's index in the rank program and the key of its random draws.
    """

    number: int
    function: str
    label: str
    reads: tuple[Ref, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: those of one block. Each parameter (canonical name) is in exactly one unit.

    stages: the pipeline stages that hold it, in order; the first is its home. What several stages read is a unit of its own.
    """

    number: int
    shard: Shard
    parameters: tuple[str, ...]
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Wire:
    """What a value that leaves its stage looks like at so many rows: the size of every dim is fixed + per_row * rows.

    expanded: dims in which all elements are one in memory; they travel once.
    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    dtype: dtype
    expanded: tuple[int, ...] = ()

    def shape(self, rows: int) -> tuple[int, ...]:
        return tuple(fixed + per_row * rows for fixed, per_row in self.sizes)

    def core(self, rows: int) -> tuple[int, ...]:
        """The shape that travels."""
        return tuple(1 if dim in self.expanded else size for dim, size in enumerate(self.shape(rows)))

    def bytes(self, rows: int) -> int:
        """What travels; of the value's gradient `whole_bytes` do."""
        return prod(self.core(rows)) * self.dtype.itemsize

    def whole_bytes(self, rows: int) -> int:
        return prod(self.shape(rows)) * self.dtype.itemsize


@dataclass(frozen=True)
class Program:
    """One rank's program for one (mode, training, input shapes). rank of ranks is its place on `axis`, stage of stages its place in the pipeline.

    mode "step": `instructions` are forward, backward and reductions. mode "forward": `instructions` end with OUTPUT and `after` holds the
    backward of the same call (for loss.backward()), to be run only if a gradient arrives.
    total: rows of the global batch (None: the batch is not cut); rows[mb]: this rank's rows; starts[mb]: its first global rows.
    whole_rows / whole_start: this rank's share, all micro-batches (what PROLOGUE sees).
    share: 1 / (ranks * micro-batches), the scalar of that name; parts[mb]: that of the name part, rows of the batch / rows of the micro-batch on all
    ranks of the axis. keyed: whether draws are keyed (False: one rank in eager order, key -1).
    inputs: every tensor leaf that some block reads, and its cut. prologue: names of prologue values.
    loss: the value that holds the (Partial) loss, in step mode. outputs: per leaf of the user's output, the ref and its cut;
    output_placements: "replicate", "shard" or "partial" per leaf. buffers: buffer name -> ref of its new value.
    calls and units: those of this stage. chunked: stages have several runs of blocks, between which others' come. wires: the values that cross
    stages, and results; homes: result -> the stage that computes it. asynchronous: each step leaves work to the next, see runtime/steps.py.
    others_draw: whether some stage draws random numbers.
    """

    mode: Mode
    training: bool
    rank: int
    ranks: int
    axis: str
    instructions: tuple[Instruction, ...]
    calls: tuple[Call, ...]
    functions: dict[str, Function]
    units: tuple[Unit, ...]
    inputs: tuple[Slice, ...]
    total: int | None
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    whole_rows: int
    whole_start: int
    share: float
    keyed: bool
    parts: tuple[float, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)
    literals: dict[str, Any] = field(default_factory=dict)
    loss: str | None = None
    outputs: tuple[tuple[Ref, Slice], ...] = ()
    output_placements: tuple[str, ...] = ()
    out_spec: Any = None
    buffers: tuple[tuple[str, Ref], ...] = ()
    after: tuple[Instruction, ...] = ()
    stage: int = 0
    stages: int = 1
    chunked: bool = False
    wires: dict[str, Wire] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    asynchronous: bool = False
    others_draw: bool = False

    @property
    def place(self) -> str:
        """Who plays it, in words."""
        stage = f", stage {self.stage} of {self.stages}" if self.stages > 1 else ""
        return f"rank {self.rank} of {self.ranks}{stage}"

    def computes(self, name: str) -> bool:
        """Whether this stage computes a result."""
        return self.homes.get(name, self.stage) == self.stage

    @cached_property
    def call_of(self) -> dict[int, Call]:
        """Block number -> call."""
        return {call.number: call for call in self.calls}

    @cached_property
    def unit_of(self) -> dict[str, Unit]:
        """Parameter name -> the unit it is gathered and reduced with."""
        return {name: unit for unit in self.units for name in unit.parameters}

    @cached_property
    def unit_numbered(self) -> dict[int, Unit]:
        """Unit number -> unit."""
        return {unit.number: unit for unit in self.units}

    @property
    def keeps(self) -> bool:
        """Whether forward keeps saved values: a step always, a forward only if its backward is in `after`."""
        return self.mode == "step" or bool(self.after)

    @cached_property
    def owed(self) -> tuple[Instruction, ...]:
        """What a step leaves to the next: played alone, it empties the pipeline."""
        return tuple(instruction for instruction in self.instructions if instruction.owed)

    @cached_property
    def owed_reads(self) -> frozenset[tuple[str, str]]:
        """(kind, name) of what the backwards that are left to the next step read again."""
        late = {instruction.block for instruction in self.owed if instruction.block is not None}
        calls = [call for call in self.calls if call.number in late]
        return frozenset((ref.kind, ref.name) for call in calls for ref in read_again(call, self.functions[call.function]))

    @cached_property
    def stashed(self) -> dict[int, tuple[str, ...]]:
        """Unit -> its parameters that STASH copies."""
        return stashed(self.calls, self.functions, self.units)

    @cached_property
    def draws(self) -> bool:
        """Whether any block of any stage draws random numbers by key: all share the seed then."""
        return self.others_draw or draws_by_key(self.calls)

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Values through which a gradient can come back."""
        return frozenset(
            call.writes[index] for call in self.calls if self.functions[call.function].backward for index in self.functions[call.function].tangents
        )


def draws_by_key(calls: Iterable[Call]) -> bool:
    """Whether any of these blocks draws random numbers by key."""
    return any(ref.kind == "scalar" and ref.name in KEYS for call in calls for ref in call.reads)


def read_again(call: Call, function: Function) -> list[Ref]:
    """What the backward of a block fetches anew: parameters, buffers, inputs and the like, which are not kept for it."""
    if function.backward is None:
        return []
    return [call.reads[index] for kind, index in function.saved if kind == "read" and call.reads[index].kind != "value"]


def stashed(calls: Sequence[Call], functions: Mapping[str, Function], units: Sequence[Unit]) -> dict[int, tuple[str, ...]]:
    """Unit -> its parameters that backwards of these blocks read again and that an optimizer may change meanwhile: those that get a gradient here or,
    of several stages, there.
    """
    again: set[str] = set()
    changing = {name for unit in units if len(unit.stages) > 1 for name in unit.parameters}
    for call in calls:
        function = functions[call.function]
        again.update(ref.name for ref in read_again(call, function) if ref.kind == "parameter")
        changing.update(call.reads[index].name for index in function.gradients if call.reads[index].kind == "parameter")
    found = {unit.number: tuple(name for name in unit.parameters if name in again & changing) for unit in units}
    return {number: names for number, names in found.items() if names}


@dataclass(frozen=True)
class Request:
    """What the driver is asked to lower: a program for these leaves (path -> tensor, or the literal itself), with its backward or without."""

    mode: Mode
    training: bool
    leaves: Mapping[str, Any]
    grad: bool
