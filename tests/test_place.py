"""Cutting the batch changes nothing: every small loss and every model of the zoo, whole and on shards in lock step, forward and backward."""

import operator
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.tensor.placement_types import Partial, Replicate

from partitioner.errors import BatchError, PlacementError
from partitioner.passes import collectives
from partitioner.passes.batch import Batch
from partitioner.passes.check_place import check_placed
from partitioner.passes.dims import Cut
from partitioner.passes.place import Placed
from tests import ranks
from tests.lockstep import Captured, captured, compare, join, rows_of, run_placed, shards
from tests.models import MODELS, cast
from tests.place_cases import CASES, F64, INPUTS, B, D, Given, T

aten, ops = torch.ops.aten, torch.ops.partitioner
ZOO = [name for name in MODELS if not name.startswith("hf_")]  # those train on ranks in test_equality


@cache
def prepared(name: str) -> tuple[Captured, Batch | None, Placed]:
    given = captured(*CASES[name].call())
    batch = given.infer()
    return given, batch, given.place(batch)


def placed_of(function: Callable[..., Any], *inputs: Tensor, mode: Any = "loss") -> tuple[Captured, Batch, Placed]:
    made = captured(Given(function), inputs, mode=mode)
    batch = made.infer()
    assert batch is not None
    return made, batch, made.place(batch)


def nodes(placed: Placed, target: Any) -> list[fx.Node]:
    return [node for node in placed.graph.module.graph.nodes if node.target is target]


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
        (first, *_) = batch.cuts if batch is not None else ()
        node = next(n for n, given in zip(made.graph.placeholders, made.graph.inputs, strict=True) if given.name == first)
        for dim in (made.dims.shape(node) or ())[1:]:
            other = Batch((dim[0],), made.dims.sizes(dim[:1]), {first: made.dims.cut(node, dim[0])})  # type: ignore[dict-item]
            compare(made, made.place(other), other, 2)


# --- outputs -------------------------------------------------------------------------------------------------------


def many_outputs(p: Any, x: Tensor, number: Tensor) -> Any:
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

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(self.linear(x)) * x).mean()

    made = captured(Outer(), (INPUTS["flat"],))
    (fallback,) = made.place(made.infer()).fallbacks
    assert fallback.op == "aten.flip.default" and fallback.module == "inner" and "test_place.py" in fallback.source
    assert "mixes the rows" in fallback.why


def test_one_op_without_a_rule_runs_whole() -> None:
    def function(p: Any, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x @ p.w).sum() + torch.block_diag(x @ p.w, p.w).pow(2).sum()

    made, batch, placed = placed_of(function, INPUTS["flat"])
    assert [fallback.op for fallback in placed.fallbacks] == ["aten.block_diag.default"]
    for count in (2, 3):
        compare(made, placed, batch, count)


def test_a_sum_of_inputs_alone_is_computed_ahead_and_nothing_else_is() -> None:
    def function(p: Any, x: Tensor, weight: Tensor) -> Tensor:
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


def test_rows_that_an_op_makes_itself_are_made_in_local_size() -> None:
    def function(p: Any, x: Tensor) -> Tensor:
        token, noise, zeros = p.one.expand(B, D), torch.rand(B, D, dtype=F64), torch.zeros(B, D, dtype=F64)
        return torch.cat([x @ p.w, token, noise, zeros], 1).pow(2).mean()

    made, batch, placed = placed_of(function, INPUTS["flat"])
    for target in (aten.expand.default, ops.random.default, aten.zeros.default):
        (node,) = nodes(placed, target)
        assert node.meta["cut"] == Cut(0)
    assert not nodes(placed, ops.shard.default)
    compare(made, placed, batch, 3)


