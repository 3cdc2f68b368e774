"""The two doors: `make_plan` decides, `auto_parallelize` decides and runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partitioner.calibrate import local_cluster, measure_link
from partitioner.cluster import Cluster
from partitioner.errors import CaptureError, InputError, LaunchError, PartitionerError, PlanError, RankError
from partitioner.passes.collectives import bind
from partitioner.passes.tree import named_leaves
from partitioner.plan import Plan
from partitioner.prepare import AXIS
from partitioner.quantities import parse_bytes
from partitioner.runtime import watch
from partitioner.runtime.launch import Ranks, agree, broadcast_object, join, launched, peer_seconds
from partitioner.runtime.module import ParallelModule
from partitioner.runtime.parameters import UnitStore
from partitioner.runtime.pipe import Pipe
from partitioner.runtime.program import Program, Request, Slice, Unit
from partitioner.runtime.text import digest
from partitioner.session import Session
from partitioner.ship import Parcel, pack, unpack

Gpus = int | str | Cluster | Path


def make_plan(
    model: nn.Module,
    gpus: Gpus = 1,
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    example_targets: Any = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
    batch_dim: Any = "auto",
    optimizer: str | None = None,
    precision: str = "fp32",
    memory: int | str | None = None,
    constraints: Mapping[str, Any] | None = None,
    verify: bool = True,
    plan: Plan | None = None,
) -> Plan:
    """Decide how to train `model` on `gpus` devices; nothing is run but the check of the capture.

    gpus: a number of devices like those at hand, "16x8 h100-sxm" (nodes x devices), a Cluster, or the path of a cluster .toml.
    example_inputs, example_kwargs, example_targets: one global batch, real, fake or meta tensors.
    loss: callable(output) or, with example_targets, callable(output, targets); None: the model returns its loss.
    init_fn: for models on meta; auto_parallelize calls init_fn(model) on an empty copy.
    batch_dim: an int, a pytree of int / None like the inputs, or "auto".
    optimizer: what memory and time are planned for, by name; None: "adamw". constraints: decisions to pin, see constraints.py.
    memory: bytes per device that a whole step may take, for instance "16GB"; None: all that a device has.
    verify: compare the captured graph with the model itself on the example batch (models with real weights).
    plan: decisions to take over, from a file perhaps, instead of deciding; its optimizer and memory too, where none are given.

    Raises PartitionerError: CaptureError, BatchError, ConstraintError, InfeasibleError, ClusterError, InputError, PlanError.
    """
    optimizer, memory = _settled(plan, optimizer, memory)
    session = Session(
        model,
        Cluster.parse(gpus),
        example_inputs=example_inputs,
        example_kwargs=example_kwargs,
        loss=loss,
        example_targets=example_targets,
        batch_dim=batch_dim,
        optimizer=optimizer,
        precision=precision,
        memory=memory,
        constraints=constraints,
        verify=verify,
        at_hand=isinstance(gpus, int),
    )
    return session.plan(plan)


def auto_parallelize(
    model: nn.Module,
    gpus: Gpus = 1,
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    example_targets: Any = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
    batch_dim: Any = "auto",
    optimizer: str | None = None,
    precision: str = "fp32",
    memory: int | str | None = None,
    constraints: Mapping[str, Any] | None = None,
    verify: bool = True,
    plan: Plan | None = None,
) -> ParallelModule:
    """Plan as `make_plan` does (or take `plan`) and return the model as a module that trains on all ranks.

    Under torchrun every rank calls this alike: rank 0 plans and lowers, the others take its decisions and its weights. Without torchrun and
    with more than one device the returned module holds the plan, and its train_step raises LaunchError with the torchrun line to type.
    """
    alone = not launched()
    devices = gpus if isinstance(gpus, int) else Cluster.parse(gpus).devices
    ranks = join(1 if alone else devices)
    cluster = Cluster.parse(gpus) if alone else _cluster(gpus, ranks)
    sessions: list[Session] = []

    def start() -> None:
        named, cap = _settled(plan, optimizer, memory)
        sessions.append(
            Session(
                model,
                cluster,
                example_inputs=example_inputs,
                example_kwargs=example_kwargs,
                loss=loss,
                example_targets=example_targets,
                batch_dim=batch_dim,
                optimizer=named,
                precision=precision,
                memory=cap,
                constraints=constraints,
                verify=verify,
                at_hand=isinstance(gpus, int),
            )
        )

    ranks.together(start, RankError)
    (session,) = sessions
    if alone and devices > 1:
        return _Unlaunched(model, session.plan(plan))  # type: ignore[return-value]
    group = ranks.group
    agree({**session.facts(plan), "verify": str(verify), watch.SECONDS_VARIABLE: f"{peer_seconds():g}"}, ranks)
    made: Plan = _on_first(ranks, lambda: session.plan(plan), "planning")
    if any(p.is_meta for p in model.parameters()):
        _materialize(model, init_fn, ranks.device)
    else:
        model.to(ranks.device)
    _same_weights(model, ranks)
    lowering = _Lowering(session, ranks)
    pipe = Pipe.make(ranks, made.stages, [unit.stages for unit in lowering.units]) if made.stages > 1 else None
    own = ranks if pipe is None else pipe.dp
    bind(AXIS, own.group)
    store = UnitStore(model, lowering.units, ranks=own.ranks, rank=own.rank, group=own.group, pipe=pipe)
    store.planned_optimizer = session.optimizer
    session.take_over()
    _guard(model)
    return ParallelModule(
        model,
        store,
        lowering,
        made,
        rank=ranks.rank,
        ranks=ranks.ranks,
        group=group,
        device=ranks.device,
        flatten=lambda args, kwargs, has_targets, targets: named_leaves(args, kwargs, targets, has_targets),
        expected=session.leaves,
        batch=[Slice(leaf.path, leaf.dim, leaf.outer, leaf.inner) for leaf in made.batch.leaves],
        pipe=pipe,
    )


def _settled(plan: object, optimizer: str | None, memory: int | str | None) -> tuple[str, int | str | None]:
    """The optimizer and the memory cap: the plan's own where none are given. Raises PlanError where others are."""
    if not isinstance(plan, Plan):
        return "adamw" if optimizer is None else optimizer, memory
    for name, given, asked, planned in (
        ("optimizer", optimizer, optimizer, plan.optimizer),
        ("memory", memory, memory if memory is None else parse_bytes(memory), plan.memory_bytes),
    ):
        if None not in (asked, planned) and asked != planned:
            raise PlanError(
                f"{name}={given!r} was given, but the plan was made for {planned!r}; leave {name} out to follow the plan, or make a new one: "
                f"make_plan(model, …, {name}={given!r})"
            )
    return plan.optimizer if optimizer is None else optimizer, plan.memory_bytes if memory is None else memory


