"""Cutting into blocks and folding: how many, where, and with which gradients."""

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from partitioner.passes.block import Blocks, Port
from partitioner.passes.blocks import cut
from partitioner.passes.dims import Cut
from partitioner.passes.flow import gradient_flow
from partitioner.passes.graph import Graph, Input, Output
from partitioner.passes.randomness import random
from tests.blocks_support import captured, functions_of, run_chain

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.gelu(self.up(y)) * torch.sigmoid(self.gate(y)).add(1.0).mul(0.5))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Embedding, layers whose residual adds stand outside of them, norm and head."""

    def __init__(self, depth: int, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, width), nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def squares(out: Any) -> Tensor:
    return out.square().sum()  # type: ignore[no-any-return]


IDS = torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(0))


def sizes(blocks: Blocks) -> list[int]:
    return [sum(n.op == "call_function" for n in blocks.classes[b.cls].module.graph.nodes) for b in blocks.blocks]


def test_equal_layers_fold_into_one_class_the_adds_between_them_included() -> None:
    blocks = cut(captured(Stack(24), (IDS,), squares)[0])
    layers = [b for b in blocks.blocks if b.label.startswith("layers.")]
    assert [b.label for b in layers] == [f"layers.{i}" for i in range(24)]
    assert len({b.cls for b in layers}) == 1
    assert len(blocks.classes) <= 4
    cls = blocks.classes[layers[0].cls]
    assert {n.meta["module"] for n in cls.module.graph.nodes if n.op == "call_function"} >= {"layers.N.up", "layers.N"}
    assert all(cls.wants) and cls.tangents == (0,)


def test_depth_adds_no_class() -> None:
    shallow, deep = (cut(captured(Stack(depth), (IDS,), squares)[0]) for depth in (3, 7))
    assert list(shallow.classes) == list(deep.classes)
    assert [str(c.module.graph) for c in shallow.classes.values()] == [str(c.module.graph) for c in deep.classes.values()]


def test_a_tied_parameter_is_read_by_both_of_its_blocks_and_gets_both_gradients() -> None:
    torch.manual_seed(0)
    model = Stack(3, tied=True)
    graph, tensors = captured(model, (IDS,), squares)
    blocks = cut(graph)
    tied = Port("parameter", "embed.weight")
    readers = [b.index for b in blocks.blocks if tied in b.reads]
    assert readers == [0, blocks.blocks[-1].index]
    _, gradients = run_chain(blocks, functions_of(blocks, None), tensors)
    squares(model(IDS)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients["embed.weight"], model.embed.weight.grad)


def test_a_deep_sequence_of_tiny_layers_is_grouped_in_step() -> None:
    model = nn.Sequential(*[part for _ in range(200) for part in (nn.Linear(4, 4), nn.ReLU())])
    blocks = cut(captured(model, (torch.randn(2, 4),), squares)[0])
    assert 20 <= len(blocks.blocks) <= 110
    assert len(blocks.classes) <= 4
    assert min(sizes(blocks)[:-1]) >= 4


WIDE = 2048  # of a square of float32: as many bytes as are large


class Named(nn.Module):
    """Layers that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu()).relu()  # type: ignore[no-any-return]


def linears(*parts: Any, times: int = 5, step: int = 0) -> nn.Module:
    widths = [WIDE + step * at for at in range(times + 1)]
    return nn.Sequential(*[m for a, b in pairwise(widths) for m in (nn.Linear(a, b), *(part(b) for part in parts))])


def relu(width: int) -> nn.Module:
    return nn.ReLU()


