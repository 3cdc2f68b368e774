"""Programs as text, both ways: one instruction a line, comments after `#`, the backward of a forward program after a line `AFTER`.

    # rank 0 of 2 on dp, step, training, 3 + 3 of 12 rows from 0
    GATHER unit 0 on gather bytes 8192
    FORWARD block 0 mb 0 on compute                      # layers.0, function block_a
    FORWARD block 1 mb 0 on compute drops v0             # layers.1, function block_a

`parse_program(program_text(p))` gives back p's instructions. Seconds are prices, not text.
"""

import hashlib
import re

from partitioner.errors import ProgramError
from partitioner.runtime.program import OPS, Instruction, Program

FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "REFRESH": (frozenset({"unit"}), frozenset({"bytes"})),
    "GATHER": (frozenset({"unit"}), frozenset({"bytes"})),
    "FREE": (frozenset({"unit"}), frozenset({"bytes"})),
    "PROLOGUE": (frozenset({"block"}), frozenset({"bytes"})),
    "FORWARD": (frozenset({"block", "mb"}), frozenset({"bytes", "drops"})),
    "DROP": (frozenset({"values"}), frozenset({"mb", "bytes"})),
    "BACKWARD": (frozenset({"block", "mb"}), frozenset({"bytes"})),
    "BACKWARD_INPUT": (frozenset({"block", "mb"}), frozenset({"bytes"})),
    "BACKWARD_WEIGHT": (frozenset({"block", "mb"}), frozenset({"bytes"})),
    "REDUCE": (frozenset({"unit"}), frozenset({"mb", "bytes"})),
    "TIE": (frozenset({"unit"}), frozenset({"mb", "bytes"})),
    "SEND": (frozenset({"value", "mb", "stage"}), frozenset({"bytes"})),
    "RECV": (frozenset({"value", "mb", "stage"}), frozenset({"bytes"})),
    "SEND_GRADIENT": (frozenset({"value", "mb", "stage"}), frozenset({"bytes"})),
    "RECV_GRADIENT": (frozenset({"value", "mb", "stage"}), frozenset({"bytes"})),
    "LOSS": (frozenset(), frozenset({"bytes"})),
    "EPILOGUE": (frozenset({"block"}), frozenset({"bytes"})),
    "COMMIT": (frozenset(), frozenset({"bytes"})),
    "OUTPUT": (frozenset(), frozenset({"bytes"})),
    "STASH": (frozenset({"unit"}), frozenset({"bytes"})),
    "UNSTASH": (frozenset({"unit", "mb"}), frozenset({"bytes"})),
}
"""Per op: the fields it must have and those it may have."""

STREAMS = ("compute", "gather", "reduce", "send", "copy")
AFTER = "AFTER"
_COMMENT = re.compile(r"(^|\s+)#.*$")
_LINE = re.compile(
    r"(?P<op>[A-Z_]+)"
    r"(?: block (?P<block>\d+))?"
    r"(?: unit (?P<unit>\d+))?"
    r"(?: values (?P<values>\S+(?: \S+)*?))?"
    r"(?: value (?P<value>\S+))?"
    r"(?: mb (?P<mb>-?\d+))?"
    r"(?: stage (?P<stage>\d+))?"
    r" on (?P<stream>[a-z]+)"
    r"(?: bytes (?P<bytes>\d+))?"
    r"(?: drops (?P<drops>\S+(?: \S+)*))?"
)


def instruction_text(instruction: Instruction) -> str:
    """One line, without comment."""
    words = [instruction.op]
    if instruction.block is not None:
        words.append(f"block {instruction.block}")
    if instruction.unit is not None:
        words.append(f"unit {instruction.unit}")
    if instruction.op == "DROP":
        words.append(f"values {' '.join(instruction.drops)}")
    if instruction.value is not None:
        words.append(f"value {instruction.value}")
    if instruction.mb is not None:
        words.append(f"mb {instruction.mb}")
    if instruction.stage is not None:
        words.append(f"stage {instruction.stage}")
    words.append(f"on {instruction.stream}")
    if instruction.bytes:
        words.append(f"bytes {instruction.bytes}")
    if instruction.drops and instruction.op != "DROP":
        words.append(f"drops {' '.join(instruction.drops)}")
    return " ".join(words)


