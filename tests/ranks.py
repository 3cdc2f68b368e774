"""A pool of worker processes that stay alive between tests, each one rank: `run(3, function, *args) -> [result of rank 0, 1, 2]`.

Starting a process and importing torch costs seconds, a task on a living worker milliseconds. A task on n ranks runs on the first n workers. Each task
sees the environment that torchrun would set (RANK, WORLD_SIZE, MASTER_ADDR, …) and, unless `group=False`, an initialised gloo group of its own.

    test process ── TCPStore
         │ pipe       ▲ one connection for life, one prefix a task (each new connection may cost a reverse name lookup of seconds)
         └─ worker 0 ─┘   worker 1 …   env → init_process_group → function(*args) → destroy_process_group

What goes wrong reaches the test: the exception of the rank that failed first is raised with that rank's traceback, a rank that does not end in time
is reported with its stack, one that died with its exit code. Workers that cannot be trusted afterwards are killed and started anew by the next task.
"""

import atexit
import contextlib
import faulthandler
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # defined, but not declared as exported

MOST_RANKS = 4
SECONDS = 120.0
GRACE_SECONDS = 5.0  # how long the other ranks may take to end once one has failed

Task = Callable[..., Any] | str


class RankFailure(Exception):
    """The text of a worker's traceback; the cause of the exception that the test sees."""


class RankHung(Exception):
    """A rank did not end within the time of its task."""


class RankDied(Exception):
    """A rank's process ended before its task did."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed. `at` is a reading of the monotonic clock, which all processes of a machine share (seconds)."""

    rank: int
    at: float
    error: BaseException | None
    text: str


