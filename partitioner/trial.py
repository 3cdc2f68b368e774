"""Try a choice: lower it to step programs and simulate them, rank by rank."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from partitioner.cluster import Cluster, Collective
from partitioner.constraints import Constraints
from partitioner.cost import accumulate_seconds, collective_seconds
from partitioner.lower import Choice, Communication, lower
from partitioner.passes.rematerialize import Point
from partitioner.prepare import Prepared
from partitioner.runtime.optimizer_bytes import planned_bytes
from partitioner.runtime.program import Program, Unit
from partitioner.runtime.shards import Together, lay_out
from partitioner.runtime.simulator import Lasting, Simulation, simulate_together
from partitioner.runtime.unit_bytes import UnitBytes

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype, bool]]
Local = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Task:
    """What the planner is asked.

    prepared(m): the capture, ready for m micro-batches. ranks: of each of the `stages`. shapes: (shape, dtype, trainable) of every parameter.
    fixed_bytes: storage bytes of every input leaf, buffer and constant. capacity_bytes: what one device may hold. optimizer_seconds(local
    shapes): of one `optimizer.step`.
    """

    prepared: Callable[[int], Prepared]
    cluster: Cluster
    ranks: int
    stages: int
    shapes: Shapes
    fixed_bytes: Mapping[str, int]
    capacity_bytes: int
    optimizer: str
    optimizer_seconds: Callable[[Sequence[Local]], float]
    constraints: Constraints


def ranks_to_simulate(ranks: int) -> tuple[int, ...]:
    """All of a few; of many the first and the last, which hold the most and the fewest rows."""
    return tuple(range(ranks)) if ranks <= 4 else (0, ranks - 1)


def communication(cluster: Cluster, ranks: int, shapes: Shapes) -> Communication:
    """Seconds of an instruction that communicates: those of the collectives that the unit's layout makes of it."""
    scatter: Collective = "all_reduce" if cluster.device == "cpu" else "reduce_scatter"  # gloo scatters by an all-reduce

    def together(kind: Collective, parameters: Together, parts: int) -> float:
        alone = [parts * piece.size * piece.dtype.itemsize for piece in parameters.alone]
        shared = [parts * some.segment * some.dtype.itemsize for some in parameters.shared]
        return sum(collective_seconds(kind, size, ranks, cluster) for size in alone + shared)

    @cache
    def seconds(op: str, size: int, unit: Unit | None) -> float:
        if op == "SEND":
            link = cluster.inter if cluster.nodes > 1 else cluster.intra  # some neighbouring stages are on two nodes
            return link.base_seconds + link.alpha_seconds + size / link.bytes_per_second
        if op == "TIE" or unit is None:
            return collective_seconds("all_reduce", size, 2, cluster)
        layout = lay_out(unit, shapes, ranks)
        if op in ("REFRESH", "GATHER"):
            return together("all_gather", layout.gathered, ranks)
        return together(scatter, layout.scattered, ranks) + together("all_reduce", layout.summed, 1)

    return seconds


def sizes_of(shapes: Shapes) -> dict[str, int]:
    """Whole bytes of every parameter."""
    return {name: size_of(shape, dtype) for name, (shape, dtype, _) in shapes.items()}


@dataclass(frozen=True)
class Trial:
    """One rank's step program, simulated."""

    program: Program
    simulation: Simulation


@dataclass(frozen=True)
class Verdict:
    """The choice, its trials, and a proven lower bound of the step."""

    prepared: Prepared
    choice: Choice
    points: tuple[Point, ...]  # the frontier point of every block
    trials: tuple[Trial, ...]
    bound_seconds: float

    @property
    def step_seconds(self) -> float:
        return max(trial.simulation.step_seconds for trial in self.trials)

    @property
    def peak_bytes(self) -> int:
        return max(trial.simulation.peak_bytes for trial in self.trials)


def trial(task: Task, prepared: Prepared, choice: Choice) -> tuple[Trial, ...]:
    """Lower a choice to step programs and simulate them, all stages together: of each the ranks that `ranks_to_simulate` lists."""
    programs = lower(
        prepared,
        choice,
        mode="step",
        grad=True,
        ranks=task.ranks,
        only=ranks_to_simulate(task.ranks),
        parameter_bytes=sizes_of(task.shapes),
        communication=communication(task.cluster, task.ranks, task.shapes),
        accumulation=partial(accumulate_seconds, cluster=task.cluster),
        prefetch=task.cluster.overlap,
    )
    stages = choice.pipeline.stages
    columns = [programs[at :: len(programs) // stages] for at in range(len(programs) // stages)]  # the programs that send to each other
    played: dict[Hashable, list[Simulation]] = {}  # ranks with as many rows that step on equal shapes do the same
    found: dict[tuple[int, int], Trial] = {}
    for column in columns:
        ghosts = [UnitBytes.of(program.units, task.shapes, task.ranks, program.rank) for program in column]
        local = [_stepped(task, units) for units in ghosts]
        alike = (column[0].rows, column[0].whole_rows, tuple(local))
        if alike not in played:
            lasting = [_lasting(task, units, shapes) for units, shapes in zip(ghosts, local, strict=True)]
            played[alike] = simulate_together(list(zip(column, lasting, strict=True)), overlap=task.cluster.overlap, share=task.cluster.share)
        for program, simulation in zip(column, played[alike], strict=True):
            found[program.stage, program.rank] = Trial(program, simulation)
    return tuple(found[program.stage, program.rank] for program in programs)


def _stepped(task: Task, units: Mapping[int, UnitBytes]) -> tuple[Local, ...]:
    """What an optimizer steps on, in the order of the model's parameters: a loop over them holds some temporaries of the one before."""
    pieces = {name: piece for unit in units.values() for name, piece in unit.local_pieces().items()}
    return tuple(pieces[name] for name in task.shapes if name in pieces)


def _lasting(task: Task, units: Mapping[int, UnitBytes], local: Sequence[Local]) -> Lasting:
    """What a rank holds and does besides its program."""
    state, temporary = planned_bytes(task.optimizer, local, task.cluster.device)
    return Lasting(task.fixed_bytes, units, state, temporary, task.optimizer_seconds(local))


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
