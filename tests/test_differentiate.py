"""Joint graphs: equal to eager at any number of rows, gradients that own their storage, refusals of what depends on the batch's size."""

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from partitioner.errors import CaptureError
from partitioner.passes.block import BlockClass, Blocks
from partitioner.passes.differentiate import differentiate, root
from partitioner.passes.dims import Cut
from partitioner.passes.split import split
from partitioner.passes.unify import Linear
from tests.blocks_support import functions_of, placed_blocks, run_chain

torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True), nn.GRU(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        return self.gru(out)[0] + hidden[-1, :, None, :4]  # type: ignore[no-any-return]


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        picked = self.table[x]
        return torch.cumsum(picked, 1) * picked.amax(-1, keepdim=True) + F.pad(picked, (0, 0, 1, -1))


class Transposed(nn.Module):
    """The backward kernels of what reads a transposed tensor lay their results out otherwise than their fake ones do."""

    def __init__(self, read: nn.Module) -> None:
        super().__init__()
        self.first, self.read, self.last = nn.Linear(6, 8), read, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(self.first(x).transpose(1, 2)))  # type: ignore[no-any-return]


def squares(out: Tensor) -> Tensor:
    return out.square().sum()


def cross_entropy(out: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), out.argmax(-1).flatten().remainder(3), reduction="sum")


def transposed_error(out: Tensor) -> Tensor:
    return F.mse_loss(out.transpose(1, 2), out.detach().transpose(1, 2).contiguous().tanh(), reduction="sum")


