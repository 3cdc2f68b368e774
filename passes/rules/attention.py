"""Attention: rows and heads are free, sequence and head dims are whole."""

import sympy

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by, product
from partitioner.passes.rules.registry import rule


def attention_flops(batch: list[Dim], l: Dim, s: Dim, e: Dim, v: Dim, forward: bool) -> sympy.Expr:  # noqa: E741
    """Forward: scores and their product with the values. Backward: scores again, then the gradients of scores, values, queries and keys
    (torch.utils.flop_counter, sdpa_flop_count and sdpa_backward_flop_count)."""
    over_e = product(2, *batch, l, s, e)
    over_v = product(2, *batch, l, s, v)
    return over_e + over_v if forward else 3 * over_e + 2 * over_v


def attention_dims(call: Call) -> tuple[Labels, dict[str, list[Dim]], list[Dim], tuple[list[Dim], Dim, Dim, Dim, Dim]] | None:
    """Labels, inputs, result and (batch and heads, l, s, e, v) of scaled_dot_product_attention.

        query [b.., h g, l, e], key [b.., h, s, e], value [b.., h, s, v], mask broadcasting to [b.., h g, l, s] -> [b.., h g, l, v]

    With grouped queries g query heads share a key head; a shard of h takes its query heads along.
    """
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    rank = len(query)
    if not rank == len(key) == len(value) or rank < 2:
        return None
    labels = Labels()
    l, s = labels.new(query[-2], "l", whole=True), labels.new(key[-2], "s", whole=True)  # noqa: E741
    e, v = labels.new(query[-1], "e", whole=True), labels.new(value[-1], "v", whole=True)
    sizes = [a if a != 1 else b if b != 1 else c for a, b, c in zip(query[:-2], key[:-2], value[:-2], strict=True)]
    batch = labels.of(sizes, "b")

    def fitted(shape: tuple[int, ...]) -> list[Dim]:
        return [() if size == 1 else dim for size, dim in zip(shape[:-2], batch, strict=True)]

    parts = [fitted(shape) for shape in (query, key, value)]
    if call.get("enable_gqa") and rank > 2 and query[-3] != key[-3]:
        if key[-3] != value[-3] or query[-3] % key[-3]:
            return None
        shared, group = labels.new(key[-3], "h"), labels.new(query[-3] // key[-3], "g")
        batch[-1] = parts[0][-1] = (*shared, *group)
        parts[1][-1] = parts[2][-1] = shared
    inputs = {"query": [*parts[0], l, e], "key": [*parts[1], s, e], "value": [*parts[2], s, v]}
    if call.is_tensor("attn_mask"):
        mask = call.shape("attn_mask")
        if len(mask) > rank:
            return None
        full = [*batch, l, s]
        inputs["attn_mask"] = [() if size == 1 else dim for size, dim in zip(mask, full[rank - len(mask) :], strict=True)]
    return labels, inputs, [*batch, l, v], (batch, l, s, e, v)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> OpDims | None:
    found = attention_dims(call)
    if found is None:
        return None
    labels, inputs, out, (batch, l, s, e, v) = found  # noqa: E741
    return describe_by(call, labels, inputs, [out], linear=("value",), flops=attention_flops(batch, l, s, e, v, forward=True))
