"""The order of a rank program, as golden text: four ways to shard, kept units, prefetch, micro-batches, tied parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from partitioner.order import Order, arrange
from partitioner.runtime.check import check
from partitioner.runtime.program import Call, Function, Instruction, Ref, Replay, Shard, Unit
from partitioner.runtime.text import instruction_text
from tests.small_programs import chain

BYTES = 64


def absent(arguments: list[object]) -> tuple[Tensor, ...]:
    raise AssertionError("the order is made without running anything")


def function(name: str, saved: tuple[tuple[str, int], ...], gradients: tuple[int, ...], *, trained: bool = True) -> Function:
    nothing = Replay(len(saved), (), ())
    backward = absent if trained else None
    return Function(name, "", absent, backward, 1, saved, (0,) if trained else (), gradients, nothing, nothing if trained else None)


FUNCTIONS = {
    "layer": function("layer", (("read", 0), ("read", 1), ("own", 0)), (0, 1)),  # backward reads the parameter again
    "norm": function("norm", (("read", 1),), (0, 1)),  # backward does without it
    "frozen": function("frozen", (), (), trained=False),
    "loss": function("loss", (("own", 0),), (0,)),
}


def calls_of(*layers: tuple[str, str]) -> list[Call]:
    """Blocks (function, parameter) in a row, and a loss behind them; block i writes v<i>."""
    calls = []
    for number, (name, parameter) in enumerate(layers):
        given = Ref("value", f"v{number - 1}") if number else Ref("input", "args[0]")
        calls.append(Call(number, name, name, (Ref("parameter", parameter), given), (f"v{number}",)))
    last = len(layers)
    return [*calls, Call(last, "loss", "loss", (Ref("value", f"v{last - 1}"),), ("l",))]


THREE = calls_of(("layer", "a"), ("norm", "b"), ("layer", "c"))


def order_of(calls: Sequence[Call], shard: Shard, **changes: Any) -> Order:
    """One unit per parameter."""
    names = dict.fromkeys(ref.name for call in calls for ref in call.reads if ref.kind == "parameter")
    units = tuple(Unit(number, shard, (name,)) for number, name in enumerate(names))
    order = Order(
        calls=calls,
        functions=FUNCTIONS,
        units=units,
        kept=frozenset(),
        joined=True,
        micro_batches=1,
        prefetch=False,
        bytes_of={unit.number: BYTES for unit in units},
        held=frozenset({"l"}),
        price=lambda op, name, mb: 2.0 if op == "BACKWARD" else 1.0,
        communication=lambda op, size, unit: size / 128,
    )
    return replace(order, **changes)


def listed(order: Order, backward: bool = True) -> list[str]:
    ahead, after = arrange(order, backward=backward)
    return [instruction_text(line) for line in (*ahead, *after)]


def golden(text: str) -> list[str]:
    """One instruction a line, indented as it may be."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


