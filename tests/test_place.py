"""Cutting the batch changes nothing: every small loss and every model of the zoo, whole and on shards in lock step, forward and backward."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.tensor.placement_types import Partial, Replicate

from partitioner.errors import BatchError
from partitioner.passes import collectives
from partitioner.passes.batch import Batch
from partitioner.passes.dims import Cut
from partitioner.passes.place import Placed
from partitioner.passes.placement import SCALARS
from tests import ranks
from tests.lockstep import Captured, captured, compare, join, rows_of, run_placed, shards
from tests.models import MODELS, cast
from tests.place_cases import CASES, F64, INPUTS, B, D, Given, nodes, placed_of, prepared
from tests.random_programs import ENDS, STEPS, Program, program_inputs

aten, ops = torch.ops.aten, torch.ops.partitioner
LARGE = ("hf_", "resnet", "unet", "selective", "vision", "nested_", "lstm", "dropout", "tied")  # these train on ranks alone, in test_equality
ZOO = [name for name in MODELS if not name.startswith(LARGE)]


# --- equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_buffers_are_those_of_the_whole_batch(name: str) -> None:
    made, batch, placed = prepared(name)
    assert (None if batch is None else batch.total) == CASES[name].rows
    for count in (2, 3, 5, 7):
        if batch is None or batch.total >= count:
            compare(made, placed, batch, count)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows == B])
def test_what_mixes_no_rows_is_cut_in_time_too(name: str) -> None:
    made, batch, placed = prepared(name)
    assert bool(placed.collectives or placed.fallbacks) == CASES[name].mixes
    if not placed.collectives:
        compare(made, placed, batch, 2, micro_batches=3)


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str) -> None:
    case = cast(MODELS[name](), torch.float64)
    loss, targets = case["loss_fn"], case["targets"]
    if loss is not None and targets is None:
        made = captured(case["model"], case["args"], case["kwargs"], lambda output: loss(output, None))
    else:
        made = captured(case["model"], case["args"], case["kwargs"], loss, targets)
    batch = made.infer(case["batch_dim"] if isinstance(case["batch_dim"], int) else None)
    placed = made.place(batch)
    assert case["mixes_batch"] or not placed.fallbacks
    for count in (2, 3, 5):
        if batch is None or batch.total >= count:
            compare(made, placed, batch, count, tolerance=case["fp64"])
    if batch is not None and batch.total >= 4 and not placed.collectives:
        compare(made, placed, batch, 2, 2, tolerance=case["fp64"])


@pytest.mark.parametrize("name", ["mean_sum_and_penalty", "contrastive", "batch_norm", "random_numbers"])
def test_without_a_batch_every_rank_takes_its_share(name: str) -> None:
    made, _, _ = prepared(name)
    placed = made.place(None)
    assert not placed.collectives and placed.whole == 1.0 and all(cut is None for cut in placed.cuts)
    compare(made, placed, None, 3)


def test_features_cut_as_if_they_were_the_batch_are_still_right() -> None:
    """The placement is right for any atom, the batch or not: contractions become Partials, parameters are sliced."""
    for name in ("mean_sum_and_penalty", "contrastive", "layers_of_norms", "einsum", "order_within_rows"):
        made, batch, _ = prepared(name)
        assert batch is not None
        first = next(iter(batch.cuts))
        node = next(n for n, given in zip(made.graph.placeholders, made.graph.inputs, strict=True) if given.name == first)
        for dim in (made.dims.shape(node) or ())[1:]:
            other = Batch((dim[0],), made.dims.sizes(dim[:1]), {first: made.dims.cut(node, dim[0])})  # type: ignore[dict-item]
            compare(made, made.place(other), other, 2)


# --- outputs -------------------------------------------------------------------------------------------------------


def many_outputs(p: Given, x: Tensor, number: Tensor) -> Any:
    h = x @ p.w
    return {"rows": h, "input": x, "twice": (h, h), "columns": h.T, "sum": h.sum(0), "mean": h.mean(), "weight": p.w * 2, "number": number, "w": p.w}


def test_every_leaf_of_an_output_says_where_it_is() -> None:
    made, batch, placed = placed_of(many_outputs, INPUTS["flat"], INPUTS["number"], mode="forward")
    found = {output.name: where for output, where in zip(placed.graph.outputs, placed.outputs, strict=True)}
    assert found["output['rows']"] == found["output['input']"] == found["output['twice'][1]"] == Cut(0)
    assert found["output['columns']"] == Cut(1)
    assert found["output['sum']"] == found["output['mean']"] == Partial()
    assert found["output['weight']"] == found["output['number']"] == found["output['w']"] == Replicate()
    for count in (2, 3, 5):
        compare_leaves(made, placed, batch, count)


def compare_leaves(made: Captured, placed: Placed, batch: Batch, count: int) -> None:
    """Values alone: the gradients of outputs that every rank holds are given to each of them (see collectives.py), not to their sum."""
    want = fx.Interpreter(made.graph.module).run(*[made.values[given.name] for given in made.graph.inputs])
    for a, column, where in zip(want, zip(*run_placed(made, placed, batch.total, count), strict=True), placed.outputs, strict=True):
        b = join(column, where) if isinstance(where, Cut) else sum(column) if where == Partial() else column[-1]
        torch.testing.assert_close(a, b)


def test_new_buffer_values_are_whole_on_every_rank() -> None:
    for name in ("centre_moves", "memory_bank"):
        _, _, placed = prepared(name)
        assert placed.outputs[-1] == Replicate()
        assert placed.collectives


# --- what place decides --------------------------------------------------------------------------------------------


def test_fallbacks_name_the_op_the_module_and_the_line() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flip(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear = Inner(), nn.Linear(D, D, dtype=F64)

        def forward(self, x: Tensor) -> Any:
            return (self.inner(self.linear(x)) * x).mean()

    made = captured(Outer(), (INPUTS["flat"],))
    (fallback,) = made.place(made.infer()).fallbacks
    assert fallback.op == "aten.flip.default" and fallback.module == "inner" and "test_place.py" in fallback.source
    assert "mixes the rows" in fallback.why


def test_one_op_without_a_rule_runs_whole() -> None:
    def function(p: Given, x: Tensor) -> Any:
        return torch.special.bessel_j0(x @ p.w).sum() + torch.block_diag(x @ p.w, p.w).pow(2).sum()  # type: ignore[no-untyped-call]

    made, batch, placed = placed_of(function, INPUTS["flat"])
    assert [fallback.op for fallback in placed.fallbacks] == ["aten.block_diag.default"]
    for count in (2, 3):
        compare(made, placed, batch, count)


def test_a_sum_of_inputs_alone_is_computed_ahead_and_nothing_else_is() -> None:
    def function(p: Given, x: Tensor, weight: Tensor) -> Tensor:
        share = weight / weight.sum()
        centred = weight - (share * weight).sum()
        return ((x @ p.w).mean(1) * centred).sum() / centred.pow(2).sum()

    made, batch, placed = placed_of(function, INPUTS["flat"], INPUTS["weight"])
    assert placed.prologue is not None and not placed.collectives
    used = [node for node, given in zip(placed.graph.placeholders, placed.graph.inputs, strict=True) if given.kind == "prologue"]
    assert len(used) == len(placed.prologue.outputs) == 2  # the first sum is needed by the prologue alone
    assert all(node.users for node in used)
    assert {given.name for given in placed.prologue.inputs} == {"args[1]", "rows"}
    compare(made, placed, batch, 2, 2)


class Named(nn.Module):
    """Its parameters have the names of the scalars that a rank's functions take."""

    def __init__(self) -> None:
        super().__init__()
        for name in SCALARS:
            self.register_parameter(name, nn.Parameter(torch.ones(D, dtype=F64)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x * self.get_parameter("rows")
        x = x / (1 + x.square().sum()).sqrt()  # summed over the batch ahead, were `rows` no parameter
        for parameter in self.parameters():
            x = torch.tanh(x * parameter)
        return (x.square().mean(1) * mask).sum() / mask.square().sum().clamp(min=1)


def test_parameters_may_be_named_as_scalars_are() -> None:
    made = captured(Named(), (INPUTS["flat"], INPUTS["weight"]))
    placed = made.place(made.infer())
    assert placed.prologue is not None and {given.kind for given in placed.prologue.inputs} == {"input", "scalar"}


def test_rows_that_an_op_makes_itself_are_made_in_local_size() -> None:
    def function(p: Given, x: Tensor) -> Tensor:
        token, noise, zeros = p.one.expand(B, D), torch.rand(B, D, dtype=F64), torch.zeros(B, D, dtype=F64)
        return torch.cat([x @ p.w, token, noise, zeros], 1).pow(2).mean()

    made, batch, placed = placed_of(function, INPUTS["flat"])
    for target in (aten.expand.default, ops.random.default, aten.zeros.default):
        (node,) = nodes(placed, target)
        assert node.meta["cut"] == Cut(0)
    assert not nodes(placed, ops.shard.default)
    compare(made, placed, batch, 3)


def test_rows_made_whole_where_they_are_needed_whole_are_not_gathered() -> None:
    def function(p: Given, x: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros(B, D, dtype=F64).index_add(0, ids, x @ p.w).pow(2).mean()

    _, _, placed = placed_of(function, INPUTS["flat"], INPUTS["ids"])
    assert [name.split()[0] for name in placed.collectives] == ["all_gather"]  # of x @ w


def test_draws_differ_between_shards_of_the_batch_and_agree_elsewhere() -> None:
    _, _, placed = prepared("random_numbers")
    keys = {node.meta.get("cut"): node.args[6].name for node in nodes(placed, ops.random.default)}  # type: ignore[union-attr]
    assert keys == {Cut(0): "key_local", None: "key_shared"}


def test_a_value_is_converted_once() -> None:
    def function(p: Given, x: Tensor) -> Tensor:
        h = x @ p.w
        return (h @ h.flip(0).T).mean() + (h * h.roll(1, 0)).mean() + h.cumsum(0).mean()

    _, _, placed = placed_of(function, INPUTS["flat"])
    assert len(placed.collectives) == 1


def test_what_is_not_read_is_not_gathered() -> None:
    def function(p: Given, x: Tensor) -> Tensor:
        total = (x @ p.w).sum(0)
        return (total.type_as(x) * p.b).sum() + x.new_ones(3).sum() * p.s + total.to(x).sum()

    made, batch, placed = placed_of(function, INPUTS["flat"])
    assert not placed.collectives
    compare(made, placed, batch, 3)


def test_a_loss_that_keeps_its_rows_is_refused() -> None:
    made, batch, _ = prepared("mean_sum_and_penalty")
    graph = made.graph
    rows = next(node for node in graph.module.graph.nodes if node.target is aten.matmul.default)
    output = next(iter(reversed(graph.module.graph.nodes)))
    kept = output.args
    output.args = ([rows],)
    try:
        with pytest.raises(BatchError, match=r"loss has shape \(7, 4, 6\).*reduce it"):
            made.place(batch)
    finally:
        output.args = kept


def test_own_rows_are_gathered_only_where_the_index_enumerates_them() -> None:
    for name in ("own_column", "last_token", "last_of_time_first", "chosen_tokens"):
        made, _, _ = prepared(name)
        assert not [n for n in made.graph.module.graph.nodes if n.target is aten.index.Tensor]

    def shifted(p: Given, x: Tensor, labels: Tensor) -> Tensor:
        h = x @ p.w
        return (
            h[torch.arange(1, B), labels[1:]].mean() + h[torch.arange(B - 1), labels[:-1]].mean() + h[:, :B][torch.arange(B).flip(0), labels].mean()
        )

    made, batch, placed = placed_of(shifted, INPUTS["flat"], INPUTS["labels"])
    assert len([n for n in made.graph.module.graph.nodes if n.target is aten.index.Tensor]) == 3
    compare(made, placed, batch, 3)


def test_getitem_is_the_only_operator_besides_sizes() -> None:
    for name in CASES:
        _, _, placed = prepared(name)
        for node in placed.graph.module.graph.nodes:
            assert node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload) or node.target in (operator.getitem, operator.mul)


# --- the collectives themselves, on ranks --------------------------------------------------------------------------


def collective_rank(total: int) -> list[str]:
    """Value and gradient of each collective on this rank against those of the lock step, on rows that may be uneven or none."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    collectives.bind("dp", torch.distributed.group.WORLD)
    wrong = []
    try:
        parts, cut = shards(total, world), Cut(1, 2, 3)
        mine = parts[rank]
        generator = torch.Generator().manual_seed(0)

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=F64)

        whole, weights = new(2, 6 * total, 2), [new(2, 6 * total, 2) for _ in parts]
        partials = [new(3, 2) for _ in parts]
        given = [new(3, 2) for _ in parts]

        def check(what: str, value: Tensor, wanted: Tensor, leaf: Tensor, weight: Tensor, gradient: Tensor) -> None:
            (found,) = torch.autograd.grad(value, leaf, weight)
            if value.shape != wanted.shape or not torch.allclose(value, wanted):
                wrong.append(f"{what} value")
            if found.shape != gradient.shape or not torch.allclose(found, gradient):
                wrong.append(f"{what} gradient")

        leaf = partials[rank].clone().requires_grad_()
        check("all_reduce", ops.all_reduce(leaf, "dp"), sum(partials), leaf, given[rank], sum(given))  # type: ignore[arg-type]
        leaf = rows_of(whole, cut, mine).requires_grad_()
        check("all_gather", ops.all_gather(leaf, "dp", 1, 2, 3, total), whole, leaf, weights[rank], rows_of(sum(weights), cut, mine))  # type: ignore[arg-type]
        leaf = whole.clone().requires_grad_()
        shard = ops.shard(leaf, 1, 2, 3, mine.start, mine.rows)
        zeros = join([rows_of(weights[0], cut, part) * (part is mine) for part in parts], cut)
        check("shard", shard, rows_of(whole, cut, mine), leaf, rows_of(weights[0], cut, mine), zeros)
        check("share", ops.share(leaf, 0.25), whole / 4, leaf, weights[0], weights[0] / 4)
    finally:
        collectives.bind("dp", None)
    return wrong


@pytest.mark.parametrize("total", [7, 2])
def test_collectives_on_ranks_follow_the_gradient_rule(total: int) -> None:
    assert ranks.run(3, collective_rank, total) == [[], [], []]


# --- random programs -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    ends=st.lists(st.tuples(st.integers(0, len(ENDS) - 1), st.integers(0, 99)), min_size=1, max_size=3),
)
def test_random_programs(steps: list[tuple[int, int, int]], ends: list[tuple[int, int]]) -> None:
    made = captured(Program(steps, ends), program_inputs())
    batch = made.infer()
    placed = made.place(batch)
    for count in (2, 3, 4):
        compare(made, placed, batch, count)
    if not placed.collectives:
        compare(made, placed, batch, 2, micro_batches=2)


def test_every_step_of_the_random_programs() -> None:
    for first in range(0, len(STEPS), 4):
        steps = [(step, step, 1) for step in range(first, min(first + 4, len(STEPS)))]
        made = captured(Program(steps, [(0, which) for which in range(7)]), program_inputs())
        batch = made.infer()
        compare(made, made.place(batch), batch, 3)