CONV = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 4))
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(5, 4, 6), squares),
    "layer_norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Softmax(-1)), lambda: torch.randn(5, 4, 6), squares),
    "attention": (Attention, lambda: torch.randn(5, 6, 16), squares),
    "conv": (lambda: nn.Sequential(*CONV), lambda: torch.randn(5, 3, 14, 14), squares),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)), lambda: torch.randint(0, 9, (5, 4)), cross_entropy),
    "recurrent": (Recurrent, lambda: torch.randn(5, 3, 6), squares),
    "elu": (lambda: Transposed(nn.ELU()), lambda: torch.randn(5, 4, 6), squares),
    "log_softmax": (lambda: Transposed(nn.LogSoftmax(1)), lambda: torch.randn(5, 4, 6), squares),
    "norm": (lambda: Transposed(nn.LayerNorm(4)), lambda: torch.randn(5, 4, 6), squares),
    "error": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), lambda: torch.randn(5, 4, 6), transposed_error),
    "gather": (Gather, lambda: torch.randint(0, 7, (5, 4)), squares),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager_at_any_number_of_rows(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, loss = MODELS[name]
    model, x = copy.deepcopy(make()).double(), inputs()  # layers may be shared between tests
    x = x.double() if x.is_floating_point() else x
    blocks, total = placed_blocks(model, (x,), loss)
    assert total == 5
    functions = functions_of(blocks, 2)
    state = dict(model.named_parameters())
    for rows in (0, 1, 2, 5):
        given: dict[str, Any] = {n: p.detach() for n, p in state.items()}
        given |= {"args[0]": x[:rows].clone(), "rows": rows, "start": 0, "share": 1.0, "key_local": 1, "key_shared": 1}
        results, gradients = run_chain(blocks, functions, given)
        model.zero_grad()
        if rows:
            expected = loss(model(x[:rows]))
            expected.backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(results[0], expected)
        else:
            assert results[0].item() == 0
        for parameter in state:
            want = state[parameter].grad if rows else torch.zeros_like(state[parameter])
            torch.testing.assert_close(gradients[parameter], want)


Make = Callable[[fx.Graph, dict[str, fx.Node]], list[fx.Node]]
Read = tuple[tuple[int, ...], bool, Cut | None]


def one_block(make: Make, reads: dict[str, Read], scalars: tuple[str, ...] = ()) -> BlockClass:
    """A class by hand: reads by (shape, wants a gradient, cut), then scalars; `make` returns the writes, all of them tangents."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    mode = torch._subclasses.FakeTensorMode()
    for name, (shape, _, cut) in reads.items():
        nodes[name] = graph.placeholder(name)
        with mode:
            nodes[name].meta.update(val=torch.empty(shape), kind="value", **({"cut": cut} if cut else {}))
    for name in scalars:
        nodes[name] = graph.placeholder(name)
    writes = make(graph, nodes)
    with mode:
        for write in writes:
            write.meta["val"] = torch.empty(2, 2)
    graph.output(tuple(writes))
    wants = (*(want for _, want, _ in reads.values()), *(False for _ in scalars))
    numbered = {len(reads) + at: name for at, name in enumerate(scalars)}
    return BlockClass("hand", fx.GraphModule(nn.Module(), graph), wants, tuple(range(len(writes))), numbered)


aten = torch.ops.aten


def test_every_gradient_owns_a_contiguous_storage() -> None:
    def make(graph: fx.Graph, n: dict[str, fx.Node]) -> list[fx.Node]:
        both = graph.call_function(aten.add.Tensor, (n["a"], n["b"]))  # the tangent itself, twice
        wide = graph.call_function(aten.sum.default, (n["c"],))  # an expanded number
        turned = graph.call_function(aten.t.default, (n["d"],))  # a transposed view of the tangent
        joined = graph.call_function(aten.cat.default, ([n["e"], n["f"]],))  # slices of one tangent
        zero = graph.call_function(aten.zeros_like.default, (n["g"],))
        return [both, wide, turned, joined, zero]

    shape = ((4, 3), True, None)
    cls = one_block(make, dict.fromkeys("abcdefg", shape))
    cls = BlockClass(cls.name, cls.module, cls.wants, (0, 1, 2, 3), {})
    joint = differentiate(cls, None)
    gradients = joint.results[joint.writes :]
    assert len(gradients) == 7 and joint.gradients == tuple(range(7))
    assert len({root(g) for g in gradients}) == 7
    for gradient in gradients:
        val = gradient.meta["val"]
        assert root(gradient)[0].op == "call_function" and val.is_contiguous() and val.untyped_storage().nbytes() == 48
    assert [str(s) for s in gradients[0].meta["sizes"]] == ["4", "3"]


def test_sizes_and_scalars_become_arguments() -> None:
    def make(graph: fx.Graph, n: dict[str, fx.Node]) -> list[fx.Node]:
        flat = graph.call_function(aten.view.default, (n["x"], [graph.call_function(operator.mul, (n["rows"], 10)), 3]))
        part = graph.call_function(torch.ops.partitioner.shard.default, (n["w"], 0, 1, 1, n["start"], n["rows"]))
        shared = graph.call_function(torch.ops.partitioner.share.default, (flat, n["share"]))
        return [shared, part]

    reads = {"x": ((8, 10, 3), True, Cut(0)), "w": ((8, 2), True, None)}
    joint = differentiate(one_block(make, reads, ("rows", "start", "share")), 3)
    text = {node.name: node for node in joint.module.graph.nodes}
    assert [str(s) for s in text["view"].meta["sizes"]] == ["rows*10", "3"]
    assert text["shard"].args[4:] == (text["start"], text["rows"])
    assert text["unshard"].args[4:] == (text["start"], 8)
    shares = [n for n in joint.module.graph.nodes if n.target is torch.ops.partitioner.share.default]
    assert len(shares) == 2 and all(n.args[1] is text["share"] for n in shares)
    back = next(n for n in joint.module.graph.nodes if n.target is aten.view.default and n.name not in joint.forward)
    assert back.args[1] == [text["rows"], 10, 3]
    assert joint.bytes["shard"].at(7) == 7 * 2 * 4


def test_the_same_class_gives_the_same_graph() -> None:
    torch.manual_seed(0)
    blocks, _ = placed_blocks(Attention(), (torch.randn(5, 6, 16),), squares)
    (cls,) = blocks.classes.values()
    assert str(differentiate(cls, 2).module.graph) == str(differentiate(cls, 3).module.graph) == str(differentiate(cls, 1000).module.graph)


@pytest.mark.parametrize("size", ["square", "compare"])
def test_what_is_no_multiple_of_the_rows_is_refused(size: str) -> None:
    def make(graph: fx.Graph, n: dict[str, fx.Node]) -> list[fx.Node]:
        if size == "square":
            number = graph.call_function(operator.mul, (n["rows"], n["rows"]))
            return [graph.call_function(aten.full.default, ([number], 1.0))]
        return [graph.call_function(aten.mm.default, (n["x"], graph.call_function(aten.t.default, (n["x"],))))]  # rows × rows

    with pytest.raises(CaptureError, match=r"no a\*rows \+ b|expected"):
        differentiate(one_block(make, {"x": ((8, 3), True, Cut(0))}, ("rows",)), 4)


def test_a_read_that_is_cut_needs_the_rows() -> None:
    cls = one_block(lambda graph, n: [graph.call_function(aten.sin.default, (n["x"],))], {"x": ((8, 3), True, Cut(0))})
    with pytest.raises(CaptureError, match="does not take `rows`"):
        differentiate(cls, 4)


def saved_block() -> tuple[Any, BlockClass]:
    def make(graph: fx.Graph, n: dict[str, fx.Node]) -> list[fx.Node]:
        product = graph.call_function(aten.linear.default, (n["x"], n["w"]))
        return [graph.call_function(aten.tanh.default, (graph.call_function(aten.exp.default, (product,)),))]

    cls = one_block(make, {"x": ((4, 3), True, None), "w": ((5, 3), True, None)})
    return differentiate(cls, None), cls


def test_split_recomputes_exactly_what_is_not_saved() -> None:
    joint, _ = saved_block()
    everything = {n for n in joint.forward if n in ("exp", "tanh")} | {"x", "w"}
    _, back = split(joint, everything)
    assert back is not None and "exp" not in back.recomputed and "mm" not in back.recomputed
    assert [(s.kind, s.index) for s in back.saved] == [("read", 0), ("read", 1), ("own", 0), ("own", 1)]
    ahead, back = split(joint, {"x"}, free={"w"})
    assert back is not None and [r for r in back.recomputed if r != "t"] == ["mm", "exp", "tanh"]
    assert [(s.kind, s.index) for s in back.saved] == [("read", 0), ("read", 1)]
    assert len(list(ahead.graph.nodes)[-1].args[0]) == 1
    order = [n.name for n in back.graph.nodes]
    assert order.index("tanh") < order.index("tanh_backward") < order.index("mul")


def test_split_says_what_is_missing() -> None:
    joint, _ = saved_block()
    with pytest.raises(CaptureError, match="the read x, which is neither saved nor free"):
        split(joint, {"exp", "tanh"}, free={"w"})
    with pytest.raises(CaptureError, match="mm, which must not run again"):
        split(joint, {"x"}, free={"w"}, keep={"mm"})
    with pytest.raises(CaptureError, match="has no tensors \\['nothing'\\]"):
        split(joint, {"nothing"})


def test_collectives_run_again_only_when_allowed() -> None:
    def make(graph: fx.Graph, n: dict[str, fx.Node]) -> list[fx.Node]:
        total = graph.call_function(torch.ops.partitioner.all_reduce.default, (n["x"], "dp"))
        return [graph.call_function(aten.exp.default, (total,))]

    joint = differentiate(one_block(make, {"x": ((4, 3), True, None)}), None)
    with pytest.raises(CaptureError, match="all_reduce, which communicates"):
        split(joint, {"x"})
    _, back = split(joint, {"x"}, communicate_again=True)
    assert back is not None and "all_reduce" in back.recomputed


def test_a_saved_view_of_a_read_saves_the_read() -> None:
    joint, _ = saved_block()
    _, back = split(joint, {"x", "t", "exp", "tanh"})
    assert back is not None and [(s.kind, s.index) for s in back.saved][:2] == [("read", 0), ("read", 1)]
    assert [s.kind for s in back.saved].count("own") == 2


def test_linear_sizes_read_well() -> None:
    assert [str(Linear(*pair)) for pair in ((3, 0), (0, 1), (0, 10), (2, 4), (-1, 1))] == ["3", "rows", "rows*10", "rows*4 + 2", "rows - 1"]
    assert math.prod(s.at(3) for s in (Linear(0, 2), Linear(5))) == 30


def test_blocks_that_need_no_gradient_have_no_backward() -> None:
    cls = one_block(lambda graph, n: [graph.call_function(aten.sin.default, (n["x"],))], {"x": ((4, 3), False, None)})
    joint = differentiate(BlockClass(cls.name, cls.module, cls.wants, (), {}), None)
    assert joint.gradients == joint.tangents == ()
    assert split(joint, ())[1] is None


def test_ops_that_work_in_place_inside_are_made_functional() -> None:
    cell = nn.GRUCell(6, 4)
    x = torch.randn(5, 6)
    blocks: Blocks = placed_blocks(cell, (x,), squares)[0]
    for cls in blocks.classes.values():
        for node in differentiate(cls, 2).module.graph.nodes:
            assert not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable
    given = {n: p.detach() for n, p in cell.named_parameters()} | {"args[0]": x, "rows": 5, "start": 0, "share": 1.0}
    _, gradients = run_chain(blocks, functions_of(blocks, 2), given)
    squares(cell(x)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in cell.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
