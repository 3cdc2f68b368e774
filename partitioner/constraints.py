"""The user's constraints: each pins one decision of the solver; anything else is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partitioner.asynchronous import refusal
from partitioner.errors import ConstraintError
from partitioner.schedules import ASYNCHRONOUS, NAMES, Name
from partitioner.wording import counted

SCHEDULES = (*NAMES, *ASYNCHRONOUS)
SHARDS = ("none", "zero1", "zero2", "zero3", "auto")
CHECKPOINTS = ("none", "full", "auto")
STATISTICS = ("global", "micro_batch")
MOST = 1_000_000  # ranks or micro-batches


@dataclass(frozen=True)
class Constraints:
    """What is pinned. None: the solver chooses; `dp` None: as many ranks as a stage has.

    `pp` None: stages where nothing fits without, for gradients cannot come back through the outputs of a pipeline; "auto": wherever they are quicker.
    `batch_statistics`: what BatchNorm normalises by, the statistics of the global batch or those of each micro-batch; this changes the mathematics
    and is never chosen.
    """

    pp: int | Literal["auto"] | None = None
    dp: int | None = None
    schedule: Name | None = None
    micro_batches: int | None = None
    shard: Literal["none", "zero1", "zero2", "zero3", "auto"] = "auto"
    checkpoint: Literal["none", "full", "auto"] = "auto"
    batch_statistics: Literal["global", "micro_batch"] = "global"

    @property
    def stages(self) -> int:
        """How many stages are pinned; 1 where the solver chooses."""
        return self.pp if isinstance(self.pp, int) else 1

    def as_dict(self) -> dict[str, Any]:
        """Only what is pinned, as the user would write it."""
        given = {
            "pp": self.pp,
            "dp": self.dp,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "shard": self.shard,
            "checkpoint": self.checkpoint,
            "batch_statistics": self.batch_statistics,
        }
        return {key: value for key, value in given.items() if value not in (None, "auto", "global")}


def parse(given: Mapping[str, Any] | None, ranks: int) -> Constraints:
    """Read the `constraints` argument. Raises ConstraintError naming the key, what it was, and what it may be."""
    if given is None:
        return Constraints()
    if not isinstance(given, Mapping):
        raise ConstraintError(f'constraints is a {type(given).__name__}; write a dict such as {{"shard": "zero3", "checkpoint": "full"}}')
    wanted = dict(given)
    degree = wanted.pop("tp", 1)
    if not _is_count(degree):
        raise ConstraintError(f"constraints['tp'] is {degree!r}; write a whole number from 1 to {MOST:,}")
    if degree != 1:
        raise ConstraintError(
            f"constraints['tp'] is {degree}, but tensor parallelism is not available yet: the mesh has the axes pp and dp; leave tp out"
        )
    known = {"pp", "dp", "schedule", "micro_batches", "shard", "checkpoint", "batch_statistics"}
    if unknown := sorted(map(str, wanted.keys() - known)):
        raise ConstraintError(f"unknown constraint {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for key, allowed in (("shard", SHARDS), ("checkpoint", CHECKPOINTS), ("batch_statistics", STATISTICS)):
        if key in wanted and wanted[key] not in allowed:
            raise ConstraintError(f"constraints[{key!r}] is {wanted[key]!r}; it may be {', '.join(allowed)}")
    if wanted.get("schedule") is not None and wanted["schedule"] not in SCHEDULES:
        raise ConstraintError(f"constraints['schedule'] is {wanted['schedule']!r}; it may be {', '.join(SCHEDULES)}")
    for key in ("pp", "dp", "micro_batches"):
        if wanted.get(key) is not None and not _is_count(wanted[key]) and (key, wanted[key]) != ("pp", "auto"):
            also = ', or "auto"' if key == "pp" else ""
            raise ConstraintError(f"constraints[{key!r}] is {wanted[key]!r}; write a whole number from 1 to {MOST:,}{also}")
    stages = wanted["pp"] if _is_count(wanted.get("pp")) else 1
    if ranks % stages:
        raise ConstraintError(
            f"constraints['pp'] is {stages}, but {ranks} devices cannot be dealt to {stages} stages evenly; write a divisor of {ranks}"
        )
    if wanted.get("dp") not in (None, ranks // stages):
        raise ConstraintError(
            f"constraints['dp'] is {wanted['dp']}, but {ranks} devices in {counted(stages, 'stage')} leave {ranks // stages} a stage; "
            f"write gpus={wanted['dp'] * stages} or leave dp out"
        )
    if wanted.get("schedule") is not None and stages == 1:
        pinned = "pp is not pinned; write pp too" if wanted.get("pp") is None else f"pp is {wanted['pp']!r}; write a number above 1"
        raise ConstraintError(f"constraints['schedule'] is {wanted['schedule']!r}, which orders pipeline stages, but {pinned}")
    if why := refusal(wanted.get("schedule"), stages, wanted.get("micro_batches"), wanted.get("shard")):
        raise ConstraintError(f"constraints: {why}")
    return Constraints(**wanted)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST
