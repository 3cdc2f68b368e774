"""Runs a placed graph in one process: all shards of the batch in lock step, collectives by what they mean on the list of per-shard values.

Everything is one autograd graph, so that the gradients are those of the sum over the shards, by the definition of each collective. Random ops
draw the whole value and keep the shard's rows of it, so that a placed graph with random ops equals the whole graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor.placement_types import Partial

from partitioner.passes.batch import Batch, infer
from partitioner.passes.capture import capture
from partitioner.passes.collectives import _as_rows, _from_rows, spread
from partitioner.passes.dims import Cut, Dims, analyse
from partitioner.passes.graph import Graph, module_of
from partitioner.passes.own_rows import pair_rows
from partitioner.passes.place import Placed, Where, place
from partitioner.passes.randomness import random as draw
from partitioner.passes.tree import named_leaves

KEY, LOCAL, SHARED = 11, -2, -3  # what draws here; what stands for key_local and key_shared
_ops = torch.ops.partitioner


@dataclass(frozen=True)
class Shard:
    """Rows start … start + rows of the batch."""

    start: int
    rows: int


def shards(total: int, parts: int) -> list[Shard]:
    counts = spread(total, parts)
    return [Shard(sum(counts[:i]), count) for i, count in enumerate(counts)]


def rows_of(value: Tensor, cut: Cut, shard: Shard) -> Tensor:
    return _from_rows(_as_rows(value, cut.dim, cut.outer, cut.inner).narrow(0, shard.start, shard.rows), cut.dim)


def join(values: Sequence[Tensor], cut: Cut) -> Tensor:
    return _from_rows(torch.cat([_as_rows(v, cut.dim, cut.outer, cut.inner) for v in values]), cut.dim)


def run_graph(
    graph: Graph, named: Mapping[str, Any], parts: Sequence[Shard], cuts: Sequence[Cut | None], extra: Sequence[Mapping[str, Any]]
) -> list[list[Any]]:
    """The results of each shard: result[shard][output]. `named` holds whole values by input name, `extra` further values per shard."""
    envs: list[dict[fx.Node, Any]] = [{} for _ in parts]
    for node, described, cut in zip(graph.placeholders, graph.inputs, cuts, strict=True):
        for env, shard, more in zip(envs, parts, extra, strict=True):
            if described.kind == "scalar":
                env[node] = {"rows": shard.rows, "start": shard.start, "key_local": LOCAL, "key_shared": SHARED, "share": 1 / len(parts)}[
                    described.name
                ]
            elif described.name in more:
                env[node] = more[described.name]
            else:
                env[node] = named[described.name] if cut is None else rows_of(named[described.name], cut, shard)
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        given = [(fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)) for env in envs]
        for env, shard, value in zip(envs, parts, _step(node, given, parts), strict=True):
            env[node] = value
            _check_shape(node, value, shard)
    return [[env[n] for n in graph.results] for env in envs]


def _step(node: fx.Node, given: list[tuple[Any, Any]], parts: Sequence[Shard]) -> list[Any]:
    """One op on every shard."""
    first = [args[0] for args, _ in given if args]
    if node.target is _ops.all_reduce.default:
        return [torch.stack(first).sum(0).to(first[0].dtype)] * len(parts)
    if node.target is _ops.all_gather.default:
        _, _, dim, outer, inner, total = given[0][0]
        assert total == sum(shard.rows for shard in parts)
        return [join(first, Cut(dim, outer, inner))] * len(parts)
    if node.target is _ops.random.default:
        cut = node.meta.get("cut")
        assert {args[6] for args, _ in given} == {SHARED if cut is None else LOCAL}, f"{node} draws with the wrong key"
        whole = draw(list(node.meta["val"].shape), *given[0][0][1:6], KEY, given[0][0][7])
        return [whole if cut is None else rows_of(whole, cut, shard) for shard in parts]
    if node.target is _ops.shard.default:  # by its definition, so that autograd needs no rule of ours
        return [rows_of(x, Cut(dim, outer, inner), Shard(start, rows)) for (x, dim, outer, inner, start, rows), _ in given]
    if node.target is _ops.share.default:
        return [x * share for (x, share), _ in given]
    return [node.target(*args, **kwargs) for args, kwargs in given]  # type: ignore[operator]


def _check_shape(node: fx.Node, value: Any, shard: Shard) -> None:
    if isinstance(value, Tensor):
        shape, cut = list(node.meta["val"].shape), node.meta.get("cut")
        if cut is not None:
            shape[cut.dim] = shard.rows * cut.outer * cut.inner
        assert list(value.shape) == shape and value.dtype == node.meta["val"].dtype, f"{node} has {tuple(value.shape)} in place of {shape}"


@dataclass
class Captured:
    """A captured model with the values of its inputs by name. `graph` is what is placed, `original` what was captured."""

    original: Graph
    graph: Graph
    values: dict[str, Any]
    dims: Dims

    @property
    def trained(self) -> dict[str, Tensor]:
        return {d.name: self.values[d.name] for d in self.graph.inputs if d.kind == "parameter" and d.requires_grad}

    def place(self, batch: Batch | None) -> Placed:
        return place(self.graph, self.dims, batch, "dp")

    def infer(self, dim: int | None = None) -> Batch | None:
        return infer(self.graph, self.dims, lambda batch: self.place(batch).fit, dim)


def captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    mode: Literal["loss", "forward"] = "loss",
) -> Captured:
    """A loss of (output) where there are no targets, else of (output, targets)."""
    has_targets = targets is not None
    original = capture(model, args, kwargs, loss=loss, targets=targets, has_targets=has_targets, mode=mode)
    leaves, _ = named_leaves(args, dict(kwargs or {}), targets, has_targets and mode == "loss")
    values: dict[str, Any] = {**dict(leaves), **original.constants}
    values.update((name, tensor.detach().clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers()))
    for described in original.inputs:
        if described.kind == "parameter" and described.requires_grad:
            values[described.name].requires_grad_()
    copied = fx.Graph()
    copied.output(copied.graph_copy(original.module.graph, {}))
    graph = original.with_module(module_of(copied))
    pair_rows(graph)
    return Captured(original, graph, values, analyse(graph))


def run_whole(given: Captured) -> list[Any]:
    """The results of the captured graph on the whole batch."""
    inputs = [KEY if d.kind == "scalar" else given.values[d.name] for d in given.original.inputs]
    results: list[Any] = fx.Interpreter(given.original.module).run(*inputs)
    return results


def run_placed(given: Captured, placed: Placed, total: int, ranks: int, micro_batches: int = 1) -> list[list[Any]]:
    """The results of every shard: ranks in order, micro-batches in order within each."""
    whole = shards(total, ranks)
    early: list[dict[str, Any]] = [{} for _ in whole]
    if placed.prologue is not None:
        cuts = [node.meta.get("cut") for node in placed.prologue.placeholders]
        results = run_graph(placed.prologue, given.values, whole, cuts, early)
        names = [output.name for output in placed.prologue.outputs]
        early = [dict(zip(names, values, strict=True)) for values in results]
    parts, extra = [], []
    for shard, values in zip(whole, early, strict=True):
        for piece in shards(shard.rows, micro_batches):
            parts.append(Shard(shard.start + piece.start, piece.rows))
            extra.append(values)
    return run_graph(placed.graph, given.values, parts, placed.cuts, extra)


def combine(values: Sequence[Any], where: Where) -> Tensor:
    """The whole value of what shards hold in a placement; replicas must agree."""
    if isinstance(where, Cut):
        return join(values, where)
    if isinstance(where, Partial):
        return torch.stack(list(values)).sum(0)
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-9, atol=1e-12)
    return values[0]  # type: ignore[no-any-return]


def gradients(ends: Sequence[Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of the ends weighted by fixed numbers."""
    live = [end for end in ends if end.requires_grad]
    if not live:
        return dict.fromkeys(trained)
    weights = [torch.ones_like(e) if e.dim() == 0 else torch.cos(torch.arange(e.numel(), dtype=e.dtype)).reshape(e.shape) for e in live]
    return dict(zip(trained, torch.autograd.grad(live, list(trained.values()), weights, allow_unused=True), strict=True))


