"""Which model a plan belongs to.

Names, shapes, dtypes, requires_grad and ties of parameters and buffers, and the paths of the input tree. Neither the values, nor input shapes,
nor node names (they differ between versions of torch) take part.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module, in_tree_paths: Iterable[str]) -> str:
    """64 hex digits. `in_tree_paths` are the paths of the input leaves, such as `args[0]` or `kwargs['input_ids']`."""
    about = {"parameters": _described(model.named_parameters(remove_duplicate=False)), "inputs": sorted(in_tree_paths)}
    about["buffers"] = _described(model.named_buffers(remove_duplicate=False))
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _described(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[object]]:
    """One entry per name, sorted; an alias of a shared tensor names the first name (in sorted order) that it goes by."""
    first: dict[int, str] = {}
    entries: list[list[object]] = []
    for name, tensor in sorted(named, key=lambda item: item[0]):
        tie = first.setdefault(id(tensor), name)
        entries.append([name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad, tie])
    return entries


def facts(model: nn.Module) -> dict[str, str]:
    """What takes part in the fingerprint, in words: name of a parameter or buffer -> shape, dtype, what it is and whom it is tied to."""
    words = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, shape, dtype, trained, tie in _described(named):
            words[str(name)] = f"{dtype} {shape}{' with gradient' if trained else ''}{f', tied to {tie}' if tie != name else ''}"
    return words


def described(leaf: Any) -> str:
    """An input leaf in words, the same in every process that is given the same."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, (str, int, float, bool, bytes, complex, type(None))) else type(leaf).__name__