def parse_instruction(line: str) -> Instruction:
    """Inverse of `instruction_text`. Raises ProgramError with the grammar of the op."""
    text = " ".join(_COMMENT.sub("", line).split())
    op = text.split(" ", 1)[0]
    if op not in OPS:
        raise ProgramError(f"{line.strip()!r} starts with {op!r}, which is no instruction; write one of {', '.join(OPS)}")
    match = _LINE.fullmatch(text)
    required, optional = FIELDS[op]
    grammar = " ".join([op, *(f"{name} …" for name in ("block", "unit", "values", "value", "mb", "stage") if name in required), "on STREAM"])
    extra = ", ".join(sorted(optional))
    if match is None:
        raise ProgramError(f"{line.strip()!r} is not readable as an instruction; write {grammar!r} (optional: {extra})")
    found = {name for name in ("block", "unit", "values", "value", "mb", "stage", "bytes", "drops") if match[name] is not None}
    if not required <= found or not found <= required | optional:
        wrong = ", ".join(sorted((required - found) | (found - required - optional)))
        raise ProgramError(f"{line.strip()!r} lacks or must not have: {wrong}; write {grammar!r} (optional: {extra})")
    if match["stream"] not in STREAMS:
        raise ProgramError(f"{line.strip()!r} names the stream {match['stream']!r}; write one of {', '.join(STREAMS)}")
    number = {name: None if match[name] is None else int(match[name]) for name in ("block", "unit", "mb", "stage", "bytes")}
    return Instruction(
        op=op,
        block=number["block"],
        unit=number["unit"],
        mb=number["mb"],
        value=match["value"],
        stage=number["stage"],
        stream=match["stream"],  # type: ignore[arg-type]  # checked against STREAMS above
        bytes=number["bytes"] or 0,
        drops=tuple((match["values"] or match["drops"] or "").split()),
    )


def _comment(program: Program, instruction: Instruction) -> str:
    if instruction.block is not None:
        call = program.call_of[instruction.block]
        return f"{call.label}, function {call.function}"
    if instruction.unit is not None:
        unit = program.unit_numbered[instruction.unit]
        first = unit.parameters[0] if unit.parameters else "no parameters"
        return f"{unit.shard}, {first}" + (f" and {len(unit.parameters) - 1} more" if len(unit.parameters) > 1 else "")
    return ""


def _lines(program: Program, instructions: tuple[Instruction, ...]) -> list[str]:
    lines = []
    for instruction in instructions:
        text, comment = instruction_text(instruction), _comment(program, instruction)
        lines.append(f"{text:52s} # {comment}" if comment else text)
    return lines


def program_text(program: Program) -> str:
    """The whole program: a comment that says whose it is, the instructions, and after `AFTER` the backward of a forward program."""
    rows = "the batch is not cut"
    if program.total is not None:
        rows = f"{' + '.join(map(str, program.rows))} of {program.total} rows from {program.whole_start}"
    mode = "training" if program.training else "evaluation"
    stage = f", stage {program.stage} of {program.stages}" if program.stages > 1 else ""
    lines = [f"# rank {program.rank} of {program.ranks} on {program.axis}{stage}, {program.mode}, {mode}, {rows}"]
    lines += _lines(program, program.instructions)
    if program.after:
        lines += [AFTER, *_lines(program, program.after)]
    return "\n".join(lines) + "\n"


def parse_program(text: str) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """(instructions, after) of a program text. Raises ProgramError with the line number."""
    parts: list[list[Instruction]] = [[]]
    for number, line in enumerate(text.splitlines(), 1):
        bare = _COMMENT.sub("", line).strip()
        if not bare:
            continue
        if bare == AFTER and len(parts) == 1:
            parts.append([])
            continue
        try:
            parts[-1].append(parse_instruction(line))
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}") from None
    return tuple(parts[0]), tuple(parts[1]) if len(parts) > 1 else ()


def digest(program: Program) -> str:
    """SHA-256 of everything that all ranks of the axis must share: instructions, calls, function sources, units; not this rank's rows."""
    shared = [
        program.mode,
        program.training,
        program.ranks,
        program.axis,
        [instruction_text(instruction) for instruction in program.instructions],
        [instruction_text(instruction) for instruction in program.after],
        program.calls,
        sorted((name, function.source) for name, function in program.functions.items()),
        program.units,
        program.total,
        len(program.rows),
        program.share,
        program.parts,
        program.keyed,
        program.loss,
        program.outputs,
        program.output_placements,
        program.buffers,
        program.asynchronous,
    ]
    return hashlib.sha256(repr(shared).encode()).hexdigest()
