"""What an op's schema tells: its arguments by name, what it writes, its functional twin; and where a node stands in the user's code."""

import functools
import os
import re
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(.*?)", line (\d+), in (\S+)')
_DUNDER = {
    "__ior__": "bitwise_or",
    "__iand__": "bitwise_and",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "__lshift__",
    "__irshift__": "__rshift__",
}
FOREIGN_NAMES: dict[Any, Any] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
    aten.swapdims.default: aten.transpose.int,
    aten.swapaxes.default: aten.transpose.int,
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.moveaxis.int: aten.movedim.int,
    aten.moveaxis.intlist: aten.movedim.intlist,
}
"""Second names of an op, and the one that later passes know."""


def bind(node: fx.Node, args: Any = None, kwargs: Any = None) -> dict[str, Any]:
    """Arguments of an op by name, defaults filled in."""
    given = node.args if args is None else args
    named = node.kwargs if kwargs is None else kwargs
    bound = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if i < len(given) and not argument.kwarg_only:
            bound[argument.name] = given[i]
        else:
            bound[argument.name] = named.get(argument.name, argument.default_value)
    return bound


@functools.cache
def written_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an op changes in place."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The op that returns what `op` writes: `add_` -> `add`, `mv.out` -> `mv`. None where there is none."""
    namespace, name = op._schema.name.split("::")
    out = any(a.kwarg_only for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    base = name if out else _DUNDER.get(name, name[:-1] if name.endswith("_") else "")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base else None
    if packet is None:
        return None
    written = set(written_arguments(op)) if out else set()
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in written]
    overloads = sorted(packet.overloads(), key=lambda o: o != op._overloadname)
    for overload in overloads:
        twin: OpOverload = getattr(packet, overload)
        if not twin._schema.is_mutable and [(a.name, str(a.type)) for a in twin._schema.arguments] == wanted:
            return twin
    return None


@functools.cache
def _innermost_user_frame(trace: str) -> str:
    frames = _FRAME.findall(trace)
    user = [f for f in frames if not f[0].startswith((_TORCH, "<"))] or frames
    return f"{os.path.basename(user[-1][0])}:{user[-1][1]} in {user[-1][2]}" if user else ""


def source_of(node: fx.Node) -> str:
    """`file.py:12 in forward`: the innermost frame of the node that is not torch's own."""
    trace = node.meta.get("stack_trace")
    return _innermost_user_frame(trace) if trace else ""


def module_of(node: fx.Node, prefix: str) -> str:
    """Dotted name of the innermost module in the user's model, which the traced root holds as attribute `prefix`."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"@\d+", "", str(next(reversed(stack.values()))[0]))
    return path[len(prefix) + 1 :] if path.startswith(prefix + ".") else ""
