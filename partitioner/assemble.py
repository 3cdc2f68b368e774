"""From the planner's verdict to a Plan and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner import plan as plans
from partitioner.alternatives import Alternatives
from partitioner.errors import PlanError
from partitioner.lower import Choice, Decision, units_of
from partitioner.options import FRONTIER_POINTS
from partitioner.passes.dims import Cut
from partitioner.passes.emit import emit_source_file
from partitioner.passes.rematerialize import Point
from partitioner.pipeline import Pipeline
from partitioner.prepare import Prepared
from partitioner.runtime.program import Program, Shard
from partitioner.runtime.simulator import Simulation
from partitioner.runtime.text import program_text
from partitioner.runtime.timeline import Timeline
from partitioner.trial import Trial, Verdict

if TYPE_CHECKING:
    from partitioner.session import Session


@dataclass(frozen=True)
class Lowered:
    """The programs behind a plan: what `plan.simulate`, `plan.emit` and the drawings show, and what `plan.explain` computes."""

    programs: tuple[Program, ...]
    simulations: tuple[Simulation, ...]
    source: str
    prepared: Prepared
    alternatives: Alternatives

    @property
    def explanation(self) -> plans.Explanation:
        return self.alternatives.explanation

    def plain(self, ranks: int) -> Simulation:
        """The fullest of so many ranks that shard and recompute nothing, in one micro-batch."""
        return self.alternatives.plain(ranks)

    def write(self, folder: Path) -> None:
        """`functions.py`: every block class as Python; `rank_K.txt`: the program of each simulated rank."""
        (folder / "functions.py").write_text(self.source, encoding="utf-8")
        for program in self.programs:
            number = program.stage * program.ranks + program.rank
            (folder / f"rank_{number}.txt").write_text(program_text(program), encoding="utf-8")


def assemble(session: "Session", verdict: Verdict, alternatives: Alternatives) -> plans.Plan:
    """The plan that says what was decided, with its programs attached."""
    prepared, choice = verdict.prepared, verdict.choice
    shard_of = {name: unit.shard for unit in choice.units for name in unit.parameters}
    seen: set[str] = set()
    keys: dict[tuple[str, frozenset[str]], str] = {}
    classes: dict[str, dict[str, plans.SavedSet]] = {}
    described: dict[str, str] = {}
    blocks = []
    for block, decision, point in zip(prepared.blocks.blocks, choice.decisions, verdict.points, strict=True):
        key = keys.setdefault((block.cls, decision.saved), f"set{sum(cls == block.cls for cls, _ in keys)}")
        sets = classes.setdefault(block.cls, {})
        if key not in sets:
            sets[key] = _saved_set(prepared, block.cls, decision, point, choice.micro_batches)
            described.setdefault(block.cls, block.label)
        own = [port.name for port in block.reads if port.kind == "parameter" and port.name not in seen]
        seen.update(own)
        shard: Shard = shard_of[own[0]] if own else "none"
        stage = choice.pipeline.chunks[block.index] if choice.pipeline.stages > 1 else 0
        blocks.append(
            plans.BlockPlan(label=block.label, block_class=block.cls, shard=shard, keep_gathered=decision.keep_gathered, saved=key, stage=stage)
        )
    tried = {(trial.program.stage, trial.program.rank): trial for trial in verdict.trials}
    # ranks between the first and the last of a stage hold no more rows than the first
    told = {place: _prediction(trial) for place, trial in tried.items()}
    predictions = [told.get((stage, rank), told[stage, 0]) for stage in range(session.stages) for rank in range(session.dp)]
    leaves = tuple(
        plans.BatchLeaf(path=described.name, **_where(cut))
        for described, cut in zip(prepared.placed.graph.inputs, prepared.placed.cuts, strict=True)
        if described.kind == "input"
    )
    made = plans.Plan(
        model=type(session.model).__name__,
        fingerprint=session.fingerprint,
        mesh={"pp": session.stages, "dp": session.dp} if session.stages > 1 else {"dp": session.ranks},
        micro_batches=choice.micro_batches,
        schedule=choice.pipeline.schedule,
        batch_statistics=session.batch_statistics,
        batch_norms=len(prepared.placed.batch_norms),
        batch=plans.Batch(rows=prepared.total, leaves=leaves),
        classes={name: plans.ClassPlan(description=described[name], saved_sets=sets) for name, sets in classes.items()},
        blocks=tuple(blocks),
        optimizer=session.optimizer,
        training=session.model.training,
        memory_bytes=session.memory_bytes,
        cluster=plans.ClusterSummary.of(session.cluster),
        replicated=tuple(plans.Replicated(op=f.op, module=f.module, source=f.source, reason=f.why) for f in prepared.placed.fallbacks),
        predicted=plans.Predicted.of(predictions),
        bound_seconds=verdict.bound_seconds,
        constraints=session.constraints.as_dict(),
    )
    functions = [prepared.function(block.cls, decision.saved) for block, decision in zip(prepared.blocks.blocks, choice.decisions, strict=True)]
    functions += [once.function for once in (prepared.prologue, prepared.epilogue) if once is not None]
    source = emit_source_file({function.name: function for function in functions}.values())
    made._lowered = Lowered(
        programs=tuple(t.program for t in verdict.trials),
        simulations=tuple(t.simulation for t in verdict.trials),
        source=source,
        prepared=prepared,
        alternatives=alternatives,
    )
    return made


def _prediction(trial: Trial) -> plans.RankPrediction:
    simulation = trial.simulation
    kinds = {kind: count for kind, count in simulation.peak.by_kind.items() if count}
    timeline = Timeline.of(trial.program, simulation)
    return plans.RankPrediction(
        step_seconds=simulation.step_seconds,
        peak_bytes=simulation.peak_bytes,
        compute_seconds=timeline.busy.get("compute", 0.0),
        bubble_seconds=timeline.bubble_seconds if trial.program.stages > 1 else 0.0,
        breakdown=kinds,
    )


def _where(cut: Cut | None) -> dict[str, int]:
    return {} if cut is None else {"dim": cut.dim, "outer": cut.outer, "inner": cut.inner}


def _saved_set(prepared: Prepared, cls: str, decision: Decision, point: Point, micro_batches: int) -> plans.SavedSet:
    """Figures of one micro-batch of the busiest rank."""
    points = prepared.frontier(cls, FRONTIER_POINTS)
    function = prepared.function(cls, decision.saved)
    rows = -(-prepared.typical_rows // micro_batches)
    joint = prepared.joint(cls)
    part = rows / prepared.typical_rows if joint.rows else 1.0
    return plans.SavedSet(
        values=tuple(sorted(decision.saved)),
        bytes=round(point.saved_bytes * part),
        keepable=max(len(p.saved) for p in points),
        keepable_bytes=round(points[-1].saved_bytes * part),
        recompute_seconds=point.recompute_seconds * part,
        forward_seconds=prepared.price(function, False, rows),
        backward_seconds=prepared.price(function, True, rows),
    )


def cuts_of(prepared: Prepared) -> dict[str, int | None]:
    """Which dim of every input leaf is cut."""
    placed = prepared.placed
    described = zip(placed.graph.inputs, placed.cuts, strict=True)
    return {leaf.name: None if cut is None else cut.dim for leaf, cut in described if leaf.kind == "input"}


def decisions_of(plan: plans.Plan, prepared: Prepared, parameters: tuple[str, ...], limit: int) -> tuple[Choice, tuple[Point, ...]]:
    """The plan's decisions for this capture. Raises PlanError where its blocks or saved values are not the capture's."""
    blocks = prepared.blocks.blocks
    if [block.label for block in plan.blocks] != [block.label for block in blocks]:
        pairs = enumerate(zip(plan.blocks, blocks, strict=False))
        at = next((i for i, (one, other) in pairs if one.label != other.label), min(len(plan.blocks), len(blocks)))
        theirs, mine = (repr(listed[at].label) if at < len(listed) else "missing" for listed in (plan.blocks, blocks))
        raise PlanError(
            f"the plan has {len(plan.blocks)} blocks and this model is cut into {len(blocks)}: block {at} is {theirs} in the plan, {mine} here. "
            "It was edited, or made by another version of this library or of torch; make a new plan"
        )
    decisions, points = [], []
    for planned, block in zip(plan.blocks, blocks, strict=True):
        saved = frozenset(plan.classes[planned.block_class].saved_sets[planned.saved].values)
        point = prepared.point(block.cls, saved, block.label)
        decisions.append(Decision(point.saved, planned.keep_gathered))
        points.append(point)
    pipeline = (
        Pipeline(plan.stages, tuple(planned.stage for planned in plan.blocks), plan.schedule) if plan.stages > 1 else Pipeline.none(len(blocks))
    )
    units = units_of(blocks, [planned.shard for planned in plan.blocks], parameters, pipeline)
    return Choice(tuple(decisions), units, plan.micro_batches, pipeline), tuple(points)
