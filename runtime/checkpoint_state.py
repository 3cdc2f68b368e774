"""What a checkpoint holds of a model, an optimizer and the random numbers, by name, and how it is put back.

An optimizer's state is torch's own (`state` and `param_groups` of its state_dict), under the names of the parameters instead of numbers, so that it
goes to any placement: of a cut parameter the optimizer keeps this rank's rows, which are saved as the shard that they are. What other
stages of a pipeline hold is on `meta` here: neither saved nor filled.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from partitioner.errors import CheckpointError
from partitioner.runtime.checkpoint_manifest import TENSOR, Entry, Group, Number, OptimizerRecord
from partitioner.runtime.shards import local

_NAMED = 3  # names that an error lists
_ORDER = "param_names"  # of an optimizer made from named_parameters; its own, not the checkpoint's

StateOf = dict[str, dict[str, Number]]
"""Parameter -> key of its optimizer state -> the number, or TENSOR."""


@dataclass(frozen=True)
class ModelState:
    """tensors: name -> parameter or buffer as it is placed, each once; aliases: further names of the same; values: what is no tensor."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    values: dict[str, Any]


def model_state(module: nn.Module) -> ModelState:
    """The entries of `module.state_dict()`; the tensors are the module's own."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            values[name] = plain(value, f"the entry {name!r} of state_dict()")
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value
    return ModelState(tensors, aliases, values)


def match_model(state: ModelState, entries: Mapping[str, Entry], values: Mapping[str, Any], where: object) -> dict[str, Tensor]:
    """Entry -> tensor of the model to fill. Raises CheckpointError where names, shapes or kinds of numbers are not the model's."""
    names: dict[str, list[str]] = {name: [name] for name in state.tensors}
    for other, name in state.aliases.items():
        names[name].append(other)
    saved = {key.removeprefix("model/") for key in entries if key.startswith("model/")}
    found = {name: next((alias for alias in aliases if alias in saved), None) for name, aliases in names.items()}
    missing = [name for name, alias in found.items() if alias is None] + [name for name in state.values if name not in values]
    known = {*state.tensors, *state.aliases, *state.values}
    unknown = [name for name in [*sorted(saved), *values] if name not in known]
    if missing or unknown:
        lacks, strange = _some(missing, "of the model are missing in it"), _some(unknown, "in it are not the model's")
        raise CheckpointError(f"{where} is of another model: {lacks}, {strange}; build the model that was saved")
    targets = {}
    for name, alias in found.items():
        assert alias is not None
        entry, tensor = entries[f"model/{alias}"], state.tensors[name]
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{where} is of another model: {name!r} has shape {list(entry.shape)} in it and {list(tensor.shape)} in the model; "
                "build the model that was saved"
            )
        if not torch.can_cast(entry.torch_dtype, tensor.dtype):
            raise CheckpointError(f"{where} holds {name!r} as {entry.dtype}, which cannot become the model's {tensor.dtype}")
        targets[f"model/{alias}"] = tensor
    return targets


def put_values(module: nn.Module, state: ModelState, values: Mapping[str, Any]) -> None:
    """Hand what get_extra_state returned, tensor or not, back to set_extra_state."""
    extra = {name: tensor for name, tensor in state.tensors.items() if name.endswith("_extra_state")}
    if state.values or extra:
        module.load_state_dict({**extra, **{name: values[name] for name in state.values}}, strict=False)


