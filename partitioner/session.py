"""What one call of `make_plan` or `auto_parallelize` knows: the model, its example batch, the machine, and what has been prepared so far."""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_unflatten

from partitioner.alternatives import Alternatives
from partitioner.assemble import assemble, cuts_of, decisions_of
from partitioner.asynchronous import refusal
from partitioner.batch_dims import batch_dims
from partitioner.belongs import check_belongs
from partitioner.calibrate import core_share, local_device, neighbours
from partitioner.cluster import Cluster
from partitioner.constraints import parse
from partitioner.cost import accumulate_seconds
from partitioner.errors import BatchError, CaptureError, ConstraintError, InputError, OptimizerError, PartitionerError, PlanError
from partitioner.examples import example_call
from partitioner.fingerprint import described, facts, fingerprint
from partitioner.functions import Functions
from partitioner.garbage import no_collection
from partitioner.lower import Choice, Decision, lower
from partitioner.op_times import OpTimes
from partitioner.options import FRONTIER_POINTS
from partitioner.passes.blocks import Homes
from partitioner.passes.capture import capture
from partitioner.passes.graph import Graph
from partitioner.passes.refuse import check_model
from partitioner.passes.trained import trained
from partitioner.passes.tree import map_tensors, named_leaves
from partitioner.passes.verify import verify as verify_capture
from partitioner.pipeline import Pipeline
from partitioner.plan import Plan
from partitioner.planner import choose
from partitioner.prepare import Prepared, check_micro_batches, most_micro_batches, prepare
from partitioner.prices import Prices
from partitioner.progress import tell
from partitioner.quantities import parse_bytes
from partitioner.runtime.check import check
from partitioner.runtime.module import ParallelModule
from partitioner.runtime.parameters import shapes_of
from partitioner.runtime.program import Program, Request, Unit
from partitioner.runtime.simulator import storage_bytes
from partitioner.schedules import chunks_of
from partitioner.trial import Shapes, Task, Verdict, communication, sizes_of, trial

_STAGES = (1, 2, 4, 8)  # what is tried where the user does not say
_MOST_STAGES = 64  # and where the quickest is sought


def _prepared(
    graph: Graph, batch_dim: Any, prices: Prices, functions: Functions, own_statistics: bool,
    ranks: int, in_time: bool, chunks: int = 1, homes: Homes | None = None,
) -> Prepared:
    return prepare(
        graph, batch_dim=batch_dim, ranks=ranks, in_time=in_time, keyed=ranks * chunks > 1, own_statistics=own_statistics, at_least=chunks,
        homes=homes, seconds=replace(prices, ranks=ranks).op, functions=functions,
    )


def _dim(number: int | None) -> str:
    return "no dim" if number is None else f"dim {number}"


def _refuse_empty(leaves: Mapping[str, Any]) -> None:
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.dim() and not leaf.numel():
            raise BatchError(f"{path} has shape {tuple(leaf.shape)}: there is nothing to compute; pass a batch with rows")