PAIR: list[Callable[[], nn.Module]] = [lambda: nn.Linear(WIDE, 2 * WIDE), nn.ReLU, lambda: nn.Linear(2 * WIDE, WIDE), nn.ReLU]
LARGE: dict[str, Callable[[], nn.Module]] = {
    "bare": linears,
    "activated": lambda: linears(relu),
    "normalised": lambda: linears(nn.LayerNorm, relu),
    "unequal": lambda: linears(relu, step=16),
    "two in a period": lambda: nn.Sequential(*[make() for _ in range(3) for make in PAIR]),
    "in no list": Named,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_parameters_are_not_gathered_together_however_few_their_ops(name: str) -> None:
    with torch.device("meta"):
        model, x = LARGE[name](), torch.zeros(4, WIDE)
    blocks = cut(captured(model, (x,), squares)[0])
    large = [[p for port in b.reads if (p := port.name).endswith("weight") and model.get_parameter(p).dim() == 2] for b in blocks.blocks]
    assert max(map(len, large)) == 1 and sum(map(len, large)) == len([m for m in model.modules() if isinstance(m, nn.Linear)])
    norms = [
        any(isinstance(model.get_submodule(port.name.rpartition(".")[0]), nn.LayerNorm) for port in b.reads if "." in port.name)
        for b in blocks.blocks
    ]
    assert not any(norm and not weights for norm, weights in zip(norms, large, strict=True)), "what is small goes with its neighbour"


def conv(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(conv(a, b) for a, b in ((3, 4), (4, 8), (8, 16)))
        self.up = nn.ModuleList(conv(a, b) for a, b in ((32, 8), (16, 4), (8, 4)))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for part in self.down:
            x = part(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for part in self.up:
            skip = skips.pop()
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return x


def test_long_skips_cross_blocks() -> None:
    torch.manual_seed(0)
    model = UNet()
    x = torch.randn(2, 3, 16, 16)
    graph, tensors = captured(model, (x,), squares)
    blocks = cut(graph)
    assert len(blocks.blocks) >= 4
    wrote = {name: b.index for b in blocks.blocks for name in b.writes}
    assert max(b.index - wrote[p.name] for b in blocks.blocks for p in b.reads if p.kind == "value") >= 3
    results, gradients = run_chain(blocks, functions_of(blocks, None), tensors)
    loss = squares(model(x))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(results[0], loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_layer_called_again_and_again_is_one_class() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(8)])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = x + self.layers[0](x)
            return x

    blocks = cut(captured(Recurrent(), (torch.randn(2, 8),), squares)[0])
    assert len(blocks.blocks) >= 6
    assert len(blocks.classes) <= 3


def test_a_huge_block_is_cut_where_little_is_live() -> None:
    class Huge(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(60):  # ten wide ops, then a narrow waist
                y = x.expand(16, 8)
                for _ in range(8):
                    y = (y * 1.5).tanh()
                x = y.sum(0)
            return x

    x = torch.randn(8)
    blocks = cut(captured(Huge(), (x,), squares)[0])
    assert max(sizes(blocks)) <= 300 and len(blocks.blocks) > 4
    for block in blocks.blocks[:-1]:
        (write,) = block.writes
        value = next(n for n in blocks.classes[block.cls].module.graph.nodes if n.op == "output").args[0][0].meta["val"]
        assert value.numel() == 8, f"block {block.index} was cut at {write}, where {value.numel()} elements are live"


def test_blocks_without_trained_parameters_are_inference_functions() -> None:
    model = Stack(4)
    model.embed.requires_grad_(False)
    for layer in list(model.layers)[:2]:
        layer.requires_grad_(False)
    blocks = cut(captured(model, (IDS,), squares)[0])
    flags = {b.label: (any(blocks.classes[b.cls].wants), blocks.classes[b.cls].tangents) for b in blocks.blocks}
    assert flags["layers.0"] == (False, ()) and flags["layers.1"] == (False, ())
    assert flags["layers.2"][0] and flags["layers.3"][0]
    third = next(b for b in blocks.blocks if b.label == "layers.2")
    wants = dict(zip(third.reads, blocks.classes[third.cls].wants, strict=True))
    assert not next(want for port, want in wants.items() if port.kind == "value")


def test_gradients_stop_at_detach_and_integers_and_unused_branches() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            stopped = self.a(x).detach()
            index = self.c(x).argmax(-1)
            floor = (self.d(x) > 0).float()
            return self.b(x) * stopped + index.unsqueeze(-1) * floor  # type: ignore[no-any-return]

    graph, _ = captured(Net(), (torch.randn(2, 4),), squares)
    flow = gradient_flow(graph)
    names = {d.name: n for n, d in zip(graph.placeholders, graph.inputs, strict=True)}
    assert names["b.weight"] in flow.back
    assert not {names[f"{k}.{w}"] for k in "acd" for w in ("weight", "bias")} & flow.back.keys()
    blocks = cut(graph)
    wanted = {p.name for b in blocks.blocks for p, want in zip(b.reads, blocks.classes[b.cls].wants, strict=True) if want and p.kind == "parameter"}
    assert wanted == {"b.weight", "b.bias"}


def test_results_of_one_op_stay_together_and_statistics_carry_no_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 12) for _ in range(4))
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                q, k, v = part(x).chunk(3, -1)
                top, where = (q * k).softmax(-1).max(-1, keepdim=True)
                x = (v * top + where).tanh() + x.sin() + x.cos()
            return self.last(x)  # type: ignore[no-any-return]

    blocks = cut(captured(Net(), (torch.randn(2, 4),), squares)[0])
    assert len(blocks.blocks) > 3
    for cls in blocks.classes.values():
        for node in cls.module.graph.nodes:
            if node.target is operator.getitem:
                assert node.args[0].op == "call_function"
            assert node.op != "placeholder" or isinstance(node.meta["val"], Tensor)


def random_graph(depth: int) -> Graph:
    """Layers of dropout by hand: partitioner::random with a running index, sizes from the scalar `rows`."""
    graph = fx.Graph()
    x, rows, key = (graph.placeholder(name) for name in ("x", "rows", "key_local"))
    with torch._subclasses.FakeTensorMode():
        x.meta.update(val=torch.empty(6, 4), cut=Cut(0))
        value = last = x
        for index in range(depth):
            size = graph.call_function(operator.mul, (rows, 4))
            for op, args in (
                (random._opoverload, ([size], torch.float32, torch.device("cpu"), "bernoulli", 0.5, 0.0, key, index)),
                (torch.ops.aten.view.default, (None, [rows, 4])),
                (torch.ops.aten.mul.Tensor, (value, None)),
                *[(torch.ops.aten.tanh.default, (None,))] * 9,
            ):
                last = graph.call_function(op, tuple(last if a is None else a for a in args))  # type: ignore[misc]
                last.meta.update(val=torch.empty(24) if op is random._opoverload else torch.empty(6, 4), module=f"layers.{index}")
                if op is not random._opoverload:
                    last.meta["cut"] = Cut(0)
            value = last
        graph.output([value])
    inputs = (Input("input", "x"), Input("scalar", "rows"), Input("scalar", "key_local"))
    return Graph(fx.GraphModule(nn.Module(), graph), inputs, (Output("output"),)).check()


def test_draws_are_numbered_anew_and_sizes_computed_anew_in_each_block() -> None:
    blocks = cut(random_graph(5))
    assert [b.cls for b in blocks.blocks] == ["block_0", *["block_1"] * 4]  # the first reads an input, the others a value
    for cls in blocks.classes.values():
        (draw,) = [n for n in cls.module.graph.nodes if n.target is random._opoverload]
        assert draw.args[7] == 0
        assert sorted(cls.scalars.values()) == ["key_local", "rows"]
        assert any(n.target is operator.mul for n in cls.module.graph.nodes)
    values = {p.name for b in blocks.blocks for p in b.reads if p.kind == "value"}
    assert values == {b.writes[0] for b in blocks.blocks[:-1]}  # integers are no values


def test_a_block_that_sees_the_batch_takes_rows() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta.update(val=torch.empty(6, 4), cut=Cut(0))
        y = graph.call_function(torch.ops.aten.tanh.default, (x,))
        y.meta.update(val=torch.empty(6, 4), cut=Cut(0))
    graph.output([y])
    blocks = cut(Graph(fx.GraphModule(nn.Module(), graph), (Input("input", "x"),), (Output("output"),)))
    assert blocks.blocks[0].reads == (Port("input", "x"), Port("scalar", "rows"))
    assert blocks.classes["block_0"].scalars == {1: "rows"}


def test_results_may_be_inputs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.empty(3)
        y = graph.call_function(torch.ops.aten.sin.default, (x,))
        y.meta["val"] = torch.empty(3)
    graph.output([x, y, y])
    blocks = cut(Graph(fx.GraphModule(nn.Module(), graph), (Input("input", "args[0]"),), (Output("output"),) * 3))
    assert blocks.results == (Port("input", "args[0]"), Port("value", "sin_default"), Port("value", "sin_default"))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_transformers_fold(family: str) -> None:
    import transformers as hf

    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    if family == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, **sizes))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0}
        model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=32, dropout_rate=0.0, **sizes))
    graph, tensors = captured(Wrapped(model), (IDS,))
    blocks = cut(graph)
    assert len(blocks.classes) <= (4 if family == "llama" else 8)
    assert len(blocks.blocks) >= len(blocks.classes) + 2
    results, gradients = run_chain(blocks, functions_of(blocks, None, keep_all=False), tensors)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    torch.testing.assert_close(results[0], loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[f"model.{name}"], parameter.grad)


def test_every_value_is_written_before_it_is_read() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            late = torch.arange(6.0).mul(2.0)  # moves to its one user
            y = self.a(x)
            early = x.exp() + y  # x.exp() cannot move without what it meets
            z = self.b(early.sigmoid().sin().cos().tanh())
            hidden = mask.logical_not().float()
            return self.c(z * hidden).add(late) * hidden  # type: ignore[no-any-return]

    blocks = cut(captured(Net(), (torch.randn(2, 6), torch.ones(2, 6, dtype=torch.bool)), squares)[0])
    assert len(blocks.blocks) > 1
    known: set[str] = set()
    for block in blocks.blocks:
        assert {p.name for p in block.reads if p.kind == "value"} <= known
        known |= set(block.writes)