def names_of(module: nn.Module) -> dict[int, str]:
    """id of a parameter -> its name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def optimizer_state(optimizer: Optimizer, module: nn.Module) -> tuple[OptimizerRecord, StateOf, dict[str, Tensor]]:
    """The optimizer by parameter names without state, the state of every parameter that is held here, and its tensors, rows of cut ones as shards."""
    names = names_of(module)
    tensors: dict[str, Tensor] = {}
    state: StateOf = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        name = _name(names, parameter, optimizer)
        if parameter.is_meta:
            continue
        state[name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            where = f"the optimizer's state {key!r} of {name!r}"
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = _as_placed(value, parameter, where)
                state[name][key] = TENSOR
            elif value is None or isinstance(value, (bool, int, float)):
                state[name][key] = value
            else:
                raise CheckpointError(
                    f"{where} is a {type(value).__name__}, neither tensor nor number, and cannot be saved; save without the optimizer"
                )
    groups = tuple(
        Group(
            names=tuple(names[id(parameter)] for parameter in group["params"]),
            options={
                key: plain(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, f"the optimizer's option {key!r}")
                for key, value in group.items()
                if key not in ("params", _ORDER)
            },
        )
        for group in optimizer.param_groups
    )
    return OptimizerRecord(kind=kind_of(optimizer), groups=groups, state={}), state, tensors


def joined(states: Iterable[StateOf]) -> StateOf | None:
    """The state that ranks have together; None where two that hold a parameter differ in it."""
    found: StateOf = {}
    for state in states:
        for name, own in state.items():
            if found.setdefault(name, own) != own:
                return None
    return {name: own for name, own in found.items() if own}


def optimizer_targets(
    optimizer: Optimizer, module: nn.Module, record: OptimizerRecord, entries: Mapping[str, Entry], where: object
) -> dict[str, Tensor]:
    """Empty tensors for the saved state, placed as the parameters are. Raises CheckpointError for an optimizer of another class or other groups."""
    if kind_of(optimizer) != record.kind:
        raise CheckpointError(
            f"{where} holds the state of {record.kind}, but the optimizer is {kind_of(optimizer)}; make the optimizer that was saved"
        )
    names = names_of(module)
    groups = [{_name(names, parameter, optimizer) for parameter in group["params"]} for group in optimizer.param_groups]
    if len(groups) != len(record.groups):
        raise CheckpointError(
            f"{where} holds an optimizer of {len(record.groups)} parameter groups, but this one has {len(groups)}; make the groups that were saved"
        )
    for number, (mine, saved) in enumerate(zip(groups, record.groups, strict=True)):
        if mine != set(saved.names):
            missing, unknown = sorted(mine - set(saved.names)), sorted(set(saved.names) - mine)
            raise CheckpointError(
                f"{where} holds an optimizer whose group {number} is of other parameters: {_some(missing, 'of this one are missing in it')}, "
                f"{_some(unknown, 'in it are not in this one')}; make the groups that were saved"
            )
    targets = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        name = names[id(parameter)]
        for key, value in record.state.get(name, {}).items() if not parameter.is_meta else ():
            if value == TENSOR:
                entry = entries[f"optimizer/{key}/{name}"]
                targets[f"optimizer/{key}/{name}"] = _empty(entry, parameter, f"{where}: the optimizer's state {key!r} of {name!r}")
    return targets


def put_optimizer(
    optimizer: Optimizer, module: nn.Module, record: OptimizerRecord, filled: Mapping[str, Tensor], entries: Mapping[str, Entry]
) -> None:
    """Give the optimizer its state and options, through its own load_state_dict."""
    names = names_of(module)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    parameters: list[Tensor] = []
    for group, saved in zip(optimizer.param_groups, record.groups, strict=True):
        options = {key: _like(value, group.get(key)) for key, value in saved.options.items()}
        if _ORDER in group:
            options[_ORDER] = group[_ORDER]
        start = len(parameters)
        parameters += group["params"]
        groups.append({**options, "params": list(range(start, len(parameters)))})
    for number, parameter in enumerate(parameters):
        name = names[id(parameter)]
        if name in record.state and not parameter.is_meta:
            values = {key: local(filled[f"optimizer/{key}/{name}"]) if value == TENSOR else value for key, value in record.state[name].items()}
            state[number] = values
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # It casts state to the parameter's dtype, which a number beside it need not have had (NAdam's product of momenta): the saved bits are put back.
    for number, values in state.items():
        parameter = parameters[number]
        if entries[f"model/{names[id(parameter)]}"].torch_dtype == parameter.dtype:
            for key, value in values.items():
                if isinstance(value, Tensor):
                    placed = optimizer.state[parameter][key]
                    optimizer.state[parameter][key] = placed if placed.dtype == value.dtype else value.to(placed.device)


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The default generators of this rank: the step's seed comes from the CPU's, draws in eager order from the device's."""
    found = {f"random/cpu/{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        found[f"random/cuda/{rank}"] = torch.cuda.get_rng_state(device)
    return found


def random_targets(rank: int, ranks: int, saved_ranks: int, device: torch.device, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Each rank's own generators where as many ranks run as were saved, else those of rank 0."""
    own = rank if ranks == saved_ranks else 0
    return {
        name: torch.empty(entries[name].shape, dtype=torch.uint8)
        for name in (f"random/{kind}/{own}" for kind in ("cpu", device.type))
        if name in entries and len(entries[name].shape) == 1
    }


def put_random(filled: Mapping[str, Tensor], device: torch.device) -> None:
    for name, state in filled.items():
        if name.startswith("random/cpu/"):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def kind_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def plain(value: Any, what: str) -> Any:
    """The value, if JSON keeps it (a tuple becomes a list)."""
    try:
        kept = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        kept = None
    if kept is None and value is not None:
        raise CheckpointError(f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, numbers, texts, lists and dicts")
    return kept


def _like(value: Any, current: Any) -> Any:
    """A saved option in the form that the optimizer uses."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def _name(names: Mapping[int, str], parameter: Tensor, optimizer: Optimizer) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that is not the model's; "
            f"make it from the model's own: torch.optim.{type(optimizer).__name__}(parallel.parameters(), …)"
        )
    return names[id(parameter)]


def _as_placed(value: Tensor, parameter: Tensor, where: str) -> Tensor:
    """State of a cut parameter as the shard that it is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    if value.shape != local(parameter).shape:
        raise CheckpointError(f"{where} has shape {list(value.shape)}, neither one number nor like this rank's rows {list(local(parameter).shape)}")
    return _shard(value, parameter)


def _shard(rows: Tensor, parameter: DTensor) -> Tensor:
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )


def _empty(entry: Entry, parameter: Tensor, where: str) -> Tensor:
    if not entry.shape:  # a step count, which torch keeps on the CPU unless the optimizer wants it elsewhere
        return torch.empty((), dtype=entry.torch_dtype)
    if isinstance(parameter, DTensor):
        if entry.shape != tuple(parameter.shape):
            raise CheckpointError(f"{where} has shape {list(entry.shape)}, neither one number nor like the parameter {list(parameter.shape)}")
        return _shard(torch.empty_like(local(parameter), dtype=entry.torch_dtype), parameter)
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=parameter.device)


def _some(names: Iterable[str], what: str) -> str:
    """`3 names of the model are missing in it ('a', 'b', 'c')`."""
    listed = list(names)
    first = ", ".join(repr(name) for name in listed[:_NAMED])
    return f"{len(listed)} names {what}" + (f" ({first}{', …' if len(listed) > _NAMED else ''})" if listed else "")
