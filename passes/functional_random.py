"""Random ops as `partitioner::random` and arithmetic, with eager's bits where the key is -1.

    dropout          x * (bernoulli(1-p) / (1-p))         as at::_dropout_impl on CPU
    feature dropout  the same with noise of shape (N, C, 1, …)
    alpha dropout    x * a·noise + b                      b = (noise - 1)·α·a + α·a·p,  a = ((α²p + 1)(1-p))^-1/2
    rand, randn, randint, normal, bernoulli(p), uniform_, normal_, exponential_, bernoulli_, random_(from, to) and their kin: one draw
    scaled_dot_product_attention(dropout_p > 0)           at::_scaled_dot_product_attention_math, with its dropout
    lstm, gru, rnn with dropout                           one op a layer, dropout between

What draws a number of values that depends on data (rrelu), or by an algorithm of its own (multinomial, randperm), is refused by name.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partitioner.errors import CaptureError
from partitioner.passes.functional_builder import Builder, aten, first_value
from partitioner.passes.functional_schema import bind, source_of

Form = Callable[[Builder, fx.Node, dict[str, Any]], Any]
_ALPHA = 1.7580993408473766


def _scaled_noise(builder: Builder, x: fx.Node, p: float, feature: bool) -> fx.Node:
    like = first_value(x)
    if feature:
        with builder.mode, torch.no_grad():
            like = torch.empty([*like.shape[:2], *[1] * (like.ndim - 2)], dtype=like.dtype, device=like.device)
    else:
        like = builder.empty_like(like)
    mask = builder.draw(like, torch.bool, "bernoulli", 1 - p)
    return builder.cast(mask, like.dtype)


def dropout(builder: Builder, x: fx.Node, p: float, train: bool, feature: bool = False, alpha: bool = False) -> fx.Node:
    """`x` after dropout; `x` itself where nothing is dropped."""
    if p == 0 or not train or first_value(x).numel() == 0:
        return x
    if p == 1:
        return builder.emit(aten.mul.Tensor, x, builder.emit(aten.zeros_like.default, x))
    noise = _scaled_noise(builder, x, p, feature)
    if not alpha:
        return builder.emit(aten.mul.Tensor, x, builder.emit(aten.div.Tensor, noise, 1 - p))
    a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    b = builder.emit(aten.add.Tensor, noise, -1)
    b = builder.emit(aten.add.Tensor, builder.emit(aten.mul.Tensor, b, _ALPHA * a), _ALPHA * a * p)
    return builder.emit(aten.add.Tensor, builder.emit(aten.mul.Tensor, x, builder.emit(aten.mul.Tensor, noise, a)), b)


def _dropout_form(feature: bool = False, alpha: bool = False) -> Form:
    def form(builder: Builder, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        x = given["input"] if "input" in given else given["self"]
        return dropout(builder, x, given["p"], given["train"], feature, alpha)

    return form


def _native_dropout(builder: Builder, node: fx.Node, given: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    x, p = given["input"], given["p"]
    if p == 0 or given["train"] is False:
        return x, builder.emit(aten.ones_like.default, x, dtype=torch.bool)
    mask = builder.draw(builder.empty_like(first_value(x)), torch.bool, "bernoulli", 1 - p)
    scaled = builder.emit(aten.mul.Tensor, builder.emit(aten.mul.Tensor, x, builder.cast(mask, first_value(x).dtype)), 1 / (1 - p) if p < 1 else 0.0)
    return scaled, mask


def _fill(kind: str, first: str | None = None, second: str | None = None, defaults: tuple[float, float] = (0.0, 0.0)) -> Form:
    """A tensor of draws with the layout and dtype of the node's own example value."""

    def form(builder: Builder, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        a = given[first] if first is not None else defaults[0]
        b = given[second] if second is not None else defaults[1]
        like = first_value(node)
        if kind == "bernoulli" and not like.dtype.is_floating_point:
            return builder.draw(like, like.dtype, kind, a)
        return builder.draw(like, like.dtype, kind, a, b)

    return form


def _bernoulli_tensor(builder: Builder, node: fx.Node, given: dict[str, Any]) -> fx.Node:
    """Each element is 1 with the probability of its own: the uniform number eager draws for it lies below."""
    p = given["p"] if isinstance(given.get("p"), fx.Node) else given["self"]
    like = first_value(node)
    number = torch.float64 if first_value(p).dtype == torch.float64 else torch.float32
    uniform = builder.draw(like, number, "uniform", 0.0, 1.0)
    below = builder.emit(aten.lt.Tensor, uniform, builder.expand(builder.detached(p), like.shape))
    return builder.cast(below, like.dtype)


def _normal_tensor(builder: Builder, node: fx.Node, given: dict[str, Any]) -> fx.Node:
    """mean + std * normal(0, 1), either of them a tensor."""
    like = first_value(node)
    drawn = builder.draw(like, like.dtype, "normal", 0.0, 1.0)
    return builder.emit(aten.add.Tensor, builder.emit(aten.mul.Tensor, drawn, given["std"]), given["mean"])


def _attention(builder: Builder, node: fx.Node, given: dict[str, Any]) -> fx.Node | None:
    """Attention with dropout, as ATen writes it where no fused kernel is used; None without dropout."""
    if not given["dropout_p"]:
        return None
    query, key, value, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    origin = first_value(query).dtype
    if origin in (torch.float16, torch.bfloat16):  # half precision accumulates in float
        query, key, value = (builder.cast(t, torch.float32) for t in (query, key, value))
        mask = builder.cast(mask, torch.float32) if mask is not None and first_value(mask).dtype != torch.bool else mask
    like = first_value(query)
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(like.shape[-1])
    root = math.sqrt(abs(scale))
    if given["is_causal"]:
        size = [like.shape[-2], first_value(key).shape[-2]]
        mask = builder.emit(aten.tril.default, builder.emit(aten.ones.default, size, dtype=torch.bool, device=like.device))
    if mask is not None and first_value(mask).dtype == torch.bool:
        zeros = builder.emit(aten.zeros_like.default, mask, dtype=like.dtype)
        mask = builder.emit(aten.masked_fill.Scalar, zeros, builder.emit(aten.logical_not.default, mask), -math.inf)
    if given["enable_gqa"]:
        heads = like.shape[-3]
        for name, tensor in (("key", key), ("value", value)):
            repeats = heads // first_value(tensor).shape[-3]
            repeated = tensor if repeats == 1 else builder.emit(aten.repeat_interleave.self_int, tensor, repeats, -3)
            key, value = (repeated, value) if name == "key" else (key, repeated)
    query = builder.emit(aten.mul.Tensor, query, -root if scale < 0 else root)
    turned = builder.emit(aten.mul.Tensor, builder.emit(aten.transpose.int, key, -2, -1), root)
    attention = builder.emit(aten.matmul.default, query, turned)
    if mask is not None:
        attention = builder.emit(aten.add.Tensor, attention, mask)
    attention = builder.emit(aten._safe_softmax.default, attention, -1)
    attention = dropout(builder, attention, given["dropout_p"], True)
    return builder.cast(builder.emit(aten.matmul.default, attention, value), origin)


def _recurrent(builder: Builder, node: fx.Node, given: dict[str, Any]) -> tuple[fx.Node, ...] | None:
    """A stack of recurrent layers with dropout between them: one op a layer. None without dropout."""
    if not given["dropout"] or not given["train"] or given["num_layers"] == 1:
        return None
    directions = 2 if given["bidirectional"] else 1
    layers, params = given["num_layers"], given["params"]
    each, x = len(params) // layers, given["input"]
    states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    finals: list[list[fx.Node]] = [[] for _ in states]
    for layer in range(layers):
        mine = [builder.emit(aten.slice.Tensor, s, 0, layer * directions, (layer + 1) * directions) for s in states]
        hidden: Any = mine if isinstance(given["hx"], (list, tuple)) else mine[0]
        weights = params[layer * each : (layer + 1) * each]
        rest = (given["has_biases"], 1, 0.0, True, given["bidirectional"], given["batch_first"])
        made = builder.emit(node.target, x, hidden, weights, *rest)
        parts = [builder.emit(operator.getitem, made, i) for i in range(1 + len(states))]
        x = parts[0] if layer == layers - 1 else dropout(builder, parts[0], given["dropout"], True)
        for final, part in zip(finals, parts[1:], strict=True):
            final.append(part)
    return (x, *(builder.emit(aten.cat.default, final, 0) for final in finals))


def _refusal(node: fx.Node) -> str:
    name = str(node.target)
    why = "draws in a way that cannot be split over ranks and repeated"
    instead = "Draw with torch.rand / randn / bernoulli of a fixed shape, or draw outside the model and pass the result as an input."
    if "rrelu" in name:
        why = "draws one number per negative element, so how many depends on the data"
        instead = "Use leaky_relu, or multiply by torch.empty_like(x).uniform_(lower, upper) where x is negative."
    elif "multinomial" in name:
        instead = "Sample with the Gumbel trick: (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)."
    elif "randperm" in name:
        instead = "Write torch.rand(n).argsort()."
    elif bind(node).get("generator") is not None:
        why = "draws from a torch.Generator of its own, whose state the captured program does not hold"
    return f"{source_of(node)}: {name} {why}. {instead}"


def refuse_random(node: fx.Node) -> None:
    """Raise where a random op has no form here."""
    raise CaptureError(_refusal(node))


FORMS: dict[Any, Form] = {
    aten.dropout.default: _dropout_form(),
    aten.feature_dropout.default: _dropout_form(feature=True),
    aten.alpha_dropout.default: _dropout_form(alpha=True),
    aten.feature_alpha_dropout.default: _dropout_form(feature=True, alpha=True),
    aten.native_dropout.default: _native_dropout,
    aten.rand.default: _fill("uniform", defaults=(0.0, 1.0)),
    aten.rand_like.default: _fill("uniform", defaults=(0.0, 1.0)),
    aten.randn.default: _fill("normal", defaults=(0.0, 1.0)),
    aten.randn_like.default: _fill("normal", defaults=(0.0, 1.0)),
    aten.randint.default: _fill("integer", None, "high"),
    aten.randint.low: _fill("integer", "low", "high"),
    aten.randint_like.default: _fill("integer", None, "high"),
    aten.randint_like.low_dtype: _fill("integer", "low", "high"),
    aten.bernoulli.default: _bernoulli_tensor,
    aten.bernoulli.p: _fill("bernoulli", "p"),
    aten.normal.float_float: _fill("normal", "mean", "std"),
    aten.normal.Tensor_float: _normal_tensor,
    aten.normal.float_Tensor: _normal_tensor,
    aten.normal.Tensor_Tensor: _normal_tensor,
    aten.normal_functional.default: _fill("normal", "mean", "std"),
    aten.scaled_dot_product_attention.default: _attention,
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
}
for _with, _without in (
    (aten.rand.generator, aten.rand.default),
    (aten.rand_like.generator, aten.rand_like.default),
    (aten.randn.generator, aten.randn.default),
    (aten.randn_like.generator, aten.randn_like.default),
    (aten.randint.generator, aten.randint.default),
    (aten.randint.low_generator, aten.randint.low),
    (aten.randint_like.generator, aten.randint_like.default),
    (aten.randint_like.low_generator_dtype, aten.randint_like.low_dtype),
):
    FORMS[_with] = FORMS[_without]
"""Functional random ops. A form returns a node, a tuple for a multi-output op, or None to keep the op."""

IN_PLACE_FORMS: dict[Any, Form] = {
    aten.dropout_.default: _dropout_form(),
    aten.feature_dropout_.default: _dropout_form(feature=True),
    aten.alpha_dropout_.default: _dropout_form(alpha=True),
    aten.feature_alpha_dropout_.default: _dropout_form(feature=True, alpha=True),
    aten.uniform_.default: _fill("uniform", "from", "to"),
    aten.normal_.default: _fill("normal", "mean", "std"),
    aten.exponential_.default: _fill("exponential", "lambd"),
    aten.bernoulli_.float: _fill("bernoulli", "p"),
    aten.bernoulli_.Tensor: _bernoulli_tensor,
    getattr(aten.random_, "from"): _fill("integer", "from", "to"),
    aten.random_.to: _fill("integer", None, "to"),
}
"""Ops that fill `self` with random numbers; a form returns the new value of `self`."""


def is_random(node: fx.Node) -> bool:
    """Whether an op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draws_nothing(node: fx.Node, given: dict[str, Any]) -> bool:
    """Ops tagged as random that draw nothing as they are called here."""
    if "rrelu" in str(node.target):
        return given.get("training") is False
    if "dropout_p" in given:
        return not given["dropout_p"]
    return "num_layers" in given and (not given["dropout"] or not given["train"] or given["num_layers"] == 1)


