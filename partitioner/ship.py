"""Programs as data: functions travel as their source text and are made from it again, so every rank runs what was emitted."""

import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partitioner.passes.emit import compile_source
from partitioner.runtime.program import Function, Program


@dataclass(frozen=True)
class Parcel:
    """A program without callables. out_spec: the tree of the output, pickled: torch warns of its own leaves when they are unpickled."""

    program: Program
    out_spec: bytes


def pack(program: Program) -> Parcel:
    """Take the callables out."""
    functions = {name: _without(function) for name, function in program.functions.items()}
    return Parcel(replace(program, functions=functions, out_spec=None), pickle.dumps(program.out_spec))


def unpack(parcel: Parcel, device: torch.device) -> Program:
    """Make the callables from their source; constants go to this rank's device."""
    functions: dict[str, Any] = {}
    for name, function in parcel.program.functions.items():
        made = compile_source(function.source, name)
        halves = function.halves
        if halves is not None and made.backward_input is not None:
            halves = replace(halves, input=made.backward_input, weight=made.backward_weight)
        functions[name] = replace(function, forward=made.forward, backward=made.backward, halves=halves)
    constants = {name: value.to(device) for name, value in parcel.program.constants.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        out_spec = pickle.loads(parcel.out_spec)
    return replace(parcel.program, functions=functions, constants=constants, out_spec=out_spec)


def _without(function: Function) -> Function:
    halves = function.halves
    if halves is not None:
        halves = replace(halves, input=_absent, weight=None if halves.weight is None else _absent)
    return replace(function, forward=_absent, backward=None if function.backward is None else _absent, halves=halves)


def _absent(arguments: list[object]) -> tuple[Tensor, ...]:
    raise RuntimeError("a packed program cannot run; unpack it first")
