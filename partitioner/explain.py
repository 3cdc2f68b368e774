"""What `plan.explain()` says: the usual ways to train with what they would take and why each was not chosen, and what binds the one that was."""

from typing import Any

from partitioner.plan import Alternative, Explanation, Plan
from partitioner.quantities import format_bytes, format_seconds
from partitioner.report import own_statistics
from partitioner.stage_facts import stage_data, stage_facts, stage_lines
from partitioner.wording import Text, counted, fitted, percent, wrapped

WIDTH = 100
SHARDS = {"none": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
_SAME, _CLOSE = 1.002, 1.1  # the search is not closer than that; what takes less than that much longer is told in percent
_SEARCHED = 1.01  # the solver stops 0.1 % from the best of its memory model, which differs from the simulator's: together they miss up to this
_NAME = 36
_STAGES = 16


def explain(plan: Plan) -> Text:
    """The explanation of a plan as text of at most WIDTH columns."""
    found = plan.explained
    cluster = plan.cluster
    size = f"{cluster.nodes}x{cluster.devices_per_node}" if cluster.nodes > 1 else str(cluster.devices_per_node)
    lines = [f"why this plan: {plan.model} on {size} {cluster.name}, {plan.optimizer}, {format_bytes(plan.capacity_bytes)} a rank"]
    lines += [*own_statistics(plan), ""]
    if found is None:
        lines += [*_rows([_chosen(plan)]), "", *_bound(plan), *stage_lines(plan, _STAGES, WIDTH)]
        lines += wrapped(
            "The file does not hold what was not chosen. It does when the plan is written with plan.save(…) where it was made; or bind it to its "
            "model, plan = make_plan(model, …, plan=plan), and explain that.",
            WIDTH,
            0,
        )
    else:
        limit = _pipeline(plan, found) if plan.stages > 1 else _limit(plan, found)
        lines += [*_table(plan, found), "", *_bound(plan), *limit, *_peak(plan, found), *_more(plan, found)]
    return Text("\n".join(fitted(line, WIDTH) for line in lines))


def as_data(plan: Plan) -> dict[str, Any]:
    """The same for scripts. `alternatives` is None where a file does not hold them."""
    found, predicted = plan.explained, plan.predicted
    about = {"name": described(plan), "capacity_bytes": plan.capacity_bytes, "bound_seconds": plan.bound_seconds}
    about |= {"step_seconds": predicted.step_seconds, "peak_bytes": predicted.peak_bytes}
    if plan.stages > 1:
        about["stages"] = stage_data(plan)
    if found is None:
        return {"plan": about, "alternatives": None}
    ways = [
        {"name": named(way), "why": "chosen" if is_chosen(plan, way) else reason(plan, way), **way.model_dump(mode="json")}
        for way in found.alternatives
    ]
    return {"plan": about, "alternatives": ways, **found.model_dump(mode="json", exclude={"alternatives"})}


def named(way: Alternative) -> str:
    """`ZeRO-2 + full checkpointing, 4 micro-batches`."""
    name = "one device" if way.ranks == 1 else SHARDS[way.shard]
    return name + (" + full checkpointing" if way.checkpoint == "full" else "") + _cut(way.micro_batches)


def reason(plan: Plan, way: Alternative) -> str:
    """One sentence: why this way was not chosen."""
    step, capacity = plan.predicted.step_seconds, plan.capacity_bytes
    if way.peak_bytes > capacity:
        return f"needs {format_bytes(way.peak_bytes)}, the cap is {format_bytes(capacity)}"
    ratio = way.step_seconds / step if step > 0 else 1.0
    if pinned := _pinned(plan, way):
        return f"fits, but {pinned} was asked for"
    if ratio >= _CLOSE:
        return f"fits, but takes {ratio:.2f}x as long"
    if ratio > _SAME:
        return f"fits, but takes {percent(ratio - 1)} longer"
    if ratio >= 1 / _SAME:
        return "is as fast, but takes more memory" if way.peak_bytes > plan.predicted.peak_bytes else "is as fast"
    if ratio >= 1 / _SEARCHED and way.ranks == plan.ranks:
        return "is as fast within the solver's gap"
    if plan.stages > 1 and plan.constraints.get("pp"):
        return f"is {percent(1 - ratio)} faster, but pp={plan.stages} was asked for"
    faster = f"fits and is {percent(1 - ratio)} faster"
    return f"{faster}: gpus=1 does better" if way.ranks < plan.ranks else f"{faster}: the search missed it"


def described(plan: Plan) -> str:
    """The plan's own decisions in a few words: `ZeRO-1, saves 71 % for backward, 8 micro-batches`."""
    used = [SHARDS[shard] for shard in SHARDS if any(block.shard == shard for block in plan.blocks)]
    used = used[1:] if used[:1] == ["DDP"] and len(used) > 1 and not _plain_parameters(plan) else used
    sets = [plan.classes[block.block_class].saved_sets[block.saved] for block in plan.blocks]
    keepable = sum(saved.keepable_bytes for saved in sets)
    words = "one device" if plan.ranks == 1 else " and ".join(used) or "DDP"
    if plan.stages > 1:
        words = f"{plan.stages} stages ({plan.schedule})" + (f" of {words}" if plan.ranks > plan.stages else "")
    if keepable and sum(saved.bytes for saved in sets) < keepable:
        words += f", saves {percent(sum(saved.bytes for saved in sets) / keepable)} for backward"
    return words + _cut(plan.micro_batches)


def _plain_parameters(plan: Plan) -> bool:
    """Whether some block that holds state is not sharded. Blocks of no parameters say "none" too, but do nothing that would be worth saving."""
    return any(block.shard == "none" and plan.classes[block.block_class].saved_sets[block.saved].keepable for block in plan.blocks)


def _cut(micro_batches: int) -> str:
    return f", {counted(micro_batches, 'micro-batch', 'es')}" if micro_batches > 1 else ""


def _pinned(plan: Plan, way: Alternative) -> str:
    """The constraint that rules this way out, as it was written."""
    for name in ("shard", "checkpoint", "micro_batches"):
        asked = plan.constraints.get(name)
        if asked is not None and way.ranks == plan.ranks and plan.stages == 1 and asked != getattr(way, name):
            return f"{name}={asked}"
    return ""


def is_chosen(plan: Plan, way: Alternative) -> bool:
    """Whether the plan is this way: the same figures, from the same decisions."""
    figures = way.step_seconds == plan.predicted.step_seconds and way.peak_bytes == plan.predicted.peak_bytes
    shards = {block.shard for block in plan.blocks}
    return (
        plan.stages == 1
        and figures
        and way.ranks == plan.ranks
        and way.micro_batches == plan.micro_batches
        and (shards - {"none"} or {"none"}) == {way.shard}
    )


def _table(plan: Plan, found: Explanation) -> list[str]:
    rows: list[tuple[str, int, float, str]] = []
    family: tuple[int, str] | None = None
    chosen = False
    for way in found.alternatives:
        name = named(way)
        if family == (way.ranks, way.shard):
            plain = "one device" if way.ranks == 1 else SHARDS[way.shard]
            name = "  +" + name.removeprefix(plain).removeprefix(" +").removeprefix(",")
        family = (way.ranks, way.shard)
        mine = not chosen and is_chosen(plan, way)
        chosen = chosen or mine
        rows.append((name, way.peak_bytes, way.step_seconds, "chosen" if mine else reason(plan, way)))
    if not chosen:
        rows.append(_chosen(plan))
    return _rows(rows)


def _chosen(plan: Plan) -> tuple[str, int, float, str]:
    return "this plan: " + described(plan), plan.predicted.peak_bytes, plan.predicted.step_seconds, "chosen"


def _rows(rows: list[tuple[str, int, float, str]]) -> list[str]:
    wide = min(_NAME, max(len(name) for name, *_ in rows))
    lines = [f"  {'way to train':{wide}}  {'memory':>8}  {'step':>8}"]
    for name, peak_bytes, seconds, why in rows:
        first, *rest = wrapped(name, wide, 4)
        lines.append(f"  {first:{wide}}  {format_bytes(peak_bytes):>8}  {format_seconds(seconds):>8}  {why}")
        lines += [f"  {line}" for line in rest]
    return lines


def _bound(plan: Plan) -> list[str]:
    if plan.bound_seconds <= 0:
        return []
    return [f"bound: no plan for these constraints takes less than {format_seconds(plan.bound_seconds)} a step (gap {percent(plan.gap)})"]


def _limit(plan: Plan, found: Explanation) -> list[str]:
    step, compute, moved = plan.predicted.step_seconds, found.compute_seconds, found.communication_seconds
    if step <= 0:
        return []
    waited = max(0.0, step - compute)
    if waited > compute:
        line = f"limit: communication; computation takes {format_seconds(compute)} of the {format_seconds(step)}"
    else:
        line = f"limit: computation, {format_seconds(compute)} of the {format_seconds(step)} ({percent(min(1.0, compute / step))})"
    if moved > waited * 1.001:
        line += f"; communication, {format_seconds(moved)}, runs beside it, and {format_seconds(waited)} of it is waited for"
    elif moved:
        line += f"; communication takes {format_seconds(moved)}, while nothing is computed"
    return wrapped(line, WIDTH, 2)


def _pipeline(plan: Plan, found: Explanation) -> list[str]:
    """Every stage, which of them the others wait for, and what would be faster without any."""
    busiest = max(stage_facts(plan), key=lambda facts: facts.busy)
    lines = [
        *stage_lines(plan, _STAGES, WIDTH),
        f"limit: stage {busiest.number}, which computes {percent(busiest.busy)} of the {format_seconds(plan.predicted.step_seconds)}; more "
        "micro-batches make bubbles shorter",
    ]
    fitting = [way for way in found.alternatives if way.peak_bytes <= plan.capacity_bytes]
    quickest = min(fitting, key=lambda way: way.step_seconds, default=None)
    if quickest is None:
        lines.append("without stages: nothing fits into the memory of a device")
    elif quickest.step_seconds * _SAME < plan.predicted.step_seconds:
        less = percent(1 - quickest.step_seconds / plan.predicted.step_seconds)
        advice = "plan with gpus=1" if quickest.ranks == 1 else "leave out pp"
        lines.append(f"without stages: {named(quickest)} takes {format_seconds(quickest.step_seconds)}, {less} less; {advice}")
    else:
        lines.append(f"without stages: the best, {named(quickest)}, takes {format_seconds(quickest.step_seconds)}")
    return lines


def _peak(plan: Plan, found: Explanation) -> list[str]:
    fullest = plan.predicted.fullest
    parts = sorted(((size, kind) for kind, size in fullest.breakdown.items() if size), reverse=True)[:3]
    made = ", ".join(f"{format_bytes(size)} {kind}" for size, kind in parts)
    return wrapped(f"peak: {format_bytes(fullest.peak_bytes)} in {found.peak_at}" + (f": {made}" if made else ""), WIDTH, 2)


def _more(plan: Plan, found: Explanation) -> list[str]:
    if not found.more_memory:
        return ["more memory would not make the step noticeably shorter"]
    step = plan.predicted.step_seconds
    lines = ["more memory would make the step shorter:"]
    for more in found.more_memory:
        extra = format_bytes(max(0, more.memory_bytes - plan.capacity_bytes))
        less = f", {percent(1 - more.step_seconds / step)} less" if 0 < more.step_seconds < step else ""
        lines.append(f"  with {extra} more a rank {format_seconds(more.step_seconds)}{less}, in {counted(more.micro_batches, 'micro-batch', 'es')}")
    return lines
