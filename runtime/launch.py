"""Joining the other ranks: torchrun's environment → process group and device; and two things that all ranks do together before a step.

Ranks that disagree about the plan or the programs would hang in their first collective, so digests are compared beforehand.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partitioner.errors import LaunchError, RankError

T = TypeVar("T")

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. `group` is None where there is one rank only."""

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None


def torchrun_line(ranks: int) -> str:
    """What to type to start `ranks` ranks of the running script."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module is not None and module.name:
        script = f"-m {module.name.removesuffix('.__main__')}"
    elif sys.argv and sys.argv[0] not in ("", "-c"):
        script = sys.argv[0]
    else:
        script = "script.py"
    return " ".join([f"torchrun --nproc-per-node {ranks}", script, *(sys.argv[1:] if script != "script.py" else [])])


def launched() -> bool:
    """Whether this process is one of a launch, by torchrun or with a process group of its own."""
    return "WORLD_SIZE" in os.environ or (dist.is_available() and dist.is_initialized())


def running() -> int:
    """How many ranks run: of the process group if there is one, else as torchrun says, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _environment("WORLD_SIZE", 1)


def join(expected: int, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
    """Become one of `expected` ranks: choose the device by LOCAL_RANK, initialise the default process group (NCCL on CUDA, else gloo) if it is not.

    A collective that a dead peer leaves unanswered fails after timeout_seconds. Raises LaunchError where another number of ranks runs.
    """
    found = running()
    if found != expected:
        if found == 1:
            raise LaunchError(f"the plan is for {expected} ranks, and this process runs alone; start it with\n    {torchrun_line(expected)}")
        raise LaunchError(
            f"the plan is for {expected} ranks, and {found} were started; start it with\n    {torchrun_line(expected)}\nor plan with gpus={found}"
        )
    initialised = dist.is_available() and dist.is_initialized()
    device = _device(dist.get_backend() if initialised else None)
    if expected == 1:
        return Ranks(0, 1, device, None)
    if not initialised:
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **options)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"{expected} ranks could not be joined by {backend}: {error}. Start all of them with\n    {torchrun_line(expected)}"
            ) from error
    return Ranks(dist.get_rank(), expected, device, dist.group.WORLD)


def broadcast_object(value: T | None, ranks: Ranks) -> T:
    """Rank 0's value, on every rank; the others' is ignored."""
    box: list[Any] = [value]
    if ranks.group is not None:
        _together(
            lambda: dist.broadcast_object_list(box, group=ranks.group, group_src=0, device=_wire(ranks)), ranks, "receiving what rank 0 decided"
        )
    result: T = box[0]
    return result


def agree(name: str, digest: str, ranks: Ranks) -> None:
    """Compare a digest of `name` ("the plan", "the programs") over the ranks. Raises RankError on every rank together, naming those that differ."""
    if ranks.group is None:
        return
    digests: list[Any] = [None] * ranks.ranks
    _together(lambda: dist.all_gather_object(digests, digest, group=ranks.group), ranks, f"comparing {name}")
    counts = {value: digests.count(value) for value in digests}
    if len(counts) == 1:
        return
    common = max(counts, key=lambda value: (counts[value], value == digests[0]))
    others = {rank: value for rank, value in enumerate(digests) if value != common}
    listed = ", ".join(f"rank {rank} has {str(value)[:16]}" for rank, value in list(others.items())[:8])
    raise RankError(
        f"the ranks differ in {name}: {counts[common]} of {ranks.ranks} have {str(common)[:16]}, but {listed}"
        f"{f' and {len(others) - 8} more' if len(others) > 8 else ''}. Run the same code, the same package versions and the same files on every rank"
    )


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"the environment variable {name} is {text[:40]!r}, which is no number; torchrun sets it, so start with torchrun") from None


def _device(backend: str | None) -> torch.device:
    """The CUDA device of LOCAL_RANK where there is one and the process group, if it is already there, can use it; else the CPU."""
    if not torch.cuda.is_available() or (backend is not None and "nccl" not in backend):
        return torch.device("cpu")
    local, count = _environment("LOCAL_RANK", torch.cuda.current_device()), torch.cuda.device_count()
    if local >= count:
        raise LaunchError(
            f"local rank {local} has no CUDA device: this machine shows {count}. Start at most {count} ranks on it, or set CUDA_VISIBLE_DEVICES= "
            "(empty) to run on the CPU"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _wire(ranks: Ranks) -> torch.device | None:
    return ranks.device if ranks.device.type == "cuda" else None


def _together(call: Any, ranks: Ranks, what: str) -> None:
    try:
        call()
    except RuntimeError as error:
        raise RankError(
            f"rank {ranks.rank} of {ranks.ranks}, {what}: a peer died, stopped or did not answer in time: {error}. Look at the first error among the "
            "other ranks"
        ) from error
