"""Seconds of an op and of a collective on a cluster.

    op          max(flops / (rate(dtype) * efficiency(class, smallest dim)), (bytes read + written) / (bandwidth * efficiency)) + launch
    view        0
    optimizer   (bytes its ops read and write) / bandwidth + launches
    collective  base + steps * alpha + bytes on the wire per device / bandwidth, ring algorithm over n ranks on k nodes:
                all_gather, reduce_scatter   n-1 steps, k-1 of them between nodes (if k > 1),   (n-1)/n * bytes
                all_reduce                   twice that

(Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4, ring.)
FLOPs are those of `torch.utils.flop_counter`; kernels that it does not know are added below by its own formulas.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from partitioner.cluster import Cluster, Collective, Efficiency, OpClass
from partitioner.runtime.optimizer_bytes import Shapes
from partitioner.runtime.optimizer_work import step_work

aten: Any = torch.ops.aten
Value = Callable[[fx.Node], Any]
_WHOLE = Efficiency()


@dataclass(frozen=True)
class OpCost:
    """What one op costs on one device."""

    flops: int
    bytes_read: int
    bytes_written: int
    seconds: float


_FREE = OpCost(0, 0, 0, 0.0)


def _captured(node: fx.Node) -> Any:
    return node.meta.get("val")


def op_cost(node: fx.Node, cluster: Cluster, ranks: int = 1, value: Value = _captured) -> OpCost:
    """Cost of one call_function node on this cluster; other nodes, views, getitem and integer arithmetic are free.

    `value(node)` is the fake tensor (or tuple of them) that a node stands for, by default `meta["val"]`: another row count needs only
    another `value`. `ranks` is the number of ranks over which the collectives of `passes.collectives` communicate.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or _is_view(target):
        return _FREE
    kind = _collective_kind(target)
    out = value(node)
    inputs = [value(source) for source in node.all_input_nodes]
    if target.overloadpacket in _maybe_views() and _same_storage(out, inputs):
        return _FREE
    read, written = _traffic(target, inputs, out)
    if kind is not None:
        seconds = collective_seconds(kind, max(read, written), ranks, cluster)
        return OpCost(0, read, written, seconds + cluster.launch_seconds)
    flops, dims, dtype = _work(target, node, out, value)
    op_class = _op_class(target)
    efficiency = cluster.efficiency.get(op_class, _WHOLE)
    if flops:
        compute = flops / (cluster.rate(dtype) * efficiency.at(min(dims, default=0)))
        stream = cluster.efficiency.get("pointwise", _WHOLE).fraction
    else:
        compute, stream = 0.0, efficiency.fraction
    moved = (read + written) / (cluster.memory_bytes_per_second * stream)
    return OpCost(flops, read, written, max(compute, moved) + cluster.launch_seconds)


def op_seconds(node: fx.Node, cluster: Cluster, ranks: int = 1, value: Value = _captured) -> float:
    """`op_cost(...).seconds`."""
    return op_cost(node, cluster, ranks, value).seconds


def graph_costs(graph: fx.Graph, cluster: Cluster, ranks: int = 1, value: Value = _captured) -> dict[fx.Node, OpCost]:
    """The cost of every call_function node of a graph."""
    return {node: op_cost(node, cluster, ranks, value) for node in graph.nodes if node.op == "call_function"}


def collective_seconds(kind: Collective, size_bytes: float, ranks: int, cluster: Cluster) -> float:
    """Seconds of one collective over `ranks` ranks, filling nodes in order. `size_bytes` are those of the whole tensor: what
    all_gather returns, what reduce_scatter and all_reduce take."""
    if ranks <= 1:
        return 0.0
    nodes = ceil(ranks / cluster.devices_per_node)
    rounds = 2 if kind == "all_reduce" else 1
    steps_between = nodes - 1
    steps_inside = ranks - 1 - steps_between
    link = cluster.inter if nodes > 1 else cluster.intra
    bandwidth = min(link.rate(kind), cluster.intra.rate(kind)) if steps_inside else link.rate(kind)
    latency = steps_inside * cluster.intra.alpha_seconds + steps_between * cluster.inter.alpha_seconds
    return link.base_seconds + rounds * (latency + (ranks - 1) / ranks * size_bytes / bandwidth)


def accumulate_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Seconds of adding a micro-batch's gradients, so many bytes, to those of the ones before: two reads and a write."""
    return 3 * size_bytes / _stream_rate(cluster)


def optimizer_seconds(optimizer: str, shapes: Shapes, cluster: Cluster) -> float:
    """Seconds of one `optimizer.step` on parameters of these (shape, dtype) on one device."""
    work = step_work(optimizer, shapes, cluster.device)
    return work.bytes / _stream_rate(cluster) + work.launches * cluster.launch_seconds


def _stream_rate(cluster: Cluster) -> float:
    """Bytes per second that pointwise ops read and write."""
    return cluster.memory_bytes_per_second * cluster.efficiency.get("pointwise", _WHOLE).fraction


# ---------------------------------------------------------------------------------------------------------------- bytes


@cache
def _is_view(target: OpOverload) -> bool:
    """Whether the result lies in an argument's storage, or nothing is computed at all."""
    if target.overloadpacket in (aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.sym_size):
        return True
    returns = target._schema.returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)


@cache
def _maybe_views() -> frozenset[Any]:
    """Ops that copy only where a view will not do."""
    return frozenset((aten.reshape, aten.contiguous, aten.flatten, aten.to, aten.dropout, aten.type_as, aten.expand_as, aten.reshape_as))


