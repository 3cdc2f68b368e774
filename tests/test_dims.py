"""Dims as products of atoms: relations that hold for the values themselves, formulas that hold at other sizes, and no relation that is not there."""

import time
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from partitioner.passes.dims import Cut, Dims, Shape, analyse
from tests.lockstep import Captured, captured
from tests.models import MODELS
from tests.place_cases import CASES, Given


def node_of(given: Captured, name: str) -> fx.Node:
    return next(n for n, described in zip(given.graph.placeholders, given.graph.inputs, strict=True) if described.name == name)


def atoms(given: Captured, name: str) -> Shape:
    shape = given.dims.shape(node_of(given, name))
    assert shape is not None
    return shape


def traced(function: Any, *inputs: Tensor) -> Captured:
    return captured(Given(function), inputs)


# --- atoms ---------------------------------------------------------------------------------------------------------


def test_equal_sizes_become_one_atom_and_products_split() -> None:
    dims = Dims()
    hidden, heads, width = dims.fresh(12), dims.fresh(3), dims.fresh(4)
    assert dims.unify(hidden, (*heads, *width))
    assert dims.roots(hidden) == (*heads, *width)
    whole, part = dims.fresh(12), dims.fresh(3)
    assert dims.unify(whole, hidden)
    assert dims.unify(part, dims.roots(whole)[:1])
    assert dims.roots(part) == dims.roots(heads)
    assert dims.fresh(1) == () and dims.sizes(()) == 1


def test_a_relation_may_be_learnt_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)):
        dims = Dims()
        a, b, c, d = dims.fresh(24), dims.fresh(4), dims.fresh(6), dims.fresh(24)
        relations = [(a, (*b, *c)), (d, a), ((*b, *c), d)]
        assert all(dims.unify(*relations[at]) for at in order)
        assert dims.roots(a) == dims.roots(d) and dims.sizes(dims.roots(a)) == 24


def test_factors_split_further_where_boundaries_differ() -> None:
    dims = Dims()
    eight, three, two, twelve = dims.fresh(8), dims.fresh(3), dims.fresh(2), dims.fresh(12)
    assert dims.unify((*two, *twelve), (*eight, *three))  # 2·12 = 8·3: 2, then 12 against 4·3
    assert [dims.sizes((a,)) for a in dims.roots(eight)] == [2, 4]
    assert [dims.sizes((a,)) for a in dims.roots(twelve)] == [4, 3]
    assert dims.roots(eight)[1] == dims.roots(twelve)[0]


def test_what_does_not_factor_is_not_related() -> None:
    dims = Dims()
    six, four = dims.fresh(6), dims.fresh(4)
    assert not dims.unify(six, four)
    assert dims.roots(six) == six and dims.roots(four) == four
    assert not dims.unify(six, ())
    twin = dims.fresh(6)
    assert not dims.unify((*six, *four), twin)  # too long; what is known so far is kept
    assert dims.roots(six) == dims.roots(twin)


@pytest.mark.parametrize("backwards", [False, True])
def test_long_runs_of_relations_are_followed(backwards: bool) -> None:
    dims = Dims()
    many = [dims.fresh(6) for _ in range(20_000)]
    pairs = list(pairwise(many))
    start = time.process_time()
    for a, b in reversed(pairs) if backwards else pairs:
        dims.unify(a, b)
    assert dims.roots(many[-1]) == dims.roots(many[0]) == many[0]
    assert time.process_time() - start < 2


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.lists(st.integers(0, 11), max_size=3), st.lists(st.integers(0, 11), max_size=3)), max_size=12))
def test_sizes_never_change(relations: list[tuple[list[int], list[int]]]) -> None:
    dims = Dims()
    known = [dims.fresh(size) for size in (2, 3, 4, 6, 8, 12, 24, 2, 6, 24, 5, 36)]
    for left, right in relations:
        a, b = (tuple(atom for at in side for atom in known[at]) for side in (left, right))
        if dims.sizes(a) == dims.sizes(b) and dims.unify(a, b):
            assert dims.roots(a) == dims.roots(b)
    for atom, size in zip(known, (2, 3, 4, 6, 8, 12, 24, 2, 6, 24, 5, 36), strict=True):
        assert dims.sizes(dims.roots(atom)) == size
        assert all(dims._link[root] is None for root in dims.roots(atom))


# --- relations that hold for the values ----------------------------------------------------------------------------


