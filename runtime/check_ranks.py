"""What the programs of several ranks must have in common: rows that make the batch, collectives in one order, stages that end together."""

import re
from collections.abc import Sequence

from partitioner.errors import ProgramError
from partitioner.runtime.check_stages import check_stages
from partitioner.runtime.inputs import spread
from partitioner.runtime.program import EVERYONE, Instruction, Program
from partitioner.runtime.text import instruction_text

COLLECTIVES = ("REFRESH", "GATHER", "REDUCE", "TIE", *EVERYONE)
_ALIKE = (
    *("mode", "training", "ranks", "axis", "total", "share", "parts", "keyed"),
    *("loss", "units", "outputs", "output_placements", "buffers"),
)
_INSIDE = re.compile(r"partitioner\.(all_reduce|all_gather|reduce_scatter)\b")


def check_ranks(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless programs that are sound one by one can be played to their end together."""
    stages: dict[int, list[Program]] = {}
    for program in programs:
        stages.setdefault(program.stage, []).append(program)
    for members in stages.values():
        _check_rows(members)
        _check_order(members)
    if len(stages) > 1 or programs[0].stages > 1:
        _check_pipeline(stages)


def excerpt(lines: Sequence[Instruction], index: int) -> str:
    shown = []
    for position in range(max(0, index - 2), min(len(lines), index + 3)):
        shown.append(f"{'-->' if position == index else '   '} {position:4d}  {instruction_text(lines[position])}")
    return "\n".join(shown)


def _check_pipeline(stages: dict[int, list[Program]]) -> None:
    """All stages have programs of the same ranks, which come to their end together."""
    first = next(iter(stages.values()))
    if sorted(stages) != list(range(first[0].stages)) or any([p.rank for p in members] != [p.rank for p in first] for members in stages.values()):
        raise ProgramError(
            f"there are programs of stages {sorted(stages)} of {first[0].stages}, with ranks {[[p.rank for p in m] for m in stages.values()]}; "
            "give one for every rank of every stage"
        )
    ends = [[text.op for text in members[0].instructions if text.op in EVERYONE] for members in stages.values()]
    if any(end != ends[0] for end in ends):
        raise ProgramError(f"the stages end with {' and with '.join(', '.join(end) for end in ends)}; all must do so alike")
    ties: dict[int, list[int]] = {}
    for stage, members in stages.items():
        for text in members[0].instructions:
            if text.op == "TIE" and text.unit is not None:
                ties.setdefault(text.unit, []).append(stage)
    for unit, found in ties.items():
        held = _holders(stages, unit)
        if sorted(found) != held:
            raise ProgramError(
                f"unit {unit} is held by stages {held}, but stages {sorted(found)} sum its gradient; write TIE unit {unit} on each, once"
            )
    for at in range(len(first)):
        check_stages([stages[stage][at] for stage in sorted(stages)])


def _holders(stages: dict[int, list[Program]], unit: int) -> list[int]:
    """The stages that hold a unit."""
    return sorted(stage for stage, members in stages.items() if unit in members[0].unit_numbered)


def _check_rows(programs: Sequence[Program]) -> None:
    first = programs[0]
    ranks = [program.rank for program in programs]
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < first.ranks for rank in ranks):
        raise ProgramError(f"the programs are those of ranks {ranks} of {first.ranks}; give each rank one program")
    for program in programs:
        for field in _ALIKE:
            if getattr(program, field) != getattr(first, field):
                raise ProgramError(
                    f"rank {program.rank} has {field} {getattr(program, field)!r}, rank {first.rank} has {getattr(first, field)!r}; "
                    "ranks of one axis must be lowered from one plan"
                )
        if program.total is None:
            continue
        counts = spread(program.total, program.ranks)
        if program.whole_rows != counts[program.rank] or program.whole_start != sum(counts[: program.rank]):
            raise ProgramError(
                f"rank {program.rank} takes {program.whole_rows} rows from {program.whole_start}; of {program.total} rows over {program.ranks} ranks "
                f"its share is {counts[program.rank]} from {sum(counts[: program.rank])}"
            )
        starts = [program.whole_start + sum(program.rows[:mb]) for mb in range(len(program.rows))]
        if sum(program.rows) != program.whole_rows or list(program.starts) != starts:
            raise ProgramError(
                f"rank {program.rank} cuts its {program.whole_rows} rows into micro-batches of {list(program.rows)} from {list(program.starts)}; "
                f"they must follow each other and add up: {starts}"
            )


def _communications(program: Program) -> list[tuple[str, int]]:
    """(what, line) of everything that talks to other ranks, blocks with collectives inside included."""
    talking = {name for name, function in program.functions.items() if _INSIDE.search(function.source)}
    result = []
    for line, instruction in enumerate((*program.instructions, *program.after)):
        inside = instruction.block is not None and program.call_of[instruction.block].function in talking
        if inside or (instruction.op in COLLECTIVES and program.ranks > 1):
            result.append((instruction_text(instruction), line))
    return result


def _check_order(programs: Sequence[Program]) -> None:
    first = programs[0]
    expected = _communications(first)
    sources = {name: function.source for name, function in first.functions.items()}
    for program in programs[1:]:
        if {name: function.source for name, function in program.functions.items()} != sources:
            raise ProgramError(
                f"ranks {first.rank} and {program.rank} hold different functions; rows must be arguments of one function, not constants of two"
            )
        found = _communications(program)
        for position in range(max(len(expected), len(found))):
            left = expected[position] if position < len(expected) else None
            right = found[position] if position < len(found) else None
            if left is not None and right is not None and left[0] == right[0]:
                continue
            sides = []
            for each, side in ((first, left), (program, right)):
                lines = (*each.instructions, *each.after)
                sides.append(f"rank {each.rank}:\n" + ("    … no collective any more" if side is None else excerpt(lines, side[1])))
            raise ProgramError(
                f"ranks {first.rank} and {program.rank} would wait for each other forever: their collective {position} differs; "
                "put the same collectives in the same order on both\n" + "\n".join(sides)
            )
