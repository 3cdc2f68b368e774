"""The verifier of placed graphs sees every kind of sabotage, accepts what is right, and is cheap."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Replicate

from partitioner.errors import PlacementError
from partitioner.passes.check_place import check_placed
from partitioner.passes.dims import Cut
from partitioner.passes.place import Placed
from tests.place_cases import INPUTS, B, D, Given, T, nodes, placed_of, prepared

aten, ops = torch.ops.aten, torch.ops.partitioner


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
    ("memory_bank", lambda placed: last(placed).replace_input_with(placed.graph.results[-1], nodes(placed, aten.matmul.default)[0]), "is said to be"),
]


def last(placed: Placed) -> fx.Node:
    return placed.graph.module.graph.output_node()


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
    def deep(p: Given, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(x @ p.w) + x * p.b
        return x.mean()

    _, _, placed = placed_of(deep, INPUTS["flat"])
    assert len(placed.graph.module.graph.nodes) > 400
    check_placed(placed)
    best = min(timed(lambda: check_placed(placed)) for _ in range(5))
    assert best < 0.05, f"{best:.3f} s for 400 ops"


def timed(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start