def coordinates(shape: Shape, dims: Dims, atom: int) -> Tensor | None:
    """For every element of a tensor whose dims are these products, its position along the atom."""
    for position, dim in enumerate(shape):
        if atom in dim:
            at = dim.index(atom)
            along = torch.arange(dims.sizes(dim)) // dims.sizes(dim[at + 1 :]) % dims.sizes((atom,))
            return along.reshape([-1 if d == position else 1 for d in range(len(shape))]).expand([dims.sizes(d) for d in shape])
    return None


SIZES = st.sampled_from([(4, 6), (2, 3, 4), (6, 4, 2), (4, 4, 3), (12, 2), (2, 2, 6), (24,), (1, 8, 3)])


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SIZES, st.lists(st.one_of(SIZES, st.permutations(range(4))), min_size=1, max_size=5))
def test_an_element_keeps_its_position_along_every_atom_that_its_value_keeps(start: tuple[int, ...], moves: list[Any]) -> None:
    """Any sequence of views and permutations: read where each element went from its value, and compare with what the atoms say."""

    def move(x: Tensor) -> Tensor:
        for how in moves:
            if isinstance(how, list):
                x = x.permute([d for d in how if d < x.dim()])
            elif prod(how) == x.numel():
                x = x.reshape(how)
        return x

    shape = start if prod(start) == 24 else (4, 6)
    x = torch.arange(24.0, dtype=torch.float64).reshape(shape)
    made = captured(Given(lambda p, x: {"out": move(x) * p.s}), (x,), mode="forward")
    before = atoms(made, "args[0]")
    after = made.dims.shape(made.graph.results[0])
    assert after is not None and [made.dims.sizes(dim) for dim in after] == list(move(x).shape)
    origin = move(x).long()
    for atom in {a for dim in before for a in dim} & {a for dim in after for a in dim}:
        was, now = coordinates(before, made.dims, atom), coordinates(after, made.dims, atom)
        assert was is not None and now is not None
        assert torch.equal(was.reshape(-1)[origin], now)


def test_a_view_back_finds_the_dims_again() -> None:
    made = captured(Given(lambda p, x: {"out": (x.reshape(28, 6) @ p.w).view(7, 4, 6)}), (torch.randn(7, 4, 6, dtype=torch.float64),), mode="forward")
    batch, time_, _ = atoms(made, "args[0]")
    result = made.dims.shape(made.graph.results[0])
    assert result is not None and result[:2] == (batch, time_)


