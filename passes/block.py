"""What the passes hand to the driver: block classes, their instances, and each class as two functions with a footprint."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor, fx

from partitioner.passes.graph import InputKind


@dataclass(frozen=True)
class Port:
    """Where a block argument comes from: a graph input (see graph.Input), or kind "value": what another block wrote."""

    kind: InputKind | str  # InputKind or "value"
    name: str


@dataclass(frozen=True)
class BlockClass:
    """Equal blocks: one module, run by many instances.

    `module`'s placeholders are the reads in order and its output is the flat tuple of the writes. `wants[i]` tells whether read i
    gets a gradient, `tangents` lists the indices of the writes through which a gradient comes back. `scalars` maps the index of a read
    of kind "scalar" to its name (rows, start, key_local, key_shared, share, part). Tensor placeholders carry meta "val" (at the global shape),
    "cut" (dim, outer, inner; absent: not cut over the batch) and "kind" (of the port). A class that reads a cut tensor always reads the scalar
    `rows` too. structure: equal where classes are, whichever graph they were cut from; None: of no graph.
    """

    name: str
    module: fx.GraphModule
    wants: tuple[bool, ...]
    tangents: tuple[int, ...]
    scalars: dict[int, str]
    structure: Hashable = field(default=None, compare=False)


@dataclass(frozen=True)
class Block:
    """One instance: `label` is where it comes from in the user's module tree ("model.layers.3")."""

    index: int
    cls: str
    label: str
    reads: tuple[Port, ...]
    writes: tuple[str, ...]  # value names, unique in the whole graph


@dataclass(frozen=True)
class Blocks:
    """The whole forward as a chain of blocks. `results[i]` is the value name (or graph input name) of Graph.outputs[i].

    groups: of every block the number of the group it was cut for, ascending; empty where no groups were asked for.
    """

    blocks: tuple[Block, ...]
    classes: dict[str, BlockClass]
    results: tuple[Port, ...]
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bytes:
    """fixed + per_row * rows bytes."""

    fixed: int
    per_row: int = 0

    def at(self, rows: int) -> int:
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class Footprint:
    """What a function does to memory, at storage level, so that a simulator can replay it to the byte.

    Storages 0 … arguments-1 are the arguments' (a scalar argument has one that is never used). `events` in order:
    ("make", s, Bytes) allocates own storage s; ("drop", s, None) gives up the function's last reference to s, own or argument.
    `results[i]` is the storage that the i-th returned tensor lies in, held by the caller from then on.
    """

    arguments: int
    events: tuple[tuple[str, int, Bytes | None], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """One argument of backward: kind "read" is the index-th read of the block, "own" the index-th extra result of forward."""

    kind: str
    index: int


@dataclass(frozen=True)
class Halves:
    """A backward in two: first what other blocks wait for, then, at any later time, what only the optimizer waits for.

    backward_input(arguments) takes the arguments of backward [saved…, tangents…] in a list that it empties and returns the gradients of `values`
    (indices of reads), then `carried` values for the other half.
    backward_weight(arguments) takes [arguments of backward at `handed`…, carried values…] in a list that it empties and returns the gradients of
    `parameters` (indices of reads). An index i in `handed` below len(saved) is saved value i, the others are tangents: the caller fetches a saved
    read of kind parameter again, and holds everything else from one half to the other. None where no parameter wants a gradient:
    then backward_input is backward. Where no other read wants one, backward_input does nothing.
    Together they return what backward returns, to the bit. A gradient of a parameter owns its storage. A carried value may lie in the storage of
    a returned gradient of a value, or be a finished gradient of a parameter: write into neither.
    """

    backward_input: Callable[[list[object]], tuple[Tensor, ...]]
    backward_weight: Callable[[list[object]], tuple[Tensor, ...]] | None
    values: tuple[int, ...]
    parameters: tuple[int, ...]
    handed: tuple[int, ...]
    carried: int
    input_footprint: Footprint
    weight_footprint: Footprint | None


@dataclass(frozen=True)
class BlockFunction:
    """A block class, differentiated and split for one chosen saved set.

    forward(arguments) takes the reads in a list that it empties and returns (writes…, own saved…).
    backward(arguments) takes [saved…, tangents…] in a list that it empties and returns the gradients of `gradients` (indices of reads).
    A saved "read" of kind parameter is fetched again by the caller, never kept by forward. Scalars that backward needs are saved reads.
    Returned gradients own their storage (no two alias, none aliases an argument). `backward` is None where nothing needs a gradient.
    Values that cross blocks, inputs, tangents and gradients are contiguous; the caller makes its inputs and the gradients it starts from so.
    `halves` is there where it was asked for and something needs a gradient.
    `source` is all functions as Python text; the callables are made from that text and nothing else.
    """

    name: str
    source: str
    forward: Callable[[list[object]], tuple[Tensor, ...]]
    backward: Callable[[list[object]], tuple[Tensor, ...]] | None
    writes: int
    saved: tuple[Saved, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    forward_footprint: Footprint
    backward_footprint: Footprint | None
    halves: Halves | None = None
    metadata: dict[str, object] = field(default_factory=dict)
