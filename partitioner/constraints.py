"""The user's constraints: each pins one decision of the solver; anything else is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partitioner.errors import ConstraintError

SHARDS = ("none", "zero1", "zero2", "zero3", "auto")
CHECKPOINTS = ("none", "full", "auto")
MOST = 1_000_000  # ranks or micro-batches


@dataclass(frozen=True)
class Constraints:
    """What is pinned. micro_batches None: the solver chooses. `dp` None: as many ranks as there are."""

    dp: int | None = None
    micro_batches: int | None = None
    shard: Literal["none", "zero1", "zero2", "zero3", "auto"] = "auto"
    checkpoint: Literal["none", "full", "auto"] = "auto"

    def as_dict(self) -> dict[str, Any]:
        """Only what is pinned, as the user would write it."""
        given = {"dp": self.dp, "micro_batches": self.micro_batches, "shard": self.shard, "checkpoint": self.checkpoint}
        return {key: value for key, value in given.items() if value not in (None, "auto")}


def parse(given: Mapping[str, Any] | None, ranks: int) -> Constraints:
    """Read the `constraints` argument. Raises ConstraintError naming the key, what it was, and what it may be."""
    if given is None:
        return Constraints()
    if not isinstance(given, Mapping):
        raise ConstraintError(f'constraints is a {type(given).__name__}; write a dict such as {{"shard": "zero3", "checkpoint": "full"}}')
    wanted = dict(given)
    for axis, what in (("pp", "pipeline"), ("tp", "tensor")):
        degree = wanted.pop(axis, 1)
        if not _is_count(degree):
            raise ConstraintError(f"constraints[{axis!r}] is {degree!r}; write a whole number from 1 to {MOST:,}")
        if degree != 1:
            raise ConstraintError(
                f"constraints[{axis!r}] is {degree}, but {what} parallelism is not available yet: the mesh has the axis dp alone; leave {axis} out"
            )
    if wanted.pop("schedule", None) is not None:
        raise ConstraintError("constraints['schedule'] chooses a pipeline schedule, but pipeline parallelism is not available yet; leave it out")
    known = {"dp", "micro_batches", "shard", "checkpoint"}
    if unknown := sorted(map(str, wanted.keys() - known)):
        raise ConstraintError(f"unknown constraint {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for key, allowed in (("shard", SHARDS), ("checkpoint", CHECKPOINTS)):
        if key in wanted and wanted[key] not in allowed:
            raise ConstraintError(f"constraints[{key!r}] is {wanted[key]!r}; it may be {', '.join(allowed)}")
    for key in ("dp", "micro_batches"):
        if wanted.get(key) is not None and not _is_count(wanted[key]):
            raise ConstraintError(f"constraints[{key!r}] is {wanted[key]!r}; write a whole number from 1 to {MOST:,}")
    if wanted.get("dp") not in (None, ranks):
        raise ConstraintError(
            f"constraints['dp'] is {wanted['dp']}, but there are {ranks} devices and dp is the only axis; write gpus={wanted['dp']} or leave dp out"
        )
    return Constraints(**wanted)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST
