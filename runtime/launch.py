"""Joining the other ranks: torchrun's environment → process group and device; and what all ranks do together before a step.

The ranks talk through a group of their own: its timeout is how long a peer may be missing (PARTITIONER_PEER_SECONDS), and what the user does with
the default group never stands between. Ranks that disagree would hang in their first collective, so they are compared beforehand.
"""

import math
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # defined, but not declared as exported
from torch.distributed.rendezvous import rendezvous

from partitioner.errors import LaunchError, RankError
from partitioner.runtime import watch
from partitioner.runtime.meeting import meet
from partitioner.runtime.together import Peers
from partitioner.runtime.wire import guarded

T = TypeVar("T")

PEER_SECONDS = 30.0
"""How long a peer may be missing before the others give up."""

START_SECONDS = 600.0
"""How long the ranks wait for the last one to start. On NCCL also the timeout of the group, whose operations are queued long before they run."""

# The group that we made beside each default group; it ends with that.
_own: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks(Peers):
    """This process among its peers, and its device. `group` is None where there is one rank only."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


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


def peer_seconds() -> float:
    """PARTITIONER_PEER_SECONDS, or 30."""
    text = os.environ.get(watch.SECONDS_VARIABLE, str(PEER_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(
            f"the environment variable {watch.SECONDS_VARIABLE} is {text[:40]!r}; write the seconds that a peer may be missing, such as 30"
        )
    return seconds


def join(expected: int) -> Ranks:
    """Become one of `expected` ranks: choose the device by LOCAL_RANK, initialise the default process group (NCCL on CUDA, else gloo) if it is not,
    and make a group of our own on it, in which a peer that is missing for `peer_seconds()` is a PeerError.

    Raises LaunchError where another number of ranks runs, or not all of them come.
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
        return Ranks(device=device)
    seconds = peer_seconds()
    if not initialised:
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(seconds=START_SECONDS)
        try:
            store, rank, _ = next(iter(rendezvous("env://", timeout=patience)))
            store = PrefixStore(meet(PrefixStore("start", store), rank, expected, START_SECONDS), store)
            dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=expected, **options)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"{expected} ranks could not be joined by {backend}: {error}. Start all of them with\n    {torchrun_line(expected)}"
            ) from error
    return Ranks(dist.get_rank(), expected, _group(device, seconds), device)


def _group(device: torch.device, seconds: float) -> dist.ProcessGroup:
    """Our group beside the default one, with a thread that watches the peers."""
    world = dist.group.WORLD
    assert world is not None
    if world in _own:
        return _own[world]
    watch.sweep()
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mark = meet(PrefixStore("partitioner", store), rank, ranks, START_SECONDS)
    queued = device.type == "cuda"
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=START_SECONDS if queued else seconds), group_desc="partitioner")
    own, alive = PrefixStore(mark, store), weakref.ref(group)

    def abort() -> None:
        if (waiting := alive()) is not None:
            waiting.abort()

    watch.attach(watch.Watch(own, rank, ranks, seconds, abort if queued else None), group)
    own.wait([f"beat/{other}" for other in range(ranks)], timedelta(seconds=START_SECONDS))
    _own[world] = group
    return group


def broadcast_object(value: T | None, ranks: Ranks) -> T:
    """Rank 0's value, on every rank; the others' is ignored. They wait for as long as rank 0 lives: it may take minutes to plan."""
    box: list[Any] = [value]
    if ranks.group is not None:
        if (others := watch.of(ranks.group)) is not None:
            if ranks.rank == 0:
                others.say()
            else:
                others.listen("what rank 0 decides")
        guarded(lambda: dist.broadcast_object_list(box, group=ranks.group, group_src=0, device=_wire(ranks)), ranks.group, "what rank 0 decided")
    result: T = box[0]
    return result


def agree(facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Compare facts with rank 0's; a fact is a text or a mapping of texts. Raises RankError on every rank together, naming what differs and where."""
    first = broadcast_object(dict(facts), ranks)
    texts = ranks.together(lambda: _difference(facts, first), RankError)
    if different := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]:
        raise RankError(
            f"{len(different)} of {ranks.ranks} ranks differ from rank 0. {_listed(different)}. Run the same code with the same arguments, files and "
            "package versions on every rank"
        )


def _difference(facts: Mapping[str, Any], first: Mapping[str, Any]) -> str | None:
    """The first fact that is not as on rank 0, in words."""
    for name in dict.fromkeys((*first, *facts)):
        mine, theirs = facts.get(name, "nothing"), first.get(name, "nothing")
        if mine == theirs:
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            return f"{name} {_difference(mine, theirs)}"
        return f"{name} is {str(mine)[:100]}, on rank 0 {str(theirs)[:100]}"
    return None


def _listed(texts: list[str]) -> str:
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")


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
