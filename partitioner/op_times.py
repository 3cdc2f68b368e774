"""Seconds of an op as the device at hand runs it: each distinct call (op, shapes, strides, numbers) timed once, and remembered.

A formula with a few figures a machine misses what decides on a CPU: caches, kernels that like some shapes and not others. What is timed is the
middle of a few runs, as a step has good and bad ones; beside as many busy threads as other ranks share the machine (`neighbours.py`); at a CPU's
usual pace (`pace.py`); and on tensors that take turns, because in a step a tensor has left the nearest cache when it is read again. An op that
formulas price at more than `PATIENCE_SECONDS`, that communicates, or that cannot be called on made-up tensors keeps its formula. So does the step
of an optimizer elsewhere than on a CPU.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from partitioner.calibrate import cache_folder, machine_key, settle
from partitioner.errors import ClusterError
from partitioner.files import read_text, write_text
from partitioner.neighbours import Neighbours
from partitioner.pace import Pace
from partitioner.passes.layout import at_rows
from partitioner.passes.unify import Linear
from partitioner.runtime.optimizer_bytes import Shapes, prepared_step

PATIENCE_SECONDS = 0.2
_FEWEST, _MOST, _ENOUGH_SECONDS = 5, 13, 0.01  # runs of a call; no more once they took so long
_CACHE_BYTES, _MOST_COPIES = 2**26, 32  # tensors that take turns are to be more than caches hold that ranks share
_MOST_BYTES = 2**30
_FILE_BYTES, _ENTRIES = 16 * 2**20, 50_000
_PACE = "the usual pace"  # where it stands among the seconds that are remembered


class OpTimes:
    """Op times of one device. `share`: how much of a core a rank has, `neighbours`: how many other ranks compute beside it (see `calibrate`)."""

    def __init__(self, device: torch.device, share: float, neighbours: int = 0) -> None:
        self.device, self.share = device, share
        self._neighbours = Neighbours(neighbours)
        self._path = cache_folder() / f"ops-{machine_key(device.type, neighbours)}.json"
        self._known: dict[str, float] | None = None
        self._new = False
        self._clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        self._pace = Pace(self._clock) if device.type == "cpu" else None

    def seconds(self, node: fx.Node, rows: int | None, expected: float) -> float:
        """Seconds of a call_function node at so many rows; `expected`, what formulas say, where it is not timed."""
        if not 0.0 < expected * self.share <= PATIENCE_SECONDS or not isinstance(node.target, OpOverload) or node.target.namespace == "partitioner":
            return expected
        try:
            call = _Call(node, rows)
        except KeyError:  # an argument without a recorded value
            return expected
        if call.bytes > _MOST_BYTES:
            return expected
        known = self._remembered()
        if call.key not in known:
            found = self._time(call)
            known[call.key] = -1.0 if found is None else found
            self._new = True
        return known[call.key] / self.share if known[call.key] >= 0 else expected

    def step_seconds(self, optimizer: str, shapes: Shapes, expected: float) -> float:
        """Seconds of `optimizer.step` on parameters of these (shape, dtype). Timed on CPU, where torch steps parameter by parameter."""
        if self.device.type != "cpu":
            return expected
        known, total = self._remembered(), 0.0
        for (shape, dtype), count in Counter(shapes).items():
            size = torch.Size(shape).numel()
            key = f"{optimizer} {size} {dtype}"
            if key not in known:
                several = [((size,), dtype)] * max(2, _copies(size * dtype.itemsize))  # so that what a step costs once counts less
                known[key] = self._middle([prepared_step(optimizer, several, "cpu", "cpu")]) / len(several)
                self._new = True
            total += count * known[key]
        return total / self.share

    def save(self) -> None:
        """Remember what was timed for the next plan on this machine; a cache that cannot be written does no harm."""
        if not self._new or self._known is None:
            return
        self._new = False
        try:
            write_text(self._path, json.dumps(dict(list(self._known.items())[-_ENTRIES:])))
        except (OSError, RuntimeError):
            return

    def _remembered(self) -> dict[str, float]:
        if self._known is None:
            self._known = _read(self._path)
        return self._known

    def _time(self, call: "_Call") -> float | None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[] if self.device.type == "cpu" else [self.device]):
                return self._middle(call.bound(self.device, _copies(call.bytes)))
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None  # zeros are no valid index, or the op is not there on this device

    def _middle(self, runs: Sequence[Callable[[], object]]) -> float:
        """The median seconds of a few runs, which take turns. On CUDA a run is a burst of calls: what is timed is the kernel, not the wait for it.

        One CPU thread is timed by its own clock, which stands still while other processes have the core.
        """
        burst = 1 if self.device.type == "cpu" else 10
        usual = self.usual_pace()
        found: list[float] = []
        spent = 0.0
        results = [run() for run in runs]  # kept until their turn comes again: a step does not write where it has just written
        settle(self.device)
        with self._neighbours.busy():
            while len(found) < _FEWEST or (len(found) < _MOST and spent < _ENOUGH_SECONDS):
                turn = len(found) % len(runs)
                pace = usual / self._pace.now() if self._pace else 1.0
                start = self._clock()
                for _ in range(burst):
                    results[turn] = runs[turn]()
                settle(self.device)
                seconds = self._clock() - start
                found.append(pace * seconds / burst)
                spent += seconds
        return median(found)

    def usual_pace(self) -> float:
        """Seconds of the product that tells a CPU's pace, as they usually are: listened for once on a machine. 1 elsewhere."""
        if self._pace is None:
            return 1.0
        known = self._remembered()
        if known.get(_PACE, 0.0) <= 0.0:
            known[_PACE] = self._pace.listen(self._neighbours)
            self._new = True
        return known[_PACE]


