"""Program text both ways, and what `check` refuses."""

from dataclasses import replace

import pytest

from partitioner.errors import ProgramError
from partitioner.runtime.check import check
from partitioner.runtime.program import Instruction, Program
from partitioner.runtime.text import digest, instruction_text, parse_instruction, parse_program, program_text
from tests.small_programs import chain, forward_chain

GOLDEN = """\
# rank 0 of 1 on dp, step, training, 2 + 1 of 3 rows from 0
PROLOGUE block 3 on compute                          # prologue, function count
GATHER unit 0 on gather bytes 1024                   # zero3, layers.0.weight
FORWARD block 0 mb 0 on compute                      # layers.0, function layer
FREE unit 0 on compute bytes 1024                    # zero3, layers.0.weight
GATHER unit 1 on gather bytes 1024                   # zero3, layers.1.weight
FORWARD block 1 mb 0 on compute drops v0             # layers.1, function layer
FREE unit 1 on compute bytes 1024                    # zero3, layers.1.weight
FORWARD block 2 mb 0 on compute drops v1             # loss, function loss
BACKWARD block 2 mb 0 on compute                     # loss, function loss
GATHER unit 1 on gather bytes 1024                   # zero3, layers.1.weight
BACKWARD block 1 mb 0 on compute                     # layers.1, function layer
FREE unit 1 on compute bytes 1024                    # zero3, layers.1.weight
REDUCE unit 1 mb 0 on reduce bytes 1024              # zero3, layers.1.weight
GATHER unit 0 on gather bytes 1024                   # zero3, layers.0.weight
BACKWARD block 0 mb 0 on compute                     # layers.0, function layer
FREE unit 0 on compute bytes 1024                    # zero3, layers.0.weight
REDUCE unit 0 mb 0 on reduce bytes 1024              # zero3, layers.0.weight
"""

FORWARD = """\
# rank 0 of 1 on dp, forward, training, 6 of 6 rows from 0
FORWARD block 0 mb 0 on compute                      # layers.0, function layer
FORWARD block 1 mb 0 on compute drops v0             # layers.1, function layer
OUTPUT on gather bytes 384
AFTER
BACKWARD block 1 mb 0 on compute                     # layers.1, function layer
REDUCE unit 1 on reduce bytes 1024                   # none, layers.1.weight
BACKWARD block 0 mb 0 on compute                     # layers.0, function layer
REDUCE unit 0 on reduce bytes 1024                   # none, layers.0.weight
"""


def test_golden_step() -> None:
    text = program_text(chain(layers=2, total=3, micro_batches=2, shard="zero3"))
    assert text.startswith(GOLDEN)
    assert text.endswith("LOSS on reduce bytes 4\n")


def test_golden_forward() -> None:
    assert program_text(forward_chain()) == FORWARD


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_text_comes_back(shard: str) -> None:
    program = chain(shard=shard)  # type: ignore[arg-type]
    assert parse_program(program_text(program)) == (program.instructions, ())
    forward = forward_chain()
    assert parse_program(program_text(forward)) == (forward.instructions, forward.after)


