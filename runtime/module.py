"""ParallelModule: the user's model, trained on many ranks, under the user's own names.

It shares the user's module's dictionaries of children, parameters and buffers instead of holding the module as a child: names carry no prefix,
`parallel.layers[0]` is the user's layer, and `parallel.parameters()` are the placed ones.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_unflatten

from partitioner.errors import InputError, PartitionerError, ProgramError, RankError
from partitioner.runtime.asynchronous import AsynchronousExecutor
from partitioner.runtime.bridge import attach, refuse
from partitioner.runtime.checkpoint import load, save
from partitioner.runtime.executor import Executor, Store
from partitioner.runtime.inputs import Expected
from partitioner.runtime.launch import Ranks
from partitioner.runtime.measure import MEASURED_STEPS, Measured
from partitioner.runtime.pipe import Pipe
from partitioner.runtime.program import Mode, Program, Request, Slice
from partitioner.runtime.rows import RowSampler, exchange, hand_over, rows_in, whole
from partitioner.runtime.same import Same
from partitioner.runtime.shards import local


class _Absent:
    """The targets of a call that has none (None may be a target)."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()


class ModuleStore(Store, Protocol):
    """What the module asks of the parameters besides what programs do."""

    def mark_stale(self) -> None: ...

    def held(self) -> list[Tensor]: ...

    def full_state(self) -> dict[str, Any]: ...

    def load_full_state(self, state: Mapping[str, Any]) -> None: ...

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor: ...


_NO_COPY = (
    "a parallelized model is tied to its processes and can be neither copied nor pickled; for its weights write parallel.full_state_dict(), for a "
    "file to go on from parallel.save(folder, optimizer); copy the plain model before auto_parallelize"
)

Lower = Callable[[Request], Program]
Flatten = Callable[[tuple[Any, ...], dict[str, Any], bool, Any], tuple[list[tuple[str, Any]], TreeSpec]]


