"""Small functional graphs, a chain of blocks run by hand, and a tracker of tensor storages, for the tests of blocks and their functions."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.passes.batch import told
from partitioner.passes.block import BlockClass, BlockFunction, Blocks
from partitioner.passes.blocks import cut
from partitioner.passes.capture import capture
from partitioner.passes.differentiate import Joint, differentiate
from partitioner.passes.dims import analyse
from partitioner.passes.emit import emit
from partitioner.passes.graph import Graph
from partitioner.passes.place import place
from partitioner.passes.split import split
from partitioner.passes.tree import named_leaves


def captured(model: nn.Module, args: tuple[Any, ...], loss: Callable[..., Any] | None = None) -> tuple[Graph, dict[str, Any]]:
    """The functional graph of model and loss, and the values of its inputs by name (one rank: key -1)."""
    graph = capture(model, args, loss=loss)
    leaves, _ = named_leaves(args, {})
    known: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants, **dict(leaves)}
    given = {d.name: -1 if d.kind == "scalar" else known[d.name].detach() for d in graph.inputs}
    return graph, given


def run_chain(
    blocks: Blocks, functions: dict[str, BlockFunction], tensors: dict[str, Any], gradient: Tensor | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run every block forward and then backward, dropping values as an executor would; returns the results and the gradients by input name."""
    values: dict[str, Tensor] = {}
    kept: list[list[Any]] = []
    last = {port.name: block.index for block in blocks.blocks for port in block.reads if port.kind == "value"}
    wanted = {port.name for port in blocks.results}
    for block in blocks.blocks:
        function = functions[block.cls]
        box: list[Any] = [values[p.name] if p.kind == "value" else tensors[p.name] for p in block.reads]
        reads = list(box)
        for port in block.reads:
            if last.get(port.name) == block.index and port.name not in wanted:
                values.pop(port.name, None)
        saved_reads = {s.index: reads[s.index] for s in function.saved if s.kind == "read"}
        reads.clear()
        out = function.forward(box)
        values.update(zip(block.writes, out, strict=False))
        own = out[function.writes :]
        kept.append([saved_reads[s.index] if s.kind == "read" else own[s.index] for s in function.saved])
        del out, own, saved_reads, box
    results = [values.pop(p.name) if p.kind == "value" else tensors[p.name] for p in blocks.results]
    values.clear()
    gradients: dict[str, Tensor] = {}
    ends = {block.writes[i] for block in blocks.blocks for i in functions[block.cls].tangents}
    for port, result in zip(blocks.results, results, strict=True):
        if port.name in ends:
            gradients[port.name] = torch.ones_like(result) if gradient is None else gradient
    for block in reversed(blocks.blocks):
        function = functions[block.cls]
        box = kept.pop()
        if function.backward is None:
            continue
        box += [gradients.pop(block.writes[i]) for i in function.tangents]
        for index, found in zip(function.gradients, function.backward(box), strict=True):
            name = block.reads[index].name
            gradients[name] = gradients[name] + found if name in gradients else found
        del found, box
    return results, gradients


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensor storages as ops make them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self.now -= size
            self._seen.discard(key)

        weakref.finalize(storage, gone)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(one, Tensor):
                self.track(one)
        return out


def placed_blocks(module: nn.Module, args: tuple[Any, ...], loss: Callable[..., Any] | None = None) -> tuple[Blocks, int | None]:
    """Captured, cut over the batch, and cut into blocks; also the rows of the whole batch."""
    graph = capture(module, args, loss=loss)
    dims = analyse(graph)
    batch = told(graph, dims, {"args[0]": 0})
    return cut(place(graph, dims, batch, "dp").graph), None if batch is None else batch.total


def function_of(cls: BlockClass, joint: Joint, keep_all: bool) -> BlockFunction:
    """The class with everything saved, or with its reads alone."""
    kinds = {n.name: n.meta.get("kind") for n in cls.module.graph.nodes if n.op == "placeholder"}
    saved = {name for name, kind in kinds.items() if kind == "value"}
    if keep_all:
        saved |= {name for name in joint.forward if isinstance(joint.nodes[name].meta["val"], Tensor)}
    free = {name for name, kind in kinds.items() if kind != "value"}
    ahead, back = split(joint, saved, free)
    return emit(cls, ahead, back, cls.name)


def functions_of(blocks: Blocks, rows: int | None, keep_all: bool = True) -> dict[str, BlockFunction]:
    return {name: function_of(cls, differentiate(cls, rows), keep_all) for name, cls in blocks.classes.items()}


def measured_peak(function: Callable[[list[object]], tuple[Tensor, ...]], arguments: list[Any]) -> tuple[tuple[Tensor, ...], int]:
    """Run with the list holding the only references to its tensors; the peak counts them."""
    with Tracker() as tracker:
        for one in arguments:
            if isinstance(one, Tensor):
                tracker.track(one)
        del one
        results = function(arguments)
    return results, tracker.peak
