"""Which dim of which input is the batch: inferred from what the model does with it, told by the user, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.errors import BatchError
from partitioner.passes.batch import Batch, Fit, candidates, infer, told
from partitioner.passes.dims import Cut
from tests.lockstep import Captured, captured, compare
from tests.models import MODELS
from tests.place_cases import CASES

B, T, D = 6, 5, 8
FIRST, SECOND = Cut(0), Cut(1)


class Model(nn.Module):
    """A few layers, and a function of (layers, *inputs) that is the forward."""

    def __init__(self, function: Callable[..., Tensor], width: int = D, heads: int = 2) -> None:
        super().__init__()
        self.function = function
        self.linear, self.table = nn.Linear(width, width), nn.Embedding(11, width)
        self.attention, self.norm = nn.MultiheadAttention(width, heads, batch_first=True), nn.BatchNorm1d(width)
        self.positions = nn.Parameter(torch.randn(T, width))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


def model_of(function: Callable[..., Tensor], *args: Any, width: int = D, **kwargs: Any) -> Captured:
    torch.manual_seed(0)
    return captured(Model(function, width).double(), args, kwargs)


def attend(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    x = m.linear(x)
    out: Tensor = x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return out


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def inferred(given: Captured, **expected: Cut) -> Batch:
    """The batch, which must lie in exactly these inputs ("a" for args[0], "b" for args[1], … or keyword names)."""
    batch = given.infer()
    assert batch is not None
    names = {name if len(name) > 1 else f"args[{ord(name) - ord('a')}]": cut for name, cut in expected.items()}
    names = {name if name.startswith("args") else f"kwargs['{name}']": cut for name, cut in names.items()}
    assert dict(batch.cuts) == names
    compare(given, given.place(batch), batch, 2)
    return batch


# --- inferred ------------------------------------------------------------------------------------------------------


def test_batch_first_and_sequence_first_are_told_apart_by_what_attention_mixes() -> None:
    inferred(model_of(lambda m, x: attend(m, x).mean(), rows(B, T, D)), a=FIRST)
    swapped = model_of(lambda m, x: attend(m, x.transpose(0, 1)).transpose(0, 1).mean(), rows(T, B, D))
    assert inferred(swapped, a=SECOND).total == B


def test_without_anything_that_mixes_dim_0_is_the_batch() -> None:
    inferred(model_of(lambda m, x: m.linear(x).pow(2).mean(), rows(T, B, D)), a=FIRST)


def test_recurrence_tells_the_batch_too() -> None:
    def scan(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(B, D, dtype=x.dtype)
        for step in range(T):
            h = torch.tanh(m.linear(x[step]) + h)
        return h.mean()

    inferred(model_of(scan, rows(T, B, D)), a=SECOND)


def test_a_mask_as_long_as_the_batch_has_no_batch() -> None:
    inferred(model_of(lambda m, x, mask: attend(m, x, mask).mean(), rows(T, T, D), rows(T, T)), a=FIRST)


def test_a_mask_first_among_the_arguments_is_not_mistaken_for_the_batch() -> None:
    assert inferred(model_of(lambda m, mask, x: attend(m, x, mask).mean(), rows(T, T), rows(B, T, D)), b=FIRST).total == B
    assert inferred(model_of(lambda m, mask, x: attend(m, x, mask).mean(), rows(T, T), rows(T, T, D)), b=FIRST).total == T


def test_a_table_of_positions_is_not_the_batch_whatever_its_size() -> None:
    inferred(model_of(lambda m, x: attend(m, x + m.positions).mean(), rows(T, T, D)), a=FIRST)
    inferred(model_of(lambda m, x, table: attend(m, x + table).mean(), rows(T, T, D), rows(T, D)), a=FIRST)
    inferred(model_of(lambda m, table, x: attend(m, x + table).mean(), rows(T, D), rows(B, T, D)), b=FIRST)


def test_a_batch_as_large_as_the_hidden_size() -> None:
    inferred(model_of(lambda m, x: m.linear(x).relu().mean(), rows(D, D)), a=FIRST)
    inferred(model_of(lambda m, x: attend(m, x).mean(), rows(D, D, D)), a=FIRST)
    inferred(model_of(lambda m, x: attend(m, x.transpose(0, 1)).mean(), rows(D, D, D)), a=SECOND)
    inferred(model_of(lambda m, x, y: F.mse_loss(m.norm(m.linear(x)), y), rows(D, D), rows(D, D)), a=FIRST, b=FIRST)


def test_targets_follow_the_inputs_they_meet() -> None:
    def loss(m: Any, x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        return (F.cross_entropy(m.linear(x).sum(1), labels, reduction="none") * weight[0]).sum()

    inferred(model_of(loss, rows(B, T, D), torch.arange(B), rows(1, B)), a=FIRST, b=FIRST, c=SECOND)


def test_an_input_of_targets_alone_is_enough() -> None:
    inferred(model_of(lambda m, labels: F.cross_entropy(m.table(labels)[:, :D], labels % D), torch.arange(B)), a=FIRST)


def test_scalars_and_unbatched_inputs_have_none() -> None:
    def loss(m: Any, x: Tensor, scale: Tensor, weight: Tensor, *, temperature: Tensor) -> Any:
        return (m.linear(x) * weight).mean() * scale / temperature

    given = model_of(loss, rows(B, D), torch.tensor(2.0, dtype=torch.float64), rows(D), temperature=torch.tensor([3.0], dtype=torch.float64))
    inferred(given, a=FIRST)


def test_the_batch_hidden_in_a_merged_dim() -> None:
    inferred(model_of(lambda m, x: attend(m, m.linear(x).view(B, T, D)).mean(), rows(B * T, D)), a=Cut(0, 1, T))
    inferred(model_of(lambda m, x: attend(m, x.view(T, B, D).transpose(0, 1)).mean(), rows(T * B, D)), a=Cut(0, T, 1))
    inferred(model_of(lambda m, x, y: (attend(m, x) * y.view(B, T, 1)).mean(), rows(B, T, D), rows(B * T)), a=FIRST, b=Cut(0, 1, T))


def test_where_all_mix_the_batch_is_what_spares_most_work() -> None:
    def batch_first(m: Any, x: Tensor) -> Tensor:
        z = F.normalize(attend(m, x).mean(1), dim=-1)
        return (z @ z.T).logsumexp(1).mean()

    def sequence_first(m: Any, x: Tensor) -> Tensor:
        return batch_first(m, x.transpose(0, 1))

    inferred(model_of(batch_first, rows(B, T, D)), a=FIRST)
    inferred(model_of(sequence_first, rows(40, B, D)), a=SECOND)


def test_statistics_over_the_batch_do_not_make_features_the_batch() -> None:
    """Every feature alone mixes nothing here, but parameters have that dim."""
    inferred(model_of(lambda m, x: (m.norm(x) * m.positions[0]).pow(3).mean(), rows(B, D)), a=FIRST)
    inferred(model_of(lambda m, x: (m.linear(x).softmax(0) * x).sum(), rows(B, D)), a=FIRST)
    inferred(model_of(lambda m, x: m.linear(x).mean().exp().log().sqrt(), rows(B, D).abs() + 3), a=FIRST)


def test_towers_that_meet_all_with_all_are_one_batch() -> None:
    def towers(m: Any, images: Tensor, texts: Tensor) -> Tensor:
        logits = F.normalize(m.linear(images).tanh(), dim=-1) @ F.normalize(m.table(texts).mean(1), dim=-1).T
        return F.cross_entropy(logits, torch.arange(B)) + F.cross_entropy(logits.T, torch.arange(B))

    given = model_of(towers, rows(B, D), torch.arange(B * T).view(B, T) % 11)
    batch = inferred(given, a=FIRST, b=FIRST)
    assert len(batch.atoms) == 2
    assert given.dims.roots(batch.atoms[1:]) == batch.atoms[:1]  # one from here on


def test_towers_that_never_meet_are_one_batch_if_they_have_as_many_rows() -> None:
    def both(m: Any, x: Tensor, y: Tensor) -> Any:
        return m.linear(x).pow(2).mean() + m.linear(y).tanh().mean()

    inferred(model_of(both, rows(B, D), rows(B, D)), a=FIRST, b=FIRST)
    batch = model_of(both, rows(B, D), rows(B + 1, D)).infer()
    assert batch is not None and len(batch.cuts) == 1


def test_one_row_is_no_batch() -> None:
    for function, shape in ((lambda m, x: m.linear(x).mean(), (1, D)), (lambda m, x: attend(m, x).mean(), (1, T, D))):
        given = model_of(function, rows(*shape))
        assert given.infer() is None
        compare(given, given.place(None), None, 3)


def test_a_model_that_no_cut_would_spare_work_has_none() -> None:
    def mixed(m: Any, x: Tensor) -> Any:
        h = x.flip(0).flip(1).cumsum(0).cumsum(1)
        return torch.linalg.matrix_exp(h @ m.linear.weight).mean()

    assert model_of(mixed, rows(D, D)).infer() is None
    assert model_of(lambda m, number: (m.positions * number).mean(), torch.tensor(1.0, dtype=torch.float64)).infer() is None


def test_the_zoo_says_where_its_batch_is() -> None:
    where = {"sequence_first": SECOND, "mask_as_long_as_the_batch": FIRST, "nested_input": FIRST, "keywords_only": FIRST}
    for name, cut in where.items():
        case = MODELS[name]()
        batch = captured(case["model"], case["args"], case["kwargs"], case["loss_fn"], case["targets"]).infer()
        assert batch is not None and set(batch.cuts.values()) == {cut}


def test_few_candidates_are_tried() -> None:
    tried: list[int] = []
    given = captured(*CASES["many_losses"].call())

    def fit(batch: Batch) -> Fit:
        tried.append(batch.atom)
        return given.place(batch).fit

    assert infer(given.graph, given.dims, fit) is not None
    assert len(tried) == 1
    crowd = model_of(lambda m, *xs: torch.stack([x.flip(0).mean() for x in xs]).sum() * m.positions.sum(), *[rows(k, 2) for k in range(2, 42)])
    assert len(candidates(crowd.graph, crowd.dims)) <= 32


# --- told ----------------------------------------------------------------------------------------------------------


def test_an_int_is_the_dim_of_every_input_that_has_the_batch() -> None:
    given = model_of(lambda m, mask, x: attend(m, x, mask).mean(), rows(T, T), rows(B, T, D))
    batch = given.infer(0)
    assert batch is not None and dict(batch.cuts) == {"args[1]": FIRST}
    second = model_of(lambda m, x, y: (m.linear(x).sum(-1) * y).mean(), rows(T, B, D), rows(T, B))
    batch = second.infer(1)
    assert batch is not None and dict(batch.cuts) == {"args[0]": SECOND, "args[1]": SECOND} and batch.total == B
    negative = second.infer(-1)
    assert negative is not None and dict(negative.cuts) == {"args[0]": Cut(2)}  # the only input whose last dim is not dim 1 of another


def test_an_int_is_obeyed_even_where_it_spares_nothing() -> None:
    given = model_of(lambda m, x: attend(m, x).mean(), rows(B, T, D))
    batch = given.infer(1)
    assert batch is not None and dict(batch.cuts) == {"args[0]": SECOND}
    compare(given, given.place(batch), batch, 2)
    scan = model_of(lambda m, x: (x.cumsum(0).cumsum(1) * m.positions[0]).mean(), rows(B, D))
    batch = scan.infer(0)
    assert batch is not None and batch.total == B


def test_an_int_that_the_model_contradicts_is_refused_by_name() -> None:
    given = model_of(lambda m, x, y: (m.linear(x).sum(-1) * y.T).mean(), rows(T, B, D), rows(B, T))
    with pytest.raises(BatchError, match=r"batch_dim=1.*dim 1 of args\[\d\] is dim 0 of args\[\d\].*tree") as caught:
        given.infer(1)
    assert "args[0]" in str(caught.value) and "args[1]" in str(caught.value)
    assert model_of(lambda m, x: m.linear(x).mean(), rows(1, D)).infer(0) is None
    with pytest.raises(BatchError, match=r"batch_dim=3, but no input has such a dim \(args\[0\] \(5, 6, 8\), args\[1\] \(6, 5\)\)"):
        given.infer(3)


def test_a_tree_says_it_for_every_input() -> None:
    given = model_of(lambda m, x, y: (m.linear(x).sum(-1) * y.T).mean(), rows(T, B, D), rows(B, T))
    batch = told(given.graph, given.dims, {"args[0]": 1, "args[1]": 0})
    assert batch is not None and batch.total == B and dict(batch.cuts) == {"args[0]": SECOND, "args[1]": FIRST}
    batch = told(given.graph, given.dims, {"args[0]": -3, "args[1]": -1})
    assert batch is not None and batch.total == T
    partly = told(given.graph, given.dims, {"args[0]": 1})
    assert partly is not None and partly.cuts["args[1]"] == FIRST  # what is not named is left to the graph
    hidden = model_of(lambda m, x, y: (attend(m, x.view(T, B, D).transpose(0, 1)) * y).mean(), rows(T * B, D), rows(B, T, D))
    batch = told(hidden.graph, hidden.dims, {"args[0]": 0, "args[1]": 0})
    assert batch is not None and batch.cuts["args[0]"] == Cut(0, T, 1)


def test_a_tree_may_join_what_the_graph_does_not_relate() -> None:
    given = model_of(lambda m, x, y: (m.linear(x) @ m.linear(y).T).tanh().mean(), rows(B, D), rows(B, D))
    batch = told(given.graph, given.dims, {"args[0]": 0, "args[1]": 0})
    assert batch is not None and set(batch.cuts) == {"args[0]", "args[1]"}
    compare(given, given.place(batch), batch, 3)
    alone = model_of(lambda m, x, y: (m.linear(x) @ m.linear(y).T).tanh().mean(), rows(B, D), rows(B, D))
    batch = told(alone.graph, alone.dims, {"args[0]": 0, "args[1]": None})
    assert batch is not None and set(batch.cuts) == {"args[0]"}


def test_a_tree_without_a_batch_or_of_a_single_row_is_none() -> None:
    given = model_of(lambda m, x: m.linear(x).mean(), rows(B, D))
    assert told(given.graph, given.dims, {"args[0]": None}) is None
    assert told(given.graph, given.dims, {}) is None
    single = model_of(lambda m, x, y: (m.linear(x) * y).mean(), rows(1, D), rows(1, D))
    assert told(single.graph, single.dims, {"args[0]": 0, "args[1]": 0}) is None


@pytest.mark.parametrize(
    "tree, says",
    [
        ({"args[0]": 0, "args[1]": 1}, r"batch_dim says 1 for args\[1\].*the batch in dim 0.*dim 0 of args\[0\]"),
        ({"args[0]": 0, "args[1]": None}, r"batch_dim says None for args\[1\].*the batch in dim 0"),
        ({"args[0]": 3}, r"batch_dim says dim 3 of args\[0\], which has shape \(6, 5, 8\)"),
        ({"args[0]": -4}, r"batch_dim says dim -4 of args\[0\]"),
        ({"args[0]": 0, "args[2]": 0}, r"batch_dim says 0 for args\[2\].*shape \(5, 5\).*no dim of 6 rows"),
        ({"args[2]": 0, "args[0]": 0}, r"args\[2\]"),
    ],
)
def test_a_tree_that_contradicts_itself_or_the_model_is_refused_by_name(tree: dict[str, int | None], says: str) -> None:
    given = model_of(lambda m, x, y, mask: (attend(m, x, mask).sum(1) * y).mean(), rows(B, T, D), rows(B, D), rows(T, T))
    with pytest.raises(BatchError, match=says):
        told(given.graph, given.dims, tree)
