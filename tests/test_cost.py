"""Costs: FLOPs as torch counts them, bytes as storages hold them, seconds as the formulas say."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import partitioner.passes.collectives
from partitioner.cluster import Cluster
from partitioner.cost import OpCost, collective_seconds, graph_costs, op_seconds
from partitioner.passes.differentiate import differentiate
from partitioner.passes.layout import value_at
from tests.blocks_support import placed_blocks

CLUSTER = Cluster.preset("cpu-local")


def captured(function: Callable[..., Any], *args: Tensor) -> fx.Graph:
    with FakeTensorMode() as mode:
        graph = make_fx(function)(*[mode.from_tensor(x) for x in args]).graph
    assert isinstance(graph, fx.Graph)
    return graph


def cost_of(function: Callable[..., Any], *args: Tensor, ranks: int = 1) -> OpCost:
    """The cost of the one op that is not free."""
    costs = [cost for cost in graph_costs(captured(function, *args), CLUSTER, ranks).values() if cost.seconds]
    assert len(costs) == 1
    return costs[0]


def gradients(function: Callable[..., Tensor], *args: Tensor) -> Callable[..., Any]:
    return lambda *tensors: torch.autograd.grad(function(*tensors).sum(), tensors)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, w, b: F.linear(x, w, b), (_leaf(4, 6, 8), _leaf(10, 8), _leaf(10))),
        (lambda a, b: a @ b, (_leaf(3, 4, 5), _leaf(3, 5, 6))),
        (lambda a, b, c: torch.baddbmm(c, a, b), (_leaf(3, 4, 5), _leaf(3, 5, 6), _leaf(3, 4, 6))),
        (lambda x, w: F.conv2d(x, w, padding=1), (_leaf(2, 3, 8, 8), _leaf(4, 3, 3, 3))),
        (lambda x, w: F.conv1d(x, w, groups=2), (_leaf(2, 4, 9), _leaf(6, 2, 3))),
        (lambda x, w: F.conv_transpose2d(x, w), (_leaf(2, 3, 5, 5), _leaf(3, 4, 3, 3))),
    ],
)
def test_flops_equal_torchs_counter_forward_and_backward(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        gradients(function)(*args)
    costs = graph_costs(captured(gradients(function), *args), CLUSTER)
    assert sum(cost.flops for cost in costs.values()) == counter.get_total_flops() > 0


def test_cpu_attention_counts_as_flash_attention_does() -> None:
    q = _leaf(2, 4, 16, 8)
    costs = graph_costs(captured(gradients(F.scaled_dot_product_attention), q, _leaf(2, 4, 16, 8), _leaf(2, 4, 16, 8)), CLUSTER)
    forward = 2 * 2 * 2 * 4 * 16 * 16 * 8
    assert sum(cost.flops for cost in costs.values()) == forward + forward * 5 // 2  # five matmuls in backward, two in forward


def test_composites_count_too() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        x, w = graph.placeholder("x"), graph.placeholder("w")
        node = graph.call_function(torch.ops.aten.linear.default, (x, w))
        x.meta["val"], w.meta["val"], node.meta["val"] = torch.empty(4, 6, 8), torch.empty(10, 8), torch.empty(4, 6, 10)
    assert graph_costs(graph, CLUSTER)[node].flops == 2 * 4 * 6 * 8 * 10


def test_views_are_free_and_reads_are_of_what_is_touched() -> None:
    x = torch.randn(6, 8)
    views = captured(lambda x: x.view(8, 6).t().unsqueeze(0).expand(3, 6, 8)[0].detach(), x)
    assert all(cost.seconds == 0 for cost in graph_costs(views, CLUSTER).values())
    assert cost_of(lambda x: x.t().contiguous(), x).bytes_written == 6 * 8 * 4
    expanded = cost_of(lambda x: x[:, None].expand(6, 100, 8) + 1, x)
    assert (expanded.bytes_read, expanded.bytes_written) == (6 * 8 * 4, 6 * 100 * 8 * 4)
    table, index = torch.randn(1000, 8), torch.zeros(5, dtype=torch.int64)
    looked_up = cost_of(lambda table, index: F.embedding(index, table), table, index)
    assert (looked_up.bytes_read, looked_up.bytes_written) == (5 * 8 * 4 + 5 * 8, 5 * 8 * 4)
    assert cost_of(lambda x: torch.zeros(10, 10), x).bytes_read == 0


def test_an_op_takes_the_longer_of_arithmetic_and_traffic_plus_its_launch() -> None:
    big = cost_of(torch.mm, torch.randn(512, 512), torch.randn(512, 512))
    assert big.seconds == pytest.approx(2 * 512**3 / (80e9 * 512 / (512 + 16)) + 4e-6)
    thin = cost_of(torch.mm, torch.randn(512, 4), torch.randn(4, 512))
    assert thin.seconds == pytest.approx(2 * 4 * 512**2 / (80e9 * 4 / (4 + 16)) + 4e-6)
    dot = cost_of(torch.mm, torch.randn(1, 4096), torch.randn(4096, 1))
    assert dot.seconds == pytest.approx((2 * 4096 * 4 + 4) / 10e9 + 4e-6)
    assert cost_of(lambda x: x + x, torch.randn(1000, 1000)).seconds == pytest.approx(8e6 / 10e9 + 4e-6)
    assert cost_of(torch.exp, torch.randn(1000, 1000)).seconds == pytest.approx(8e6 / (0.3 * 10e9) + 4e-6)
    double = cost_of(torch.mm, torch.randn(512, 512, dtype=torch.float64), torch.randn(512, 512, dtype=torch.float64))
    assert double.seconds == pytest.approx(2 * (big.seconds - 4e-6) + 4e-6)


def test_another_value_function_prices_other_shapes() -> None:
    graph = captured(torch.mm, torch.randn(8, 16), torch.randn(16, 4))
    node = next(node for node in graph.nodes if node.op == "call_function")
    assert isinstance(node, fx.Node)
    with FakeTensorMode():
        wider = {**{n: n.meta["val"] for n in graph.nodes if n.op != "output"}, node.args[0]: torch.empty(80, 16), node: torch.empty(80, 4)}
    assert graph_costs(graph, CLUSTER, value=lambda n: wider[n])[node].flops == 10 * graph_costs(graph, CLUSTER)[node].flops


def test_collectives_inside_blocks_are_priced_by_their_link() -> None:
    assert partitioner.passes.collectives.collective_ops()
    x = torch.randn(6, 8)
    gather = cost_of(lambda x: torch.ops.partitioner.all_gather(x, "dp", 0, 1, 1, 12), x, ranks=2)
    assert gather.seconds == pytest.approx(collective_seconds("all_gather", 12 * 8 * 4, 2, CLUSTER) + 4e-6)
    alone = cost_of(lambda x: torch.ops.partitioner.all_reduce(x, "dp"), x, ranks=1)
    assert alone.seconds == pytest.approx(4e-6)


def test_rings_inside_and_between_nodes() -> None:
    node, pod = Cluster.preset("h100-sxm"), Cluster.parse("4x8 h100-sxm")
    size = 1e9
    assert collective_seconds("all_gather", size, 1, node) == 0
    assert collective_seconds("all_gather", size, 8, node) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7 / 8 * size / 360e9)
    assert collective_seconds("reduce_scatter", size, 8, node) == collective_seconds("all_gather", size, 8, node)
    assert collective_seconds("all_reduce", size, 8, node) == pytest.approx(8.4e-6 + 2 * (7 * 3.4e-6 + 7 / 8 * size / 360e9))
    assert collective_seconds("all_gather", size, 32, pod) == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 3 * 14e-6 + 31 / 32 * size / 45e9)
    assert collective_seconds("all_gather", size, 8, pod) == collective_seconds("all_gather", size, 8, node)


def test_a_block_is_priced_in_milliseconds() -> None:
    def block(x: Tensor, w: Tensor) -> Any:
        for _ in range(20):
            h = F.gelu(F.linear(x, w)).view(4, 16, 8, 8).transpose(1, 2)
            x = F.layer_norm(F.scaled_dot_product_attention(h, h, h).transpose(1, 2).reshape(4, 16, 64) + x, (64,))
        return torch.autograd.grad(x.sum(), w)

    graph = captured(block, torch.randn(4, 16, 64), _leaf(64, 64))
    count = len(graph.nodes)
    assert count > 300
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        graph_costs(graph, CLUSTER)
        best = min(best, time.process_time() - start)
    assert best < 0.25e-3 * count  # 25 microseconds a node on a quiet machine


def test_what_is_no_op_is_free() -> None:
    graph = captured(torch.relu, torch.randn(3))
    assert next(op_seconds(node, CLUSTER) for node in graph.nodes) == 0
    assert op_seconds(list(graph.nodes)[-1], CLUSTER) == 0


class Mixed(nn.Module):
    """Matrix products, convolution, attention, norms, an embedding and results of which some are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(30, 16), nn.Conv1d(16, 16, 3, padding=1), nn.LayerNorm(16)
        self.out = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.conv(self.table(tokens).mT).mT)
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(F.gelu(x)).flatten(0, 1), tokens.flatten() % 5)


@pytest.mark.parametrize("rows", [2, 40])
def test_an_op_costs_at_other_rows_what_it_costs_where_it_is_recorded_with_them(rows: int) -> None:
    blocks, _ = placed_blocks(Mixed(), (torch.randint(30, (8, 12)),))
    seen = 0
    for cls in blocks.classes.values():
        here, there = differentiate(cls, 13), differentiate(cls, rows)
        for one, other in zip(here.module.graph.nodes, there.module.graph.nodes, strict=True):
            assert one.name == other.name
            if seconds := op_seconds(other, CLUSTER):
                assert op_seconds(one, CLUSTER, value=lambda node: value_at(node, rows)) == pytest.approx(seconds, rel=1e-9), one.target
                seen += 1
    assert seen > 20
