"""The plan: every decision, in words and numbers that a file can hold, for no process in particular.

A plan names blocks, saved values and parameters; it holds no tensor and no code. Lowering turns it into one program per rank; the driver
attaches the lowered programs to the plan it made, so that `simulate` and `emit` can reach them.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from partitioner.asynchronous import refusal
from partitioner.cluster import Cluster
from partitioner.errors import PlanError
from partitioner.schedules import Name as Schedule
from partitioner.schedules import chunks_of

PLAN_VERSION: Literal[1] = 1

Name = Annotated[str, Field(max_length=1000)]
Count = Annotated[int, Field(ge=0, le=2**53)]  # what every JSON reader keeps exactly
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Shard = Literal["none", "zero1", "zero2", "zero3"]
_T = TypeVar("_T")
Many = Annotated[tuple[_T, ...], Field(fail_fast=True)]
Scalar = bool | int | float | str | None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BatchLeaf(_Part):
    """One input leaf: which dim is cut, of global size outer * rows * inner; dim None means that every rank gets it whole."""

    path: Name
    dim: Annotated[int, Field(ge=0, le=64)] | None = None
    outer: Annotated[int, Field(ge=1, le=2**53)] = 1
    inner: Annotated[int, Field(ge=1, le=2**53)] = 1


class Batch(_Part):
    """The global batch of one step; rows None means that nothing is cut."""

    rows: Count | None
    leaves: Many[BatchLeaf] = ()


class SavedSet(_Part):
    """What a block class keeps from forward to backward. Bytes and seconds are of one block, one micro-batch, the busiest rank.

    keepable counts the values that might be kept, keepable_bytes what all of them would take; recompute_seconds is the price of the rest.
    """

    values: Many[Name]
    bytes: Count = 0
    keepable: Count = 0
    keepable_bytes: Count = 0
    recompute_seconds: Seconds = 0.0
    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0


class ClassPlan(_Part):
    """A block class and the saved sets that its instances use, by key."""

    description: Name = ""
    saved_sets: dict[Name, SavedSet]


class BlockPlan(_Part):
    """One block: where its parameters lie between steps, whether they stay gathered until backward, what it saves, and its stage.

    stage: ascending from 0; in an interleaved schedule a pipeline rank has several.
    """

    label: Name
    block_class: Name = Field(validation_alias=AliasChoices("block_class", "class"), serialization_alias="class")
    shard: Shard = "none"
    keep_gathered: bool = False
    saved: Name
    stage: Annotated[int, Field(ge=0, le=1_000_000)] = 0


class Replicated(_Part):
    """An op that every rank runs on the whole batch, because no rule can cut it."""

    op: Name
    module: Name = ""
    source: Name = ""
    reason: Name = ""


class RankPrediction(_Part):
    """What the simulator says of one rank, or of `ranks` consecutive equal ones. breakdown: bytes at the peak by kind.

    compute_seconds: in which it computes; bubble_seconds: in which it waits for other pipeline stages.
    """

    step_seconds: Seconds
    peak_bytes: Count
    compute_seconds: Seconds = 0.0
    bubble_seconds: Seconds = 0.0
    breakdown: dict[Name, Count] = {}
    ranks: Annotated[int, Field(ge=1, le=1_000_000)] = 1


class Predicted(_Part):
    """Step time and peak memory, per rank and over all ranks."""

    runs: Annotated[tuple[RankPrediction, ...], Field(min_length=1, fail_fast=True)]

    @staticmethod
    def of(ranks: Iterable[RankPrediction]) -> "Predicted":
        """Fold consecutive equal ranks."""
        runs: list[RankPrediction] = []
        for rank in ranks:
            alone = rank.model_copy(update={"ranks": 1})
            if runs and runs[-1].model_copy(update={"ranks": 1}) == alone:
                runs[-1] = alone.model_copy(update={"ranks": runs[-1].ranks + rank.ranks})
            else:
                runs.append(rank)
        return Predicted(runs=tuple(runs))

    @property
    def per_rank(self) -> tuple[RankPrediction, ...]:
        return tuple(run.model_copy(update={"ranks": 1}) for run in self.runs for _ in range(run.ranks))

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: those of the slowest rank."""
        return max(run.step_seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        """Peak tensor bytes of the fullest rank."""
        return self.fullest.peak_bytes

    @property
    def fullest(self) -> RankPrediction:
        return max(self.runs, key=lambda run: run.peak_bytes)


class Alternative(_Part):
    """Another way to train, the same for every block: what the simulator says of its fullest and its slowest rank."""

    ranks: Annotated[int, Field(ge=1, le=1_000_000)]
    shard: Shard
    checkpoint: Literal["none", "full"]
    micro_batches: Annotated[int, Field(ge=1, le=1_000_000)]
    step_seconds: Seconds
    peak_bytes: Count


class MoreMemory(_Part):
    """What a step would take if a device might hold so much."""

    memory_bytes: Count
    step_seconds: Seconds
    micro_batches: Annotated[int, Field(ge=1, le=1_000_000)]


class Explanation(_Part):
    """Why this plan. Seconds are those of the slowest rank's instructions; peak_at is where the fullest rank holds the most, in words."""

    alternatives: Many[Alternative]
    more_memory: Many[MoreMemory] = ()
    compute_seconds: Seconds
    communication_seconds: Seconds
    peak_at: Name


class ClusterSummary(_Part):
    """What the plan was made for, as far as a reader of the plan needs it."""

    name: Name
    device: Literal["cpu", "cuda"]
    nodes: Annotated[int, Field(ge=1, le=1_000_000)]
    devices_per_node: Annotated[int, Field(ge=1, le=1024)]
    memory_bytes: Count

    @staticmethod
    def of(cluster: Cluster) -> "ClusterSummary":
        return ClusterSummary(**{name: getattr(cluster, name) for name in ClusterSummary.model_fields})


class Lowered(Protocol):
    """What the driver attaches to a plan (`assemble.Lowered`): the programs, simulated, and a writer of their text and source."""

    @property
    def simulations(self) -> Sequence[Any]: ...

    @property
    def explanation(self) -> Explanation: ...

    def write(self, folder: Path) -> None: ...


class Plan(_Part):
    """All decisions for one model on one mesh. JSON both ways; equal when the decisions and figures are equal."""

    version: Literal[1] = PLAN_VERSION
    model: Name
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    mesh: dict[Literal["pp", "dp"], Annotated[int, Field(ge=1, le=1_000_000)]]
    micro_batches: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    schedule: Schedule = "1f1b"
    batch_statistics: Literal["global", "micro_batch"] = "global"
    batch_norms: Count = 0  # modules that normalise by the statistics of the batch, or of a micro-batch
    batch: Batch
    classes: dict[Name, ClassPlan]
    blocks: Many[BlockPlan]
    optimizer: Name = "adamw"
    precision: Name = "fp32"
    training: bool = True
    memory_bytes: Count | None = None
    cluster: ClusterSummary
    replicated: Many[Replicated] = ()
    predicted: Predicted
    bound_seconds: Seconds = 0.0
    constraints: dict[Name, Any] = {}
    explanation: Explanation | None = None  # as read from a file; a plan that was made here is explained on demand

    _lowered: Lowered | None = PrivateAttr(default=None)

    @field_validator("constraints")
    @classmethod
    def _plain(cls, constraints: dict[str, Any]) -> dict[str, Any]:
        for name, value in constraints.items():
            if not isinstance(value, Scalar) or (isinstance(value, str) and len(value) > 1000):
                raise ValueError(f"{name[:80]!r} is no number, word or null")
        return constraints

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        for block in self.blocks:
            name, cls = f"block {block.label[:80]!r}", block.block_class
            if cls not in self.classes:
                raise ValueError(f"{name} is of class {cls[:80]!r}, which `classes` does not have")
            if block.saved not in self.classes[cls].saved_sets:
                raise ValueError(f"{name} uses saved set {block.saved[:80]!r}, which class {cls[:80]!r} does not have")
        if self.ranks > 1_000_000:
            raise ValueError(f"the mesh {self.mesh} has more than 1,000,000 ranks")
        if (ranks := sum(run.ranks for run in self.predicted.runs)) != self.ranks:
            raise ValueError(f"the mesh {self.mesh} is of {self.ranks} ranks, but {ranks} were predicted; for another number make a new plan")
        stages = chunks_of(self.schedule, self.stages)
        numbers = [block.stage for block in self.blocks]
        if self.stages > 1 and (without := [at for at, block in enumerate(self.blocks) if "stage" not in block.model_fields_set]):
            raise ValueError(f"block {without[0]} ({self.blocks[without[0]].label[:80]!r}) has no stage, but the mesh has {self.stages}; write one")
        if numbers != sorted(numbers) or set(numbers) - set(range(stages)) or (stages > 1 and len(set(numbers)) < stages):
            raise ValueError(self._misplaced(stages))
        for shard in sorted({block.shard for block in self.blocks}) if self.stages > 1 else ():
            if why := refusal(self.schedule, self.stages, self.micro_batches, shard):
                raise ValueError(why)
        if self.batch.rows is not None and self.micro_batches > max(self.batch.rows, 1):
            raise ValueError(f"{self.micro_batches} micro-batches cannot be cut from {self.batch.rows} rows")
        return self

    def _misplaced(self, stages: int) -> str:
        """What is wrong with the stages of the blocks, which are to be so many."""
        runs = f", {stages // self.stages} runs of blocks a rank" if stages > self.stages else ""
        rule = f"the blocks' stages must ascend from 0 to {stages - 1} without a gap ({self.schedule} over a mesh with pp {self.stages}{runs})"
        before = 0
        for at, block in enumerate(self.blocks):
            if not before <= block.stage <= min(before + (at > 0), stages - 1):
                return f"{rule}, but block {at} ({block.label[:80]!r}) is on stage {block.stage}" + (f" behind stage {before}" if at else "")
            before = block.stage
        return f"{rule}, but the last block is on stage {before}"

    @property
    def stages(self) -> int:
        """Pipeline ranks."""
        return self.mesh.get("pp", 1)

    @property
    def ranks(self) -> int:
        product = 1
        for size in self.mesh.values():
            product *= size
        return product

    @property
    def gap(self) -> float:
        """How far the step may lie above the best one: step seconds / proven bound - 1; infinite where nothing is proven."""
        return self.predicted.step_seconds / self.bound_seconds - 1 if self.bound_seconds > 0 else float("inf")

    @property
    def capacity_bytes(self) -> int:
        """What one device may hold."""
        return self.cluster.memory_bytes if self.memory_bytes is None else self.memory_bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.model_dump(exclude={"explanation"}) == other.model_dump(exclude={"explanation"})

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.micro_batches, self.blocks))

    def __reduce__(self) -> tuple[Callable[[str], "Plan"], tuple[str]]:
        """A plan travels as its decisions; what the driver attached stays in its process."""
        return Plan.from_json, (self.to_json(),)

    def __str__(self) -> str:
        from partitioner.report import report

        return report(self)

    __repr__ = __str__

    def to_json(self) -> str:
        from partitioner.plan_file import dumps

        return dumps(self)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Raises PlanError where the text is no plan."""
        from partitioner.plan_file import loads

        return loads(text)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all; with its explanation, so that `explain` works on what is loaded."""
        from partitioner.plan_file import save

        save(self.model_copy(update={"explanation": self.explained}), Path(path))

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file: data only, validated. Raises PlanError where it is none."""
        from partitioner.plan_file import load

        return load(Path(path))

    @property
    def explained(self) -> Explanation | None:
        """The figures behind `explain`: computed once, in a few seconds, where the plan was made; None where a file did not hold them."""
        return self.explanation if self._lowered is None else self._lowered.explanation

    def explain(self) -> str:
        """Why this plan: what the usual ways to train would take and why each was not chosen, what limits the step, what more memory would buy."""
        from partitioner.explain import explain

        return explain(self)

    def diff(self, other: "Plan") -> str:
        """What differs from this plan to `other`: decisions, blocks run by run, and predictions. Raises PlanError where `other` is no plan."""
        from partitioner.diff import diff

        return diff(self, other)

    def simulate(self) -> Sequence[Any]:
        """The simulated step of every rank (events and memory). Raises PlanError on a plan that came from a file."""
        return self._bound("simulate").simulations

    def emit(self, folder: str | Path) -> Path:
        """Write every rank's program as text and the block functions as Python. Raises PlanError on a plan that came from a file."""
        lowered = self._bound("emit")
        if Path(folder).exists() and not Path(folder).is_dir():
            raise PlanError(f"{folder} is a file; give the folder that the programs are to be written into")
        Path(folder).mkdir(parents=True, exist_ok=True)
        lowered.write(Path(folder))
        return Path(folder)

    def draw(self, path: str | Path) -> Path:
        """Draw the partitioned graph as .svg, .pdf or .png; a plan that came from a file without ops and what passes between blocks."""
        from partitioner.draw_graph import draw_graph

        return draw_graph(self, path)

    def draw_timeline(self, path: str | Path, measured: Sequence[Any] = ()) -> Path:
        """Draw the streams of a simulated step over time (.svg, .pdf, .png), or write them as a Chrome trace (.json).

        measured: timelines that `parallel.measured.record()` took, to be drawn below. Raises PlanError on a plan that came from a file.
        """
        from partitioner.draw_timeline import draw_timeline

        return draw_timeline(self, path, measured)

    def draw_memory(self, path: str | Path, measured: int | None = None) -> Path:
        """Draw the bytes of a simulated step by kind, beside plain training, as .svg, .pdf or .png.

        measured: `parallel.measured.peak_bytes`, to be compared. Raises PlanError on a plan that came from a file.
        """
        from partitioner.draw_memory import draw_memory

        return draw_memory(self, path, measured)

    @property
    def is_bound(self) -> bool:
        """Whether the model's programs are attached: they are where the plan was made, and not where it was read."""
        return self._lowered is not None

    def _bound(self, verb: str) -> Lowered:
        if self._lowered is None:
            raise PlanError(
                f"plan.{verb} needs the model's programs, which a plan file does not hold; bind the plan to its model first: "
                f"plan = make_plan(model, gpus={self.ranks}, example_inputs=…, plan=plan), then plan.{verb}(…)"
            )
        return self._lowered
