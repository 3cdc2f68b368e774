"""Measured timelines: every instruction that runs is there, in order, on its stream; nothing is recorded when nobody asked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from partitioner.errors import PartitionerError
from partitioner.passes import collectives
from partitioner.runtime.executor import Executor
from partitioner.runtime.measure import Measured
from partitioner.runtime.parameters import UnitStore, shapes_of
from partitioner.runtime.recorder import Recorder, Recording
from partitioner.runtime.simulator import Lasting, simulate, storage_bytes
from partitioner.runtime.timeline import Timeline, save_trace
from partitioner.runtime.unit_bytes import UnitBytes
from partitioner.runtime.wire import watching
from tests import ranks
from tests.small_programs import Chain, WholeStore, chain, leaves

CPU = torch.device("cpu")


def recorded(shard: str, size: int) -> Timeline:
    """On every rank: the timeline of the second step, and what the simulator says of the same program."""
    rank, group = dist.get_rank(), dist.group.WORLD
    collectives.bind("dp", group)
    program, module, given = chain(3, 12, 2, shard, rank, size), Chain(3), leaves(12)  # type: ignore[arg-type]
    executor = Executor(program, module, UnitStore(module, program.units, ranks=size, rank=rank, group=group), group, CPU)
    executor.step(given)
    recording = Recording()
    executor.step(given, recording=recording)
    collectives.bind("dp", None)
    return recording.timeline


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_a_measured_step_has_the_events_of_the_simulated_one(shard: str) -> None:
    program, given = chain(3, 12, 2, shard, 0, 2), leaves(12)  # type: ignore[arg-type]
    expected = simulate(program, Lasting(bytes_of=storage_bytes(given), unit_bytes=UnitBytes.of(program.units, shapes_of(Chain(3)), 2, 0)))
    runs = [(stream, text) for stream, text, *_ in expected.events]
    for rank, timeline in enumerate(ranks.run(2, recorded, shard, 2)):
        assert timeline.rank == rank and timeline.labels[1] == program.call_of[1].label
        # a unit may need several collectives, each under its instruction's name, and a refresh of what is fresh none; a prologue has no price
        seen = list(dict.fromkeys((stream, text) for stream, text, *_ in timeline.events))
        assert [pair for pair in seen if pair[0] == "compute"] == [
            ("compute", "PROLOGUE block 4 on compute"),
            *(pair for pair in runs if pair[0] == "compute"),
        ]
        assert {stream for stream, _ in seen} == {"compute", "reduce", *(("gather",) if shard == "zero3" else ())}
        assert {pair for pair in runs if pair[0] == "reduce"} <= set(seen)
        ends: dict[str, float] = {}
        for stream, text, start, end in timeline.events:
            assert 0 <= ends.get(stream, 0.0) <= start <= end <= timeline.step_seconds, text
            ends[stream] = end
        assert all(0 < seconds <= timeline.step_seconds for seconds in timeline.busy.values())


def alone() -> tuple[Executor, dict[str, torch.Tensor], Chain]:
    program, module = chain(2, 6, 2), Chain(2)
    return Executor(program, module, WholeStore(module, program.units), None, CPU), leaves(6), module


def test_recording_is_asked_for_and_ends(tmp_path: Path) -> None:
    executor, given, module = alone()
    measured = Measured(module.parameters, lambda optimizer: optimizer.param_groups[0]["params"][0] is next(module.parameters()))
    assert measured.recording is None
    with measured.record() as recording:
        assert measured.recording is recording
        with pytest.raises(PartitionerError, match=r"nothing was recorded; call train_step inside"):
            recording.timeline  # noqa: B018
        executor.step(given, recording=measured.recording)
        first = recording.timeline
        executor.step(given, recording=measured.recording)
        torch.optim.SGD(Chain(1).parameters(), lr=0.1).step()  # somebody else's
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert measured.recording is None
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    last = recording.timeline
    assert last.events[-1][1] == "optimizer.step" and last.step_seconds >= last.events[-1][3]
    assert [event[1] for event in last.events[:-1]] == [event[1] for event in first.events]
    trace = json.loads(save_trace(tmp_path / "new" / "trace.json", [replace(last, measured=False), last]).read_text())["traceEvents"]
    for process, name in enumerate(("rank 0", "rank 0, measured")):
        mine = [event for event in trace if event["pid"] == process]
        assert mine[0]["args"] == {"name": name} and sum(event["ph"] == "X" for event in mine) == len(last.events)


def test_a_step_that_failed_has_no_timeline() -> None:
    executor, given, _ = alone()
    recording = Recording()
    with pytest.raises(KeyError):
        executor.step({"args[0]": given["args[0]"]}, recording=recording)
    with pytest.raises(PartitionerError, match="has not ended"):
        recording.timeline  # noqa: B018
    executor.step(given, recording=recording)
    assert recording.timeline.events


def test_a_watcher_goes_with_its_block() -> None:
    from partitioner.runtime import wire

    recorder = Recorder(alone()[0].program, CPU)
    with pytest.raises(ValueError), watching(print), recorder.step():
        raise ValueError
    assert wire._watcher is None
