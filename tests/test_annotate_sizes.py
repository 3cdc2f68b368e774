"""Formulas at other sizes: equal to a new capture there, or refused with the cause."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.errors import SizeError
from partitioner.passes.annotate import annotate
from partitioner.passes.batch import told
from partitioner.passes.capture import capture
from partitioner.passes.dims import analyse
from tests.annotate_support import captured, kept_bytes, known, resized, totals
from tests.models import MODELS, Case

# Sizes to ask for, other than those captured.
RESIZED: dict[str, dict[str, int]] = {
    "mlp": {"batch": 5},
    "mask_as_long_as_the_batch": {"batch": 3, "length": 10},
    "contrastive": {"batch": 17},
    "dense_experts": {"batch": 4, "length": 9},
    "dropout": {"batch": 5, "length": 7},
    "lstm_and_gru": {"batch": 5},
    "unet": {"batch": 2, "height": 13, "width": 10},
    "resnet": {"batch": 3, "height": 11, "width": 14},
    "vision_transformer": {"batch": 9, "height": 4, "width": 16},
    "hf_gpt2": {"batch": 4, "length": 8},
    "hf_llama": {"batch": 5, "length": 11},
    "hf_bert": {"batch": 4, "length": 3},
    "hf_t5": {"batch": 2, "length": 7, "input_ids_length": 9},
}


# --- other sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESIZED)
def test_formulas_equal_a_new_capture(name: str) -> None:
    case, graph, facts = known(name)
    sizes = RESIZED[name]
    assert sizes != facts.symbols and set(sizes) <= set(facts.symbols)
    again = annotate(captured(resized(case, graph, facts, **sizes)))
    assert totals(facts, **sizes) == totals(again)
    assert again.symbols == {**facts.symbols, **sizes}


class Program(nn.Module):
    """`function(x * w, parameter)` of a tensor x of shape [batch, length, 4]."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.w, self.p = function, nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.w, self.p).float().sum()


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def mask_of(x: Tensor) -> Tensor:
    """A row of ones for every row, looked up by their numbers."""
    rows, length = x.shape[:2]
    return torch.ones(1, length).expand(rows, -1)[torch.arange(rows)[:, None], torch.arange(length)]


SMALL: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "slices from both ends": (lambda x, p: x[:, :-1] * x[:, 1:], ()),
    "every second": (lambda x, p: x[:, 1::2].tanh(), ()),
    "the last three": (lambda x, p: x[:, -3:].exp(), ()),
    "the first three": (lambda x, p: x[:, :3].exp(), ()),
    "pad": (lambda x, p: F.pad(x, (0, 0, 2, 1)).sigmoid(), ()),
    "cat": (lambda x, p: torch.cat([x, x[:, :1], p.expand(x.shape[0], -1, -1)], 1).sigmoid(), (2, 4)),
    "halves": (lambda x, p: x[:, :-1].repeat(1, 2, 1).chunk(2, 1)[0].exp(), ()),
    "conv": (lambda x, p: F.conv1d(swapped(x), p, stride=2, dilation=2, padding=1).sigmoid(), (5, 4, 3)),
    "conv, same": (lambda x, p: F.conv1d(swapped(x), p, padding="same").sigmoid(), (5, 4, 3)),
    "conv, transposed": (lambda x, p: F.conv_transpose1d(swapped(x), p, stride=2, padding=1, output_padding=1).sigmoid(), (4, 5, 3)),
    "pool": (lambda x, p: F.max_pool1d(swapped(x), 3, stride=2, padding=1).exp(), ()),
    "pool, rounded up": (lambda x, p: F.avg_pool1d(swapped(x), 2, ceil_mode=True).exp(), ()),
    "upsample": (lambda x, p: F.interpolate(swapped(x), scale_factor=3).exp(), ()),
    "windows": (lambda x, p: x.unfold(1, 3, 2).exp(), ()),
    "differences": (lambda x, p: x.diff(dim=1).exp(), ()),
    "learnt positions": (lambda x, p: (x + p[: x.shape[1]]).exp(), (99, 4)),
    "embedded positions": (lambda x, p: (x + F.embedding(torch.arange(2, 2 + x.shape[1]), p)).exp(), (99, 4)),
    "masked scores": (lambda x, p: (x @ swapped(x)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9).softmax(-1) @ x, ()),
    "merged": (lambda x, p: x.reshape(-1, 4) @ p, (4, 6)),
    "gram matrix": (lambda x, p: x.flatten(1) @ x.flatten(1).T, ()),
    "pairs": (lambda x, p: (x[:, :, None] - x[:, None]).norm(dim=-1), ()),
    "best two": (lambda x, p: x.topk(2, 1)[0].exp(), ()),
    "sorted": (lambda x, p: x.sort(1)[0] * x.max(1, keepdim=True)[0] * x.logsumexp(1, keepdim=True), ()),
    "own row": (lambda x, p: x[torch.arange(x.shape[0]), -1].exp(), ()),
    "a mask by rows": (lambda x, p: (x * mask_of(x)[..., None]).exp(), ()),
    "norms": (lambda x, p: F.group_norm(swapped(x), 2) + F.batch_norm(swapped(x), None, None, training=True), ()),
    "losses": (lambda x, p: F.binary_cross_entropy_with_logits(x, x.sigmoid()) + F.mse_loss(x, x.exp()) + x.std(1).sum(), ()),
}