def _resolve(task: Task) -> Callable[..., Any]:
    if not isinstance(task, str):
        return task
    module, _, name = task.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _portable(error: BaseException) -> BaseException | None:
    """The exception itself where it survives pickling, else None."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error if type(copy) is type(error) and str(copy) == str(error) else None


def _apply(filters: Sequence[tuple[Any, ...]]) -> None:
    """Make the warning filters those of the test process, so that a warning on a rank is an error there too."""
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        patterns = {"message": getattr(message, "pattern", ""), "module": getattr(module, "pattern", "")}
        warnings.filterwarnings(action, category=category, lineno=line, append=True, **patterns)


def _perform(rank: int, job: dict[str, Any], store: Store) -> tuple[str, Any]:
    """Run one task as rank `rank` with the environment of torchrun; ("done", packed result) or ("failed", Failure)."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job["ranks"],
        "LOCAL_WORLD_SIZE": job["ranks"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": job["port"],
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served by the test process, so that no port is raced for
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCH_DIST_INIT_BARRIER": 1,  # without it a rank that is done early closes connections that others are still making
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        with warnings.catch_warnings():
            _apply(job["filters"])
            torch.manual_seed(0)
            if job["group"]:
                own = PrefixStore(f"task {job['number']}", store)
                dist.init_process_group("gloo", store=own, rank=rank, world_size=job["ranks"])
            return "done", _pack(_resolve(job["task"])(*job["args"]))
    except BaseException as error:  # noted before the group is destroyed, which makes the other ranks fail too
        return "failed", Failure(rank, time.monotonic(), _portable(error), traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in environment:
            os.environ.pop(name, None)


def _serve(rank: int, pipe: Connection, stacks: str, port: int) -> None:
    """A worker's life: tasks in, results or failures out, until the pipe closes."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    file = open(stacks, "w")  # noqa: SIM115  faulthandler writes to it for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            job = _unpack(data)
        except Exception as error:  # its module cannot be imported here
            reply: tuple[str, Any] = ("failed", Failure(rank, time.monotonic(), _portable(error), traceback.format_exc()))
        else:
            reply = _perform(rank, job, store)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(reply)


def _new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Pool:
    """Worker processes 0 … size-1, each started when first needed."""

    def __init__(self, size: int = MOST_RANKS) -> None:
        self.size = size
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._number = 0
        self._store: TCPStore | None = None
        self._launch: TCPStore | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, ranks: int, task: Task, *args: Any, seconds: float = SECONDS, group: bool = True) -> list[Any]:
        """Run `task` on `ranks` ranks and return their results in rank order.

        `task` is a function that can be pickled (one at the top level of a module) or its address "module:function".
        `group=False` leaves init_process_group to the task, as under torchrun. Raises what the first failing rank raised, RankHung or RankDied.
        """
        if not 1 <= ranks <= self.size:
            raise ValueError(f"{ranks} ranks asked of a pool of {self.size}")
        self._start(ranks)
        self._number += 1
        if not group:
            self._launch = _new_store()  # the place where the ranks meet must be empty
        meeting = self._store if group else self._launch
        assert meeting is not None
        job = {"ranks": ranks, "task": task, "args": args, "group": group, "number": self._number, "port": meeting.port}
        data = _pack({**job, "filters": list(warnings.filters)})
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(data)
        return self._collect(ranks, time.monotonic() + seconds, seconds)

    def close(self) -> None:
        """Kill the workers; the next task starts new ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes, self._store, self._launch = [], [], None, None

    @property
    def pids(self) -> list[int | None]:
        return [worker.pid for worker in self._workers]

    def _start(self, ranks: int) -> None:
        if not all(worker.is_alive() for worker in self._workers):
            self.close()
        self._store = self._store or _new_store()
        context = multiprocessing.get_context("spawn")
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(len(self._workers), ranks):
                here, there = context.Pipe()
                worker = context.Process(
                    target=_serve, args=(rank, there, str(self._stack(rank)), self._store.port), daemon=True, name=f"rank {rank}"
                )
                worker.start()
                there.close()
                self._workers.append(worker)
                self._pipes.append(here)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack-{rank}.txt"

    def _collect(self, ranks: int, end: float, seconds: float) -> list[Any]:
        waiting: dict[Connection, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in [pipe for pipe in multiprocessing.connection.wait(list(waiting), left) if isinstance(pipe, Connection)]:
                rank = waiting.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    failures.append(self._death(rank))
                else:
                    if kind == "done":
                        results[rank] = _unpack(value)
                    else:
                        failures.append(value)
            if failures:
                end = min(end, time.monotonic() + GRACE_SECONDS)
        hung = sorted(waiting.values())
        stacks = self._stacks(hung)
        if hung or any(isinstance(failure.error, RankDied) for failure in failures):
            self.close()
        if failures:
            raise_first(failures)
        if hung:
            raise RankHung(f"ranks {hung} of {ranks} did not end within {seconds:g} s; they stand at\n{stacks}")
        return [results[rank] for rank in range(ranks)]

    def _death(self, rank: int) -> Failure:
        worker = self._workers[rank]
        worker.join(GRACE_SECONDS)
        text = f"the process of rank {rank} died with exit code {worker.exitcode} before its task ended"
        return Failure(rank, time.monotonic(), RankDied(text), text)

    def _stacks(self, ranks: list[int]) -> str:
        """Where the given ranks stand right now, as Python stacks."""
        for rank in ranks:
            pid = self._workers[rank].pid
            if pid is not None and self._workers[rank].is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0)
        return "\n".join(f"rank {rank}:\n{self._stack(rank).read_text() if self._stack(rank).exists() else 'not started'}" for rank in ranks)


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise the error of the rank that failed first; its own traceback, and those of ranks that failed otherwise, are the cause."""
    first, *others = sorted(failures, key=lambda failure: failure.at)
    text = f"rank {first.rank} failed first{f', then {[failure.rank for failure in others]}' if others else ''}:\n{first.text}"
    seen = {_last_line(first)}
    for failure in others:
        if _last_line(failure) not in seen:
            seen.add(_last_line(failure))
            text += f"\nrank {failure.rank} then failed otherwise:\n{failure.text}"
    told = RankFailure(text)
    if first.error is None:
        raise told
    raise first.error from told


def _last_line(failure: Failure) -> str:
    return failure.text.rstrip().rsplit("\n", 1)[-1]


_pool = Pool()
run = _pool.run
close = _pool.close
atexit.register(_pool.close)
