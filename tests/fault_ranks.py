"""Ranks that may die: each is a process of its own, which sends what became of it; the test process serves the store, as torchrun would.

Processes are forked from a server that has imported torch, so that starting three takes milliseconds.
"""

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # defined, but not declared as exported

from partitioner import auto_parallelize
from partitioner.errors import PeerError
from partitioner.passes import collectives
from partitioner.passes.tree import named_leaves
from partitioner.runtime import launch
from partitioner.runtime.executor import TensorMachine
from partitioner.runtime.module import ParallelModule
from partitioner.runtime.parameters import UnitStore
from partitioner.runtime.program import Function, Program, Request
from partitioner.runtime.shards import local
from tests.small_programs import Chain, chain, leaves

PEER_SECONDS = 3.0
RATE = 0.01
NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""torch looks up the name of every address that it connects to; an answer that is lost costs 1 s so, and 5 s otherwise."""
Fault = Callable[[], object]

_stepped = 0.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "torch._dynamo", "partitioner.api"])  # what ranks would spend seconds on importing


@dataclass(frozen=True)
class End:
    """How a rank ended: the result of its task, or the error. `after`: seconds since its last whole step, `exit_code`: of its process."""

    result: Any
    kind: str
    text: str
    ranks: tuple[int, ...]
    after: float
    exit_code: int | None = None


def environment(rank: int, ranks: int, port: int, seconds: float = PEER_SECONDS) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PARTITIONER_PEER_SECONDS": str(seconds),
        "OMP_NUM_THREADS": "1",
        **NAMES,
    }


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _live(rank: int, ranks: int, port: int, pipe: Connection, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment(rank, ranks, port))
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    end = End(None, "", "", (), 0.0)
    try:
        end = replace(end, result=task(*arguments))
    except Exception as error:
        end = replace(end, kind=type(error).__name__, text=str(error), ranks=error.ranks if isinstance(error, PeerError) else ())
    pipe.send(replace(end, after=time.monotonic() - _stepped))


def run(ranks: int, task: Callable[..., Any], *arguments: Any, lost: int | None = None, seconds: float = 120.0) -> list[End]:
    """How each rank ended, the `lost` one excepted: it is not waited for, but killed in the end, like every process that is left."""
    store, begun = new_store(), time.monotonic()
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = _context.Pipe()
        processes.append(_context.Process(target=_live, args=(rank, ranks, store.port, there, task, arguments), name=f"rank {rank}"))
        processes[-1].start()
        there.close()
        pipes.append(here)
    ends = []
    try:
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            if rank != lost:
                assert pipe.poll(max(0.0, begun + seconds - time.monotonic())), f"rank {rank} did not end within {seconds:g} s"
                told: End = pipe.recv()
                process.join(max(0.0, begun + seconds - time.monotonic()))
                ends.append(replace(told, exit_code=process.exitcode))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return ends


# --- faults ------------------------------------------------------------------------------------------------------


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def endless() -> None:
    for _ in range(10**9):
        time.sleep(0.001)


def raises() -> None:
    raise ValueError("no rows left")


def leaves_program() -> None:
    sys.exit(3)


# --- a model -----------------------------------------------------------------------------------------------------


def model(fault: Fault = lambda: None, at: int = -1) -> ParallelModule:
    """A chain of layers on all ranks, without planning; the at-th run of a layer on rank 1 meets the fault."""
    size = int(os.environ["WORLD_SIZE"])
    ranks = launch.join(size)
    collectives.bind("dp", ranks.group)
    runs = 0

    def layer(forward: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        nonlocal runs
        runs += 1
        if ranks.rank == 1 and runs == at:
            fault()
        return forward(arguments)

    def lower(request: Request) -> Program:
        program = chain(2, request.leaves["args[0]"].shape[0], 1, "zero3", ranks.rank, size)
        function = program.functions["layer"]
        faulty = replace(function, forward=lambda arguments: layer(function.forward, arguments))
        return replace(program, functions={**program.functions, "layer": faulty})

    module = Chain(2)
    store = UnitStore(module, chain(2, shard="zero3").units, ranks=size, rank=ranks.rank, group=ranks.group)
    return ParallelModule(
        module,
        store,
        lower,
        None,
        rank=ranks.rank,
        ranks=size,
        group=ranks.group,
        device=ranks.device,
        flatten=lambda args, kwargs, has_targets, targets: named_leaves(args, kwargs, targets, has_targets),
    )


def train_in_stages(at_rank: int, fault: Fault, at: int) -> float:
    """Two stages of two ranks; the at-th block that one of the ranks runs forward meets the fault."""
    rank, runs = int(os.environ["RANK"]), 0
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    pinned = {"pp": 2, "dp": 2, "micro_batches": 2, "schedule": "1f1b", "shard": "zero3"}
    x = torch.ones(8, 4)
    parallel = auto_parallelize(
        nn.Sequential(*layers), gpus=4, example_inputs=(x,), loss=lambda output: output.square().mean(), constraints=pinned, verify=False
    )
    forward = TensorMachine.forward

    def faulty(self: TensorMachine, function: Function, arguments: list[Any], rows: int) -> list[Tensor]:
        nonlocal runs
        runs += 1
        if rank == at_rank and runs == at:
            fault()
        return forward(self, function, arguments, rows)

    TensorMachine.forward = faulty  # type: ignore[method-assign]
    global _stepped
    for _ in range(5):
        loss = parallel.train_step(x)
        _stepped = time.monotonic()
    return float(loss)


def step(parallel: ParallelModule, **changes: Any) -> float:
    """Train on one batch by plain gradient descent (torch's optimizers import their compiler, which takes seconds)."""
    given = leaves(7) | changes
    loss = parallel.train_step(given["args[0]"], given["args[1]"], targets=given["targets"])
    with torch.no_grad():
        for parameter in parallel.parameters():
            assert parameter.grad is not None
            local(parameter).sub_(local(parameter.grad), alpha=RATE)
            parameter.grad = None
    global _stepped
    _stepped = time.monotonic()
    return float(loss)