def compare(given: Captured, placed: Placed, batch: Batch | None, ranks: int, micro_batches: int = 1, tolerance: float = 1e-9) -> None:
    """Assert that the placed graph on so many shards has the results and the gradients of the whole graph."""
    total = batch.total if batch is not None else ranks
    want = run_whole(given)
    columns = zip(*run_placed(given, placed, total, ranks, micro_batches), strict=True)
    have = [combine(column, where) for column, where in zip(columns, placed.outputs, strict=True)]
    ends: list[list[Tensor]] = [[], []]
    for output, a, b in zip(given.graph.outputs, want, have, strict=True):
        close(f"{output.kind} {output.name}", a, b, tolerance)
        if output.kind != "buffer" and a.is_floating_point():
            ends[0].append(a)
            ends[1].append(b)
    expected, found = gradients(ends[0], given.trained), gradients(ends[1], given.trained)
    for name, gradient in expected.items():
        other = found[name]
        if gradient is not None and other is not None:
            close(f"gradient of {name}", gradient, other, tolerance)
        else:
            assert gradient is other, f"gradient of {name}: {gradient} against {other}"


def close(what: str, want: Tensor, have: Tensor, tolerance: float) -> None:
    assert want.shape == have.shape and want.dtype == have.dtype, f"{what}: {want.shape} {want.dtype} against {have.shape} {have.dtype}"
    if not want.is_floating_point():
        assert torch.equal(want, have), f"{what}: {want} against {have}"
        return
    scale = max(1.0, float(want.detach().abs().nan_to_num().max())) if want.numel() else 1.0
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{what}: {text}")
