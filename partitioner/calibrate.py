"""Figures of the machine at hand, measured in a second or two and remembered.

    local_cluster(ranks)       this process measures its own device: matmul, attention, convolution, memory, launch
    measure_link(group)        all ranks of a process group measure all_gather and all_reduce together; every rank returns rank 0's figures

Figures are cached under the user's cache dir (`TORCH_PARTITIONER_CACHE` names another one), keyed by device, versions and threads. A cache that
cannot be read is measured again, one that cannot be written does no harm.
"""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from partitioner.cluster import Cluster, Dtype, Duration, Efficiency, Link, OpClass, Rate
from partitioner.errors import ClusterError
from partitioner.files import read_text, write_text
from partitioner.runtime.wire import all_gather, all_reduce

_VERSION = 3
_UNDER_WAY = 16  # reductions of CPU ranks that are timed together, beside computation
_Model = TypeVar("_Model", bound=BaseModel)
_GUESSED_LINKS = {"cpu": Link(alpha_seconds=100e-6, bytes_per_second=1.5e9), "cuda": Link(alpha_seconds=10e-6, bytes_per_second=50e9)}
_DTYPES: tuple[Dtype, ...] = ("float32", "float64", "bfloat16", "float16")


class Figures(BaseModel):
    """What one process measured of its own device."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    flops_per_second: dict[Dtype, Rate]
    memory_bytes_per_second: Rate
    launch_seconds: Duration
    efficiency: dict[OpClass, Efficiency]


def local_cluster(ranks: int, link: Link | None = None) -> Cluster:
    """`ranks` devices like the one at hand (the current CUDA device, else one CPU rank of this machine), measured or from the cache.

    CPU ranks share the machine: the memory is divided by their number, and the rates where they have fewer cores than this process.
    `link` is what `measure_link` returned; without it, figures from an earlier run with as many ranks, else an estimate.
    """
    device = local_device().type
    figures = _remembered(machine_key(device), Figures, lambda: _measure(local_device()))
    per_node = _devices_per_node(ranks, device)
    sources = {"rates": f"measured on this machine, torch {torch.__version__}"}
    if link is None:
        link = _read(_link_key(device, ranks), Link)
        sources["links"] = "measured on this machine" if link else "estimate; a run under torchrun measures them"
    else:
        sources["links"] = "measured on this machine"
    link = link or _GUESSED_LINKS[device]
    share = core_share(ranks, device)
    return Cluster(
        name=_device_name(device),
        device=device,  # type: ignore[arg-type]
        nodes=ranks // per_node,
        devices_per_node=per_node,
        memory_bytes=_machine_memory() // per_node if device == "cpu" else torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        flops_per_second={dtype: rate * share for dtype, rate in figures.flops_per_second.items()},
        memory_bytes_per_second=figures.memory_bytes_per_second * share,
        launch_seconds=figures.launch_seconds,
        efficiency=figures.efficiency,
        intra=link,
        inter=link,
        overlap=device == "cuda",
        share=share,
        sources=sources,
    )


def local_device() -> torch.device:
    """The current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def core_share(ranks: int, device: str) -> float:
    """How much of the cores that this process uses a rank will have: less than 1 where CPU ranks outnumber them."""
    return min(1.0, _cores() / (_devices_per_node(ranks, device) * torch.get_num_threads())) if device == "cpu" else 1.0


