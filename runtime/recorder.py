"""Records when the instructions of a step really ran, told by the executor's machine and by every collective that is issued.

On CUDA moments are events on streams and are read when somebody asks, so that recording awaits nothing; the end of a collective is seen from a
stream of its own. On CPU moments are readings of the clock, and the thread of a collective reads it when the collective is done.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from partitioner.errors import PartitionerError
from partitioner.runtime.program import Instruction, Program
from partitioner.runtime.simulator import OPTIMIZER
from partitioner.runtime.text import instruction_text
from partitioner.runtime.timeline import Timeline, labels_of
from partitioner.runtime.wire import watching


@dataclass
class _Span:
    stream: str
    text: str
    start: Any
    end: Any = None


class Recorder:
    """One step of one rank. `timeline()` is complete once the step, and the optimizer's where there is one, have returned."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._spans: list[_Span] = []
        self._instruction: Instruction | None = None
        self._running: _Span | None = None
        self._start = self._now()
        self._end: Any = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the play of the program."""
        self._start = self._now()
        with watching(self._issued):
            yield
        self._end = self._now()

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Around the optimizer's step."""
        span = _Span("compute", OPTIMIZER, self._now())
        yield
        span.end = self._end = self._now()
        self._spans.append(span)

    def begin(self, instruction: Instruction) -> None:
        self._instruction = instruction

    def run(self) -> None:
        """A block function starts: what it reads is there."""
        if self._instruction is not None:
            self._running = _Span(self._instruction.stream, instruction_text(self._instruction), self._now())

    def end(self) -> None:
        if self._running is not None:
            self._running.end = self._now()
            self._spans.append(self._running)
        self._instruction = self._running = None

    def timeline(self) -> Timeline:
        """What was recorded, in seconds from the start of the step. A collective begins when it is issued, or when the one before it is done."""
        if self._end is None:
            raise PartitionerError("the step that was recorded has not ended; look at its timeline after train_step has returned")
        if self._side is not None:
            torch.cuda.synchronize(self._device)
        free: dict[str, float] = {}
        events = []
        for span in self._spans:
            start = max(self._seconds(span.start), free.get(span.stream, 0.0))
            end = max(start, self._seconds(self._end if span.end is None else span.end))
            free[span.stream] = end
            events.append((span.stream, span.text, start, end))
        program = self._program
        return Timeline(
            program.rank,
            self._seconds(self._end),
            tuple(events),
            labels_of(program),
            measured=True,
            stage=program.stage,
            stages=program.stages,
        )

    def _issued(self, work: Any) -> None:
        if self._instruction is None:
            return
        span = _Span(self._instruction.stream, instruction_text(self._instruction), self._now())
        self._spans.append(span)
        if self._side is not None:
            with torch.cuda.stream(self._side):
                work.wait()
                span.end = self._now()
        else:
            work.get_future().then(lambda _: setattr(span, "end", time.perf_counter()))

    def _now(self) -> Any:
        if self._side is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        return float(self._start.elapsed_time(moment)) / 1e3 if self._side is not None else float(moment - self._start)


class Recording:
    """The recorder of the last step that ran while it was on."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    @property
    def timeline(self) -> Timeline:
        """This rank's last step. Raises PartitionerError before the first one."""
        if self.recorder is None:
            raise PartitionerError("nothing was recorded; call train_step inside `with parallel.measured.record() as recording:`")
        return self.recorder.timeline()