def _copies(size: int) -> int:
    """How many sets of tensors of so many bytes take turns."""
    return min(_MOST_COPIES, 1 + _CACHE_BYTES // max(size, 1))


class _Call:
    """One op with tensors by shape. Raises KeyError where an argument has neither a fake tensor nor a number recorded."""

    def __init__(self, node: fx.Node, rows: int | None) -> None:
        self.target: Any = node.target
        self._shapes: dict[fx.Node, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}

        def value(source: fx.Node) -> Any:
            val = source.meta.get("val")
            if not isinstance(val, Tensor):
                return _number(source, rows)
            if source not in self._shapes:
                self._shapes[source] = *at_rows(source, rows), val.dtype
            return source

        self.args, self.kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        self.bytes = sum(prod(shape) * dtype.itemsize for shape, _, dtype in self._shapes.values())
        order = {source: index for index, source in enumerate(self._shapes)}
        shown = map_arg((self.args, self.kwargs), lambda source: f"%{order[source]}")
        self.key = f"{self.target} {shown} {list(self._shapes.values())}"

    def bound(self, device: torch.device, count: int) -> list[Callable[[], object]]:
        """The call so many times, each on tensors of its own with the same values: floats drawn, integers zero, booleans true."""
        first = {source: _storage(*described, device) for source, described in self._shapes.items()}
        return [self._on({source: flat.clone() for source, flat in first.items()} if number else first, device) for number in range(count)]

    def _on(self, storages: dict[fx.Node, Tensor], device: torch.device) -> Callable[[], object]:
        made = {source: flat.as_strided(*self._shapes[source][:2]) for source, flat in storages.items()}
        args, kwargs = map_arg(self.args, made.__getitem__), map_arg(self.kwargs, made.__getitem__)
        target = self.target
        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        return lambda: target(*args, **kwargs)


def _number(node: fx.Node, rows: int | None) -> Any:
    at = node.meta["number"]
    return at.at(rows or 0) if isinstance(at, Linear) else at


def _storage(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The flat values of a tensor of this shape and stride."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if prod(shape) else 0
    flat = torch.empty(extent, dtype=dtype, device=device)
    if dtype == torch.bool:
        flat.fill_(True)
    elif dtype.is_floating_point or dtype.is_complex:
        flat.normal_()
    else:
        flat.zero_()
    return flat


def _read(path: Path) -> dict[str, float]:
    try:
        known = json.loads(read_text(path, _FILE_BYTES, ClusterError, "cache of op times"))
    except (ClusterError, ValueError, RecursionError, RuntimeError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {str(key): float(value) for key, value in known.items() if isinstance(value, int | float)}
