"""Programs as data: functions travel as their source text and are made from it again, so every rank runs what was emitted."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partitioner.passes.emit import compile_source
from partitioner.runtime.program import Program


@dataclass(frozen=True)
class Parcel:
    """A program without callables."""

    program: Program


def pack(program: Program) -> Parcel:
    """Take the callables out."""
    functions = {name: replace(f, forward=_absent, backward=None if f.backward is None else _absent) for name, f in program.functions.items()}
    return Parcel(replace(program, functions=functions))


def unpack(parcel: Parcel, device: torch.device) -> Program:
    """Make the callables from their source; constants go to this rank's device."""
    functions: dict[str, Any] = {}
    for name, function in parcel.program.functions.items():
        made = compile_source(function.source, name)
        functions[name] = replace(function, forward=made.forward, backward=made.backward)
    constants = {name: value.to(device) for name, value in parcel.program.constants.items()}
    return replace(parcel.program, functions=functions, constants=constants)


def _absent(arguments: list[object]) -> tuple[Tensor, ...]:
    raise RuntimeError("a packed program cannot run; unpack it first")
