"""Who holds which part of a parameter, when it is whole, and how its gradient reaches `.grad`.

    shard   storage between steps     parameter and .grad               gradients                        whole
    none    whole                     plain                             all-reduced                      always
    zero1   whole                     DTensor Shard(0), a slice of it   whole, reduce-scattered once     after `refresh`
    zero2   whole                     DTensor Shard(0), a slice of it   reduce-scattered every `reduce`  after `refresh`
    zero3   this rank's piece         DTensor Shard(0), the piece       reduce-scattered every `reduce`  between `gather` and `free`

The mechanisms are elsewhere: layout in shards.py, buffers in units.py, gradients in reductions.py, the optimizer's step in optimizers.py. What all of
them allocate is told beforehand, to the byte, by unit_bytes.py; change them together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, debug

from partitioner.errors import InputError, ProgramError
from partitioner.runtime.clip import clip, norm_dtype, total_norm
from partitioner.runtime.optimizers import register, retire
from partitioner.runtime.pipe import Pipe
from partitioner.runtime.program import Unit
from partitioner.runtime.reductions import Pending, Reducer
from partitioner.runtime.shards import Layout, Shapes, lay_out, local
from partitioner.runtime.units import UnitBuffers, join


def shapes_of(module: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
    """Shape, dtype and requires_grad of every parameter under each of its names."""
    return {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


class UnitStore:
    """Takes over the parameters of `module`, in place: afterwards they are placed over `group` as their units say.

    Names, ties (one Parameter object at all its places), requires_grad and attributes set on a parameter are kept. Parameters of no unit, 0-dim
    and empty ones stay plain and replicated, as do frozen ones of zero1 and zero2 units. The values must be the same on every rank before.
    Parameters on `meta` become zeros. `device` is where storage is made; None: where each parameter is. `planned_optimizer` may be set to the
    name that memory was planned for. With a `pipe` the units are those of all stages: what this stage does not hold stays on `meta`, without
    storage and gradient, and belongs to the first of the unit's stages.

    Every method that communicates must be called by all ranks, in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        *,
        ranks: int,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device | None = None,
        axis: str = "dp",
        pipe: Pipe | None = None,
    ) -> None:
        if ranks > 1 and (group is None or group.size() != ranks):
            raise ProgramError(
                f"{ranks} ranks need a process group of that size, not {None if group is None else group.size()}; make one with launch.join"
            )
        self.module = module
        self.ranks = ranks
        self.rank = rank
        self.group = group if ranks > 1 else None
        self.planned_optimizer: str | None = None
        self.pipe = pipe
        self._all_units = tuple(units)
        self.units: dict[int, Unit] = {unit.number: unit for unit in units if pipe is None or pipe.stage in unit.stages}
        shapes = shapes_of(module)
        self._layouts: dict[int, Layout] = {unit.number: lay_out(unit, shapes, ranks) for unit in units}
        self._buffers: dict[int, UnitBuffers] = {}
        self._unit_of: dict[str, int] = {}
        self._canonical: dict[str, str] = {}  # every name -> the name its unit knows it under
        self._parameters: dict[str, nn.Parameter] = {}  # every name -> parameter
        self._mesh: DeviceMesh | None = None
        self._axis = axis
        self._assign()
        self._take_over(device)
        self._scattering: list[Pending] = []
        self._reducers: dict[int, Reducer] = {}  # batch -> its gradients; batches follow each other while backwards of one are owed

    # Whole parameters

    def whole(self, name: str) -> Tensor:
        """The whole parameter, detached, for a block to read. Awaits a gather or refresh under way; ProgramError where it is not there."""
        name = self._known(name)
        number = self._unit_of.get(name)
        if number in self._buffers and name in self._buffers[number].pieces:
            return self._buffers[number].whole(name)
        return self._parameters[name].detach()

    def refresh(self, unit: Unit) -> None:
        """Issue the all-gather of what `optimizer.step` changed in a zero1 or zero2 unit; no-op where nothing is stale."""
        if unit.number in self._buffers:
            self._buffers[unit.number].refresh()

    def gather(self, unit: Unit) -> None:
        """Issue the all-gather of a zero3 unit; no-op where its parameters are there."""
        if unit.number in self._buffers:
            self._buffers[unit.number].gather()

    def free(self, unit: Unit) -> None:
        """Drop the gathered parameters of a zero3 unit."""
        if unit.number in self._buffers:
            self._buffers[unit.number].free()

    def mark_stale(self) -> None:
        """The shards changed: zero1 and zero2 units need a refresh before they are read. Called after every optimizer step."""
        for buffers in self._buffers.values():
            buffers.stale = buffers.persists

    def holds(self, name: str) -> bool:
        """Whether this stage holds a parameter."""
        return self.pipe is None or self._known(name) not in self._absent

    def home(self, name: str) -> int:
        """The stage that answers for a parameter, where several hold it."""
        return self._home[self._known(name)]

    def held(self) -> list[Tensor]:
        """Tensors whose storages are all that the store holds now of parameters, those of no unit included: what a memory tracker starts from."""
        tensors = [local(parameter.detach()) for name, parameter in self._unique().items() if self.holds(name)]
        for buffers in self._buffers.values():
            tensors += [*buffers.pieces.values(), *buffers.wholes.values()]
        return tensors

    # Gradients

    def _gradients(self, batch: int) -> Reducer:
        if batch not in self._reducers:
            self._reducers[batch] = Reducer(self._layouts, self.rank, self.group, self._scattering)
        return self._reducers[batch]

    def accumulate(self, name: str, gradient: Tensor, batch: int = 0) -> None:
        """Add a micro-batch's whole gradient. The first is kept, so it must own its storage; it is given up by the caller.

        batch: tells gradients of several batches apart, here and below.
        """
        name = self._known(name)
        if name not in self._unit_of:
            raise ProgramError(f"a gradient arrived for {name!r}, which is in no unit; the program belongs to another model")
        self._gradients(batch).accumulate(name, gradient)

    def reduce(self, unit: Unit, last: bool, batch: int = 0) -> None:
        """Issue the sum over the ranks of what the unit has accumulated. Units that reduce once a step (none, zero1) wait for `last`."""
        if last or unit.shard in ("zero2", "zero3"):
            self._gradients(batch).reduce(unit.number)

    def tie(self, unit: Unit, batch: int = 0) -> None:
        """Issue the sum of a unit's reduced gradient over the stages that hold it."""
        if self.pipe is None:
            raise ProgramError(f"TIE unit {unit.number} speaks to other stages, but this program runs without a pipeline")
        self._gradients(batch).tie(unit.number, self.pipe.tie(unit.stages), self.pipe.world.device)

    def finish(self, batch: int = 0) -> None:
        """Await all reductions and add the results to `.grad`, which stays None where none came."""
        reducer = self._reducers.pop(batch, None)
        for name, gradient in {} if reducer is None else reducer.finish().items():
            parameter = self._parameters[name]
            if isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = _wrap(gradient, parameter._spec)
                else:
                    local(parameter.grad).add_(gradient)
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm, taken over all parameters and ranks, is at most max_norm; returns the norm before, 0-dim."""
        shards: list[Tensor] = []
        wholes: list[Tensor] = []
        for parameter in self._unique().values():
            if parameter.grad is not None:
                (shards if isinstance(parameter.grad, DTensor) else wholes).append(local(parameter.grad))
        if self.pipe is None:
            device = next((gradient.device for gradient in shards + wholes), torch.device("cpu"))
            like = torch.zeros((), dtype=norm_dtype(shards + wholes), device=device)
            norm = total_norm(shards, wholes, norm_type, self.group if shards else None, like)
        else:
            norm = self._norm_over_stages(self.pipe, norm_type)
        clip(shards + wholes, max_norm, norm)
        return norm

    def _norm_over_stages(self, pipe: Pipe, norm_type: float) -> Tensor:
        """Each gradient counts once: at its home stage, and where all ranks of that hold it whole, on the first of them."""
        counted = []
        for name, parameter in self._unique().items():
            if parameter.grad is not None and self.home(name) == pipe.stage and (isinstance(parameter.grad, DTensor) or pipe.dp.rank == 0):
                counted.append(local(parameter.grad))
        dtypes = [parameter.dtype for parameter in self._unique().values() if parameter.requires_grad]
        like = torch.zeros((), dtype=norm_dtype([torch.empty(0, dtype=dtype, device="meta") for dtype in dtypes]), device=pipe.world.device)
        return total_norm(counted, [], norm_type, pipe.world.group, like)

    # State

    @torch.no_grad()
    def full_state(self) -> dict[str, Any]:
        """Copies of all parameters, whole, and of the buffers, on every rank, under the keys of `module.state_dict()`; ties share a tensor."""
        done: dict[int, Any] = {}
        result: dict[str, Any] = {}
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for key, value in self.module.state_dict(keep_vars=True).items():
            if id(value) not in done:
                if id(value) in names:
                    done[id(value)] = self._whole_copy(names[id(value)])
                else:
                    done[id(value)] = value.detach().clone() if isinstance(value, Tensor) else value
            result[key] = done[id(value)]
        return result

    @torch.no_grad()
    def load_full_state(self, state: Mapping[str, Any]) -> None:
        """Put whole tensors in place, the same on every rank. InputError, before anything changes, where keys or shapes are not the model's."""
        expected = self.module.state_dict(keep_vars=True)
        missing, unknown = [key for key in expected if key not in state], [key for key in state if key not in expected]
        if missing or unknown:
            raise InputError(
                f"the state is of another model: {len(missing)} keys are missing{_first(missing)}, {len(unknown)} are unknown{_first(unknown)}; "
                "give what full_state_dict() of the same model returned"
            )
        for key, value in expected.items():
            if isinstance(value, Tensor) and tuple(state[key].shape) != tuple(value.shape):
                raise InputError(
                    f"{key!r} has shape {list(state[key].shape)} in the state and {list(value.shape)} in the model; it is of another model"
                )
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        rest = {}
        for key, value in expected.items():
            if id(value) in names:
                self._put(names[id(value)], state[key])
            else:
                rest[key] = state[key]
        self.module.load_state_dict(rest, strict=False)
        for buffers in self._buffers.values():
            buffers.stale = False

    # How it is made

    def _assign(self) -> None:
        """Which unit each parameter belongs to, under which name, and at which stage it is at home."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        known: dict[int, str] = {}
        self._absent: set[str] = set()
        self._home: dict[str, int] = {}
        for unit in self._all_units:
            for name in unit.parameters:
                if id(named[name]) in known:
                    raise ProgramError(
                        f"parameter {name!r} of unit {unit.number} is already in a unit as {known[id(named[name])]!r}; it may be in one only"
                    )
                known[id(named[name])] = name
                self._home[name] = unit.stages[0]
                if unit.number in self.units:
                    self._unit_of[name] = unit.number
                else:
                    self._absent.add(name)
        for name, parameter in named.items():
            self._canonical[name] = known.setdefault(id(parameter), name)
            self._home.setdefault(self._canonical[name], 0)

    @torch.no_grad()
    def _take_over(self, device: torch.device | None) -> None:
        """Place parameters one by one, each given up as it is replaced, so that no more than a unit is held twice."""
        places: dict[str, list[tuple[nn.Module, str, str]]] = {}
        for prefix, owner in self.module.named_modules(remove_duplicate=False):
            for key in owner._parameters:
                name = f"{prefix}.{key}" if prefix else key
                if name in self._canonical:
                    places.setdefault(self._canonical[name], []).append((owner, key, name))
        for name, spots in places.items():
            owner, key, _ = spots[0]
            former = owner._parameters[key]
            assert former is not None
            parameter = self._place(name, former, device)
            for owner, key, alias in spots:
                owner._parameters[key] = parameter
                self._parameters[alias] = parameter
            register(parameter, name, self)
            if parameter is not former:
                retire(former, name)
            del former

    def _place(self, name: str, former: nn.Parameter, device: torch.device | None) -> nn.Parameter:
        """The parameter in its new place; a plain one that needs no move stays the same object."""
        if name in self._absent:
            return _like(former, nn.Parameter(torch.empty_like(former, device="meta"), requires_grad=former.requires_grad))
        where = device or (torch.device("cpu") if former.is_meta else former.device)
        number = self._unit_of.get(name)
        layout = None if number is None else self._layouts[number]
        if layout is None or any(piece.name == name for piece in layout.plain):
            if former.device == where:
                return former
            moved = torch.zeros_like(former, device=where) if former.is_meta else former.detach().to(where)
            return _like(former, nn.Parameter(moved, requires_grad=former.requires_grad))
        assert number is not None and self.group is not None
        if number not in self._buffers:
            self._buffers[number] = UnitBuffers(layout, self.rank, where, self.group)
        buffers = self._buffers[number]
        if not former.is_meta:
            buffers.put(name, former.detach())
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, where.type, mesh_dim_names=(self._axis,))
            _forget_equal_meshes()
        shape = former.shape
        stride = torch.empty(shape, device="meta").stride()
        shard = DTensor.from_local(buffers.local(name), self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return _like(former, nn.Parameter(shard, requires_grad=former.requires_grad))

    def _known(self, name: str) -> str:
        if name not in self._canonical:
            raise ProgramError(f"the program names parameter {name!r}, which the model does not have; it belongs to another model")
        return self._canonical[name]

    def _unique(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if self._canonical[name] == name}

    def _whole_copy(self, name: str) -> Tensor:
        """The whole parameter, from whichever stage holds it. Collective."""
        if self.pipe is None:
            return self._copy(name)
        parameter, home = self._parameters[name], self.home(name)
        if self.pipe.stage == home:
            value = self._copy(name)
            self.pipe.share([value.contiguous()], home)
            return value
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.pipe.world.device)
        self.pipe.share([value], home)
        return value

    def _copy(self, name: str) -> Tensor:
        name = self._known(name)
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return parameter.detach().clone()
        buffers = self._buffers[self._unit_of[name]]
        if buffers.persists:
            buffers.refresh()
            return buffers.whole(name).clone()
        assert self.group is not None
        return join(buffers.layout.pieces[name], buffers.pieces[name], self.ranks, self.group)

    def _put(self, name: str, value: Tensor) -> None:
        name = self._known(name)
        parameter = self._parameters[name]
        if name in self._absent:
            return
        if isinstance(parameter, DTensor):
            self._buffers[self._unit_of[name]].put(name, value.to(local(parameter).device))
        else:
            parameter.copy_(value)


def _like(former: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """Carry over what users hang on a parameter (`_no_weight_decay` and the like)."""
    parameter.__dict__.update(former.__dict__)
    if former.grad is not None:
        raise InputError("a parameter already has a gradient; call model.zero_grad() before auto_parallelize")
    return parameter


def _forget_equal_meshes() -> None:
    """torch remembers what an op makes of a DTensor, its mesh included, and takes all meshes of the same ranks for one, be their groups gone."""
    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget is not None:
        forget()


def _wrap(local: Tensor, spec: Any) -> DTensor:
    """A DTensor around rows at hand: what DTensor.from_local makes, without its checks and its autograd node."""
    make: Any = DTensor
    wrapped: DTensor = make(local, spec, requires_grad=False)
    return wrapped


def _first(keys: Sequence[str]) -> str:
    return f" (first {keys[0]!r})" if keys else ""


__all__ = ["Shapes", "UnitStore", "shapes_of"]