def _same_storage(out: Any, inputs: list[Any]) -> bool:
    if not isinstance(out, torch.Tensor):
        return False
    mine = out.untyped_storage()._cdata
    return any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == mine for x in inputs)


def _bytes(value: Any) -> int:
    """Bytes that reading or writing a value touches: an expanded (stride 0) dim counts once."""
    if isinstance(value, torch.Tensor):
        count = value.numel()
        if count and not value.is_contiguous():
            for size, stride in zip(value.shape, value.stride(), strict=True):
                if stride == 0:
                    count //= size
        return count * value.element_size()
    if isinstance(value, tuple | list):
        return sum(_bytes(item) for item in value)
    return 0


@cache
def _gathers(target: OpOverload) -> bool:
    """Ops that read as many elements of their first argument as they write."""
    return target.overloadpacket in (aten.embedding, aten.index, aten.gather, aten.index_select, aten._unsafe_index, aten.take)


def _traffic(target: OpOverload, inputs: list[Any], out: Any) -> tuple[int, int]:
    written = _bytes(out)
    if _gathers(target) and inputs:
        return min(_bytes(inputs[0]), written) + sum(_bytes(x) for x in inputs[1:]), written
    return sum(_bytes(x) for x in inputs), written


# ---------------------------------------------------------------------------------------------------------------- FLOPs


@cache
def _formula(target: OpOverload) -> Callable[..., int] | None:
    packet = target.overloadpacket
    return _more_formulas().get(packet) or flop_registry.get(packet)


@cache
def _more_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for composites and for CPU kernels that the counter has no entry for."""

    def attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        heads, key_heads = query.shape[-3], key.shape[-3]
        grouped = heads // key_heads if key_heads else 1  # enable_gqa: each key head serves several query heads
        q = (query.shape[:-3].numel(), *query.shape[-3:])
        k = (q[0], key_heads * grouped, *key.shape[-2:])
        v = (q[0], key_heads * grouped, *value.shape[-2:])
        return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]

    def linear(x: Any, weight: Any, bias: Any = None, *, out_val: Any = None) -> int:
        return int(2 * x.numel() * weight.shape[0])

    def matmul(a: Any, b: Any, *, out_val: Any = None) -> int:
        return int(2 * out_val.numel() * a.shape[-1])

    def convolution(x: Any, weight: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(2 * out_val.numel() * weight.shape[1:].numel())

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten.scaled_dot_product_attention: attention,
        aten.linear: linear,
        aten.matmul: matmul,
        aten.conv1d: convolution,
        aten.conv2d: convolution,
        aten.conv3d: convolution,
    }


@cache
def _op_class(target: OpOverload) -> OpClass:
    packet, name = target.overloadpacket, target._schema.name
    if "attention" in name:
        return "attention"
    if "conv" in name and _formula(target) is not None:
        return "convolution"
    if _formula(target) is not None:
        return "matmul"
    return "special" if packet in _special() or name == "partitioner::random" else "pointwise"


@cache
def _special() -> frozenset[Any]:
    """Ops whose arithmetic, not only whose traffic, takes time on a CPU."""
    names = (
        "exp expm1 log log2 log1p sin cos tan tanh tanh_backward erf erfc erfinv pow sigmoid sigmoid_backward silu silu_backward "
        "gelu gelu_backward softplus mish _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
        "softmax log_softmax cumsum sort topk bernoulli"
    )
    return frozenset(getattr(aten, name) for name in names.split())


def _work(target: OpOverload, node: fx.Node, out: Any, value: Value) -> tuple[int, tuple[int, ...], str]:
    """FLOPs, the dims of the contraction (for the efficiency) and the dtype that the rate depends on."""
    formula = _formula(target)
    if formula is None:
        return 0, (), "float32"
    args = fx.node.map_arg(node.args, value)
    kwargs = fx.node.map_arg(node.kwargs, value)
    tensors = [item for item in _flat(args) if isinstance(item, torch.Tensor) and item.dtype.is_floating_point]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    return int(formula(*args, **kwargs, out_val=out)), _contraction(target, tensors), dtype


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for item in args:
        if isinstance(item, tuple | list):
            yield from _flat(item)
        else:
            yield item


def _contraction(target: OpOverload, tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """The matrix dims (m, k, n) of a matmul, (channels in, channels out) of a convolution, () where shape does not matter."""
    op_class = _op_class(target)
    if op_class == "matmul":
        matrices = [x for x in tensors if x.ndim >= 2]
        if len(matrices) >= 2:
            a, b = matrices[-2:]
            if target.overloadpacket is aten.linear:
                return a.shape[:-1].numel(), a.shape[-1], b.shape[0]
            return a.shape[-2], a.shape[-1], b.shape[-1]
    if op_class == "convolution":
        kernels = [x for x in tensors if x.ndim >= 3]
        if len(kernels) >= 2:
            weight = kernels[-1]
            return weight.shape[0], weight.shape[1:].numel()
    return ()


# ---------------------------------------------------------------------------------------------------------------- collectives


@cache
def _collective_kind(target: OpOverload) -> Collective | None:
    kinds: dict[str, Collective] = {
        "partitioner::all_reduce": "all_reduce",
        "partitioner::all_gather": "all_gather",
        "partitioner::reduce_scatter": "reduce_scatter",
    }
    return kinds.get(target._schema.name)