@pytest.mark.parametrize(
    "line",
    [
        Instruction("DROP", mb=1, drops=("v4", "v7")),
        Instruction("DROP", drops=("n",)),
        Instruction("REDUCE", unit=3, stream="reduce", bytes=8),
        Instruction("COMMIT"),
        Instruction("FORWARD", block=3, mb=1, drops=("a", "mb", "on")),
    ],
)
def test_line_comes_back(line: Instruction) -> None:
    assert parse_instruction(instruction_text(line)) == line


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("FORWRD block 3 mb 1 on compute", "'FORWRD', which is no instruction"),
        ("FORWARD block 3 on compute", "lacks or must not have: mb; write 'FORWARD block … mb … on STREAM'"),
        ("FORWARD block x mb 1 on compute", "not readable"),
        ("GATHER unit 3 mb 1 on gather", "must not have: mb"),
        ("GATHER unit 3 on ether", "stream 'ether'"),
        ("DROP mb 1 on compute", "values"),
    ],
)
def test_bad_line_is_refused(line: str, part: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse_instruction(line)
    assert part in str(caught.value)


def test_parse_names_the_line() -> None:
    with pytest.raises(ProgramError, match="line 2: 'NONSENSE'"):
        parse_program("COMMIT on compute\nNONSENSE\n")


def test_digest_is_the_ranks_own_and_nobody_elses() -> None:
    assert digest(chain(ranks=2, rank=0)) == digest(chain(ranks=2, rank=1))
    assert digest(chain(ranks=2)) != digest(chain(ranks=2, shard="zero1"))


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_good_programs_pass(shard: str, ranks: int) -> None:
    check([chain(shard=shard, rank=rank, ranks=ranks, micro_batches=3) for rank in range(ranks)])  # type: ignore[arg-type]
    check([forward_chain()])
    check([chain(tied=True)])


def without(program: Program, *places: int) -> Program:
    return replace(program, instructions=tuple(line for place, line in enumerate(program.instructions) if place not in places))


def place_of(program: Program, op: str, **fields: int) -> int:
    for place, line in enumerate(program.instructions):
        if line.op == op and all(getattr(line, name) == value for name, value in fields.items()):
            return place
    raise AssertionError(op)


def moved(program: Program, source: int, target: int) -> Program:
    lines = list(program.instructions)
    lines.insert(target, lines.pop(source))
    return replace(program, instructions=tuple(lines))


def refused(program: Program, *parts: str) -> None:
    with pytest.raises(ProgramError) as caught:
        check([program])
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_arrow_points_at_the_fault() -> None:
    program = chain(layers=2, total=3, micro_batches=1)
    refused(
        without(program, place_of(program, "FORWARD", block=0)),
        "rank 0, line 1: v0 of micro-batch 0 is read before anything wrote it; run the block that writes it first\n",
        "       0  PROLOGUE block 3 on compute\n"
        "-->    1  FORWARD block 1 mb 0 on compute drops v0\n"
        "       2  FORWARD block 2 mb 0 on compute drops v1\n",
    )


def test_faults_of_values() -> None:
    program = chain()
    first = place_of(program, "FORWARD", block=1)
    early = replace(program, instructions=(*program.instructions[:first], Instruction("DROP", mb=0, drops=("v0",)), *program.instructions[first:]))
    refused(early, f"line {first} gave it up", f"--> {first + 1:4d}  FORWARD block 1 mb 0")
    refused(moved(program, first, len(program.instructions)), "FORWARD block 2 mb 0", "v1 of micro-batch 0 is read before")
    twice = replace(program, instructions=(*program.instructions[:first], program.instructions[first - 1], *program.instructions[first:]))
    refused(twice, "a second time")
    refused(without(program, 0), "prologue value n is read before")
    odd = replace(program.instructions[first], drops=("v5",))
    strange = replace(program, instructions=(*program.instructions[:first], odd, *program.instructions[first + 1 :]))
    refused(strange, "v5 is dropped by a block that does not read it")


def test_faults_of_units() -> None:
    program = chain(shard="zero3")
    refused(without(program, place_of(program, "GATHER", unit=1)), "GATHER unit 1 before")
    refused(without(program, place_of(program, "FREE", unit=1)), "is gathered already")
    forward = forward_chain()
    kept = replace(
        forward,
        units=tuple(replace(unit, shard="zero3") for unit in forward.units),
        instructions=(*(Instruction("GATHER", unit=unit) for unit in (0, 1)), *forward.instructions),
        after=(*forward.after, *(Instruction("FREE", unit=unit) for unit in (0, 1))),
    )
    refused(kept, "still gathered when the forward is over")
    last = max(place for place, line in enumerate(program.instructions) if line.op == "FREE")
    refused(without(program, last), "still gathered at the end", "at its end")
    refused(without(chain(shard="zero1"), 1), "REFRESH unit 0 before")
    refused(without(chain(shard="none"), place_of(chain(shard="none"), "REDUCE", unit=1)), "never summed", "add REDUCE unit 1")
    two = chain(shard="zero2")
    refused(without(two, place_of(two, "REDUCE", unit=1, mb=0)), "still holds the gradients of micro-batch 0")
    none = chain()
    refused(moved(none, place_of(none, "REDUCE", unit=1), 1), "unit 1 has no gradient to sum here")


def test_faults_of_backward() -> None:
    program = chain()
    at = place_of(program, "BACKWARD", block=2, mb=0)
    refused(without(program, at), "block 2 reads it and has its BACKWARD later")
    refused(without(program, place_of(program, "BACKWARD", block=0, mb=0)), "saved values of micro-batch 0")
    refused(moved(program, at, at + 1), "the gradient of v1 is not complete")
    refused(without(program, len(program.instructions) - 1), "the program has no LOSS")


def test_ranks_that_would_wait_for_each_other() -> None:
    programs = [chain(shard="zero3", rank=rank, ranks=2) for rank in range(2)]
    other = programs[1]
    reduce, gather = place_of(other, "REDUCE", unit=2, mb=0), place_of(other, "GATHER", unit=1)
    assert reduce > gather
    later = moved(other, reduce, place_of(other, "REDUCE", unit=1, mb=0))
    with pytest.raises(ProgramError) as caught:
        check([programs[0], later])
    text = str(caught.value)
    assert "ranks 0 and 1 would wait for each other forever" in text
    assert text.count("-->") == 2 and "REDUCE unit 2 mb 0 on reduce bytes 1024" in text
    short = replace(other, instructions=tuple(line for line in other.instructions if line.op != "LOSS"), mode="step")
    with pytest.raises(ProgramError, match="no LOSS"):
        check([programs[0], short])
    wide = replace(other.instructions[1], bytes=2048)
    with pytest.raises(ProgramError, match="would wait"):
        check([programs[0], replace(other, instructions=(other.instructions[0], wide, *other.instructions[2:]))])


def test_rows_must_be_the_batch() -> None:
    good = [chain(total=5, micro_batches=1, rank=rank, ranks=2) for rank in range(2)]
    with pytest.raises(ProgramError, match="its share is 2 from 3"):
        check([good[0], replace(good[1], whole_rows=3, whole_start=2)])
    with pytest.raises(ProgramError, match="rank 1 has total 6"):
        check([good[0], chain(total=6, micro_batches=1, rank=1, ranks=2)])
    with pytest.raises(ProgramError, match="give each rank one program"):
        check([good[0], good[0]])
