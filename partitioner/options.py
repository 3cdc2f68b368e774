"""What every block may take, in numbers: the options among which the solver chooses, for one number of micro-batches."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from torch import fx

from partitioner import asynchronous
from partitioner.cost import accumulate_seconds
from partitioner.errors import InfeasibleError
from partitioner.lower import Choice, Decision, units_of
from partitioner.order import EACH_MICRO_BATCH
from partitioner.passes.block import Block, BlockFunction, Footprint
from partitioner.passes.rematerialize import Point
from partitioner.pipeline import Pipeline
from partitioner.progress import tell
from partitioner.runtime.optimizer_bytes import state_bytes
from partitioner.runtime.program import Shard, Unit
from partitioner.runtime.unit_bytes import UnitBytes
from partitioner.schedules import ASYNCHRONOUS
from partitioner.solver import Option, Problem, Run, solve
from partitioner.solver_problem import Choices
from partitioner.trial import Task, Verdict, communication, size_of, trial
from partitioner.wording import counted

FRONTIER_POINTS = 16
GAP = 1e-3  # relative; cost figures are not better than that
SHARDS: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")


class Options:
    """Blocks as options in numbers, for one number of micro-batches."""

    def __init__(self, task: Task, micro_batches: int) -> None:
        self.task, self.micro_batches = task, micro_batches
        prepared = self.prepared = task.prepared(micro_batches)
        self.blocks = prepared.blocks.blocks
        self.rows = -(-prepared.typical_rows // micro_batches) if prepared.total is not None else 1
        self.own, self.rest = self._own_parameters()
        self._cache: dict[tuple[object, ...], list[tuple[Option, Decision, Shard, Point]]] = {}
        readers: dict[str, set[int]] = {}
        for block in self.blocks:
            for port in block.reads:
                if port.kind == "value":
                    readers.setdefault(port.name, set()).add(block.index)
        self.shared = {name for name, used in readers.items() if len(used) > 1}
        self.options: list[list[tuple[Option, Decision, Shard, Point]]] = []
        for done, block in enumerate(self.blocks):
            tell(f"what every block may take, {counted(micro_batches, 'micro-batch', 'es')}", done, len(self.blocks))
            self.options.append(self._options(block))

    def _own_parameters(self) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        shards: list[Shard] = ["zero3"] * len(self.blocks)
        units = units_of(self.blocks, shards, tuple(self.task.shapes))
        mine = {unit.parameters[0]: unit for unit in units if unit.shard == "zero3"}
        own = []
        for block in self.blocks:
            first = next((port.name for port in block.reads if port.kind == "parameter" and port.name in mine), None)
            own.append(mine.pop(first).parameters if first is not None else ())
        rest = tuple(name for unit in units if unit.shard == "none" for name in unit.parameters)
        return own, rest

    def _options(self, block: Block) -> list[tuple[Option, Decision, Shard, Point]]:
        signature = tuple((self.task.shapes[name]) for name in self.own[block.index])
        shared = tuple(port.name in self.shared for port in block.reads)
        key = (block.cls, signature, shared)
        if key not in self._cache:
            self._cache[key] = self._make(block)
        return self._cache[key]

    def _make(self, block: Block) -> list[tuple[Option, Decision, Shard, Point]]:
        task, prepared = self.task, self.prepared
        points = prepared.frontier(block.cls, FRONTIER_POINTS)
        match task.constraints.checkpoint:
            case "none":
                points = points[-1:]
            case "full":
                points = points[:1]
        own = self.own[block.index]
        shards: tuple[Shard, ...] = SHARDS if task.constraints.shard == "auto" else (task.constraints.shard,)
        if task.constraints.schedule in ASYNCHRONOUS:
            shards = tuple(shard for shard in shards if shard in asynchronous.SHARDS)
        if not own or (task.ranks == 1 and task.constraints.shard == "auto"):
            shards = shards[:1]
        made = []
        for point in points:
            function = prepared.function(block.cls, point.saved)
            ahead, back = prepared.price(function, False, self.rows), prepared.price(function, True, self.rows)
            for shard in shards:
                for keep in (False, True) if shard == "zero3" and self._reads_again(block, function, own) else (False,):
                    option = self._option(block, function, own, shard, keep, (ahead + back) * self.micro_batches)
                    made.append((option, Decision(point.saved, keep), shard, point))
        return made

    def _reads_again(self, block: Block, function: BlockFunction, own: Sequence[str]) -> bool:
        again = {block.reads[saved.index].name for saved in function.saved if saved.kind == "read" and block.reads[saved.index].kind == "parameter"}
        return bool(again & set(own))

    def _option(self, block: Block, function: BlockFunction, own: tuple[str, ...], shard: Shard, keep: bool, compute: float) -> Option:
        task, m = self.task, self.micro_batches
        whole, trainable = self._weigh(own)
        alone = Unit(0, shard, own)
        unit = UnitBytes.of((alone,), task.shapes, task.ranks, 0)[0] if own else None
        state = persistent = 0
        if unit is not None:
            state = state_bytes(task.optimizer, unit.local_shapes())
            compute += task.optimizer_seconds(unit.local_shapes())
            gradients = trainable if m > 1 and shard in ("none", "zero1") else unit.gradient_bytes()
            if task.constraints.schedule in ASYNCHRONOUS:  # those of the batch before, and its weights
                gradients += unit.gradient_bytes() + (whole if self._reads_again(block, function, own) else 0)
            persistent = unit.persistent() + state + gradients
        if m > 1 and trainable:
            parts = task.ranks if shard in EACH_MICRO_BATCH else 1
            compute += (m - 1) * accumulate_seconds(trainable / parts, task.cluster)
        seconds = communication(task.cluster, task.ranks, task.shapes)
        gathers = 2 if shard == "zero3" and not keep and self._reads_again(block, function, own) else 1
        traffic = 0.0
        if own and task.ranks > 1:
            times = m if shard in ("zero2", "zero3") else 1
            traffic += times * seconds(f"REDUCE {shard}", trainable, alone)
            if shard != "none":
                traffic += (m * gathers if shard == "zero3" else 1) * seconds("GATHER", whole, alone)
        values = [at for at, port in enumerate(block.reads) if port.kind == "value" and port.name not in self.shared]
        bytes_in = sum(self._argument(block, at) for at in values)
        saved_reads = {saved.index for saved in function.saved if saved.kind == "read"} & set(values)
        own_saved = _held(function.forward_footprint, range(function.writes, len(function.forward_footprint.results)), self.rows)
        saved = own_saved + sum(self._argument(block, at) for at in saved_reads)
        gathered = whole if shard == "zero3" else 0
        moving = 0 if task.ranks == 1 else whole if shard in ("zero1", "zero2") else 0
        forward = _rise(function.forward_footprint, self.rows) + bytes_in + gathered + moving
        backward = 0
        if function.backward_footprint is not None:
            backward = _rise(function.backward_footprint, self.rows) + (0 if keep else gathered) + (trainable if task.ranks > 1 else 0)
            backward += _held(function.forward_footprint, [at for at in function.tangents], self.rows)
        return Option(
            key=f"{shard} {'kept' if keep else ''} {len(function.saved)}",
            compute_seconds=compute,
            communication_seconds=traffic,
            persistent_bytes=persistent,
            saved_bytes=saved + (gathered if keep else 0),
            forward_bytes=max(forward, saved),
            backward_bytes=backward,
        )

    def _argument(self, block: Block, at: int) -> int:
        """Bytes of the value that a block reads as its argument `at`."""
        return self._bytes(self.prepared.joint(block.cls).placeholders[at])

    def written(self, block: Block, at: int) -> int:
        """Bytes of the value that a block writes as its result `at`."""
        return self._bytes(self.prepared.joint(block.cls).results[at])

    def _bytes(self, node: fx.Node) -> int:
        count = node.meta["val"].element_size()
        for size in node.meta["sizes"]:
            count *= size.at(self.rows)
        return int(count)

    def _weigh(self, names: Sequence[str]) -> tuple[int, int]:
        sizes = [(size_of(shape, dtype), trainable) for shape, dtype, trainable in (self.task.shapes[name] for name in names)]
        return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)

    def problem(self, capacity: int | None) -> Problem:
        """The solver's question. The optimizer's temporaries stand before the first block: nothing is saved then."""
        task = self.task
        runs: list[Run] = []
        last: list[tuple[Option, Decision, Shard, Point]] | None = None
        for options in self.options:
            if runs and options is last:
                runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
            else:
                runs.append(Run(1, tuple(option for option, *_ in options)))
            last = options
        rest = UnitBytes.of((Unit(0, "none", self.rest),), task.shapes, task.ranks, 0)[0].persistent() if self.rest else 0
        across = 0
        for block in self.blocks:
            across += sum(self.written(block, at) for at, name in enumerate(block.writes) if name in self.shared)
        return Problem(tuple(runs), sum(task.fixed_bytes.values()) + rest + across, capacity, task.cluster.overlap)

    @cached_property
    def fastest(self) -> float:
        """A lower bound of the step whatever memory there is: every block takes its quickest option."""
        compute = sum(min(option.compute_seconds for option, *_ in options) for options in self.options)
        communication = sum(min(option.communication_seconds for option, *_ in options) for options in self.options)
        if self.task.cluster.overlap:
            return max(compute, communication)
        return sum(min(option.compute_seconds + option.communication_seconds for option, *_ in options) for options in self.options)

    def bound(self) -> float:
        """A lower bound of the step under the memory limit: blocks take only what is certain to be held, and no transients."""
        relaxed = self.problem(self.task.capacity_bytes)
        runs = tuple(
            replace(run, options=tuple(replace(o, persistent_bytes=0, forward_bytes=o.saved_bytes, backward_bytes=0) for o in run.options))
            for run in relaxed.runs
        )
        try:
            return max(self.fastest, solve(replace(relaxed, runs=runs, base_bytes=0), gap=GAP).bound_seconds)
        except InfeasibleError:
            return inf

    @cached_property
    def quickest(self) -> Choices:
        """Per block of each run of `problem` its quickest option, and of equally quick ones the one that holds least."""

        def cost(option: Option) -> tuple[float, int]:
            seconds = option.compute_seconds + option.communication_seconds
            return float(f"{seconds:.9e}"), option.persistent_bytes + option.saved_bytes

        return tuple((min(range(len(run.options)), key=lambda at: cost(run.options[at])),) * run.count for run in self.problem(None).runs)

    def verdict(self, choices: Choices, pipeline: Pipeline | None = None) -> Verdict:
        """What was chosen, lowered and simulated."""
        choice, points = self._choice(choices, pipeline)
        return Verdict(self.prepared, choice, points, trial(self.task, self.prepared, choice), 0.0)

    def _choice(self, choices: Choices, pipeline: Pipeline | None) -> tuple[Choice, tuple[Point, ...]]:
        indices = [index for run in choices for index in run]
        taken = [options[index] for options, index in zip(self.options, indices, strict=True)]
        units = units_of(self.blocks, [shard for _, _, shard, _ in taken], tuple(self.task.shapes), pipeline)
        decisions = tuple(decision for _, decision, _, _ in taken)
        stages = pipeline or Pipeline.none(len(self.blocks))
        return Choice(decisions, units, self.micro_batches, stages), tuple(point for *_, point in taken)


def _rise(footprint: Footprint, rows: int) -> int:
    """The most bytes of its own that a function holds at a time."""
    now = most = 0
    alive: dict[int, int] = {}
    for kind, storage, size in footprint.events:
        if kind == "make" and size is not None:
            alive[storage] = size.at(rows)
            now += alive[storage]
            most = max(most, now)
        elif storage in alive:
            now -= alive.pop(storage)
    return most


def _held(footprint: Footprint, results: Sequence[int], rows: int) -> int:
    """Bytes of the own storages that these results lie in."""
    size = {storage: made.at(rows) for kind, storage, made in footprint.events if kind == "make" and made is not None}
    return sum(size.get(storage, 0) for storage in {footprint.results[at] for at in results})