class Session:
    """One model on one machine. Checks the arguments; see `make_plan` for them. at_hand: the devices are like those here, so ops can be timed."""

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        *,
        example_inputs: Any,
        example_kwargs: Mapping[str, Any] | None,
        loss: Callable[..., Tensor] | None,
        example_targets: Any,
        batch_dim: Any,
        optimizer: str,
        precision: str,
        memory: int | str | None,
        constraints: Mapping[str, Any] | None,
        verify: bool,
        at_hand: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}; pass an nn.Module")
        if isinstance(model, ParallelModule):
            raise InputError("the model is parallelized already; pass the plain model, once")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise InputError("the model is wrapped in DistributedDataParallel; pass model.module: data parallelism is a decision of the plan")
        if loss is not None and not callable(loss):
            raise InputError(f"loss is a {type(loss).__name__}; pass a function of (output) or, with example_targets, of (output, targets)")
        if precision != "fp32":
            raise PartitionerError(
                f"precision={precision!r} is not available yet; write precision='fp32', or use torch.autocast inside the model's forward"
            )
        if not isinstance(optimizer, str):
            kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
            raise OptimizerError(
                f"optimizer is {kind}; write the name that memory is planned for, such as optimizer='adamw', and make the optimizer itself "
                "afterwards, on parallel.parameters()"
            )
        self.precision = precision
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.targets = map_tensors(Tensor.contiguous, example_targets)
        self.has_targets = example_targets is not None
        # inputs lie contiguously in every program, so in the capture as well
        self.args, self.kwargs = map_tensors(Tensor.contiguous, example_call(model, example_inputs, example_kwargs))
        self.cluster, self.ranks = cluster, cluster.devices
        self.constraints = parse(constraints, self.ranks)
        self.stages = self.constraints.stages
        self.batch_statistics = self.constraints.batch_statistics
        self.chunks = chunks_of(self.constraints.schedule or "1f1b", self.stages)
        self.memory_bytes = None if memory is None else parse_bytes(memory)
        if self.memory_bytes is not None and self.memory_bytes > cluster.memory_bytes:
            raise ConstraintError(
                f"memory={memory!r} is {self.memory_bytes:,} bytes a device, but {cluster} have {cluster.memory_bytes:,}; write that or less, or "
                "leave memory out to use all of it"
            )
        check_model(model, self.has_targets)
        self.leaves: dict[str, Any] = dict(named_leaves(self.args, self.kwargs, self.targets, self.has_targets)[0])
        _refuse_empty(self.leaves)
        self.batch_dim = batch_dims(batch_dim, self.leaves)
        self.fingerprint = fingerprint(model, self.leaves)
        every = shapes_of(model)
        self.shapes: Shapes = {name: every[name] for name, _ in model.named_parameters()}
        self._verify = verify
        here = local_device()
        times = OpTimes(here, core_share(self.ranks, here.type), neighbours(self.ranks, here.type)) if at_hand else None
        self._prices = Prices(cluster, self.ranks, optimizer, times)
        self._whole: dict[str, Tensor] = {
            name: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        self._taken_over = False
        self._graphs: dict[Hashable, Graph] = {}
        self._prepared: dict[Hashable, Prepared] = {}
        self._functions = Functions()
        self._choice: Choice | None = None
        self._planned_for: Prepared | None = None
        self._planned: dict[str, tuple[Decision, float]] = {}  # block label -> its decision and the share of bytes that it saves

    @property
    def dp(self) -> int:
        """Ranks of a stage."""
        return self.ranks // self.stages

    def facts(self, plan: object = None) -> dict[str, Any]:
        """What must be equal on all ranks, in words: versions, arguments, the plan that was given, the model and the example inputs."""
        given = (
            "none" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()[:16] if isinstance(plan, Plan) else type(plan).__name__
        )
        return {
            "the version of torch": torch.__version__,
            "the cluster": repr(self.cluster),
            "optimizer": self.optimizer,
            "memory": f"{self.memory_bytes} bytes",
            "constraints": repr(self.constraints.as_dict()),
            "batch_dim": repr(self.batch_dim),
            "loss": getattr(self.loss, "__qualname__", type(self.loss).__name__),
            "the plan": given,
            "the model": f"{type(self.model).__name__} for {'training' if self.model.training else 'evaluation'}",
            "the model's": facts(self.model),
            "the example inputs:": {path: described(leaf) for path, leaf in self.leaves.items()},
        }

    # --- captures ----------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """From now on the runtime owns the parameters; captures see meta tensors in their place."""
        self._taken_over = True

    @contextmanager
    def _whole_parameters(self) -> Iterator[None]:
        if not self._taken_over:
            yield
            return
        with _reparametrize_module(self.model, self._whole, tie_weights=True):
            yield

    def _key(self, request: Request) -> Hashable:
        flags = tuple(module.training for module in self.model.modules())
        shapes = tuple(
            (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (path, repr(leaf)) for path, leaf in request.leaves.items()
        )
        return request.mode, flags, shapes

    def _graph(self, request: Request) -> Graph:
        key = self._key(request)
        if key not in self._graphs:
            step = request.mode == "step"
            args, kwargs, targets = self._call(request)
            with self._whole_parameters():
                self._graphs[key] = capture(
                    self.model,
                    args,
                    kwargs,
                    loss=self.loss if step else None,
                    targets=targets,
                    has_targets=self.has_targets and step,
                    mode="loss" if step else "forward",
                    training=request.training,
                )
        return self._graphs[key]

    def _call(self, request: Request) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The call with these leaves: the example call's tree, filled anew."""
        has_targets = self.has_targets and request.mode == "step"
        pairs, spec = named_leaves(self.args, self.kwargs, self.targets, has_targets)
        if [path for path, _ in pairs] != list(request.leaves):
            raise InputError(f"the inputs are {', '.join(request.leaves)}, but the model was planned with {', '.join(path for path, _ in pairs)}")
        tree = tree_unflatten(list(request.leaves.values()), spec)
        return tree["args"], tree["kwargs"], tree.get("targets")

    def _ready(self, request: Request, micro_batches: int, stages: int, chunks: int) -> Prepared:
        in_time, dp = micro_batches > 1, self.ranks // stages
        key = (self._key(request), in_time or dp > 1, stages)
        if key not in self._prepared:
            planned, homes = self._planned_for, None
            if planned is not None and stages > 1:
                held = self._made().pipeline.homes(planned.blocks.blocks)
                homes = {name: held.get(name, (0,)) for name in self.shapes}
            graph, own = self._graph(request), self.batch_statistics == "micro_batch"
            self._prepared[key] = _prepared(graph, self.batch_dim, self._prices, self._functions, own, dp, in_time, chunks, homes)
        return self._prepared[key]

    # --- planning ----------------------------------------------------------------------------------------------

    @no_collection()
    def plan(self, given: Plan | None = None) -> Plan:
        """Decide, or take over the decisions of `given`."""
        if given is not None:
            check_belongs(given, self)
            self.stages, self.chunks = given.stages, chunks_of(given.schedule, given.stages)
            self.batch_statistics = given.batch_statistics
        request = Request("step", self.model.training, self.leaves, True)
        tell("capturing the model")
        graph = self._graph(request)
        self._teachable(graph)
        if self._verify:
            tell("comparing the capture with the model")
            verify_capture(self.model, graph, self.args, self.kwargs, loss=self.loss, targets=self.targets, has_targets=self.has_targets)
        asked = given is not None or self.constraints.pp is not None or self.constraints.dp is not None
        quickest = self.constraints.pp == "auto"
        tried = range(1, _MOST_STAGES + 1) if quickest else _STAGES
        meshes = [self.stages] if asked and not quickest else [n for n in tried if self.ranks % n == 0]
        fixed = self._fixed_bytes(graph)

        def ask(stages: int) -> Task:
            return self._task(request, stages, fixed)

        verdict = choose(ask, meshes, quickest) if given is None else self._follow(ask(self.stages), given)
        pipeline = verdict.choice.pipeline
        self.stages, self.chunks = pipeline.stages, pipeline.count
        task = ask(self.stages)
        self._prices.save()
        self._choice, self._planned_for = verdict.choice, verdict.prepared
        for block, decision, point in zip(verdict.prepared.blocks.blocks, verdict.choice.decisions, verdict.points, strict=True):
            most = verdict.prepared.frontier(block.cls, FRONTIER_POINTS)[-1].saved_bytes
            self._planned.setdefault(block.label, (decision, point.saved_bytes / most if most else 1.0))
        own = self.batch_statistics == "micro_batch"
        prepared = partial(_prepared, graph, self.batch_dim, self._prices, self._functions, own)  # holds neither the session nor the model
        return assemble(self, verdict, Alternatives(replace(task, prepared=lambda _: verdict.prepared), verdict, prepared))

    def _task(self, request: Request, stages: int, fixed: Mapping[str, int]) -> Task:
        """The planner's question for so many stages."""
        chunks = chunks_of(self.constraints.schedule or "1f1b", stages) if stages != self.stages else self.chunks
        return Task(
            prepared=lambda micro_batches: self._ready(request, micro_batches, stages, chunks),
            cluster=self.cluster,
            ranks=self.ranks // stages,
            stages=stages,
            shapes=self.shapes,
            fixed_bytes=fixed,
            capacity_bytes=self.cluster.memory_bytes if self.memory_bytes is None else self.memory_bytes,
            optimizer=self.optimizer,
            optimizer_seconds=self._prices.step,
            constraints=self.constraints,
        )

    def _teachable(self, graph: Graph) -> None:
        """Refuse a step that could train nothing."""
        if trained(graph):
            return
        trainable = [name for name, (_, _, wanted) in self.shapes.items() if wanted]
        raise CaptureError(
            "nothing would be trained: "
            + (
                f"the loss does not depend on any of the {len(trainable)} trainable parameters ({trainable[0]}, …), or only through detached values; "
                "return a loss that is computed from the model's output"
                if trainable
                else f"{type(self.model).__name__} has no parameter with requires_grad=True; unfreeze some, or call the model without this library"
            )
        )

    def _follow(self, task: Task, given: Plan) -> Verdict:
        prepared = task.prepared(given.micro_batches)
        check_micro_batches(prepared, self.dp, given.micro_batches)
        if (planned := {leaf.path: leaf.dim for leaf in given.batch.leaves}) != (found := cuts_of(prepared)):
            differing = next(path for path in {**planned, **found} if planned.get(path) != found.get(path))
            raise PlanError(
                f"the plan cuts {differing} along {_dim(planned.get(differing))}, but here it is cut along {_dim(found.get(differing))}: it was "
                "made with another batch_dim, or edited; make a new plan"
            )
        choice, points = decisions_of(given, prepared, tuple(self.shapes), FRONTIER_POINTS)
        verdict = Verdict(prepared, choice, points, trial(task, prepared, choice), 0.0)
        if verdict.peak_bytes > task.capacity_bytes:
            raise PlanError(
                f"the plan takes {verdict.peak_bytes:,} bytes per device, but there are {task.capacity_bytes:,}; raise memory or make a new plan"
            )
        return replace(verdict, bound_seconds=min(given.bound_seconds, verdict.step_seconds))

    def _fixed_bytes(self, graph: Graph) -> dict[str, int]:
        """Storage bytes of every input leaf, buffer and constant."""
        tensors = {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, Tensor)}
        tensors.update(dict(self.model.named_buffers()))
        tensors.update(graph.constants)
        return storage_bytes(tensors)

    # --- lowering ----------------------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[Unit, ...]:
        """Which parameter lies where. Only after `plan`."""
        return self._made().units

    def _made(self) -> Choice:
        if self._choice is None:
            raise PlanError("there is no plan yet; call plan() first")
        return self._choice

    def _like_planned(self, request: Request, micro_batches: int) -> Prepared:
        """Ready for another call. What the model cannot take is an error of the inputs: with those of planning it could."""
        _refuse_empty(request.leaves)
        try:
            return self._ready(request, micro_batches, self.stages, self.chunks)
        except CaptureError as error:
            planned = {path: tuple(leaf.shape) for path, leaf in self.leaves.items() if isinstance(leaf, Tensor)}
            given = {path: tuple(leaf.shape) for path, leaf in request.leaves.items() if isinstance(leaf, Tensor)}
            unlike = [f"{path} has shape {shape}, planned with {planned[path]}" for path, shape in given.items() if planned.get(path, shape) != shape]
            if not unlike:
                raise
            raise InputError(f"the model cannot take these inputs: {'; '.join(unlike)}. {error}") from error

    @no_collection()
    def lower(self, request: Request) -> tuple[Program, ...]:
        """Programs of all ranks for these inputs and this mode, checked together; decisions are the plan's, block by block.

        A short batch may leave too few rows for the planned micro-batches: then there are fewer.
        """
        planned = self._made()
        micro_batches = planned.micro_batches if request.mode == "step" else 1
        prepared = self._like_planned(request, micro_batches)
        micro_batches = min(micro_batches, most_micro_batches(prepared, self.dp))
        if request.mode == "step" and (why := refusal(planned.pipeline.schedule, self.stages, micro_batches, None)):
            raise InputError(f"this batch is too short: {why}")
        decisions = list(planned.decisions) if prepared is self._planned_for else []
        for block in prepared.blocks.blocks if not decisions else ():
            decision, share = self._planned.get(block.label, (Decision(frozenset()), 1.0))
            decisions.append(Decision(prepared.nearest(block.cls, decision.saved, share, FRONTIER_POINTS), decision.keep_gathered))
        programs = lower(
            prepared,
            Choice(tuple(decisions), planned.units, micro_batches, self._pipeline(prepared)),
            mode=request.mode,
            grad=request.grad and (self.stages == 1 or request.mode == "step"),
            ranks=self.dp,
            only=range(self.dp),
            parameter_bytes=sizes_of(self.shapes),
            communication=communication(self.cluster, self.dp, self.shapes),
            accumulation=partial(accumulate_seconds, cluster=self.cluster),
            prefetch=self.cluster.overlap,
        )
        check(programs)
        return programs

    def _pipeline(self, prepared: Prepared) -> Pipeline:
        """Where the blocks of a capture run: as planned, or on the stages that hold what they read."""
        planned = self._made().pipeline
        if self.stages == 1:
            return Pipeline.none(len(prepared.blocks.blocks))
        return planned if prepared is self._planned_for else Pipeline(self.stages, prepared.blocks.groups, planned.schedule)
