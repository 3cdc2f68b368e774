"""What differs between two plans: `differences` as data, `diff` as text in the words of `print(plan)`."""

from dataclasses import asdict, dataclass
from typing import Any

from partitioner.errors import PlanError
from partitioner.plan import BlockPlan, Plan
from partitioner.quantities import format_bytes, format_seconds
from partitioner.stage_facts import interleaves, place_of
from partitioner.wording import Text, change, counted, fitted, span, wrapped

WIDTH = 100
_MOST_RUNS = 30


@dataclass(frozen=True)
class BlockChange:
    """Consecutive blocks that change alike. `before` or `after` is None where only the other plan has them."""

    first: str
    last: str
    count: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True)
class Differences:
    """decisions: name -> (before, after) of what holds for the whole plan. predicted: likewise, seconds and bytes of the slowest and fullest rank."""

    decisions: dict[str, tuple[Any, Any]]
    blocks: tuple[BlockChange, ...]
    equal_blocks: int
    predicted: dict[str, tuple[float, float]]

    @property
    def same(self) -> bool:
        return not (self.decisions or self.blocks or self.predicted)

    def as_dict(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


def differences(before: Plan, after: Plan) -> Differences:
    """Raises PlanError where `after` is no plan."""
    if not isinstance(after, Plan):
        raise PlanError(f"plan.diff compares two plans, but was given a {type(after).__name__}; pass what make_plan(…) or Plan.load(…) returned")
    one, other = _decisions(before), _decisions(after)
    blocks, equal = _blocks(before, after)
    figures = {"step_seconds": _figures("step_seconds", before, after), "peak_bytes": _figures("peak_bytes", before, after)}
    kinds = dict.fromkeys([*before.predicted.fullest.breakdown, *after.predicted.fullest.breakdown])
    for kind in kinds:
        figures[kind] = before.predicted.fullest.breakdown.get(kind, 0), after.predicted.fullest.breakdown.get(kind, 0)
    figures["bound_seconds"] = before.bound_seconds, after.bound_seconds
    return Differences(
        decisions={name: (one[name], other[name]) for name in one if one[name] != other[name]},
        blocks=tuple(blocks),
        equal_blocks=equal,
        predicted={name: pair for name, pair in figures.items() if pair[0] != pair[1]},
    )


def diff(before: Plan, after: Plan) -> Text:
    """The differences as text of at most WIDTH columns."""
    found = differences(before, after)
    if found.same:
        return Text("the plans decide and predict the same")
    lines: list[str] = []
    if found.decisions:
        wide = max(len(name) for name in found.decisions)
        for name, (old, new) in found.decisions.items():
            lines += wrapped(f"{name:{wide}}  {_shown(name, old)} → {_shown(name, new)}", WIDTH, wide + 2)
        lines.append("")
    total = found.equal_blocks + sum(run.count for run in found.blocks)
    lines.append(f"blocks: {found.equal_blocks} of {total} decided alike")
    for run in found.blocks[:_MOST_RUNS]:
        lines += _run(run)
    if len(found.blocks) > _MOST_RUNS:
        lines.append(f"  and {counted(sum(run.count for run in found.blocks[_MOST_RUNS:]), 'more block')}")
    lines += ["", *_predicted(found)]
    return Text("\n".join(fitted(line, WIDTH) for line in lines))


def _decisions(plan: Plan) -> dict[str, Any]:
    cluster = plan.cluster
    return {
        "model": plan.model + ("" if not plan.fingerprint else f" ({plan.fingerprint[:8]})"),
        "mesh": " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()),
        "schedule": plan.schedule if plan.stages > 1 else "none",
        "devices": f"{cluster.nodes}x{cluster.devices_per_node} {cluster.name}",
        "memory": plan.capacity_bytes,
        "optimizer": plan.optimizer,
        "precision": plan.precision,
        "mode": "training" if plan.training else "evaluation",
        "batch": "not cut" if plan.batch.rows is None else counted(plan.batch.rows, "row"),
        "cut": ", ".join(f"{leaf.path} dim {leaf.dim}" for leaf in plan.batch.leaves if leaf.dim is not None),
        "micro-batches": plan.micro_batches,
        "batch statistics": plan.batch_statistics,
        "asked for": ", ".join(f"{name}={value}" for name, value in plan.constraints.items()) or "nothing",
    }


def _figures(name: str, before: Plan, after: Plan) -> tuple[float, float]:
    return getattr(before.predicted, name), getattr(after.predicted, name)


def _blocks(before: Plan, after: Plan) -> tuple[list[BlockChange], int]:
    """Blocks are paired by label; a label that returns is paired turn by turn."""
    old, new = _labelled(before), _labelled(after)
    staged = before.stages > 1 and after.stages > 1  # else the mesh says it
    chunks = interleaves(before) and interleaves(after)
    keys = [*old, *(key for key in new if key not in old)]
    changes: list[BlockChange] = []
    equal, adjacent = 0, False
    for key in keys:
        one = _decision(before, old[key], staged, chunks) if key in old else None
        other = _decision(after, new[key], staged, chunks) if key in new else None
        if _told(one) == _told(other):
            equal, adjacent = equal + 1, False
            continue
        last = changes[-1] if changes and adjacent else None
        if last is not None and (_told(last.before), _told(last.after)) == (_told(one), _told(other)):
            changes[-1] = BlockChange(last.first, key[0], last.count + 1, one, other)
        else:
            changes.append(BlockChange(key[0], key[0], 1, one, other))
        adjacent = True
    return changes, equal


def _labelled(plan: Plan) -> dict[tuple[str, int], BlockPlan]:
    turns: dict[str, int] = {}
    blocks: dict[tuple[str, int], BlockPlan] = {}
    for block in plan.blocks:
        turns[block.label] = turns.get(block.label, -1) + 1
        blocks[block.label, turns[block.label]] = block
    return blocks


def _decision(plan: Plan, block: BlockPlan, staged: bool, chunks: bool) -> dict[str, Any]:
    saved = plan.classes[block.block_class].saved_sets[block.saved]
    shard = block.shard + (" kept" if block.keep_gathered and block.shard == "zero3" else "")
    return {"shard": shard, "saved": sorted(saved.values), "saved_bytes": saved.bytes, "keepable": saved.keepable} | (
        {"place": place_of(plan, block, chunks)} if staged else {}
    )


def _told(decision: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """What was decided; bytes are those of a micro-batch, and follow from that."""
    return None if decision is None else (decision["shard"], decision["saved"], decision.get("place"))


def _run(run: BlockChange) -> list[str]:
    name = span(run.first, run.last, run.count) + (f"  x{run.count}" if run.count > 1 else "")
    if run.before is None or run.after is None:
        here = run.before or run.after or {}
        return wrapped(f"  {name}: only in the {'second' if run.before is None else 'first'} plan, {here['shard']}, {_saves(here)}", WIDTH, 4)
    told = []
    if run.before["shard"] != run.after["shard"]:
        told.append(f"{run.before['shard']} → {run.after['shard']}")
    if run.before.get("place") != run.after.get("place"):
        told.append(f"{run.before['place']} → {run.after['place']}")
    if run.before["saved"] != run.after["saved"]:
        told.append(f"{_saves(run.before)} → {_saves(run.after).removeprefix('saves ')}")
    return wrapped(f"  {name}: {'; '.join(told)}", WIDTH, 4)


def _saves(decision: dict[str, Any]) -> str:
    if not decision["saved"] and not decision["keepable"]:
        return "saves nothing"
    return f"saves {len(decision['saved'])} of {decision['keepable']} values ({format_bytes(decision['saved_bytes'])})"


def _shown(name: str, value: Any) -> str:
    return format_bytes(value) if name == "memory" else str(value)


def _predicted(found: Differences) -> list[str]:
    if not found.predicted:
        return ["predicted: the same step and the same peak"]
    names = {"step_seconds": "step", "peak_bytes": "peak memory", "bound_seconds": "proven bound"}
    shown = {names.get(name, f"  {name}"): (name, *pair) for name, pair in found.predicted.items()}
    wide = min(44, max(len(name) for name in shown))
    lines = ["predicted, on the slowest and on the fullest rank:"]
    for name, (key, old, new) in shown.items():
        how = format_seconds if key.endswith("_seconds") else format_bytes
        if how(old) != how(new):
            lines.append(f"  {name[:wide]:{wide}}  {how(old):>8} → {how(new):>8}  {change(old, new)}".rstrip())
    return lines
