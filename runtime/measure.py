"""Measures the peak of a rank's tensor bytes over the first steps, then costs nothing."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from partitioner.errors import PartitionerError
from partitioner.runtime.memory import Tracker
from partitioner.runtime.recorder import Recording
from partitioner.runtime.shards import local

MEASURED_STEPS = 2
"""The first step makes the optimizer's state, the second is like all others."""


class Measured:
    """What a rank was seen to use in its first `steps` steps.

    `resident()` yields the tensors that exist before the first step; `owns(optimizer)` tells whether it is ours."""

    def __init__(self, resident: Callable[[], Iterable[Tensor]], owns: Callable[[Optimizer], bool]) -> None:
        self._resident = resident
        self._owns = owns
        self.steps = MEASURED_STEPS
        self._tracker: Tracker | None = None
        self._peak: int | None = None
        self._steps = 0
        self._in_optimizer: ExitStack | None = None
        self._hooks: list[Any] = []
        self.recording: Recording | None = None

    @property
    def peak_bytes(self) -> int:
        """Most tensor bytes alive at once on this rank during the first steps, optimizer.step included. Raises before the first.

        They are two, of an asynchronous schedule three.
        """
        if self._tracker is not None:
            self._peak = self._tracker.peak_bytes
        if self._peak is None:
            raise PartitionerError(f"no peak has been measured yet; call train_step first (the first {self.steps} steps are measured)")
        return self._peak

    @contextmanager
    def step(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Around one train_step."""
        self._leave_optimizer()
        if self._steps == self.steps:
            self.stop()
        self._steps += 1
        if self._steps == 1:
            self._start()
        with self.watch():
            if self._tracker is not None:
                for tensor in inputs:
                    self._tracker.track(tensor)
            yield

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around anything else that belongs to a step."""
        if self._tracker is None:
            yield
        else:
            with self._tracker:
                yield

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record when instructions run in the train steps inside, and the optimizer's step after them: `recording.timeline` is the last one's.

        The first two steps are watched for their memory and take longer than others.
        """
        me, recording, stack = weakref.ref(self), Recording(), ExitStack()

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (measured := me()) is not None and recording.recorder is not None and measured._owns(optimizer):
                stack.enter_context(recording.recorder.optimizer())

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            stack.close()

        hooks = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
        self.recording = recording
        try:
            yield recording
        finally:
            self.recording = None
            for hook in hooks:
                hook.remove()

    def stop(self) -> None:
        """Keep the figure, drop the tracker and the hooks."""
        self._freeze()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _freeze(self) -> None:
        if self._tracker is not None:
            self._peak = self._tracker.peak_bytes
            self._tracker = None

    def _start(self) -> None:
        self._tracker = Tracker()
        for tensor in self._resident():
            self._tracker.track(local(tensor))
        me = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (measured := me()) is not None and measured._tracker is not None and measured._owns(optimizer):
                measured._leave_optimizer()
                measured._in_optimizer = ExitStack()
                measured._in_optimizer.enter_context(measured._tracker)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (measured := me()) is not None and measured._in_optimizer and measured._owns(optimizer):
                measured._leave_optimizer()
                if measured._steps == measured.steps:
                    measured._freeze()  # hooks stay: torch is walking through them

        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _leave_optimizer(self) -> None:
        if self._in_optimizer is not None:
            stack, self._in_optimizer = self._in_optimizer, None
            stack.close()
