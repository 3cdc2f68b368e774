"""What an asynchronous pipeline asks for, and what it says of itself. Its rule and its mechanism are in runtime/steps.py."""

from typing import TYPE_CHECKING

from partitioner.errors import ConstraintError
from partitioner.schedules import ASYNCHRONOUS

if TYPE_CHECKING:
    from partitioner.lower import Choice
    from partitioner.prepare import Prepared

SHARDS = ("none", "zero1")
"""The others reduce and gather in every micro-batch; they are not there yet."""

RULE = "W(t+1) = W(t) - lr * grad f(W(t-1)), not the mathematics of one process"
"""For SGD; another optimizer takes the same gradients."""


def refusal(schedule: str | None, stages: int, micro_batches: int | None, shard: str | None) -> str | None:
    """Why these decisions do not go together; None: they do, as far as they are made."""
    if schedule not in ASYNCHRONOUS:
        return None
    if micro_batches is not None and micro_batches < stages:
        return (
            f"schedule {schedule} keeps two versions of the weights, which suffices only with as many micro-batches as stages: there are "
            f"{micro_batches} for {stages} stages; write micro_batches={stages} or more, or schedule='1f1b'"
        )
    if shard not in (*SHARDS, "auto", None):
        return f"schedule {schedule} cannot be taken with shard {shard} yet; write shard='none' or 'zero1', or schedule='1f1b'"
    return None


def check_asynchronous(prepared: "Prepared", choice: "Choice") -> None:
    """Raise ConstraintError where a step program cannot leave backwards to the next step."""
    pipeline = choice.pipeline
    for shard in {unit.shard for unit in choice.units}:
        if why := refusal(pipeline.schedule, pipeline.stages, choice.micro_batches, shard):
            raise ConstraintError(why)
    if changed := [output.name for output in prepared.graph.outputs if output.kind == "buffer"]:
        raise ConstraintError(
            f"schedule {pipeline.schedule} runs the next batch before this one's backwards are over, but the model's forward changes the buffer "
            f"{changed[0]!r}, which those may read; call .eval() on that submodule before auto_parallelize, or write schedule='1f1b'"
        )