GOLDEN: dict[str, tuple[Order, str]] = {
    "none: one reduction a unit, as soon as its gradient is there": (
        order_of(THREE, "none"),
        """
        FORWARD block 0 mb 0 on compute
        FORWARD block 1 mb 0 on compute drops v0
        FORWARD block 2 mb 0 on compute drops v1
        FORWARD block 3 mb 0 on compute drops v2
        BACKWARD block 3 mb 0 on compute
        BACKWARD block 2 mb 0 on compute
        REDUCE unit 2 on reduce bytes 64
        BACKWARD block 1 mb 0 on compute
        REDUCE unit 1 on reduce bytes 64
        BACKWARD block 0 mb 0 on compute
        REDUCE unit 0 on reduce bytes 64
        """,
    ),
    "zero1, two micro-batches: refreshed once, reduced once": (
        order_of(calls_of(("layer", "a")), "zero1", micro_batches=2),
        """
        REFRESH unit 0 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FORWARD block 1 mb 0 on compute drops v0
        BACKWARD block 1 mb 0 on compute
        BACKWARD block 0 mb 0 on compute
        FORWARD block 0 mb 1 on compute
        FORWARD block 1 mb 1 on compute drops v0
        BACKWARD block 1 mb 1 on compute
        BACKWARD block 0 mb 1 on compute
        REDUCE unit 0 on reduce bytes 64
        """,
    ),
    "zero2, two micro-batches: refreshed once, reduced in each": (
        order_of(calls_of(("layer", "a")), "zero2", micro_batches=2),
        """
        REFRESH unit 0 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FORWARD block 1 mb 0 on compute drops v0
        BACKWARD block 1 mb 0 on compute
        BACKWARD block 0 mb 0 on compute
        REDUCE unit 0 mb 0 on reduce bytes 64
        FORWARD block 0 mb 1 on compute
        FORWARD block 1 mb 1 on compute drops v0
        BACKWARD block 1 mb 1 on compute
        BACKWARD block 0 mb 1 on compute
        REDUCE unit 0 mb 1 on reduce bytes 64
        """,
    ),
    "zero3: gathered per use, in backward only where it is read again": (
        order_of(THREE, "zero3"),
        """
        GATHER unit 0 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        GATHER unit 1 on gather bytes 64
        FORWARD block 1 mb 0 on compute drops v0
        FREE unit 1 on compute bytes 64
        GATHER unit 2 on gather bytes 64
        FORWARD block 2 mb 0 on compute drops v1
        FREE unit 2 on compute bytes 64
        FORWARD block 3 mb 0 on compute drops v2
        BACKWARD block 3 mb 0 on compute
        GATHER unit 2 on gather bytes 64
        BACKWARD block 2 mb 0 on compute
        FREE unit 2 on compute bytes 64
        REDUCE unit 2 mb 0 on reduce bytes 64
        BACKWARD block 1 mb 0 on compute
        REDUCE unit 1 mb 0 on reduce bytes 64
        GATHER unit 0 on gather bytes 64
        BACKWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        REDUCE unit 0 mb 0 on reduce bytes 64
        """,
    ),
    "zero3 with unit 2 kept: gathered once and freed behind its backward, in every micro-batch": (
        order_of(calls_of(("norm", "a"), ("norm", "b"), ("layer", "c")), "zero3", kept=frozenset({2}), micro_batches=2),
        "\n".join(
            f"""
        GATHER unit 0 on gather bytes 64
        FORWARD block 0 mb {mb} on compute
        FREE unit 0 on compute bytes 64
        GATHER unit 1 on gather bytes 64
        FORWARD block 1 mb {mb} on compute drops v0
        FREE unit 1 on compute bytes 64
        GATHER unit 2 on gather bytes 64
        FORWARD block 2 mb {mb} on compute drops v1
        FORWARD block 3 mb {mb} on compute drops v2
        BACKWARD block 3 mb {mb} on compute
        BACKWARD block 2 mb {mb} on compute
        FREE unit 2 on compute bytes 64
        REDUCE unit 2 mb {mb} on reduce bytes 64
        BACKWARD block 1 mb {mb} on compute
        REDUCE unit 1 mb {mb} on reduce bytes 64
        BACKWARD block 0 mb {mb} on compute
        REDUCE unit 0 mb {mb} on reduce bytes 64
        """.strip()
            for mb in range(2)
        ),
    ),
    "zero3 with prefetch: the next block's gather travels beside the current block, not across the turn": (
        order_of(THREE, "zero3", prefetch=True),
        """
        GATHER unit 0 on gather bytes 64
        GATHER unit 1 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        GATHER unit 2 on gather bytes 64
        FORWARD block 1 mb 0 on compute drops v0
        FREE unit 1 on compute bytes 64
        FORWARD block 2 mb 0 on compute drops v1
        FREE unit 2 on compute bytes 64
        FORWARD block 3 mb 0 on compute drops v2
        GATHER unit 2 on gather bytes 64
        BACKWARD block 3 mb 0 on compute
        BACKWARD block 2 mb 0 on compute
        FREE unit 2 on compute bytes 64
        REDUCE unit 2 mb 0 on reduce bytes 64
        GATHER unit 0 on gather bytes 64
        BACKWARD block 1 mb 0 on compute
        REDUCE unit 1 mb 0 on reduce bytes 64
        BACKWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        REDUCE unit 0 mb 0 on reduce bytes 64
        """,
    ),
    "zero3, a parameter tied between blocks 0 and 2: one unit, reduced when the first reader has given its gradient": (
        order_of(calls_of(("layer", "a"), ("layer", "b"), ("layer", "a")), "zero3"),
        """
        GATHER unit 0 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        GATHER unit 1 on gather bytes 64
        FORWARD block 1 mb 0 on compute drops v0
        FREE unit 1 on compute bytes 64
        GATHER unit 0 on gather bytes 64
        FORWARD block 2 mb 0 on compute drops v1
        FREE unit 0 on compute bytes 64
        FORWARD block 3 mb 0 on compute drops v2
        BACKWARD block 3 mb 0 on compute
        GATHER unit 0 on gather bytes 64
        BACKWARD block 2 mb 0 on compute
        FREE unit 0 on compute bytes 64
        GATHER unit 1 on gather bytes 64
        BACKWARD block 1 mb 0 on compute
        FREE unit 1 on compute bytes 64
        REDUCE unit 1 mb 0 on reduce bytes 64
        GATHER unit 0 on gather bytes 64
        BACKWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        REDUCE unit 0 mb 0 on reduce bytes 64
        """,
    ),
    "zero3, a parameter tied between neighbours: it stays for the next block": (
        order_of(calls_of(("layer", "a"), ("layer", "a")), "zero3"),
        """
        GATHER unit 0 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FORWARD block 1 mb 0 on compute drops v0
        FREE unit 0 on compute bytes 64
        FORWARD block 2 mb 0 on compute drops v1
        BACKWARD block 2 mb 0 on compute
        GATHER unit 0 on gather bytes 64
        BACKWARD block 1 mb 0 on compute
        BACKWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        REDUCE unit 0 mb 0 on reduce bytes 64
        """,
    ),
    "a frozen block is neither run backward nor reduced": (
        order_of(calls_of(("frozen", "a"), ("norm", "b")), "zero3"),
        """
        GATHER unit 0 on gather bytes 64
        FORWARD block 0 mb 0 on compute
        FREE unit 0 on compute bytes 64
        GATHER unit 1 on gather bytes 64
        FORWARD block 1 mb 0 on compute drops v0
        FREE unit 1 on compute bytes 64
        FORWARD block 2 mb 0 on compute drops v1
        BACKWARD block 2 mb 0 on compute
        BACKWARD block 1 mb 0 on compute
        REDUCE unit 1 mb 0 on reduce bytes 64
        """,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_orders(name: str) -> None:
    order, text = GOLDEN[name]
    assert listed(order) == golden(text)


def test_forward_and_backward_are_told_apart_and_priced() -> None:
    order = order_of(THREE, "zero3", prefetch=True)
    ahead, after = arrange(order, backward=True)
    assert [line.op for line in ahead].count("FORWARD") == 4 and not [line for line in ahead if line.op == "BACKWARD"]
    assert not [line for line in after if line.op == "FORWARD"]
    seconds = {"FORWARD": 1.0, "BACKWARD": 2.0, "GATHER": 0.5, "REDUCE": 0.5, "FREE": 0.0}
    assert all(line.seconds == seconds[line.op] for line in (*ahead, *after))
    alone, none = arrange(order, backward=False)
    assert alone == ahead and none == []


def test_values_that_are_held_stay_and_those_nobody_reads_go() -> None:
    calls = calls_of(("layer", "a"), ("layer", "b"))
    calls[0] = replace(calls[0], writes=("v0", "spare"))
    assert listed(order_of(calls, "none"), backward=False)[:3] == golden(
        """
        FORWARD block 0 mb 0 on compute
        DROP values spare mb 0 on compute
        FORWARD block 1 mb 0 on compute drops v0
        """
    )
    held = listed(order_of(calls, "none", held=frozenset({"l", "v0", "spare"})), backward=False)
    assert held[:2] == ["FORWARD block 0 mb 0 on compute", "FORWARD block 1 mb 0 on compute"]


SHARDS: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")


@given(
    layers=st.integers(1, 6),
    micro_batches=st.integers(1, 3),
    shards=st.lists(st.sampled_from(SHARDS), min_size=6, max_size=6),
    kept=st.sets(st.integers(0, 5)),
    prefetch=st.booleans(),
    tied=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_order_can_be_played(layers: int, micro_batches: int, shards: list[Shard], kept: set[int], prefetch: bool, tied: bool) -> None:
    """No order reads a parameter that is not there, drops what is still read, or forgets to reduce."""
    program = chain(layers, 12, micro_batches, "none", tied=tied)
    units = tuple(replace(unit, shard=shards[unit.number]) for unit in program.units)
    order = Order(
        calls=program.calls[: layers + 1],
        functions=program.functions,
        units=units,
        kept=frozenset(unit.number for unit in units if unit.number in kept),
        joined=True,
        micro_batches=micro_batches,
        prefetch=prefetch,
        bytes_of={unit.number: BYTES for unit in units},
        held=frozenset({"l"}),
        price=lambda op, name, mb: 1.0,
        communication=lambda op, size, unit: 1.0,
    )
    ahead, after = arrange(order, backward=True)
    whole = (program.instructions[0], *ahead, *after, Instruction("LOSS", stream="reduce", bytes=4))
    check([replace(program, units=units, instructions=whole)])
    gathers = [line.unit for line in whole if line.op == "GATHER"]
    assert len(gathers) == len([line for line in whole if line.op == "FREE"])
    if not prefetch:
        eager, lazy = (arrange(replace(order, prefetch=some), backward=True) for some in (True, False))
        assert sorted(map(instruction_text, eager[0] + eager[1])) == sorted(map(instruction_text, lazy[0] + lazy[1]))


def test_nothing_stays_gathered_between_a_forward_and_a_backward_of_its_own() -> None:
    """A forward program may never see its backward, so its units are freed and gathered again."""
    ahead, after = arrange(order_of(THREE, "zero3", joined=False), backward=True)
    here = set()
    for instruction in ahead:
        if instruction.op == "GATHER":
            here.add(instruction.unit)
        elif instruction.op == "FREE":
            here.discard(instruction.unit)
    assert not here
    assert {i.unit for i in after if i.op == "GATHER"} == {i.unit for i in after if i.op == "FREE"} != set()
