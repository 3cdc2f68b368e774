"""One class per mistake. Every message says what was found, why it cannot work, and what to write instead.

This file imports nothing, so that `passes`, `runtime` and the driver may all raise from it.
"""


class PartitionerError(Exception):
    """Base of everything that this package refuses."""


class CaptureError(PartitionerError):
    """The model cannot be captured as a graph; names the module and the source line."""


class BatchError(PartitionerError):
    """The batch dim of the inputs cannot be told or the batch cannot be cut as asked."""


class SizeError(PartitionerError):
    """A formula was asked for sizes that the captured graph does not have or cannot take."""


class PlacementError(PartitionerError):
    """The verifier found a placed graph that would not compute what one device computes; names the op and its placements."""


class ConstraintError(PartitionerError):
    """A user constraint is unknown, malformed, or contradicts another one."""


class InfeasibleError(PartitionerError):
    """No plan fits; says which limit, by how much, and ways out."""


class ClusterError(PartitionerError):
    """A cluster file or preset is unknown or malformed."""


class PlanError(PartitionerError):
    """A plan file is malformed, or belongs to another model, input or world size."""


class InputError(PartitionerError):
    """The inputs of a call do not have the structure the model was planned for."""


class OptimizerError(PartitionerError):
    """The optimizer cannot work on parameters placed as planned."""


class CheckpointError(PartitionerError):
    """A checkpoint cannot be written, or is damaged, unfinished, or of another model or optimizer; nothing of it was loaded unless it says so."""


class LaunchError(PartitionerError):
    """The process group does not match the plan; says the command line to type."""


class ProgramError(PartitionerError):
    """A rank program is malformed or cannot be played to its end."""


class RankError(PartitionerError):
    """The ranks disagree about the model, the arguments, the inputs or the programs; raised on every rank together, names the difference."""


class PeerError(PartitionerError):
    """A peer died, stopped, failed or did not arrive; names it and the instruction at which this rank waited. `ranks`: who is gone."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class NonFiniteError(PartitionerError):
    """The loss is not finite; raised on every rank together, names the step and the first block that computed such a value."""
