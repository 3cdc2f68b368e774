"""A collective that is dropped, doubled or swapped in one rank's program is refused before any process starts, wherever it stands."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from partitioner import Cluster
from partitioner.errors import ProgramError
from partitioner.runtime.check import check
from partitioner.runtime.check_ranks import COLLECTIVES
from partitioner.runtime.program import Instruction, Program, Request
from partitioner.runtime.text import instruction_text
from partitioner.session import Session
from tests.small_programs import chain

RANKS = 3


def lowered(shard: str, micro_batches: int, model: nn.Module, mode: str = "step") -> list[Program]:
    """What the driver makes of a model for three ranks."""
    x = torch.zeros(12, 6)
    constraints = {"shard": shard, "micro_batches": micro_batches}
    given = {"example_inputs": (x,), "example_kwargs": None, "loss": lambda y: y.pow(2).mean(), "example_targets": None, "batch_dim": "auto"}
    options = {"optimizer": "adamw", "precision": "fp32", "memory": None, "constraints": constraints, "verify": False}
    session = Session(model, Cluster.parse(f"1x{RANKS} h100-sxm"), **given, **options)  # type: ignore[arg-type]
    session.plan()
    return list(session.lower(Request(mode, True, {"args[0]": x}, True)))  # type: ignore[arg-type]


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def made(name: str) -> list[Program]:
    kind, _, shard = name.partition(" ")
    match kind:
        case "chain":
            return [chain(2, 7, 2, shard, rank, RANKS) for rank in range(RANKS)]  # type: ignore[arg-type]
        case "step":
            return lowered(shard, 2, layers())
        case "forward":
            return lowered(shard, 1, layers(), "forward")
        case _:
            return lowered(shard, 1, layers(nn.BatchNorm1d(8)))  # collectives within its blocks


def talking(program: Program) -> list[int]:
    """The lines, of both parts, that talk to other ranks."""
    inside = {
        name for name, function in program.functions.items() if "partitioner.all_" in function.source or "partitioner.reduce_" in function.source
    }
    return [
        at
        for at, line in enumerate((*program.instructions, *program.after))
        if line.op in COLLECTIVES or (line.block is not None and program.call_of[line.block].function in inside)
    ]


def with_lines(program: Program, lines: Sequence[Instruction], first: int) -> Program:
    return replace(program, instructions=tuple(lines[:first]), after=tuple(lines[first:]))


def sabotaged(program: Program) -> Iterator[tuple[str, Program]]:
    lines, length = [*program.instructions, *program.after], len(program.instructions)
    places = talking(program)
    assert len(places) >= 3
    for at in places:
        name = f"line {at}, {instruction_text(lines[at])}"
        yield f"{name}, dropped", with_lines(program, lines[:at] + lines[at + 1 :], length - (at < length))
        yield f"{name}, doubled", with_lines(program, lines[: at + 1] + lines[at:], length + (at < length))
    for at, other in pairwise(places):
        texts = instruction_text(lines[at]), instruction_text(lines[other])
        if texts[0] != texts[1]:
            swapped = list(lines)
            swapped[at], swapped[other] = lines[other], lines[at]
            yield f"lines {at} and {other}, {texts[0]} and {texts[1]}, swapped", with_lines(program, swapped, length)


SHARDS = ("none", "zero1", "zero2", "zero3")
NAMES = [*(f"{kind} {shard}" for kind in ("chain", "step") for shard in SHARDS), "forward zero3", "mixed none", "mixed zero3"]


def test_the_mixed_model_has_collectives_within_its_blocks() -> None:
    program = made("mixed none")[0]
    ops = [program.instructions[at].op for at in talking(program)]
    assert "FORWARD" in ops and "BACKWARD" in ops


@pytest.mark.parametrize("name", NAMES)
def test_every_collective_of_one_rank_counts(name: str) -> None:
    programs = made(name)
    check(programs)
    for rank in (0, RANKS - 1):
        taken = []
        for what, program in sabotaged(programs[rank]):
            try:
                check([program if each.rank == rank else each for each in programs])
            except ProgramError:
                continue
            taken.append(what)
        assert not taken, f"rank {rank}: {taken}"
