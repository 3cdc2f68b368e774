"""Trees of arguments and outputs: every leaf has a path in the user's own words, dataclasses are containers, what is no tensor lives in the spec.

Paths: `args[0]`, `kwargs['input_ids']`, `targets`, `args[0]['dense'][2]`, `output['logits']`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from partitioner.errors import CaptureError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Baked:
    """An output leaf that is no tensor: it has no leaf of its own, unflattening gives back the value itself."""

    def __init__(self, value: object) -> None:
        self.value = value


pytree.register_pytree_node(
    Baked, lambda baked: ([], baked.value), lambda _, value: value, serialized_type_name="partitioner.passes.tree.Baked"
)


def _register_dataclass(cls: type) -> None:
    """Make a dataclass a container; unlike `torch.export.register_dataclass`, also one with fields that `__init__` does not take."""
    names = [f.name for f in dataclasses.fields(cls)]

    def flatten(value: Any) -> tuple[list[Any], Any]:
        present = [name for name in names if hasattr(value, name)]
        return [getattr(value, name) for name in present], present

    def unflatten(children: Any, present: Any) -> Any:
        value: Any = object.__new__(cls)
        for name, child in zip(present, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        children, present = flatten(value)
        return [(pytree.GetAttrKey(name), child) for name, child in zip(present, children, strict=True)], present

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """One level of a container as (path suffix, child); None for a leaf."""
    if isinstance(tree, (Tensor, *_PLAIN)):
        return None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and type(tree) not in pytree.SUPPORTED_NODES:
        _register_dataclass(type(tree))
    # Not `node is not tree`: torch's tree_flatten leaves a reference cycle with what is_leaf holds, and a batch would live until the next collection.
    root = id(tree)
    children, _ = pytree.tree_flatten(tree, is_leaf=lambda node: id(node) != root)
    if len(children) == 1 and children[0] is tree:
        return None
    if isinstance(tree, Mapping) and len(tree) == len(children):
        suffixes = [f"[{key!r}]" for key in tree]
    elif dataclasses.is_dataclass(tree) or hasattr(tree, "_fields"):
        names = tree._fields if hasattr(tree, "_fields") else [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        suffixes = [f".{name}" for name in names]
    else:
        suffixes = [f"[{i}]" for i in range(len(children))]
    if len(suffixes) != len(children):
        suffixes = [f"[{i}]" for i in range(len(children))]
    return list(zip(suffixes, children, strict=True))


def _walk(path: str, tree: Any, found: list[tuple[str, Any]]) -> None:
    children = _children(tree)
    if children is None:
        found.append((path, tree))
        return
    for suffix, child in children:
        _walk(path + suffix, child, found)


def leaves_of(name: str, tree: Any) -> list[tuple[str, Any]]:
    """All leaves with their paths, in pytree order; the root is called `name`."""
    found: list[tuple[str, Any]] = []
    _walk(name, tree, found)
    return found


def _hides_tensors(value: object, depth: int = 3) -> bool:
    """Whether an object that is no known container holds tensors somewhere inside (a key-value cache does)."""
    if isinstance(value, Tensor):
        return True
    if depth < 0 or isinstance(value, (*_PLAIN, type, torch.nn.Module)):
        return False
    members: list[object] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        members += list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        members += list(value)
    return any(_hides_tensors(member, depth - 1) for member in members)


def named_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any = None, has_targets: bool | None = None
) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Leaves of a call with their paths, and the tree of {"args", "kwargs", "targets"}.

    Keyword arguments are ordered by name, so that the order of a call does not matter. `has_targets` None means: when targets is not None.
    Raises CaptureError for a leaf that hides tensors in an unknown container, or an array that is no tensor.
    """
    tree: dict[str, Any] = {"args": tuple(args), "kwargs": dict(sorted(kwargs.items()))}
    if has_targets or (has_targets is None and targets is not None):
        tree["targets"] = targets
    found: list[tuple[str, Any]] = []
    for key, subtree in tree.items():
        _walk(key, subtree, found)
    for path, leaf in found:
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or leaf.is_nested:
                raise CaptureError(f"{path} is no dense tensor ({leaf.layout}); only dense ones can be cut. Pass it dense, or its parts.")
        elif type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", None):
            raise CaptureError(f"{path} is a numpy array, which cannot be told from a constant. Pass torch.as_tensor(…) instead.")
        elif _hides_tensors(leaf):
            raise CaptureError(
                f"{path} is a {type(leaf).__qualname__} that holds tensors, but not a container that torch knows, so they cannot be cut or moved. "
                "Pass a dict, tuple or dataclass, or register it with torch.utils._pytree.register_pytree_node."
            )
    return found, pytree.tree_structure(tree)


def outputs_of(output: Any) -> tuple[list[tuple[str, Tensor]], TreeSpec]:
    """Tensor leaves of a model's output with their paths, and a spec that rebuilds the output from them alone.

    Leaves that are no tensors are baked into the spec. An object that hides tensors (a cache) is dropped: None stands in its place.
    """
    found = leaves_of("output", output)

    def bake(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf
        return Baked(None if _hides_tensors(leaf) else leaf)

    spec = pytree.tree_structure(pytree.tree_map(bake, output))
    return [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor)], spec


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor leaf mapped."""
    leaves_of("", tree)  # registers the dataclasses inside
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)
