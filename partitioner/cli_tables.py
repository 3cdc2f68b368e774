"""Tables of the command line: the simulated step, rank by rank, and the clusters there are."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from partitioner.cluster import Cluster
from partitioner.plan import Plan
from partitioner.quantities import format_bytes, format_seconds
from partitioner.wording import percent, printable


def data(plan: Plan) -> list[dict[str, Any]]:
    """One entry per run of equal ranks: as predicted, and, where the plan is bound to its model, what each stream does."""
    streams = _streams(plan)
    entries, first = [], 0
    for run in plan.predicted.runs:
        entry = {"first_rank": first, **run.model_dump()}
        if first in streams:
            entry["busy_seconds"] = streams[first]
        entries.append(entry)
        first += run.ranks
    return entries


def _streams(plan: Plan) -> dict[int, dict[str, float]]:
    """Seconds that each stream of a simulated rank works."""
    if not plan.is_bound:
        return {}
    from partitioner.draw_timeline import simulated

    each = plan.ranks // plan.stages
    return {timeline.stage * each + timeline.rank: timeline.busy for timeline in simulated(plan)}


def table(plan: Plan) -> Table:
    """What `partitioner simulate` prints."""
    entries = data(plan)
    streams = list(dict.fromkeys(stream for entry in entries for stream in entry.get("busy_seconds", {})))
    made = _table(f"a step of {printable(plan.model)}: {format_seconds(plan.predicted.step_seconds)}")
    stages = plan.stages > 1
    for name in ("rank", *(["stage"] if stages else []), "step", *streams, *(["bubble"] if stages else []), "peak memory", "of the cap"):
        made.add_column(name, justify="left" if name == "rank" else "right", no_wrap=True)
    made.add_column("at the peak")
    for entry in entries:
        last = entry["first_rank"] + entry["ranks"] - 1
        parts = sorted(((size, kind) for kind, size in entry["breakdown"].items() if size), reverse=True)[:3]
        busy = entry.get("busy_seconds", {})
        made.add_row(
            f"{entry['first_rank']}" + (f" … {last}" if entry["ranks"] > 1 else ""),
            *([f"{entry['first_rank'] * plan.stages // plan.ranks}"] if stages else []),
            format_seconds(entry["step_seconds"]),
            *(format_seconds(busy[stream]) if stream in busy else "" for stream in streams),
            *([format_seconds(entry["bubble_seconds"])] if stages else []),
            format_bytes(entry["peak_bytes"]),
            percent(entry["peak_bytes"] / plan.capacity_bytes) if plan.capacity_bytes else "",
            ", ".join(f"{format_bytes(size)} {printable(kind)}" for size, kind in parts),
        )
    return made


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    return {**cluster.model_dump(), "devices": cluster.devices}


def cluster_table(clusters: Sequence[Cluster]) -> Table:
    """What `partitioner clusters` prints."""
    made = _table("clusters: rates are peaks, links are per device")
    for name in ("name", "devices", "memory", "fp32", "bf16", "memory rate", "in a node", "between nodes"):
        made.add_column(name, justify="left" if name == "name" else "right", no_wrap=True)
    for cluster in clusters:
        rates = cluster.memory_bytes_per_second, cluster.intra.bytes_per_second, cluster.inter.bytes_per_second
        made.add_row(
            cluster.name,
            f"{cluster.nodes}x{cluster.devices_per_node} {cluster.device}",
            format_bytes(cluster.memory_bytes),
            _flops(cluster.rate("float32")),
            _flops(cluster.rate("bfloat16")),
            *(f"{format_bytes(rate)}/s" for rate in rates),
        )
    return made


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