def test_rows_made_whole_where_they_are_needed_whole_are_not_gathered() -> None:
    def function(p: Any, x: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros(B, D, dtype=F64).index_add(0, ids, x @ p.w).pow(2).mean()

    _, _, placed = placed_of(function, INPUTS["flat"], INPUTS["ids"])
    assert [name.split()[0] for name in placed.collectives] == ["all_gather"]  # of x @ w


def test_draws_differ_between_shards_of_the_batch_and_agree_elsewhere() -> None:
    _, _, placed = prepared("random_numbers")
    keys = {node.meta.get("cut"): node.args[6].name for node in nodes(placed, ops.random.default)}  # type: ignore[union-attr]
    assert keys == {Cut(0): "key_local", None: "key_shared"}


def test_a_value_is_converted_once() -> None:
    def function(p: Any, x: Tensor) -> Tensor:
        h = x @ p.w
        return (h @ h.flip(0).T).mean() + (h * h.roll(1, 0)).mean() + h.cumsum(0).mean()

    _, _, placed = placed_of(function, INPUTS["flat"])
    assert len(placed.collectives) == 1


def test_what_is_not_read_is_not_gathered() -> None:
    def function(p: Any, x: Tensor) -> Tensor:
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

    def shifted(p: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = x @ p.w
        return h[torch.arange(1, B), labels[1:]].mean() + h[torch.arange(B - 1), labels[:-1]].mean() + h[:, :B][torch.arange(B).flip(0), labels].mean()

    made, batch, placed = placed_of(shifted, INPUTS["flat"], INPUTS["labels"])
    assert len([n for n in made.graph.module.graph.nodes if n.target is aten.index.Tensor]) == 3
    compare(made, placed, batch, 3)


# --- the verifier --------------------------------------------------------------------------------------------------


def broken(name: str, change: Callable[[Placed], object]) -> str:
    """What the verifier says about a placed graph after `change`."""
    made, batch, _ = prepared(name)
    placed = made.place(batch)
    change(placed)
    with pytest.raises(PlacementError) as caught:
        check_placed(placed)
    return str(caught.value)


def bypass(target: Any) -> Callable[[Placed], object]:
    def change(placed: Placed) -> None:
        node = nodes(placed, target)[0]
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]

    return change


def edit(target: Any, at: int, value: Any) -> Callable[[Placed], object]:
    return lambda placed: nodes(placed, target)[0].update_arg(at, value)


def relabel(target: Any, place: Any) -> Callable[[Placed], object]:
    def change(placed: Placed) -> None:
        node = nodes(placed, target)[0]
        node.meta["placement"] = place
        node.meta.pop("cut", None)
        if isinstance(place, Cut):
            node.meta["cut"] = place

    return change


SABOTAGE: list[tuple[str, Callable[[Placed], object], str]] = [
    ("batch_norm", bypass(ops.all_reduce.default), "Partial"),
    ("contrastive", bypass(ops.all_gather.default), "is Cut"),
    ("mean_sum_and_penalty", bypass(ops.share.default), "not linear|is the loss"),
    ("numbered_rows", bypass(ops.shard.default), "is R"),
    ("contrastive", edit(ops.all_gather.default, 2, 7), "which it cannot"),
    ("contrastive", edit(ops.all_gather.default, 5, B + 1), "which it cannot"),
    ("numbered_rows", edit(ops.shard.default, 4, 0), "which it cannot"),
    ("mean_sum_and_penalty", relabel(aten.matmul.default, Cut(1)), "Cut"),
    ("mean_sum_and_penalty", relabel(aten.matmul.default, Replicate()), "must be Cut"),
    ("mean_sum_and_penalty", relabel(aten.sum.default, Replicate()), "must be P"),
    ("swapped_then_merged", relabel(aten.transpose.int, Cut(0)), "rows|must be"),
    ("order_within_rows", relabel(aten.topk.default, (Cut(0), Replicate())), "must be Cut|its source"),
    ("batch_merged_with_time", edit(aten.reshape.default, 1, [B * T, D]), "is given shape"),
    ("random_numbers", lambda placed: nodes(placed, ops.random.default)[0].update_arg(6, 3), "draws"),
    ("mean_sum_and_penalty", lambda placed: placed.graph.placeholders[0].meta.update(placement=Partial()), "handed over"),
    ("memory_bank", lambda placed: last(placed).update_arg(0, [*last(placed).args[0][:-1], nodes(placed, aten.matmul.default)[0]]), "is said to be"),
]


def last(placed: Placed) -> fx.Node:
    return next(iter(reversed(placed.graph.module.graph.nodes)))


@pytest.mark.parametrize("name, change, says", SABOTAGE)
def test_the_verifier_sees_sabotage(name: str, change: Callable[[Placed], object], says: str) -> None:
    message = broken(name, change)
    assert any(word in message for word in says.split("|")), message
    assert "please report it" in message


def test_the_verifier_accepts_every_single_change_only_where_results_stay_equal() -> None:
    """Bypassing any one collective of any case is either seen, or the collective did nothing."""
    seen = 0
    for name in ("covariance", "two_views", "unbalanced_transport", "weights_of_the_model", "entropy_of_the_mean", "sums_of_sums", "centre_moves"):
        made, batch, clean = prepared(name)
        for at, node in enumerate(clean.graph.module.graph.nodes):
            if node.op == "call_function" and getattr(node.target, "namespace", "") == "partitioner":
                placed = made.place(batch)
                twin = list(placed.graph.module.graph.nodes)[at]
                assert twin.target is node.target
                twin.replace_all_uses_with(twin.args[0])
                with pytest.raises(PlacementError):
                    check_placed(placed)
                seen += 1
    assert seen >= 10


def test_the_verifier_is_cheap() -> None:
    def deep(p: Any, x: Tensor) -> Tensor:
        for _ in range(250):
            x = torch.tanh(x @ p.w) + x * p.b
        return x.mean()

    _, _, placed = placed_of(deep, INPUTS["flat"])
    assert len(placed.graph.module.graph.nodes) > 1000
    check_placed(placed)
    best = min(timed(lambda: check_placed(placed)) for _ in range(5))
    assert best < 0.1, f"{best:.3f} s for a thousand ops"


def timed(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


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

# Values have one of these kinds; an op lists the kinds it takes and makes. Sizes coincide on purpose: B = 4 rows, T = 4 steps, D = 6 = 2 · 3 features.
STEPS: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("btd", "btd", lambda p, x: x @ p["w"]),
    ("btd", "btd", lambda p, x: torch.tanh(x)),
    ("btd", "btd", lambda p, x: x.softmax(-1)),
    ("btd", "btd", lambda p, x: x.softmax(1) * 2),
    ("btd", "btd", lambda p, x: x.softmax(0) * 2),
    ("btd", "btd", lambda p, x: x - x.mean(0)),
    ("btd", "btd", lambda p, x: x / (x.var((0, 1), unbiased=False) + 0.5).sqrt()),
    ("btd", "btd", lambda p, x: x + p["table"]),
    ("btd", "btd", lambda p, x: x * p["rows"][:, None]),
    ("btd", "btd", lambda p, x: x.masked_fill(p["mask"][..., None], 0.1)),
    ("btd", "btd", lambda p, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    ("btd", "btd", lambda p, x: x.cumsum(1) / 3),
    ("btd", "btd", lambda p, x: x.flip(0)),
    ("btd", "btd", lambda p, x: x.detach() + 0.5 * x),
    ("btd", "btd", lambda p, x: F.dropout(x, 0.25)),
    ("btd", "btd", lambda p, x: (x.transpose(0, 1).reshape(-1, 6) @ p["w"]).view(4, 4, 6).transpose(0, 1)),
    ("btd", "btd", lambda p, x: x.view(4, 4, 2, 3).transpose(1, 2).reshape(8, 4, 3).softmax(1).view(4, 2, 4, 3).transpose(1, 2).flatten(2)),
    ("btd", "btd", lambda p, x: torch.cat([x, x.tanh()]).chunk(2)[1]),
    ("btd", "btd", lambda p, x: torch.cat([x[:, 1:], p["table"][:1].expand(4, 1, 6)], 1)),
    ("btd", "btd", lambda p, x: F.layer_norm(x, (6,), p["d"])),
    ("btd", "btd", lambda p, x: F.embedding(p["tokens"], p["w"]) * x),
    ("btd btd", "btd", lambda p, x, y: x * y),
    ("btd btd", "btd", lambda p, x, y: torch.where(p["mask"][..., None], x, y)),
    ("btd btd", "btd", lambda p, x, y: (x @ y.mT).softmax(-1) @ y),
    ("btd", "bd", lambda p, x: x.mean(1)),
    ("btd", "bd", lambda p, x: x[:, -1]),
    ("btd", "bd", lambda p, x: x[torch.arange(4), p["labels"] % 4]),
    ("btd", "bd", lambda p, x: x.amax(1)),
    ("bd", "bd", lambda p, x: x @ p["w"]),
    ("bd", "bd", lambda p, x: F.batch_norm(x, None, None, p["d"], training=True)),
    ("bd", "bd", lambda p, x: x[p["labels"] % 4]),
    ("bd", "bd", lambda p, x: x.sort(0).values),
    ("bd bd", "bd", lambda p, x, y: (x @ y.T).softmax(1) @ y),
    ("bd bd", "bd", lambda p, x, y: x + y.roll(1, 0)),
    ("bd", "d", lambda p, x: x.mean(0)),
    ("bd", "d", lambda p, x: x.sum(0) / 4),
    ("bd", "d", lambda p, x: torch.zeros(6, 6, dtype=F64).index_add(0, p["labels"], x).mean(0)),
    ("btd", "d", lambda p, x: x.sum((0, 1)) / p["mask"].sum().clamp(min=1)),
    ("d", "d", lambda p, x: torch.tanh(x * p["d"])),
    ("d", "d", lambda p, x: F.linear(x, p["w"], p["d"])),
    ("d d", "d", lambda p, x, y: x * y),
    ("btd d", "btd", lambda p, x, y: x * y + y),
    ("bd d", "bd", lambda p, x, y: x - y),
    ("bd btd", "btd", lambda p, x, y: x[:, None] + y),
]
ENDS: list[Callable[..., Tensor]] = [
    lambda p, x: x.tanh().mean(),
    lambda p, x: x.tanh().sum() / 7,
    lambda p, x: x.pow(2).mean().add(1).log(),
    lambda p, x: (x.sin() * p["d"]).sum() / p["d"].pow(2).sum(),
    lambda p, x: F.cross_entropy(x.reshape(-1, 6), p["tokens"].flatten()[: x.numel() // 6]),
    lambda p, x: x.abs().max(),
    lambda p, x: x.std() if x.numel() > 1 else x.sum(),
]


class Program(nn.Module):
    """A list of (step, which values), then a list of (end, which value); the loss is the sum of the ends."""

    def __init__(self, steps: list[tuple[int, int, int]], ends: list[tuple[int, int]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.steps, self.ends = steps, ends
        self.w, self.table = nn.Parameter(self.new(generator, 6, 6)), nn.Parameter(self.new(generator, 4, 6))
        self.rows, self.d = nn.Parameter(self.new(generator, 4, 6)), nn.Parameter(self.new(generator, 6))

    @staticmethod
    def new(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64) / 2

    def forward(self, x: Tensor, mask: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        p = {"w": self.w, "table": self.table, "rows": self.rows, "d": self.d, "mask": mask, "tokens": tokens, "labels": labels}
        values: dict[str, list[Tensor]] = {"btd": [x], "bd": [x.sum(1)], "d": [self.d.tanh()]}
        for step, *which in self.steps:
            takes, makes, function = STEPS[step]
            given = [values[kind][which[at] % len(values[kind])] for at, kind in enumerate(takes.split())]
            values[makes].append(function(p, *given))
        every = [value for kind in values.values() for value in kind[::-1]]
        loss: Tensor = sum(ENDS[end](p, every[which % len(every)]) for end, which in self.ends)  # type: ignore[assignment]
        return loss


def program_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)
    return (
        torch.randn(4, 4, 6, generator=generator, dtype=F64),
        mask,
        torch.randint(0, 6, (4, 4), generator=generator),
        torch.randint(0, 6, (4,), generator=generator),
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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


def test_every_step_of_the_random_programs_alone() -> None:
    for step, (_, makes, _) in enumerate(STEPS):
        which = {"btd": 0, "bd": 2, "d": 3}[makes]  # the newest value of its kind, behind those of the kinds before it
        made = captured(Program([(step, 0, 0)], [(0, which)]), program_inputs())
        batch = made.infer()
        compare(made, made.place(batch), batch, 3)


def test_getitem_is_the_only_operator_besides_sizes() -> None:
    for name in CASES:
        _, _, placed = prepared(name)
        for node in placed.graph.module.graph.nodes:
            assert node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload) or node.target in (operator.getitem, operator.mul)