class ParallelModule(nn.Module):
    """Trains `module` with the mathematics of one process. Made by `auto_parallelize`.

    store: the placed parameters (it has taken over module's). lower: makes a program for new shapes or another mode. flatten: turns a call
    into leaves with paths. expected: the leaves the model was planned with, which later calls must equal but for shapes; without it the
    first call of each mode sets them. batch: how the plan cuts each leaf. rank, ranks and group are those of all ranks; with a pipeline, `pipe`
    says which of them are this stage's.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ModuleStore,
        lower: Lower,
        plan: Any,
        *,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        flatten: Flatten,
        expected: Mapping[str, Any] | None = None,
        batch: Iterable[Slice] = (),
        pipe: Pipe | None = None,
    ) -> None:
        super().__init__()
        own = self.__dict__
        own["_user"] = module  # past nn.Module.__setattr__, which would make it a child
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[shared] = module.__dict__[shared]
        own["training"] = module.training
        own["plan"] = plan
        own["_store"], own["_lower"], own["_flatten"] = store, lower, flatten
        own["_rank"], own["_ranks"], own["_group"], own["_device"] = rank, ranks, group, device
        own["_peers"] = Ranks(rank, ranks, group, device)
        own["_same"] = Same(self._peers)
        own["_pipe"] = pipe
        own["_steps"] = 0
        own["_expected"] = {}
        own["_executors"] = {}
        own["_batch"] = {cut.name: cut for cut in batch if cut.dim is not None}
        own["_planned_rows"] = rows_in(expected, self._batch) if expected is not None and self._batch else None
        if expected is not None:
            own["_expected"]["step"] = Expected.of(expected)
            own["_expected"]["forward"] = Expected.of(_without_targets(expected))
        own["measured"] = Measured(self._resident, self._owns)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            user = self.__dict__.get("_user")
            if user is None:
                raise
            return getattr(user, name)

    # Training

    def train_step(self, *args: Any, targets: Any = ABSENT, **kwargs: Any) -> Tensor:
        """Forward and backward of the global batch, given whole on every rank; returns its loss, gradients are in `.grad`.

        Raises InputError for inputs of another structure or dtype than planned, PeerError where a peer is gone, and, on every rank together,
        NonFiniteError for a loss that is not finite: the parameters are unchanged then, and `optimizer.zero_grad()` and the next batch may follow.

        With an asynchronous schedule loss and gradients are those of the batch before, in the first step NaN and none; `drain` gives the last ones.
        """
        leaves = self._leaves("step", args, kwargs, targets)
        return self._step(self._executor("step", leaves, grad=True), leaves, own_rows=False)

    def train_step_local(self, *args: Any, targets: Any = ABSENT, **kwargs: Any) -> Tensor:
        """`train_step` on the global batch that the ranks' rows make, one rank's after the other's, given only this rank's.

        Ranks may bring different numbers of rows, none even: rows move to where an even share of them is computed, or nowhere if each brings that
        (see `sampler`). Inputs without a batch dim are passed whole, the same on every rank. Raises what train_step does, on every rank.
        """
        try:
            leaves = self._on_device(self._checked("step", args, kwargs, targets))
            rows = rows_in(leaves, self._batch)
        except Exception:
            with suppress(RankError):  # the others are about to count
                exchange(None, self._peers, self._device)
            raise
        counts = exchange(rows, self._peers, self._device)
        if not sum(counts):
            raise InputError("no rank has brought a row, so there is nothing to compute; pass some rows")
        executor = self._executor("step", whole(leaves, self._batch, sum(counts)), grad=True, alike=False)
        # Fewer rows than ranks: all compute all of them. Stages: the rows of a share are needed on all of them.
        uncut = executor.program.total is None or self._pipe is not None
        given = {
            path: hand_over(leaf, self._batch[path], counts, uncut, self._peers) if path in self._batch and isinstance(leaf, Tensor) else leaf
            for path, leaf in leaves.items()
        }
        return self._step(executor, given, own_rows=self._pipe is None)

    def sampler(self, dataset: Any, *, batch_rows: int | None = None, shuffle: bool = False, seed: int = 0) -> RowSampler:
        """Deals the rows of a dataset to the ranks: `DataLoader(dataset, batch_sampler=parallel.sampler(dataset))` feeds train_step_local.

        batch_rows: rows of the global batch; None: those it was planned with. All ranks see as many batches, each row comes once an epoch; with
        shuffle in another order each epoch, if `set_epoch(epoch)` is called. Raises InputError for a dataset without a length.
        """
        if batch_rows is None:
            batch_rows = self._planned_rows
        if batch_rows is None:
            raise InputError("the plan cuts no input by rows, so the size of a batch is not known; write sampler(dataset, batch_rows=…)")
        return RowSampler.of(dataset, batch_rows, self._rank, self._ranks, shuffle, seed)

    def drain(self) -> Tensor | None:
        """Of an asynchronous schedule: run the backwards that are owed to the last batch, and so empty the pipeline. Collective.

        Its gradients are in `.grad` afterwards and its loss is returned, for a last optimizer.step. None, and nothing is done, where no batch is
        under way: at the start, after another drain, and always with a synchronous plan. Raises what train_step does.
        """
        late = self._late
        if late is None:
            return None
        self._same.settle()
        with self.measured.watch():
            return late.drain(self._steps)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for the global batch, whole on every rank; `loss.backward()` on it fills `.grad`.

        With pipeline stages the output is for looking at: `backward()` on it raises PartitionerError.
        """
        self._empty("calling the model")
        leaves = self._leaves("forward", args, kwargs, ABSENT)
        grad = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        executor = self._executor("forward", leaves, grad)
        run = executor.forward(leaves)
        return tree_unflatten(refuse(run) if grad and self._pipe is not None else attach(run), executor.program.out_spec)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before, the same on every rank."""
        with self.measured.watch():
            norm: Tensor = self._store.clip_grad_norm_(max_norm, norm_type)
        return norm

    def train(self, mode: bool = True) -> "ParallelModule":
        """Training or evaluation, each with a program of its own, made at first use."""
        self._user.train(mode)
        self.__dict__["training"] = mode
        return self

    # State

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict()` of the unsharded model, copies of whole tensors on every rank, aliases of tied parameters included. Collective.

        With an asynchronous schedule the parameters as they are: the gradients under way are not in them (`drain` first, to go on elsewhere).
        """
        return self._store.full_state()  # type: ignore[no-any-return]

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `full_state_dict`, from the same whole tensors on every rank. Raises InputError for the state of another model."""
        self._empty("load_full_state_dict")
        self._store.load_full_state(state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's own: parameters as they are placed, sharded ones as DTensors."""
        return self._user.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Inverse of `state_dict` on the same placement; `load_full_state_dict` takes whole tensors."""
        self._empty("load_state_dict")
        if assign:
            raise PartitionerError("load_state_dict(assign=True) would replace the placed parameters; leave assign out")
        return self._user.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ParallelModule":
        raise PartitionerError(
            "the parameters are placed as planned and cannot be moved or cast afterwards; "
            "call .to(), .half() and the like on the model before auto_parallelize"
        )

    def save(self, path: str | os.PathLike[str], optimizer: Optimizer | None = None) -> Path:
        """Write a new version into the folder `path`: model, optimizer, random numbers, step and plan; returns the version's folder. Collective.

        Each rank writes its share, a replica is written once. The version appears whole, by one rename; the one before it is kept, older ones are
        removed. Raises CheckpointError on every rank together; then the versions that were there are as they were.
        """
        self._empty("save")
        plan = self.plan.to_json() if hasattr(self.plan, "to_json") else ""
        return save(path, self._user, optimizer, self._steps, plan, self._peers, self._device)

    def load(self, path: str | os.PathLike[str], optimizer: Optimizer | None = None) -> int:
        """Go on from what `save` wrote, on whatever number of ranks and placement; returns the number of train steps done. Collective.

        path: the folder (its newest version), one version in it, a file of torch.save(model.state_dict(), …), or safetensors: a file, or a folder
        as Hugging Face writes it. The last two hold weights alone, and the optimizer is left out. Each rank reads its own slices.
        Raises CheckpointError on every rank together for what is damaged, unfinished, or of another model or optimizer, before anything changes.
        """
        self._empty("load")
        steps = load(path, self._user, optimizer, self._peers, self._device)
        self._store.mark_stale()
        self.__dict__["_steps"] = steps
        return steps

    def __deepcopy__(self, memo: Any) -> Any:
        raise PartitionerError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PartitionerError(_NO_COPY)

    # Inside

    @property
    def _late(self) -> AsynchronousExecutor | None:
        """The executor that has a batch under way."""
        every = (executor for executor in self._executors.values() if isinstance(executor, AsynchronousExecutor))
        return next((executor for executor in every if executor.under_way), None)

    def _empty(self, what: str) -> None:
        if self._late is not None:
            raise PartitionerError(
                f"{what} needs an empty pipeline, but backwards of the last batch are under way, as its asynchronous schedule has it; call "
                "parallel.drain(), and optimizer.step() on the gradients that it leaves, first"
            )

    def _leaves(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> dict[str, Any]:
        """path -> leaf, checked, tensors on this rank's device."""
        try:
            leaves = self._checked(mode, args, kwargs, targets)
        except Exception as error:  # the others are about to compare their inputs with this rank's
            if self._late is None:
                with suppress(RankError):
                    self._same.ask(f"refused with {type(error).__name__}: {error}", {})
                    self._same.settle()
            raise
        return self._on_device(leaves)

    def _on_device(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {path: leaf.to(self._device).contiguous() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}

    def _step(self, executor: Executor, leaves: Mapping[str, Any], own_rows: bool) -> Tensor:
        with self.measured.step(leaf for leaf in leaves.values() if isinstance(leaf, Tensor)):
            number = self._steps
            self.__dict__["_steps"] = number + 1  # a step whose loss is not finite counts too: the next one takes the next batch
            return executor.step(leaves, number, self.measured.recording, own_rows)

    def _checked(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> dict[str, Any]:
        pairs, _ = self._flatten(args, kwargs, targets is not ABSENT, None if targets is ABSENT else targets)
        leaves = dict(pairs)
        if mode not in self._expected:
            self._expected[mode] = Expected.of(leaves)
        self._expected[mode].check(leaves)
        return leaves

    def _executor(self, mode: Mode, leaves: Mapping[str, Any], grad: bool, alike: bool = True) -> Executor:
        """alike: every rank should hold the same values."""
        # Part of the key is every submodule's training flag: one that the user froze with .eval() runs as evaluation.
        flags = tuple(module.training for module in self._user.modules())
        key = (mode, flags, grad, tuple(_shape_key(path, leaf) for path, leaf in leaves.items()))
        executor: Executor | None = self._executors.get(key)
        late = self._late
        self._same.settle()
        if late is not None and executor is not late:
            raise InputError(
                "this batch has other shapes, or the model another mode, than the batch whose backwards are under way; call parallel.drain() and "
                "optimizer.step() first"
            )
        self._same.ask(key, leaves if alike else {})
        if late is None:  # else every stage would wait for the last one here
            self._same.settle()
        if executor is None:
            program = self._lower(Request(mode=mode, training=self.training, leaves=leaves, grad=grad))
            stage, dp = (0, self._peers) if self._pipe is None else (self._pipe.stage, self._pipe.dp)
            if (program.rank, program.ranks, program.stage, program.mode) != (dp.rank, dp.ranks, stage, mode):
                raise ProgramError(
                    f"rank {self._rank} of {self._ranks} asked for a {mode} program and got one for {program.place}, {program.mode}; "
                    "lower the plan for this rank"
                )
            kind = AsynchronousExecutor if program.asynchronous else Executor
            self.measured.steps = MEASURED_STEPS + program.asynchronous  # the first gives no gradient
            executor = self._executors[key] = kind(program, self._user, self._store, dp.group, self._device, self._pipe)
        # Whatever the user did to parameters since the last call (an averaged copy swapped in through .data leaves no trace) must be seen.
        self._store.mark_stale()
        return executor

    def _resident(self) -> Iterable[Tensor]:
        yield from self._store.held()
        yield from self._user.buffers()
        for executor in self._executors.values():
            yield from executor.program.constants.values()

    def _owns(self, optimizer: Optimizer) -> bool:
        # By storage: during a step the optimizer holds stand-ins that share the parameters' memory.
        mine = {local(parameter).untyped_storage()._cdata for parameter in self._user.parameters()}
        return any(local(parameter).untyped_storage()._cdata in mine for group in optimizer.param_groups for parameter in group["params"])


def _without_targets(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {path: leaf for path, leaf in leaves.items() if not path.startswith("targets")}


def _shape_key(path: str, leaf: Any) -> tuple[Any, ...]:
    return (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (path, type(leaf), repr(leaf))
