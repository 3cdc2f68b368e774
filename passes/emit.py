"""Write forward, backward and its halves of a block class as Python: one line per op, shapes and module paths in comments, `del` behind last uses.

The text is the program: the callables are made from it and from nothing else. It is deterministic and holds no data; numbers, dtypes and devices are
literals, and every op is bound once to a name of the file, so that a call costs one look-up.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.errors import CaptureError
from partitioner.passes.block import BlockClass, BlockFunction, Bytes, Footprint, Halves
from partitioner.passes.halves import HalfGraphs
from partitioner.passes.liveness import footprint, schedule
from partitioner.passes.reuse import reuse
from partitioner.passes.split import BackwardGraph, ForwardGraph
from partitioner.passes.unify import is_number

Run = Callable[[list[object]], tuple[Tensor, ...]]
_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.complex64: "c64", torch.complex128: "c128",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
_LITERAL_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_IMPORT = "import torch"
_CUSTOM_IMPORTS = tuple(f"import partitioner.passes.{name}  # registers its ops" for name in ("collectives", "randomness", "recurrent"))
_SYMBOL = {"mul": "*", "add": "+", "sub": "-"}


@dataclass(frozen=True)
class Compiled:
    """The functions of emitted text. Without halves in it, the input half is the whole backward and the weight half is None."""

    forward: Run
    backward: Run | None
    backward_input: Run | None
    backward_weight: Run | None


def emit(cls: BlockClass, forward: ForwardGraph, backward: BackwardGraph | None, name: str, halves: HalfGraphs | None = None) -> BlockFunction:
    """The functions of a class, made from readable source; `name` is a Python identifier. halves: of `backward`, where they are asked for."""
    if not name.isidentifier():
        raise CaptureError(f"{name!r} is no Python name; give the block function a name such as block_0")
    graphs = {"forward": reuse(forward.graph)}
    titles = {"forward": _forward_title(cls, forward)}
    if backward is not None:
        graphs["backward"] = reuse(backward.graph)
        titles["backward"] = _backward_title(cls, backward)
    if halves is not None and halves.weight is not None:
        graphs |= {"backward_input": reuse(halves.input), "backward_weight": reuse(halves.weight)}
        titles |= {"backward_input": _input_title(cls, halves), "backward_weight": _gradients_of(cls, halves.parameters)}
    ops: dict[str, str] = {}
    parts = [_function(f"{name}_{part}", graph, ops, titles[part]) for part, graph in graphs.items()]
    source = _file(ops, parts)
    made = compile_source(source, name)
    footprints = {part: footprint(graph) for part, graph in graphs.items()}
    return BlockFunction(
        name=name,
        source=source,
        forward=made.forward,
        backward=made.backward,
        writes=forward.writes,
        saved=backward.saved if backward is not None else (),
        tangents=backward.tangents if backward is not None else (),
        gradients=backward.gradients if backward is not None else (),
        forward_footprint=footprints["forward"],
        backward_footprint=footprints.get("backward"),
        halves=None if halves is None else _halves(halves, made, footprints),
    )


def _halves(halves: HalfGraphs, made: Compiled, footprints: dict[str, Footprint]) -> Halves:
    assert made.backward_input is not None
    return Halves(
        backward_input=made.backward_input,
        backward_weight=made.backward_weight,
        values=halves.values,
        parameters=halves.parameters,
        handed=halves.handed,
        carried=halves.carried,
        input_footprint=footprints.get("backward_input", footprints["backward"]),
        weight_footprint=footprints.get("backward_weight"),
    )


def compile_source(source: str, name: str) -> Compiled:
    """The callables of emitted text. The text is code: take it from `emit` alone."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    whole = namespace.get(f"{name}_backward")
    return Compiled(namespace[f"{name}_forward"], whole, namespace.get(f"{name}_backward_input", whole), namespace.get(f"{name}_backward_weight"))


def emit_source_file(functions: Iterable[BlockFunction]) -> str:
    """All functions of a model in one file: imports, ops and functions, each once."""
    ops: dict[str, str] = {}
    parts = []
    for function in functions:
        head, *body = function.source.split("\n\n\n")
        for line in head.splitlines():
            if " = torch.ops." in line:
                ops[line.split(" = ")[0]] = line.split(" = ")[1]
        parts += [part.strip("\n") for part in body]
    return _file(ops, parts)


def _file(ops: dict[str, str], parts: list[str]) -> str:
    imports = [*(_CUSTOM_IMPORTS if any(op.startswith("torch.ops.partitioner.") for op in ops.values()) else ()), ""]
    head = [_IMPORT] if len(imports) == 1 else [_IMPORT, "", *imports[:-1]]
    bindings = [f"{name} = {ops[name]}" for name in sorted(ops)]
    return "\n\n\n".join(["\n".join([*head, "", *bindings]), *parts]) + "\n"


def _forward_title(cls: BlockClass, forward: ForwardGraph) -> str:
    own = len(_results(forward.graph)) - forward.writes
    return f"{cls.name}: the writes ({forward.writes})" + (f", then saved values ({own})" if own else "")