def neighbours(ranks: int, device: str) -> int:
    """How many other ranks compute on this machine while one does, each on cores of its own."""
    return max(0, min(_devices_per_node(ranks, device), _cores() // torch.get_num_threads()) - 1) if device == "cpu" else 0


def measure_link(group: dist.ProcessGroup | None = None) -> Link:
    """Alpha and beta of a ring over the group (None: the default one). Every rank of the group calls it; all return the same figures.

    Raises ClusterError when no process group is up.
    """
    if not dist.is_initialized():
        raise ClusterError("links can only be measured between ranks: call torch.distributed.init_process_group first, or leave the link out")
    ranks = dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
    key = _link_key(device.type, ranks)
    first = dist.get_rank(group) == 0
    known = _share(_read(key, Link) if first else None, group)
    if known is not None:
        return known
    link = _share(_time_ring(ranks, device, group), group) or _GUESSED_LINKS[device.type]
    if first:
        _write(key, link)
    return link


def _share(link: Link | None, group: dist.ProcessGroup | None) -> Link | None:
    """Rank 0's figures, on every rank."""
    box = [link.model_dump_json() if link else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return Link.model_validate_json(box[0]) if box[0] else None


def _time_ring(ranks: int, device: torch.device, group: dist.ProcessGroup | None) -> Link:
    if ranks == 1:
        return _GUESSED_LINKS[device.type]

    within = group or dist.group.WORLD
    assert within is not None

    def gather(count: int) -> float:
        mine = torch.zeros(count, device=device)
        return timed(lambda: all_gather(mine.new_empty(ranks * count), mine, within, "a calibration").wait())

    def reduce(count: int) -> float:
        whole = torch.zeros(ranks * count, device=device)
        return timed(lambda: all_reduce(whole, within, "a calibration").wait())

    def reduce_meanwhile(count: int) -> float:
        if device.type != "cpu":
            return reduce(count)
        wholes = [torch.zeros(ranks * count) for _ in range(_UNDER_WAY)]
        return (timed(lambda: _meanwhile(wholes, within), 8) - timed(lambda: _meanwhile([], within), 8)) / _UNDER_WAY

    def timed(once: Callable[[], object], repeats: int = 15) -> float:
        """The median of so many runs: in a step too, ranks that wait for each other wait for what else the machine does."""
        found = []
        for _ in range(repeats + 1):
            dist.barrier(within)
            settle(device)
            start = time.perf_counter()
            once()
            settle(device)
            found.append(time.perf_counter() - start)
        return median(found[1:])

    small, large = 64, 2**18 if device.type == "cpu" else 2**24
    long, steps = gather(large), ranks - 1
    quick = min(gather(small), long / 2, 10.0)  # a machine that does other things may be late for a short one
    alpha = min(max(reduce(small) - quick, 1e-6), quick) / steps  # an all-reduce has twice the steps, and starts but once
    base = quick - alpha * steps
    passed, gathering = 4 * steps * (large - small), long - quick
    summing = max(reduce_meanwhile(large) - base - 2 * alpha * steps, 0.1 * gathering)
    return Link(
        alpha_seconds=alpha,
        base_seconds=base,
        bytes_per_second=passed / gathering,
        reduce_bytes_per_second=2 * passed / summing,
    )


def _meanwhile(wholes: list[Tensor], group: dist.ProcessGroup) -> None:
    """Multiply matrices while these are all-reduced, as gradients are while backward goes on: on CPU ranks both take the same cores."""
    a, b = torch.ones(256, 384), torch.ones(384, 1024)
    out, handles = torch.empty(256, 1024), []
    for turn in range(_UNDER_WAY):
        handles += [all_reduce(whole, group, "a calibration") for whole in wholes[turn : turn + 1]]
        torch.mm(a, b, out=out)
    for handle in handles:
        handle.wait()


# ---------------------------------------------------------------------------------------------------------------- one device


def _measure(device: torch.device) -> Figures:
    with torch.no_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [torch.cuda.current_device()]):
        return _measure_all(device)


def _measure_all(device: torch.device) -> Figures:
    launch = _launch_seconds(device)
    size = 768 if device.type == "cpu" else 4096
    rates = {dtype: _matmul_rate(size, getattr(torch, dtype), device, launch) for dtype in _DTYPES}
    peak = rates["float32"]
    little = 128 if device.type == "cpu" else 512
    half_dim = min(max(little * (peak / _matmul_rate(little, torch.float32, device, launch) - 1), 0.0), 1e4)
    bandwidth, special = _memory_rates(device)

    heads, length, width = (4, 256, 64) if device.type == "cpu" else (64, 2048, 64)
    q = torch.ones(1, heads, length, width, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    attention = 4 * heads * length * length * width / _fastest(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), device)
    attention /= peak if device.type == "cpu" else rates["bfloat16"]

    batch, channels, edge = (4, 64, 28) if device.type == "cpu" else (64, 128, 56)
    image, kernel = torch.ones(batch, channels, edge, edge, device=device), torch.ones(channels, channels, 3, 3, device=device)
    convolution = 2 * batch * edge**2 * channels**2 * 9 / _fastest(lambda: torch.nn.functional.conv2d(image, kernel, padding=1), device) / peak
    return Figures(
        flops_per_second=rates,
        memory_bytes_per_second=bandwidth,
        launch_seconds=launch,
        efficiency={
            "matmul": Efficiency(fraction=1.0, half_dim=half_dim),
            "attention": Efficiency(fraction=_fraction(attention)),
            "convolution": Efficiency(fraction=_fraction(convolution)),
            "pointwise": Efficiency(fraction=1.0),
            "special": Efficiency(fraction=_fraction(special)),
        },
    )


def _memory_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second of an add (two reads, one write) and the share of it that exp reaches."""
    elements = 2**23 if device.type == "cpu" else 2**28
    a, b, out = torch.ones(elements, device=device), torch.ones(elements, device=device), torch.empty(elements, device=device)
    bandwidth = 12 * elements / _fastest(lambda: torch.add(a, b, out=out), device)
    return bandwidth, 8 * elements / _fastest(lambda: torch.exp(a, out=out), device) / bandwidth


def _fraction(value: float) -> float:
    return min(max(value, 0.01), 1.0)


def _launch_seconds(device: torch.device) -> float:
    x, count = torch.zeros(8, device=device), 500

    def many() -> None:
        for _ in range(count):
            torch.ops.aten.add.Tensor(x, x)

    return _fastest(many, device, repeats=3) / count


def _matmul_rate(size: int, dtype: torch.dtype, device: torch.device, launch: float) -> float:
    a, out = torch.ones(size, size, dtype=dtype, device=device), torch.empty(size, size, dtype=dtype, device=device)
    seconds = _fastest(lambda: torch.mm(a, a, out=out), device)
    return float(2 * size**3 / max(seconds - launch, 0.1 * seconds))


def _fastest(call: Callable[[], object], device: torch.device, repeats: int = 4, patience: float = 0.2) -> float:
    """The shortest of a few runs in seconds, one to warm up aside. A run longer than `patience` ends it: figures must not take long."""
    best = float("inf")
    for attempt in range(repeats + 1):
        settle(device)
        start = time.perf_counter()
        call()
        settle(device)
        seconds = time.perf_counter() - start
        if attempt > 0 or seconds > patience:
            best = min(best, seconds)
        if seconds > patience:
            break
    return max(best, 1e-9)


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------------- the machine


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine_memory() -> int:
    """Bytes of this machine, or of the container around this process where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 10**9
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return total


def _devices_per_node(ranks: int, device: str) -> int:
    """Ranks of one machine: what the launcher says, else all (up to 8 GPUs)."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and 0 < int(local) <= 1024 and ranks % int(local) == 0:
        return int(local)
    if ranks <= (8 if device == "cuda" else 1024):
        return ranks
    return next(size for size in range(8 if device == "cuda" else 1024, 0, -1) if ranks % size == 0)


@cache
def _device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name(torch.cuda.current_device()))
    return f"cpu-{platform.machine() or 'unknown'}"


# ---------------------------------------------------------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """Where figures are remembered: $TORCH_PARTITIONER_CACHE, else the user's cache dir."""
    named = os.environ.get("TORCH_PARTITIONER_CACHE")
    if named:
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "torch-partitioner"


def machine_key(device: str, *more: object) -> str:
    processor = platform.processor() or platform.machine()
    about = [_VERSION, torch.__version__, _device_name(device), platform.node(), processor, _cores(), torch.get_num_threads(), *more]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def _link_key(device: str, ranks: int) -> str:
    return machine_key(device, "link", ranks)


def _read(key: str, kind: type[_Model]) -> _Model | None:
    try:
        return kind.model_validate_json(read_text(cache_folder() / f"{key}.json", 64 * 1024, ClusterError, "calibration cache"))
    except (ClusterError, ValidationError, RuntimeError):
        return None


def _write(key: str, figures: BaseModel) -> None:
    try:
        write_text(cache_folder() / f"{key}.json", figures.model_dump_json(indent=1))
    except (OSError, RuntimeError):  # read-only home, no home at all
        return


def _remembered(key: str, kind: type[Figures], measure: Callable[[], Figures]) -> Figures:
    known = _memory.get(key) or _read(key, kind)
    if known is None:
        known = measure()
        _write(key, known)
    _memory[key] = known
    return known


_memory: dict[str, Figures] = {}
