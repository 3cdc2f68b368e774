"""What `print(plan)` shows: the decisions on one screen, at most 40 lines of 120 columns.

Runs of equal blocks share a line. Text that came from a file is escaped before it reaches a terminal.
"""

from dataclasses import dataclass

from partitioner.plan import BlockPlan, Plan, Replicated
from partitioner.quantities import format_bytes, format_seconds
from partitioner.stage_facts import stage_lines
from partitioner.wording import counted, fitted, listed, percent, span

WIDTH = 120
LINES = 40
_MAX_RUNS = 14  # of blocks; fewer by the lines that stages take
_MAX_STAGES = 8
_MAX_REPLICATED = 6


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks with the same decisions."""

    first: BlockPlan
    last: BlockPlan
    count: int


def report(plan: Plan) -> str:
    """The plan as text."""
    stages = stage_lines(plan, _MAX_STAGES, WIDTH)
    between = [*stages, ""] if stages else []
    blocks = _blocks(plan, _MAX_RUNS - len(between) - len(own_statistics(plan)))
    lines = [*_headline(plan), "", *between, *blocks, "", *_memory(plan), "", *_time(plan), *_replicated(plan), *_constraints(plan)]
    return "\n".join(fitted(line, WIDTH) for line in lines)


def _headline(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    cluster = plan.cluster
    size = f"{cluster.nodes}x{cluster.devices_per_node}" if cluster.nodes > 1 else str(cluster.devices_per_node)
    rows = "not cut" if plan.batch.rows is None else counted(plan.batch.rows, "row")
    cuts = [f"{leaf.path} dim {leaf.dim}" for leaf in plan.batch.leaves if leaf.dim is not None]
    whole = [leaf.path for leaf in plan.batch.leaves if leaf.dim is None]
    about = [f"batch {rows} in {counted(plan.micro_batches, 'micro-batch', 'es')}"]
    if cuts:
        about.append("cut: " + listed(cuts, 3))
    if whole and cuts:
        about.append("whole: " + listed(whole, 2))
    alone = own_statistics(plan)
    if _shares_nothing(plan):
        alone += [
            f"THE BATCH IS NOT SHARED OUT: no dim with a row for each of {plan.mesh['dp']} ranks was found, so every rank computes all of it,",
            "no faster than one device; give a batch of more rows, say batch_dim, or take fewer ranks",
        ]
    return [
        f"{plan.model} on {counted(plan.ranks, 'rank')} ({mesh}) of {size} {cluster.name}, {plan.optimizer}, {plan.precision}",
        "   ".join(about),
        *alone,
    ]


def own_statistics(plan: Plan) -> list[str]:
    """Lines that say so where, as asked for, the mathematics is not that of one device."""
    if plan.batch_statistics == "global" or plan.micro_batches == 1 or not plan.batch_norms:
        return []
    return [
        f"NOT THE MATHEMATICS OF ONE DEVICE, AS ASKED: {counted(plan.batch_norms, 'BatchNorm')} normalise by each micro-batch's",
        "own statistics (batch_statistics=micro_batch); running statistics move once a step, by the whole batch's",
    ]


def _shares_nothing(plan: Plan) -> bool:
    return plan.batch.rows is None and plan.mesh.get("dp", 1) > 1


def _blocks(plan: Plan, most: int) -> list[str]:
    runs = _runs(plan.blocks)
    shown, hidden = (runs, []) if len(runs) <= most else (_heaviest(plan, runs, most), [])
    if len(runs) > most:
        hidden = [run for run in runs if run not in shown]
    rows = [_row(plan, run) for run in shown]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    widths[0] = min(widths[0], 44)
    lines = []
    for row in rows:
        label = row[0] if len(row[0]) <= widths[0] else "…" + row[0][-widths[0] + 1 :]
        lines.append("  " + "  ".join(text.ljust(width) for text, width in zip([label, *row[1:]], [*widths, 0], strict=True)).rstrip())
    title = f"blocks: {len(plan.blocks)}, in {counted(len(plan.classes), 'class', 'es')}"
    if hidden:
        lines.append(f"  and {counted(sum(run.count for run in hidden), 'more block')} that save less")
    return [title, *lines]


def _runs(blocks: tuple[BlockPlan, ...]) -> list[_Run]:
    """Consecutive blocks of one class and the same decisions."""
    runs: list[_Run] = []
    for block in blocks:
        last = runs[-1].last if runs else None
        if last is not None and _decisions(last) == _decisions(block):
            runs[-1] = _Run(runs[-1].first, block, runs[-1].count + 1)
        else:
            runs.append(_Run(block, block, 1))
    return runs


def _decisions(block: BlockPlan) -> tuple[object, ...]:
    return block.block_class, block.shard, block.keep_gathered, block.saved


def _heaviest(plan: Plan, runs: list[_Run], most: int) -> list[_Run]:
    """The runs that keep or could keep the most, in order."""

    def weight(run: _Run) -> int:
        saved = plan.classes[run.first.block_class].saved_sets[run.first.saved]
        return max(saved.keepable_bytes, saved.bytes) * run.count

    kept = sorted(range(len(runs)), key=lambda i: weight(runs[i]), reverse=True)[: most - 1]
    return [runs[i] for i in sorted(kept)]


def _row(plan: Plan, run: _Run) -> list[str]:
    saved = plan.classes[run.first.block_class].saved_sets[run.first.saved]
    shard = run.first.shard + (" kept" if run.first.keep_gathered and run.first.shard == "zero3" else "")
    keeps = f"saves {len(saved.values)} of {saved.keepable} values ({format_bytes(saved.bytes)} of {format_bytes(saved.keepable_bytes)})"
    if not saved.keepable and not saved.values:
        keeps = "saves nothing"
    recompute = ""
    whole = saved.forward_seconds + saved.backward_seconds
    if saved.recompute_seconds > 0 and whole > 0:
        recompute = f"recompute {percent(saved.recompute_seconds / whole)}"
    return [span(run.first.label, run.last.label, run.count), f"x{run.count}" if run.count > 1 else "", shard, keeps, recompute]


def _memory(plan: Plan) -> list[str]:
    fullest = plan.predicted.fullest
    peak, cap = fullest.peak_bytes, plan.capacity_bytes
    title = f"memory: peak {format_bytes(peak)} of {format_bytes(cap)} ({percent(peak / cap if cap else 0.0)}) on the fullest rank"
    low = min(run.peak_bytes for run in plan.predicted.runs)
    if low < peak:
        title += f", {format_bytes(low)} on the emptiest"
    parts = sorted(((kind, size) for kind, size in fullest.breakdown.items() if size), key=lambda part: -part[1])
    if len(parts) > 7:
        parts = [*parts[:6], ("other", sum(size for _, size in parts[6:]))]
    width = max((len(kind) for kind, _ in parts), default=0)
    bars = []
    for kind, size in parts:
        share = size / cap if cap else 0.0
        bar = "#" * max(1, min(50, round(50 * share)))
        bars.append(f"  {kind.ljust(width)}  {format_bytes(size):>8}  {percent(share):>6}  {bar}")
    return [title, *bars]


def _time(plan: Plan) -> list[str]:
    step = plan.predicted.step_seconds
    line = f"time: {format_seconds(step)} a step"
    if plan.batch.rows and step > 0:
        line += f", {plan.batch.rows / step:,.0f} rows/s" if plan.batch.rows / step >= 10 else f", {plan.batch.rows / step:.2g} rows/s"
    if plan.bound_seconds > 0:
        line += f"; no plan for these constraints takes less than {format_seconds(plan.bound_seconds)} (gap {percent(plan.gap)})"
    return [line]


def _replicated(plan: Plan) -> list[str]:
    """Ops that no rule cuts, counted by op and module."""
    counts: dict[Replicated, int] = {}
    for item in plan.replicated:
        counts[item] = counts.get(item, 0) + 1
    if _shares_nothing(plan):
        return ["replicated: everything"]
    if not counts:
        return ["replicated: nothing; every op runs on its rank's rows alone"]
    lines = [f"replicated: {counted(sum(counts.values()), 'op')}, run by every rank on the whole batch (correct, but slower)"]
    shown = _MAX_REPLICATED if len(counts) <= _MAX_REPLICATED else _MAX_REPLICATED - 1
    for item, count in list(counts.items())[:shown]:
        times = f" x{count}" if count > 1 else ""
        place = " at ".join(part for part in (item.module, item.source) if part)
        lines.append(f"  {item.op}{times}" + (f" in {place}" if place else "") + (f": {item.reason}" if item.reason else ""))
    if len(counts) > shown:
        lines.append(f"  and {len(counts) - shown} more")
    return lines


def _constraints(plan: Plan) -> list[str]:
    if not plan.constraints:
        return []
    return ["asked for: " + ", ".join(f"{name}={value}" for name, value in plan.constraints.items())]
