"""The captured forward: a functional ATen graph whose every input and output says what it is.

Requirements on `Graph.module.graph` (checked by `Graph.check`):
  - node ops are placeholder, call_function and one output node whose single argument is a flat list;
  - call_function targets are OpOverloads without a mutable schema, or operator.getitem of a multi-output op,
    or integer arithmetic (operator.add, sub, mul) over scalar placeholders;
  - every tensor node has meta["val"] (a FakeTensor, or a tuple of them for multi-output ops);
  - every call_function may have meta["module"] (dotted name of the innermost user module, "" for the root),
    meta["source"] ("file.py:12 in forward") for errors and comments.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import TreeSpec

from partitioner.errors import CaptureError

InputKind = Literal["parameter", "buffer", "constant", "input", "prologue", "total", "scalar"]
OutputKind = Literal["loss", "output", "buffer", "prologue", "total"]


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs the graph. Its code is only written when it is first called; for most graphs it never is."""
    return _LazyGraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True)
class Input:
    """What one placeholder is. `name` is the user's own: a dotted parameter name, or a path such as `kwargs['input_ids']`.

    kind "scalar" is an integer or float that each rank and micro-batch fills in: rows, start, key_local, key_shared, share, part.
    kind "prologue" is a value that the prologue graph computed over the whole batch, "total" the sum over micro-batches of a value of the main graph.
    """

    kind: InputKind
    name: str
    requires_grad: bool = False


@dataclass(frozen=True)
class Output:
    """What one output is: the loss, a leaf of the user's output (by path), the new value of a buffer (by dotted name), what
    the prologue computes, or what the epilogue reads in total."""

    kind: OutputKind
    name: str = ""


@dataclass(frozen=True)
class Graph:
    """A functional forward graph with named inputs and outputs.

    `inputs[i]` describes the i-th placeholder, `outputs[i]` the i-th entry of the output list.
    `ties` maps every alias of a shared parameter or buffer to the name it is listed under.
    `in_spec` is the tree of {"args", "kwargs", "targets"} and `literals` its leaves that are no tensors (path -> value, guarded);
    `out_spec` is the tree of the user's output (None in loss mode). `constants` holds the tensors of kind "constant".
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    ties: dict[str, str] = field(default_factory=dict)
    in_spec: TreeSpec | None = None
    out_spec: TreeSpec | None = None
    literals: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    training: bool = True

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        output = next(iter(reversed(self.module.graph.nodes)))
        return list(output.args[0])

    def with_module(self, module: fx.GraphModule, **changes: Any) -> "Graph":
        return replace(self, module=module, **changes)

    def check(self) -> "Graph":
        """Raise CaptureError where the requirements above do not hold; return self."""
        graph = self.module.graph
        graph.lint()
        if len(self.placeholders) != len(self.inputs):
            raise CaptureError(f"the graph has {len(self.placeholders)} placeholders but {len(self.inputs)} are described")
        if len(self.results) != len(self.outputs):
            raise CaptureError(f"the graph has {len(self.results)} outputs but {len(self.outputs)} are described")
        for node in graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise CaptureError(f"node {node} is a {node.op}; only functional ATen calls may remain")
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                raise CaptureError(f"{node.target} changes its input in place; it should have been made functional")
        return self
