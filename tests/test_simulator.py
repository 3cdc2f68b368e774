"""The simulator against what the tracker measures when the executor runs the same program: equal to the byte; and time by streams."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from partitioner.passes import collectives
from partitioner.runtime.executor import Executor
from partitioner.runtime.memory import Tracker
from partitioner.runtime.parameters import UnitStore, shapes_of
from partitioner.runtime.program import Event, Function, Instruction, Program, Ref, Replay, Shard, Slice
from partitioner.runtime.replay import Ledger, Storage, compile_replay
from partitioner.runtime.shards import local
from partitioner.runtime.simulator import Lasting, Simulation, simulate, storage_bytes
from partitioner.runtime.unit_bytes import UnitBytes
from tests import ranks
from tests.small_programs import ITEM, LAYER, ROW, SQUARE, Chain, WholeBytes, WholeStore, chain, forward_chain, leaves

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()  # what references alone do not free would be measured at random
    yield
    gc.enable()


def simulated(program: Program, given: dict[str, torch.Tensor], overlap: bool = True, **lasting: int) -> Simulation:
    unit_bytes = {unit.number: WholeBytes(unit) for unit in program.units}
    return simulate(program, Lasting(storage_bytes(given), unit_bytes, **lasting), overlap=overlap)


def measured(program: Program, module: torch.nn.Module, given: dict[str, torch.Tensor]) -> int:
    executor = Executor(program, module, WholeStore(module, program.units), None, CPU)
    with Tracker():
        executor.step(given)  # what torch sets up at first use may keep tensors of the first call
    for parameter in module.parameters():
        parameter.grad = None
    with Tracker() as tracker:
        tracker.track(list(module.parameters()))
        tracker.track(list(module.buffers()))
        tracker.track(list(given.values()))
        executor.step(given)
    peak: int = tracker.peak_bytes
    return peak


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("total", "micro_batches"), [(40, 1), (40, 3), (5, 2), (1, 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_peak_equals_the_measured_one(shard: str, total: int, micro_batches: int, tied: bool) -> None:
    program = chain(layers=4, total=total, micro_batches=micro_batches, shard=shard, tied=tied)  # type: ignore[arg-type]
    given = leaves(total)
    assert simulated(program, given).peak_bytes == measured(program, Chain(4, tied), given)


def _attend_forward(arguments: list[object]) -> tuple[torch.Tensor, ...]:
    (x,) = arguments
    arguments.clear()
    assert isinstance(x, torch.Tensor)
    y = x * 2
    return y[:1], y, x


def real_store(size: int, layers: int) -> list[tuple[str, int, int, float]]:
    """On every rank: shard, simulated peak, measured peak, worst difference of loss and gradients from eager."""
    import torch.distributed as dist

    rank, group = dist.get_rank(), dist.group.WORLD
    collectives.bind("dp", group)
    results = []
    shards: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
    for shard in shards:
        for micro_batches in (1, 3):
            tied = micro_batches == 3
            program = chain(layers, 21, micro_batches, shard, rank, size, tied)
            module, plain, given = Chain(layers, tied), Chain(layers, tied), leaves(21)
            shapes = shapes_of(module)
            store = UnitStore(module, program.units, ranks=size, rank=rank, group=group)
            executor = Executor(program, module, store, group, CPU)
            _, expected = plain(given["args[0]"], given["args[1]"], given["targets"])
            expected.backward()
            executor.step(given)
            for parameter in module.parameters():
                parameter.grad = None
            with Tracker() as tracker:
                tracker.track([*map(local, module.parameters()), given])
                loss = executor.step(given)
            result = simulate(program, Lasting(bytes_of=storage_bytes(given), unit_bytes=UnitBytes.of(program.units, shapes, size, rank)))
            worst = abs(float(loss - expected.detach()))
            for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                whole = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
                worst = max(worst, float((whole - theirs.grad).abs().max()))
            results.append((f"{shard} {micro_batches}", result.peak_bytes, tracker.peak_bytes, worst))
    collectives.bind("dp", None)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_peak_and_gradients_with_parameters_over_ranks(size: int) -> None:
    for results in ranks.run(size, real_store, size, 4):
        assert all(worst < 1e-5 for _, _, _, worst in results)
        assert [(name, simulated) for name, simulated, _, _ in results] == [(name, measured) for name, _, measured, _ in results]


def test_views_share_storages_and_copied_slices_count() -> None:
    """A value that is a view of another, an output that is an argument, a cut dim that is not outermost, and a value nobody reads."""
    twin = Function(
        name="twin",
        source="",
        forward=_attend_forward,
        backward=None,
        writes=3,
        saved=(),
        tangents=(),
        gradients=(),
        forward_replay=Replay(1, (Event(True, 1, 0, 8 * ITEM), Event(False, 0)), (1, 1, 0)),
        backward_replay=None,
    )
    base = chain(layers=1, total=20, micro_batches=2)
    given = {**leaves(20), "kwargs['z']": torch.randn(160)}
    calls = (*base.calls, *(type(base.calls[0])(9, "twin", "twin", (Ref("input", "kwargs['z']"),), ("a", "b", "c")) for _ in range(1)))
    lines = list(base.instructions)
    lines[1:1] = [
        Instruction("FORWARD", block=9, mb=0),
        Instruction("DROP", mb=0, drops=("b",)),  # its storage stays: a is a view of it
        Instruction("FORWARD", block=9, mb=1),
    ]
    program = replace(
        base,
        instructions=tuple(lines),
        calls=calls,
        functions={**base.functions, "twin": twin},
        inputs=(*base.inputs, Slice("kwargs['z']", 0, outer=4, inner=2)),
    )
    result = simulated(program, given)
    assert result.peak_bytes == measured(program, Chain(1), given)
    assert result.memory[2][2] - result.memory[0][2] == 0 + 2 * 80 * ITEM


def test_buffers_are_committed_to_the_byte() -> None:
    module = Chain(1)
    module.register_buffer("old", torch.ones(100))
    module.register_buffer("new", torch.zeros(100))
    program = replace(chain(layers=1, total=4, micro_batches=1), buffers=(("old", Ref("buffer", "new")), ("new", Ref("buffer", "old"))))
    program = replace(program, instructions=(*program.instructions, Instruction("COMMIT")))
    given = leaves(4)
    sizes = storage_bytes({**given, **dict(module.named_buffers())})
    result = simulate(program, Lasting(bytes_of=sizes, unit_bytes={0: WholeBytes(program.units[0])}))
    assert result.peak_bytes == measured(program, module, given)
    Executor(program, module, WholeStore(module, program.units), None, CPU).step(given)  # the third swap
    assert module.get_buffer("old").sum() == 0 and module.get_buffer("new").sum() == 100


def test_optimizer_bytes_count() -> None:
    program, given = chain(), leaves()
    plain = simulated(program, given)
    stateful = simulated(program, given, optimizer_state_bytes=1000)
    assert stateful.peak_bytes == plain.peak_bytes + 1000
    huge = simulated(program, given, optimizer_temporary_bytes=10**6)
    assert huge.peak_at == "optimizer.step"
    gradients = 3 * SQUARE
    assert huge.peak_bytes == 10**6 + sum(storage_bytes(given).values()) + 3 * SQUARE + gradients + ITEM
    assert plain.peak_at.startswith("BACKWARD")


def test_forward_program_with_its_backward() -> None:
    program, given = forward_chain(), leaves(6)
    result = simulated(program, given)
    assert result.memory[-1][0] == "FINISH" and result.peak_bytes > sum(storage_bytes(given).values()) + 2 * SQUARE + 4 * 6 * ROW


def test_storages_shared_by_two_names_count_once() -> None:
    base = torch.zeros(10)
    assert storage_bytes({"a": base, "b": base[2:], "c": torch.zeros(3)}) == {"a": 40, "b": 0, "c": 12}


def test_compiled_replay_is_the_replay() -> None:
    ledger = Ledger()
    arguments: list[object] = [Storage(ledger, 5), Storage(ledger, 7)]
    results = compile_replay(LAYER.forward_replay, 3).play(ledger, arguments)
    assert arguments == [] and len(results) == 2 and results[0] is results[1]
    assert ledger.peak == 2 * 3 * ROW and ledger.now == 3 * ROW
    del results
    assert ledger.now == 0


def timed(*lines: Instruction, overlap: bool) -> Simulation:
    program = chain(layers=2, total=4, micro_batches=1, shard="zero3")
    lasting = Lasting(storage_bytes(leaves(4)), {unit.number: WholeBytes(unit) for unit in program.units})
    return simulate(replace(program, instructions=lines), lasting, overlap=overlap)


def test_streams_run_beside_each_other_and_are_awaited() -> None:
    lines = (
        Instruction("GATHER", unit=0, stream="gather", seconds=1.0),
        Instruction("GATHER", unit=1, stream="gather", seconds=3.0),
        Instruction("FORWARD", block=0, mb=0, seconds=2.0),
        Instruction("FORWARD", block=1, mb=0, drops=("v0",), seconds=1.0),
        Instruction("FREE", unit=0),
    )
    result = timed(*lines, overlap=True)
    assert [(stream, start, end) for stream, _, start, end in result.events] == [
        ("gather", 0.0, 1.0),
        ("gather", 1.0, 4.0),
        ("compute", 1.0, 3.0),
        ("compute", 4.0, 5.0),
    ]
    assert result.step_seconds == 5.0
    assert timed(*lines, overlap=False).step_seconds == 7.0


def test_communication_waits_for_what_was_computed_before_it() -> None:
    lines = (
        Instruction("GATHER", unit=0, stream="gather", seconds=1.0),
        Instruction("FORWARD", block=0, mb=0, seconds=2.0),
        Instruction("GATHER", unit=1, stream="gather", seconds=1.5),
        Instruction("FORWARD", block=1, mb=0, seconds=1.0),
    )
    assert [start for _, _, start, _ in timed(*lines, overlap=True).events] == [0.0, 1.0, 3.0, 4.5]


def test_step_ends_when_the_last_reduction_does() -> None:
    program, given = chain(layers=2, total=4, micro_batches=1), leaves(4)
    result = simulated(program, given, overlap=True)
    # 1 + 1 + 0.5 forward, 0.5 + 2 + 2 backward, then the last REDUCE
    assert result.step_seconds == 8.0
    assert simulated(program, given, overlap=False).step_seconds == 9.0


@pytest.mark.parametrize("shard", ["none", "zero3"])
def test_bytes_by_kind_sum_to_the_peak_and_come_back_to_what_lasts(shard: Shard) -> None:
    program, given = chain(layers=3, total=12, micro_batches=2, shard=shard), leaves(12)
    shapes = shapes_of(Chain(3))
    ghosts = UnitBytes.of(program.units, shapes, 2, 0)
    lasting = {"parameters": sum(ghost.persistent() for ghost in ghosts.values()), "optimizer state": 77}
    result = simulate(program, Lasting(bytes_of=storage_bytes(given), unit_bytes=ghosts, optimizer_state_bytes=77, optimizer_temporary_bytes=1000))
    for moment in result.memory:
        assert sum(moment.by_kind.values()) == moment.peak_bytes and min(moment.by_kind.values()) >= 0, moment
        assert {kind: moment.by_kind[kind] for kind in lasting} == lasting
    kinds = {moment.instruction: moment.by_kind for moment in result.memory}
    first, last = kinds["FORWARD block 0 mb 0 on compute"], kinds["optimizer.step"]
    assert first["saved values"] == first["gradients"] == 0
    assert last["saved values"] == last["gathered parameters"] == 0
    assert last["gradients"] == sum(ghost.gradient_bytes() for ghost in ghosts.values()) and last["temporaries"] == 1000 + ITEM  # and the loss
    saving = kinds["BACKWARD block 2 mb 0 on compute"]
    assert saving["saved values"] > 0 and (saving["gathered parameters"] > 0) == (shard == "zero3")
    assert result.peak.seconds <= result.step_seconds == result.memory[-1].seconds