# --- every model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experts", "pictures", "many_losses", "einsum", "heads_in_the_batch", "chosen_tokens"])
def test_every_dim_is_the_product_of_its_atoms(name: str) -> None:
    made = captured(*CASES[name].call())
    for node in made.graph.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "output" or not isinstance(value, Tensor):
            continue
        shape = made.dims.shape(node)
        assert shape is not None and tuple(made.dims.sizes(dim) for dim in shape) == tuple(value.shape), node
        assert node in made.dims


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(12, 36), nn.Linear(12, 12), nn.LayerNorm(12)
        self.positions = nn.Embedding(32, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        rows, steps, _ = x.shape
        x = x + self.positions(torch.arange(steps))
        q, k, v = self.qkv(self.norm(x)).view(rows, steps, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(rows * steps, 12)
        return (x + self.out(h).view(rows, steps, 12)).mean()


def formulas(rows: int, steps: int) -> tuple[Captured, dict[int, sympy.Symbol]]:
    made = captured(Block(), (torch.randn(rows, steps, 12), torch.ones(steps, steps, dtype=torch.bool)))
    (batch,), (length,), _ = atoms(made, "args[0]")
    return made, {batch: sympy.Symbol("b"), length: sympy.Symbol("t")}


def test_sizes_as_formulas_hold_at_other_batches_and_lengths() -> None:
    made, symbols = formulas(6, 10)
    other, _ = formulas(8, 14)
    assert atoms(made, "args[1]") == (atoms(made, "args[0]")[1],) * 2  # both dims of the mask are the sequence
    pairs = list(zip(made.graph.module.graph.nodes, other.graph.module.graph.nodes, strict=True))
    assert len(pairs) > 20
    for node, twin in pairs:
        if isinstance(node.meta.get("val"), Tensor) and node.op != "output":
            assert node.target == twin.target
            sizes = made.dims.formula(node, symbols)
            assert sizes is not None
            assert [int(size.subs({"b": 8, "t": 14})) for size in sizes] == list(twin.meta["val"].shape), node


def test_formulas_speak_of_no_symbol_that_the_value_lacks() -> None:
    made, symbols = formulas(6, 10)
    weight = made.dims.formula(node_of(made, "qkv.weight"), symbols)
    assert weight == (36, 12)
    x = made.dims.formula(node_of(made, "args[0]"), symbols)
    assert x == (sympy.Symbol("b"), sympy.Symbol("t"), 12)


# --- what is not related -------------------------------------------------------------------------------------------


def test_dims_of_equal_size_are_not_the_same_dim() -> None:
    def loss(p: Any, x: Tensor, y: Tensor) -> Any:
        return (x @ y).tanh().mean() + p.s

    made = traced(loss, torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64))
    (i, k), (k2, j) = atoms(made, "args[0]"), atoms(made, "args[1]")
    assert k == k2 and len({i, k, j}) == 3


def test_a_broadcast_dim_of_size_one_has_no_atom() -> None:
    made = traced(lambda p, x, y: (x * y).mean() * p.s, torch.randn(7, 1, 6), torch.randn(1, 4, 6))
    (b, one, d), (none, t, d2) = atoms(made, "args[0]"), atoms(made, "args[1]")
    assert one == none == () and d == d2 and len({b, t, d}) == 3


def test_a_square_that_meets_its_transpose_has_one_atom_twice_and_is_cut_in_the_first() -> None:
    made = traced(lambda p, x: (x + x.T).mean() * p.s, torch.randn(6, 6))
    shape = atoms(made, "args[0]")
    assert shape[0] == shape[1]
    assert made.dims.cut(node_of(made, "args[0]"), shape[0][0]) == Cut(0)


def test_an_op_without_a_rule_relates_nothing() -> None:
    made = traced(lambda p, x: torch.block_diag(x, p.w).mean(), torch.randn(7, 6, dtype=torch.float64))  # type: ignore[no-untyped-call]
    (b, d) = atoms(made, "args[0]")
    assert not set(b + d) & {a for dim in atoms(made, "w") for a in dim}


def test_cut_says_where_a_value_carries_an_atom() -> None:
    def function(p: Any, x: Tensor) -> Any:
        return {"merged": (x * p.b).permute(1, 0, 2).reshape(4, 42), "split": x.view(7, 2, 2, 6), "gone": x.sum(0)}

    made = captured(Given(function), (torch.randn(7, 4, 6, dtype=torch.float64),), mode="forward")
    (b,), _, (d,) = atoms(made, "args[0]")
    merged, split, gone = made.graph.results
    assert made.dims.cut(merged, b) == Cut(1, 1, 6) and made.dims.cut(merged, d) == Cut(1, 7, 1)
    assert made.dims.cut(split, b) == Cut(0) and made.dims.cut(gone, b) is None


def test_results_of_one_op_have_their_own_dims() -> None:
    made = traced(lambda p, x: x.topk(2, dim=1).values.mean() + torch.var_mean(x, 1)[0].sum() * p.s, torch.randn(7, 6, dtype=torch.float64))
    topk = next(n for n in made.graph.module.graph.nodes if str(n.target) == "aten.topk.default")
    b = atoms(made, "args[0]")[0]
    for result in (0, 1):
        shape = made.dims.shape(topk, result)
        assert shape is not None and shape[0] == b and made.dims.sizes(shape[1]) == 2
    assert made.dims.shape(topk, 2) is None


def test_analysis_is_linear() -> None:
    def deep(depth: int) -> Captured:
        def loss(p: Any, x: Tensor) -> Tensor:
            for _ in range(depth):
                x = (x.reshape(28, 6) @ p.w).view(7, 4, 6).tanh() + x
            return x.mean()

        return traced(loss, torch.randn(7, 4, 6, dtype=torch.float64))

    few, many = deep(10), deep(80)

    def seconds(made: Captured) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            analyse(made.graph)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(many) < 8 * seconds(few) * 2.5


def test_a_model_of_the_zoo_shares_its_batch_among_all_leaves() -> None:
    case = MODELS["nested_input"]()
    made = captured(case["model"], case["args"], case["kwargs"], case["loss_fn"], case["targets"])
    leaves = [given.name for given in made.graph.inputs if given.kind == "input"]
    first = {atoms(made, name)[0] for name in leaves} - {()}  # one leaf is a row for all
    assert len(leaves) > 4 and len(first) == 1
