"""Where a process stands in a pipeline, and how values travel between stages.

    ranks 0 … dp-1 are stage 0, the next dp ranks stage 1, and so on; what a stage computes goes to the ranks of the same place in the others

NCCL runs what a communicator is given one after the other, so that there every ordered pair of stages has a group of its own: a rank that sends to a
stage and receives from it must not wait for one before the other. On gloo messages of one pair of ranks and direction arrive in the order sent.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime import watch
from partitioner.runtime.launch import Ranks, peer_seconds
from partitioner.runtime.program import Wire
from partitioner.runtime.wire import Handle, bits, guarded

# The groups that were made of the ranks of a larger one; they end with that.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Pipe:
    """This process among the stages. world: all ranks; dp: the ranks of this stage (None: one); stages: this place in all stages, by stage."""

    world: Ranks
    stage: int
    count: int
    dp: Ranks
    stages: dist.ProcessGroup
    _edges: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    _ties: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @staticmethod
    def make(world: Ranks, count: int, ties: Iterable[Sequence[int]] = ()) -> "Pipe":
        """Make the groups of `count` stages, and of the stages that share a parameter. Collective: every rank makes all groups, in one order."""
        size = world.ranks // count
        stage, place = divmod(world.rank, size)
        dp = [_group(world, [s * size + p for p in range(size)]) for s in range(count)] if size > 1 else [None]
        stages = [_group(world, [s * size + p for s in range(count)]) for p in range(size)]
        edges: dict[tuple[int, int], dist.ProcessGroup] = {}
        if world.device.type == "cuda":
            for a in range(count):
                for b in range(count):
                    for p in range(size) if a != b else ():
                        group = _group(world, [a * size + p, b * size + p])
                        if p == place:
                            edges[a, b] = group
        shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for held in sorted({tuple(tie) for tie in ties if len(tie) > 1}):
            for p in range(size):
                group = _group(world, [s * size + p for s in held])
                if p == place:
                    shared[held] = group
        mine = Ranks(place, size, dp[stage if size > 1 else 0], world.device)
        return Pipe(world, stage, count, mine, stages[place], edges, shared)

    def tie(self, held: Sequence[int]) -> dist.ProcessGroup:
        """The ranks of this place in the stages that hold a parameter."""
        return self._ties[tuple(held)]

    def send(self, value: Tensor, wire: Wire, gradient: bool, stage: int) -> Handle:
        """Send a value of this stage; its elements that are one in memory travel once."""
        if not gradient:
            for dim in wire.expanded:
                value = value.narrow(dim, 0, 1)
        sent = bits(value.contiguous())
        group = self._edges.get((self.stage, stage), self.stages)
        to = dist.get_group_rank(group, self._rank_of(stage))
        return Handle(partial(dist.isend, group=group, group_dst=to), (sent,), group, f"{_named(wire, gradient)} to stage {stage}", listed=False)

    def receive(self, wire: Wire, gradient: bool, rows: int, stage: int) -> tuple[Tensor, Handle]:
        """A tensor that a value of another stage is coming into, and what to await before it is read."""
        shape = wire.shape(rows) if gradient else wire.core(rows)
        value = torch.empty(shape, dtype=wire.dtype, device=self.world.device)
        taken = bits(value)
        group = self._edges.get((stage, self.stage), self.stages)
        source = dist.get_group_rank(group, self._rank_of(stage))
        what = f"{_named(wire, gradient)} from stage {stage}"
        handle = Handle(partial(dist.irecv, group=group, group_src=source), (taken,), group, what, listed=False)
        return (value if gradient or not wire.expanded else value.expand(wire.shape(rows))), handle

    def share(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Let all stages have the tensors of one, in place. Contiguous ones of one dtype travel together."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        for members in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            sent = bits(flat)
            guarded(partial(dist.broadcast, sent, group=self.stages, group_src=stage), self.stages, f"what stage {stage} computed")
            if stage != self.stage:
                at = 0
                for tensor in members:
                    tensor.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.shape))
                    at += tensor.numel()

    def _rank_of(self, stage: int) -> int:
        return stage * self.dp.ranks + self.dp.rank


def _named(wire: Wire, gradient: bool) -> str:
    return f"{'the gradient of ' if gradient else ''}value {wire.name}"


def _group(world: Ranks, ranks: list[int]) -> dist.ProcessGroup:
    """A group of some ranks in this order, watched as that of all is; made once."""
    assert world.group is not None
    made = _made.setdefault(world.group, {})
    if tuple(ranks) in made:
        return made[tuple(ranks)]
    first = [dist.get_global_rank(world.group, rank) for rank in ranks]
    patience: dict[str, timedelta] = {} if world.device.type == "cuda" else {"timeout": timedelta(seconds=peer_seconds())}
    group: dist.ProcessGroup = dist.new_group(first, group_desc="partitioner stages", **patience)  # type: ignore[arg-type]
    if world.rank in ranks and (watching := watch.of(world.group)) is not None:
        watch.share(watching, group)
    made[tuple(ranks)] = group
    return group
