"""What one rank did in one step, simulated or measured: which instruction, on which stream, from when to when. Written as a Chrome trace.

Open the trace in https://ui.perfetto.dev or chrome://tracing: a process per rank, a thread per stream; of a simulated step also bytes by kind.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.runtime.program import Instruction, Program
from partitioner.runtime.simulator import OPTIMIZER, Moment, Simulation
from partitioner.runtime.text import parse_instruction

STREAMS = ("compute", "gather", "reduce", "send", "copy")
_TOGETHER = ("LOSS", "TIE")  # what all stages that take part wait for


@dataclass(frozen=True)
class Timeline:
    """events: (stream, instruction, start, end) in seconds from the start of the step; labels: block -> where it stands in the user's model.

    rank: its place in its stage, of which there are `stages`.
    """

    rank: int
    step_seconds: float
    events: tuple[tuple[str, str, float, float], ...]
    labels: Mapping[int, str]
    memory: tuple[Moment, ...] = ()
    measured: bool = False
    stage: int = 0
    stages: int = 1

    @staticmethod
    def of(program: Program, simulation: Simulation) -> "Timeline":
        """The simulated step of a program."""
        return Timeline(
            program.rank,
            simulation.step_seconds,
            simulation.events,
            labels_of(program),
            simulation.memory,
            stage=program.stage,
            stages=program.stages,
        )

    @property
    def name(self) -> str:
        return (f"stage {self.stage}, " if self.stages > 1 else "") + f"rank {self.rank}" + (", measured" if self.measured else "")

    @property
    def busy(self) -> dict[str, float]:
        """Seconds that each stream works, by stream."""
        seconds: dict[str, float] = {}
        for stream, _, start, end in self.events:
            seconds[stream] = seconds.get(stream, 0.0) + end - start
        return {stream: seconds[stream] for stream in STREAMS if stream in seconds}

    @property
    def bubble_seconds(self) -> float:
        """Seconds of the step in which nothing is under way here but what needs other stages: they are waited for."""
        waits, at = 0.0, 0.0
        for start, end in sorted((start, end) for stream, text, start, end in self.events if stream != "send" and not text.startswith(_TOGETHER)):
            waits, at = waits + max(0.0, start - at), max(at, end)
        return waits + max(0.0, self.step_seconds - at)

    def save(self, path: str | Path) -> Path:
        """Write a Chrome trace of this rank alone."""
        return save_trace(path, [self])


def instruction_of(text: str) -> Instruction:
    """An event's instruction; the optimizer's step, which is the user's, stands for one."""
    return Instruction(OPTIMIZER) if text == OPTIMIZER else parse_instruction(text)


def labels_of(program: Program) -> dict[int, str]:
    return {call.number: call.label for call in program.calls}


def save_trace(path: str | Path, timelines: Iterable[Timeline]) -> Path:
    """Write a Chrome trace of several ranks."""
    events = [event for process, timeline in enumerate(timelines) for event in _trace(process, timeline)]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=0), encoding="utf-8")
    return target


def _trace(process: int, timeline: Timeline) -> list[dict[str, Any]]:
    threads = {stream: number for number, stream in enumerate(STREAMS)}
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.name}}]
    found += [{"ph": "M", "name": "thread_name", "pid": process, "tid": threads[s], "args": {"name": s}} for s in timeline.busy]
    for stream, text, start, end in timeline.events:
        name, about = _named(text, timeline.labels)
        span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        found.append({"ph": "X", "name": name, "pid": process, "tid": threads[stream], **span, "args": {"instruction": text, **about}})
    for moment in timeline.memory:
        found.append({"ph": "C", "name": "bytes at most", "pid": process, "ts": moment.seconds * 1e6, "args": moment.by_kind})
    return found


def _named(text: str, labels: Mapping[int, str]) -> tuple[str, dict[str, Any]]:
    if text == OPTIMIZER:
        return text, {}
    instruction = parse_instruction(text)
    about = {name: value for name in ("block", "unit", "mb", "bytes") if (value := getattr(instruction, name)) is not None}
    where = "" if instruction.block is None else f" {labels.get(instruction.block, '')}"
    return instruction.op + where, about
