"""The manifest of a checkpoint version: which tensor lies in which bytes of which file, and everything that is no tensor. Data, never code.

    {"format": 1, "step": 1200, "ranks": 2,
     "tensors": {"model/layers.0.weight": {"dtype": "float32", "shape": [5, 4], "pieces": [
         {"file": "rank-00000.bin", "byte": 0, "offsets": [0, 0], "sizes": [3, 4]},
         {"file": "rank-00001.bin", "byte": 64, "offsets": [3, 0], "sizes": [2, 4]}]}, …},
     "aliases": {"head.weight": "embed.weight"}, "values": {},
     "optimizer": {"kind": "torch.optim.adamw.AdamW", "groups": [{"names": ["layers.0.weight"], "options": {"lr": 0.001, …}}],
                   "state": {"layers.0.weight": {"exp_avg": "tensor", "step": "tensor", …}}}}

Tensors are named model/<key of state_dict>, optimizer/<key of its state>/<parameter> and random/<device type>/<rank>.
"""

from math import prod
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from partitioner.errors import CheckpointError

FORMAT: Literal[1] = 1
TENSOR = "tensor"
"""Stands in an optimizer's state for a value that is among the tensors."""

_T = TypeVar("_T")
Count = Annotated[int, Field(ge=0, le=2**62)]
Many = Annotated[tuple[_T, ...], Field(fail_fast=True)]
Number = bool | int | float | str | None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")


class Piece(_Part):
    """A box of a tensor: where it starts in the tensor and how large it is, by dim, and at which byte of which file it lies, row-major."""

    file: str
    byte: Count
    offsets: Many[Count]
    sizes: Many[Count]


class Entry(_Part):
    """One tensor; its pieces cover it, each element once."""

    dtype: str
    shape: Many[Count]
    pieces: Many[Piece]

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @model_validator(mode="after")
    def _covered(self) -> "Entry":
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype")
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.sizes) == len(self.shape):
                raise ValueError("a piece has another number of dims than its tensor")
            if any(offset + size > whole for offset, size, whole in zip(piece.offsets, piece.sizes, self.shape, strict=True)):
                raise ValueError("a piece lies outside of its tensor")
        if len({piece.offsets for piece in self.pieces}) < len(self.pieces) or sum(prod(piece.sizes) for piece in self.pieces) != prod(self.shape):
            raise ValueError("the pieces do not cover the tensor once")
        return self


class Group(_Part):
    """One of torch's param_groups: the parameters by name, and the options (learning rate and so on)."""

    names: Many[str]
    options: dict[str, JsonValue]


class OptimizerRecord(_Part):
    """An optimizer without its tensors. state: parameter -> key -> number, or TENSOR."""

    kind: str
    groups: Many[Group]
    state: dict[str, dict[str, Number]]


class Manifest(_Part):
    """All of a version. aliases: further names of tied parameters -> the name that is saved; values: entries of state_dict that are no tensors."""

    format: Literal[1]
    step: Count
    ranks: Annotated[int, Field(ge=1, le=2**31)]
    tensors: dict[str, Entry]
    aliases: dict[str, str] = {}
    values: dict[str, JsonValue] = {}
    optimizer: OptimizerRecord | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        for alias, name in self.aliases.items():
            if f"model/{name}" not in self.tensors:
                raise ValueError(f"{alias!r} is another name of {name!r}, which is not saved")
        for name, state in self.optimizer.state.items() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, str) and (value != TENSOR or f"optimizer/{key}/{name}" not in self.tensors):
                    raise ValueError(f"the optimizer's {key!r} of {name!r} is not saved")
        return self


def parse(text: str, where: object) -> Manifest:
    """The manifest that a file holds; CheckpointError where it is none."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{where} is no manifest that this version reads: {place or 'it'}: {first['msg']}") from None