def _backward_title(cls: BlockClass, backward: BackwardGraph) -> str:
    names = set(backward.recomputed)
    again = sum(node.name in names and any(isinstance(place, Bytes) for place in node.meta["storages"]) for node in backward.graph.nodes)
    return _gradients_of(cls, backward.gradients) + (f"; {again} ops run again" if again else "")


def _input_title(cls: BlockClass, halves: HalfGraphs) -> str:
    if not halves.values:
        return f"{cls.name}: nothing that another block waits for"
    return _gradients_of(cls, halves.values) + (f", then values for the other half ({halves.carried})" if halves.carried else "")


def _gradients_of(cls: BlockClass, reads: tuple[int, ...]) -> str:
    return f"{cls.name}: the gradients of reads {', '.join(map(str, reads))}"


def _results(graph: fx.Graph) -> list[fx.Node]:
    return list(next(iter(reversed(graph.nodes))).args[0])


class _Names:
    """Python names of nodes, apart from the names of ops and of the file."""

    def __init__(self, graph: fx.Graph, reserved: Iterable[str]) -> None:
        taken = {*reserved, "torch", "arguments", "inf", "nan", "float", "complex", "_"}
        self._names: dict[fx.Node, str] = {}
        for node in graph.nodes:
            name = node.name
            while name in taken:
                name += "_"
            taken.add(name)
            self._names[node] = name

    def __getitem__(self, node: fx.Node) -> str:
        return self._names[node]


def _running(target: Any) -> Any:
    """The op that runs for an op of the graph.

    A view was recorded where fake tensors could be viewed. Some kernels lay their results out otherwise than their fake ones do, and one device's
    otherwise than another's: a reshape is a view wherever it can be, and else a copy.
    """
    return torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target


def _op_name(target: Any) -> str:
    namespace, name = target._schema.name.split("::")
    overload = target._overloadname
    return re.sub(r"\W", "_", f"{namespace}_{name}" + ("" if overload == "default" else f"_{overload}"))


def _op_path(target: Any) -> str:
    namespace, name = target._schema.name.split("::")
    return f"torch.ops.{namespace}.{name}.{target._overloadname}"


def _function(name: str, graph: fx.Graph, ops: dict[str, str], title: str) -> str:
    lines = schedule(graph)
    running = [_running(line.op.target) for line in lines if line.op is not None]
    called = {_op_name(op): _op_path(op) for op in running}
    ops.update(called)
    names = _Names(graph, called)
    text = ["@torch.no_grad()", f"def {name}(arguments):", f"    # {title}"]
    arguments = [node for node in lines[0].bound if node is not None]
    if arguments:
        text.append("    (")
        text += [f"        {names[node]},  # {_about(node)}" for node in arguments]
        text += ["    ) = arguments", "    arguments.clear()"]
    text += _delete([names[n] for n in lines[0].deleted])
    for line, op in zip(lines[1:], running, strict=True):
        assert line.op is not None
        bound = [names[n] if n is not None else "_" for n in line.bound]
        left = ", ".join(bound) + ("," if isinstance(line.op.meta["val"], tuple) and len(bound) == 1 else "")
        given = [_literal(a, names) for a in line.op.args] + [f"{k}={_literal(v, names)}" for k, v in line.op.kwargs.items()]
        about = "  ".join(filter(None, [", ".join(_shape(n) for n in line.bound if n is not None), line.op.meta.get("module") or ""]))
        text.append(f"    {left} = {_op_name(op)}({', '.join(given)})" + (f"  # {about}" if about else ""))
        text += _delete([names[n] for n in line.deleted] + (["_"] if "_" in bound else []))
    results = [names[n] for n in _results(graph)]
    text.append(f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})")
    return "\n".join(text)


def _delete(names: list[str]) -> list[str]:
    return [f"    del {', '.join(names)}"] if names else []


def _about(node: fx.Node) -> str:
    if "val" not in node.meta:
        return "scalar"
    kind = node.meta.get("kind", "saved") if node.op == "placeholder" else "saved"
    return f"{kind} {_shape(node)}"


def _shape(node: fx.Node) -> str:
    val = node.meta["val"]
    return f"[{', '.join(str(s) for s in node.meta['sizes'])}] {_SHORT.get(val.dtype, str(val.dtype).removeprefix('torch.'))}"


def _literal(value: Any, names: _Names) -> str:
    """Python text of an argument. A device loses its index: every rank runs the same text on its own current device."""
    if isinstance(value, fx.Node):
        return _number(value, names) if is_number(value) else names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_literal(item, names) for item in value)}]"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({_literal(value.real, names)}, {_literal(value.imag, names)})"
    if isinstance(value, _LITERAL_TYPES):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value.type}")'
    raise CaptureError(f"an op takes {value!r}, a {type(value).__name__}, which has no literal form; pass numbers, dtypes or tensors to it")


def _number(node: fx.Node, names: _Names) -> str:
    """An integer expression over scalar arguments, such as rows * 10."""
    target: Any = node.target
    parts = []
    for argument in node.args:
        inner = _literal(argument, names)
        parts.append(f"({inner})" if isinstance(argument, fx.Node) and is_number(argument) and target.__name__ == "mul" else inner)
    symbol = _SYMBOL.get(target.__name__)
    if symbol is None:
        raise CaptureError(f"{target.__name__} of a size has no place in a block; sizes are sums and products")
    return f" {symbol} ".join(parts)
