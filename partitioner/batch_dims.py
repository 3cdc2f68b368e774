"""The `batch_dim` argument: which dim of which input leaf is the batch, as the user may write it."""

from collections.abc import Iterable, Mapping
from typing import Any

from partitioner.errors import BatchError
from partitioner.passes.tree import named_leaves


def batch_dims(given: Any, inputs: Iterable[str]) -> Any:
    """`batch_dim` as "auto", an int, or a dict path -> int | None, over these input leaves. Raises BatchError for anything else."""
    known = list(inputs)
    if given == "auto" or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if not isinstance(given, (tuple, list, Mapping)):
        raise BatchError(f"batch_dim is {given!r}; write an int, a tree of int / None like the inputs, or 'auto'")
    if isinstance(given, (tuple, list)):
        tree: dict[str, Any] = {"args": given}
    else:
        tree = dict(given) if set(given) <= {"args", "kwargs", "targets"} else {"kwargs": given}
    if not isinstance(tree.get("args", ()), (tuple, list)) or not isinstance(tree.get("kwargs", {}), Mapping):
        raise BatchError(f'batch_dim is {given!r}; "args" takes a tuple and "kwargs" a dict, formed like the inputs')
    pairs, _ = named_leaves(tuple(tree.get("args", ())), dict(tree.get("kwargs", {})), tree.get("targets"), "targets" in tree)
    for path, dim in pairs:
        if path not in known:
            raise BatchError(f"batch_dim speaks of {path}, which is no input; the inputs are {', '.join(known)}")
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise BatchError(f"batch_dim says {dim!r} for {path}; write the number of the batch dim, or None where it has none")
    return dict(pairs)
