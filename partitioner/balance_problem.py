"""What balancing is asked and answers: a chain of blocks, what each may cost, the stages and their memory. Numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite


@dataclass(frozen=True)
class Option:
    """One way to run a block.

    seconds: forward and backward of one micro-batch. persistent_bytes: held over the whole step. saved_bytes: held per micro-batch in flight.
    transient_bytes: the peak above all that is held while the block runs.
    """

    seconds: float
    persistent_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0

    def held(self, in_flight: int) -> int:
        """Bytes that a stage holds for this block with so many micro-batches in flight."""
        return self.persistent_bytes + in_flight * self.saved_bytes


@dataclass(frozen=True)
class Problem:
    """Blocks 0 … n-1 in order to be cut into len(in_flight) stages.

    blocks[i]: the options of block i; equal blocks have equal options (the same tuple, or an equal one) and are then treated together.
    in_flight[k]: micro-batches in flight in stage k at its peak. device[k]: which device runs stage k (empty: device k).
    capacity_bytes[d]: memory of device d (empty: memory does not limit).
    edge_seconds[i], edge_bytes[i]: of a cut before block i; both stages take the seconds, the stage that begins at i holds the bytes per
    micro-batch in flight. Index 0 is never read. (Empty: cuts cost nothing.)
    """

    blocks: tuple[tuple[Option, ...], ...]
    in_flight: tuple[int, ...]
    capacity_bytes: tuple[int, ...] = ()
    edge_seconds: tuple[float, ...] = ()
    edge_bytes: tuple[int, ...] = ()
    device: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        blocks, stages = len(self.blocks), len(self.in_flight)
        if stages < 1:
            raise ValueError("there is no stage; give in_flight one number per stage")
        for name, given, wanted in (
            ("edge_seconds", len(self.edge_seconds), blocks),
            ("edge_bytes", len(self.edge_bytes), blocks),
            ("device", len(self.device), stages),
            ("capacity_bytes", len(self.capacity_bytes), 1 + max(self.devices)),
        ):
            if given not in (0, wanted):
                raise ValueError(f"{name} has {given} numbers; {blocks} blocks in {stages} stages take {wanted}, or none")
        for i, options in enumerate(self.blocks):
            if not options:
                raise ValueError(f"block {i} has no option; give every block at least one")
        numbers = [n for options in set(self.blocks) for o in options for n in (o.seconds, o.persistent_bytes, o.saved_bytes, o.transient_bytes)]
        for number in (*numbers, *self.in_flight, *self.capacity_bytes, *self.edge_seconds, *self.edge_bytes, *self.device):
            if not isfinite(number) or number < 0:
                raise ValueError(f"{number} is no amount of seconds, bytes or micro-batches")

    @property
    def devices(self) -> tuple[int, ...]:
        """Per stage its device."""
        return self.device or tuple(range(len(self.in_flight)))

    def cut_seconds(self, block: int) -> float:
        """What a cut before `block` adds to the stages on both sides; nothing at the ends of the chain."""
        return self.edge_seconds[block] if self.edge_seconds and 0 < block < len(self.blocks) else 0.0

    def cut_bytes(self, block: int) -> int:
        """What the stage that begins at `block` holds per micro-batch in flight; nothing at the start of the chain."""
        return self.edge_bytes[block] if self.edge_bytes and block > 0 else 0


def ranges(problem: Problem, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Per stage its first block and the block after its last."""
    return list(zip((0, *cuts), (*cuts, len(problem.blocks)), strict=True))


def stage_seconds(problem: Problem, cuts: Sequence[int], options: Sequence[int]) -> tuple[float, ...]:
    """Per stage the seconds of a micro-batch, by definition."""
    return tuple(
        fsum((*(problem.blocks[i][options[i]].seconds for i in range(a, b)), problem.cut_seconds(a), problem.cut_seconds(b)))
        for a, b in ranges(problem, cuts)
    )


def device_bytes(problem: Problem, cuts: Sequence[int], options: Sequence[int]) -> dict[int, int]:
    """Per device the peak: what its stages hold, and the largest transient of their blocks."""
    held, transient = dict.fromkeys(problem.devices, 0), dict.fromkeys(problem.devices, 0)
    for (a, b), device, in_flight in zip(ranges(problem, cuts), problem.devices, problem.in_flight, strict=True):
        taken = [problem.blocks[i][options[i]] for i in range(a, b)]
        held[device] += sum(option.held(in_flight) for option in taken) + in_flight * problem.cut_bytes(a)
        transient[device] = max(transient[device], *(option.transient_bytes for option in taken))
    return {device: held[device] + transient[device] for device in held}
