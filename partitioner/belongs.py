"""Whether a plan that was given belongs to the model, the machine and the call at hand."""

from typing import TYPE_CHECKING

from partitioner.errors import ConstraintError, PlanError
from partitioner.plan import Plan

if TYPE_CHECKING:
    from partitioner.session import Session


def check_belongs(given: object, session: "Session") -> None:
    """Raise PlanError or ConstraintError, naming the first difference, unless a plan was made for this model, machine and call."""
    if not isinstance(given, Plan):
        raise PlanError(f"plan is a {type(given).__name__}; pass what make_plan(…) or Plan.load(…) returned")
    if given.ranks != session.ranks:
        raise PlanError(f"the plan is for {given.ranks} ranks, but gpus asks for {session.ranks}; write gpus={given.ranks} or make a new plan")
    for name, planned, here in (
        ("precision", given.precision, session.precision),
        ("mode", *("training" if mode else "evaluation" for mode in (given.training, session.model.training))),
    ):
        if planned != here:
            raise PlanError(f"the plan is for {name} {planned}, but here it is {here}; make a new plan with make_plan(model, …)")
    if given.fingerprint != session.fingerprint:
        raise PlanError(
            "the plan is for another model or other inputs (names, shapes, dtypes, requires_grad or ties of parameters and buffers, or the "
            f"input paths differ): planned for {given.model}{_other_inputs(given, session)}; make a new plan with make_plan(model, …)"
        )
    if (pinned := session.constraints.as_dict()) and pinned != given.constraints:
        raise ConstraintError(
            f"constraints are {pinned}, but a plan was given, which holds every decision already (made under {given.constraints}); "
            "leave one of them out"
        )


def _other_inputs(given: Plan, session: "Session") -> str:
    """Which inputs were planned and are not here, in words."""
    planned = [leaf.path for leaf in given.batch.leaves]
    if not (missing := [path for path in planned if path not in session.leaves]):
        return ""
    unlike = f" with {', '.join(planned)}, but here there are {', '.join(session.leaves)}"
    if any(path.startswith("targets") for path in missing):
        unlike += ", so its loss and example_targets are missing (the command line has them from the factory's loss and targets)"
    return unlike