def _guard(model: nn.Module) -> None:
    """Once its parameters are cut, the user's own module cannot run; let it say what can. Captures put whole parameters into it and pass."""

    def refuse(module: nn.Module, args: Any) -> None:
        cut = next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None)
        if cut is not None:
            raise InputError(
                f"the model was called itself, but auto_parallelize has placed its parameters: of {cut!r} this rank holds only some rows. "
                "Call what auto_parallelize returned: parallel(…), or parallel.train_step(…)"
            )

    model.register_forward_pre_hook(refuse)


def _cluster(gpus: Gpus, ranks: Ranks) -> Cluster:
    """The cluster on every rank. Of devices at hand the link is measured by all ranks, and the device by rank 0."""
    if not isinstance(gpus, int):
        return Cluster.parse(gpus)
    link = measure_link(ranks.group) if ranks.group is not None else None
    cluster: Cluster = _on_first(ranks, lambda: local_cluster(gpus, link), "calibration")
    return cluster


class _Lowering:
    """Programs on demand: rank 0 lowers for all, every rank makes its functions from the emitted source."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self._session, self._ranks = session, ranks
        self.units: tuple[Unit, ...] = broadcast_object(session.units if ranks.rank == 0 else None, ranks)

    def __call__(self, request: Request) -> Program:
        ranks = self._ranks
        lowered: tuple[list[Parcel], list[str]] = _on_first(ranks, lambda: self._lowered(request), "lowering")
        parcels, digests = lowered
        program = unpack(parcels[ranks.rank], ranks.device)
        mine = digest(program)
        agree({"the program": "as rank 0 lowered it" if mine == digests[ranks.rank] else mine}, ranks)
        return program

    def _lowered(self, request: Request) -> tuple[list[Parcel], list[str]]:
        programs = self._session.lower(request)
        return [pack(program) for program in programs], [digest(program) for program in programs]


def _on_first(ranks: Ranks, work: Callable[[], Any], what: str) -> Any:
    """Do `work` on rank 0 and give everyone its result; what it raises is raised on every rank."""
    result: tuple[bool, Any] | None = None
    problem: BaseException | None = None
    if ranks.rank == 0:
        try:
            result = (True, work())
        except PartitionerError as error:
            problem, result = error, (False, error)
        except Exception as error:  # any failure must reach the ranks that wait
            problem, result = error, (False, PartitionerError(f"{what} failed on rank 0: {type(error).__name__}: {error}"))
    good, value = broadcast_object(result, ranks)
    if problem is not None:
        raise problem
    if not good:
        raise value
    return value


def _materialize(model: nn.Module, init_fn: Callable[[nn.Module], Any] | None, device: torch.device) -> None:
    if init_fn is None:
        raise CaptureError(
            "the model is on the meta device and has no weights to train; pass init_fn=fill, where fill(model) gives every parameter "
            "and buffer its first value"
        )
    model.to_empty(device=device)
    init_fn(model)


def _same_weights(model: nn.Module, ranks: Ranks) -> None:
    """Every rank starts from rank 0's parameters and buffers."""
    if ranks.group is None:
        return
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
            if tensor.numel():
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, group=ranks.group, group_src=0)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)


class _Unlaunched(nn.Module):
    """The plan of a model that needs more processes than this one."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model, self.plan = model, plan

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise LaunchError(
            f"the plan is for {self.plan.ranks} processes, but this script runs as one; start it with\n"
            f"    torchrun --nproc-per-node {self.plan.ranks} your_script.py"
        )

    forward = train_step = _refuse

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not hasattr(ParallelModule, name) and name != "measured":
                raise
            return self._refuse