@pytest.mark.parametrize("name", SMALL)
def test_sizes_that_ops_make_equal_a_new_capture(name: str) -> None:
    function, shape = SMALL[name]
    model = Program(function, *shape)
    case: Case = {"model": model, "args": (torch.randn(3, 8, 4),), "kwargs": {}, "targets": None, "loss_fn": None}
    graph = captured(case)
    facts = annotate(graph)
    assert facts.symbols == {"batch": 3, "length": 8}
    assert facts.total("saved_bytes").captured == kept_bytes(case, graph)
    sizes = {"batch": 5, "length": 13}
    assert totals(facts, **sizes) == totals(annotate(captured(resized(case, graph, facts, **sizes))))


FIXED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], str]] = {
    "a position table": (lambda x, p: x + p, (8, 4), "parameter 'p' has 8 elements in dim 0"),
    "a token before a position table": (lambda x, p: torch.cat([x[:, :1], x], 1) + p, (9, 4), "parameter 'p' has 9 elements in dim 0"),
    "a dense layer over time": (lambda x, p: x.flatten(1) @ p, (32, 2), "parameter 'p' has 32 elements in dim 0"),
    "a Python loop": (lambda x, p: torch.stack([(x * p)[:, t].tanh() for t in range(x.shape[1])]).sum(0), (), "as a Python loop does"),
    "unbind": (lambda x, p: sum(x.unbind(1)[1:], x.unbind(1)[0]), (), "fixed number of tensors"),
    "a length that nothing ties": (lambda x, p: x.sum() * torch.arange(x.shape[1]).float().mean(), (), "nothing tells whether these are length"),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_size_that_cannot_change_is_refused_with_its_cause(name: str) -> None:
    function, shape, why = FIXED[name]
    facts = annotate(capture(Program(function, *shape), (torch.randn(3, 8, 4),)))
    flops = facts.total("bytes_read")
    assert flops(batch=5, length=8) == flops(batch=5) > flops.captured
    with pytest.raises(SizeError, match=r"length.*8.*because.*") as refused:
        flops(length=9)
    assert why in str(refused.value)


def test_limits_are_refused_with_their_cause() -> None:
    facts = known("hf_gpt2")[2]
    assert facts.total("flops")(length=8)
    with pytest.raises(SizeError, match=r"length=9 .* length <= 8, because positions are looked up in parameter '.*wpe.weight'"):
        facts.total("flops")(length=9)
    with pytest.raises(SizeError, match=r"length=11 .* because positions are looked up"):
        facts.total("flops")(length=np.array([4, 8, 11, 16]))
    with pytest.raises(SizeError, match=r"buffer 'bert\.embeddings\.position_ids'"):
        known("hf_bert")[2].total("flops")(length=9)
    patches = known("vision_transformer")[2].total("flops")
    with pytest.raises(SizeError, match=r"height=12.* 5, because parameter 'position' has 5 elements"):
        patches(height=12)
    halves = annotate(capture(Program(lambda x, p: x.chunk(2, 1)[0] * x.chunk(2, 1)[1]), (torch.randn(3, 8, 4),)))
    with pytest.raises(SizeError, match="groups it by 2"):
        halves.total("flops")(length=9)


def test_what_is_no_size_is_refused() -> None:
    flops = known("hf_llama")[2].total("flops")
    with pytest.raises(SizeError, match=r"'lenght'; the sizes that may change are, as captured: batch=\d+, length=6"):
        flops(lenght=9)
    for bad in (0, -1, 2.5, "many", [], np.array([1.0, 2.0]), [4, 0]):
        with pytest.raises(SizeError, match="whole number"):
            flops(batch=bad)


def test_names_are_the_users() -> None:
    assert list(known("hf_llama")[2].symbols) == ["batch", "length"]  # mask and labels are as long as the tokens
    size, why = known("hf_llama")[2].space.fixed["attention_mask_length"]
    assert size == 6 and why.startswith("it is length: ")
    assert list(known("hf_t5")[2].symbols) == ["batch", "length", "input_ids_length"]
    assert list(known("unet")[2].symbols) == ["batch", "height", "width"]
    assert known("unet")[2].space.fixed["channels"] == (3, "parameter 'stem.weight' has 3 elements in dim 1")
    graph = captured(MODELS["sequence_first"]())
    dims = analyse(graph)
    facts = annotate(graph, dims, told(graph, dims, {"args[0]": 1}))
    assert facts.symbols == {"batch": MODELS["sequence_first"]()["args"][0].shape[1], "length": MODELS["sequence_first"]()["args"][0].shape[0]}


class TwoTexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        result: Tensor = (self.table(first).mean(1) * self.table(second).mean(1)).sum()
        return result


def test_a_size_nothing_ties_follows_the_one_it_was_captured_equal_to() -> None:
    tokens = torch.zeros(3, 6, dtype=torch.long)
    facts = annotate(capture(TwoTexts(), (), {"first": tokens, "second": tokens.clone()}))
    assert facts.symbols == {"batch": 3, "length": 6, "second_length": 6} and facts.space.follows == {"second_length": "length"}
    read = facts.total("bytes_read")
    assert read(length=12) == read(length=12, second_length=12) > read(length=12, second_length=6) > read.captured
    for sizes in ((12, 12), (12, 6), (6, 12)):
        again = annotate(capture(TwoTexts(), (), dict(zip(("first", "second"), (tokens.new_zeros(3, size) for size in sizes), strict=True))))
        assert read(length=sizes[0], second_length=sizes[1]) == again.total("bytes_read").captured
