"""Every sharding rule, numerically: cut a label, run the op on each shard, recombine, compare with the whole op."""

from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from partitioner.passes.rules import decomposition, describe, localise, registry, tensor_arguments
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.language import parse
from tests.rule_cases import EMPTY_REFUSED, NOT_NUMERIC, ONLY_ROWS_EMPTY, Draw
from tests.rule_cases_layers import CASES

torch.set_num_threads(1)
SEEDS = (0, 1)


def overload(name: str) -> OpOverload:
    namespace, rest = name.split("::")
    op, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), variant)  # type: ignore[no-any-return]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def call_node(target: OpOverload, args: Any, kwargs: Any, value: Any) -> tuple[fx.Node, list[Tensor]]:
    """A graph node that stands for a call on real tensors, and those tensors in the order of `tensor_arguments`."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placeholder(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = x
        tensors.append(x)
        return node

    nodes, keywords = tree_map(placeholder, (args, kwargs))
    node = graph.call_function(target, nodes, keywords)
    node.meta["val"] = value
    return node, tensors


def piece(x: Tensor, dims: tuple[Dim, ...], sizes: dict[str, int], label: str, start: int, length: int) -> Tensor:
    """The part of a tensor whose label runs from start to start + length."""
    for position, dim in enumerate(dims):
        if label in dim:
            at = dim.index(label)
            outer, inner = prod(sizes[name] for name in dim[:at]), prod(sizes[name] for name in dim[at + 1 :])
            shape = x.shape
            x = x.reshape(*shape[:position], outer, sizes[label], inner, *shape[position + 1 :]).narrow(position + 1, start, length)
            x = x.reshape(*shape[:position], outer * length * inner, *shape[position + 1 :])
    return x.contiguous()


def join(parts: list[Tensor], dims: tuple[Dim, ...], sizes: dict[str, int], label: str, lengths: list[int]) -> Tensor:
    position = next(position for position, dim in enumerate(dims) if label in dim)
    dim = dims[position]
    at = dim.index(label)
    outer, inner = prod(sizes[name] for name in dim[:at]), prod(sizes[name] for name in dim[at + 1 :])
    split = [x.reshape(*x.shape[:position], outer, length, inner, *x.shape[position + 1 :]) for x, length in zip(parts, lengths, strict=True)]
    joined = torch.cat(split, position + 1)
    return joined.reshape(*parts[0].shape[:position], -1, *parts[0].shape[position + 1 :]) if joined.numel() else joined.flatten()


def close(found: Any, wanted: Any, what: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}")


def may_be_empty(target: OpOverload, dims: OpDims, label: str) -> bool:
    """Whether torch runs the op on a shard with nothing of this label."""
    name = str(target._schema.name).removeprefix("aten::")
    if name.startswith(EMPTY_REFUSED):
        return False
    if not name.startswith(ONLY_ROWS_EMPTY):
        return True
    first = dims.inputs[0]
    spatial = next((int(letter) for letter in name if letter.isdigit()), None)
    has_rows = first is not None and (spatial is None or len(first) == spatial + 2)
    return has_rows and label in first[0]  # type: ignore[index]


def check_cuts(target: OpOverload, args: Any, kwargs: Any) -> int:
    """Cut every label that may be cut; return how many there were."""
    whole = target(*args, **kwargs)
    node, tensors = call_node(target, args, kwargs, whole)
    dims = describe(node)
    assert dims is not None, f"{target} has no rule for {args} {kwargs}"
    assert len(dims.inputs) == len(tensors) == len(tensor_arguments(node))
    wholes = as_list(whole)
    assert len(dims.outputs) == len(wholes)
    cut = [label for label in dims.sizes if label not in dims.whole]
    for label in cut:
        size = dims.sizes[label]
        assert size > 1
        for lengths in ([1, size - 1], *([[size, 0]] if may_be_empty(target, dims, label) else ())):
            check_one(node, tensors, dims, wholes, label, lengths)
    check_linear(node, tensors, dims, wholes)
    return len(cut)


def local_dim(dim: Dim, sizes: dict[str, int], label: str, length: int) -> int:
    return prod(length if name == label else sizes[name] for name in dim)


def check_one(node: fx.Node, tensors: list[Tensor], dims: OpDims, wholes: list[Tensor], label: str, lengths: list[int]) -> None:
    what = f"{node.target} cut {label} of {dims} into {lengths}"
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    results: list[list[Tensor]] = []
    for start, length in zip(starts, lengths, strict=True):
        local = [x if entry is None else piece(x, entry, dims.sizes, label, start, length) for x, entry in zip(tensors, dims.inputs, strict=True)]
        shapes = [None if entry is None else [local_dim(dim, dims.sizes, label, length) for dim in entry] for entry in dims.outputs]
        result = run(node, local, shapes)
        for x, shape in zip(result, shapes, strict=True):
            assert shape is None or list(x.shape) == shape, what
        results.append(result)
    carried = any(label in dim for entry in dims.inputs if entry is not None for dim in entry)
    for position, (entry, wanted) in enumerate(zip(dims.outputs, wholes, strict=True)):
        parts = [result[position] for result in results]
        if entry is not None and any(label in dim for dim in entry):
            close(join(parts, entry, dims.sizes, label, lengths).reshape(wanted.shape), wanted, what)
        elif carried:
            close(sum(parts[1:], parts[0]), wanted, what)
        else:
            for part in parts:
                close(part, wanted, what)


def run(node: fx.Node, tensors: list[Tensor], shapes: list[list[int] | None]) -> list[Tensor]:
    """The node's op on local tensors."""
    args, kwargs = localise(node, node.args, dict(node.kwargs), shapes)
    given = iter(tensors)
    args, kwargs = tree_map(lambda x: next(given) if isinstance(x, fx.Node) else x, (list(args), kwargs))
    return as_list(node.target(*args, **kwargs))  # type: ignore[operator]


def check_linear(node: fx.Node, tensors: list[Tensor], dims: OpDims, wholes: list[Tensor]) -> None:
    """f(x + y) = f(x) + f(y) in the arguments of `linear` together and of `linear_one` one by one."""
    shapes: list[list[int] | None] = [list(x.shape) for x in wholes]
    for group in (dims.linear, *((index,) for index in dims.linear_one)):
        if not group or not all(tensors[index].is_floating_point() for index in group):
            continue
        first = [torch.randn_like(x) if index in group else x for index, x in enumerate(tensors)]
        second = [x - first[index] if index in group else x for index, x in enumerate(tensors)]
        for a, b, wanted in zip(run(node, first, shapes), run(node, second, shapes), wholes, strict=True):
            close(a + b, wanted, f"{node.target} in its arguments {group}", 1e-4)


def instances(name: str, seeds: Iterable[int] = SEEDS) -> Iterable[tuple[Any, Any]]:
    for case in CASES[name]:
        for seed in seeds:
            yield case(Draw(seed))


@pytest.mark.filterwarnings("ignore")  # torch's own, of deprecated ops
@pytest.mark.parametrize("name", sorted(CASES))
def test_cutting_any_label_gives_the_whole_op(name: str) -> None:
    for args, kwargs in instances(name):
        check_cuts(overload(name), args, kwargs)


def test_every_rule_has_a_case() -> None:
    covered = {*CASES, *(name.rsplit(".", 1)[0] for name in CASES)}
    assert set(registry.RULES) - covered <= NOT_NUMERIC


def decomposable() -> list[str]:
    return [name for name in sorted(CASES) if registry.find(registry.DECOMPOSERS, overload(name)) is not None]


def gradients(target: OpOverload, function: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor | None]:
    """Gradients of a weighted sum of the first result in the floating-point tensors that may have one (of a loss: its first argument)."""
    fixed = {"running_mean", "running_var"}
    names = [argument.name for argument in target._schema.arguments]
    if any(word in str(target) for word in ("loss", "entropy", "kl_div")):
        fixed |= set(names[1:])
    leaves: list[Tensor] = []

    def leaf(name: str, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and name not in fixed:
            x = x.detach().clone().requires_grad_()
            leaves.append(x)
        return x

    args = [leaf(name, x) for name, x in zip(names, args, strict=False)]
    out = as_list(function(*args, **{name: leaf(name, x) for name, x in kwargs.items()}))[0]
    if not out.requires_grad:
        return []
    weight = torch.arange(1, out.numel() + 1, dtype=out.dtype).reshape(out.shape)
    (out * weight).sum().backward()
    return [x.grad for x in leaves]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", decomposable())
def test_decomposition(name: str) -> None:
    """Equal to the op in value and gradient; every finer op has a rule, and cutting any of its labels is right too."""
    target = overload(name)
    for args, kwargs in instances(name, (0, 1)):
        whole = target(*args, **kwargs)
        finer = decomposition(call_node(target, args, kwargs, whole)[0])
        if finer is None:
            continue
        for found, wanted in zip(as_list(finer(*args, **kwargs)), as_list(whole), strict=True):
            close(found, wanted, f"decomposition of {target}")
        for mine, theirs in zip(gradients(target, finer, args, kwargs), gradients(target, target, args, kwargs), strict=True):
            close(mine, theirs, f"gradient of the decomposition of {target}")
        leaves, spec = tree_flatten((args, kwargs))
        traced = make_fx(partial(with_tensors, finer, leaves, spec), pre_dispatch=True)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        Checker(traced(*tensors)).run(*tensors)


def with_tensors(function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, *tensors: Tensor) -> Any:
    """Call with the tensors among the flattened arguments replaced."""
    given = iter(tensors)
    args, kwargs = tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)
    return function(*args, **kwargs)


class Checker(fx.Interpreter):
    """Runs a traced decomposition and checks every op on the way; no tensor constants may have been baked in."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, OpOverload):
            check_cuts(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError(f"the decomposition holds the constant tensor {target}")


def test_losses_of_rows_that_are_all_ignored() -> None:
    """A shard of ignored targets adds 0 to the sum; a batch of them is nan, as in torch."""
    x, ignored = torch.randn(4, 5), torch.full((4,), -100)
    node, _ = call_node(torch.ops.aten.cross_entropy_loss.default, (x, ignored), {}, torch.tensor(0.0))
    finer = decomposition(node)
    assert finer is not None and finer(x, ignored).isnan()
    assert finer(x, torch.tensor([1, 2, -100, -100])).isfinite()
    assert torch.ops.aten.cross_entropy_loss.default(x, ignored, None, 2) == 0


def test_decomposed_means_keep_the_precision_of_16_bits() -> None:
    x = torch.full((70_000,), 1.0, dtype=torch.float16)  # the sum overflows in 16 bits
    node, _ = call_node(torch.ops.aten.mean.default, (x,), {}, x.mean())
    finer = decomposition(node)
    assert finer is not None and finer(x) == 1 and finer(x).dtype == torch.float16


def test_norm_of_a_zero_row_has_gradient_zero() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    for target, args in ((torch.ops.aten.linalg_vector_norm.default, (x, 2, [1])), (torch.ops.aten.std.correction, (x, [1]))):
        finer = decomposition(call_node(target, args, {}, target(*args))[0])
        assert finer is not None
        assert all((g == 0).all() for g in gradients(target, finer, args, {}) if g is not None)


# ---- named examples, so that a wrong rule shows as text ----


def dims_of(target: OpOverload, *args: Any, **kwargs: Any) -> OpDims:
    found = describe(call_node(target, args, kwargs, target(*args, **kwargs))[0])
    assert found is not None
    return found


def test_linear_by_name() -> None:
    found = dims_of(torch.ops.aten.linear.default, torch.randn(8, 10, 32), torch.randn(64, 32), torch.randn(64))
    assert found.inputs == ((("b0",), ("b1",), ("i",)), (("o",), ("i",)), (("o",),))
    assert found.outputs == ((("b0",), ("b1",), ("o",)),)
    assert found.sizes == {"b0": 8, "b1": 10, "i": 32, "o": 64}
    assert found.whole == {"i"}  # for the bias; without one a cut of i is a Partial
    assert str(found.flops) == "2*b0*b1*i*o"
    assert not dims_of(torch.ops.aten.linear.default, torch.randn(8, 32), torch.randn(64, 32)).whole


def test_views_factor_from_the_left() -> None:
    found = dims_of(torch.ops.aten.view.default, torch.randn(8, 10, 32), [80, 4, 8])
    assert found.inputs == ((("d0",), ("d1",), ("d2", "d3")),) and found.outputs == ((("d0", "d1"), ("d2",), ("d3",)),)
    assert dims_of(torch.ops.aten.view.default, torch.randn(3, 4), [4, 3]).whole == {"d0", "d1", "d2", "d3"}


def test_a_square_mask_is_not_the_batch() -> None:
    x = torch.randn(8, 2, 8, 4)
    found = dims_of(torch.ops.aten.scaled_dot_product_attention.default, x, x, x, torch.ones(8, 8, dtype=torch.bool))
    batch = found.inputs[0][0]  # type: ignore[index]
    assert batch[0] not in {label for dim in found.inputs[3] or () for label in dim}


def test_new_zeros_reads_nothing_of_its_tensor() -> None:
    assert dims_of(torch.ops.aten.new_zeros.default, torch.randn(3), [2, 4]).inputs == (None,)


def test_random_is_made_by_the_op() -> None:
    from partitioner.passes.randomness import random

    args = ([4, 3], torch.float32, torch.device("cpu"), "uniform", 0.0, 1.0, 5, 0)
    node, _ = call_node(random._opoverload, args, {}, random(*args))
    found = describe(node)
    assert found is not None and found.inputs == () and not found.whole
    assert localise(node, node.args, {}, [[2, 3]])[0][0] == [2, 3]


def test_localise_takes_symbolic_sizes_and_writes_out_minus_one() -> None:
    graph = fx.Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    x.meta["val"] = torch.randn(8, 6)
    node = graph.call_function(torch.ops.aten.view.default, (x, [-1, 2, 3]))
    assert localise(node, node.args, {}, [[rows, 2, 3]]) == ((x, [rows, 2, 3]), {})
    node = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 8))
    assert localise(node, node.args, {}, [[rows, 6]]) == ((x, 0, 0, rows), {})
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    assert localise(node, node.args, {}, [[rows, 6]]) == ((x,), {})


def test_unknown_ops_have_no_rule() -> None:
    x = torch.randn(3, 3)
    assert describe(call_node(torch.ops.aten.nonzero.default, (x,), {}, x.nonzero())[0]) is None
    node, _ = call_node(torch.ops.aten.index.Tensor, (x, [x > 0]), {}, x[x > 0])
    assert describe(node) is None


@pytest.mark.parametrize("bad", ["b.. i, o i b.. o", "b.. I -> b..", "b.. (i -> b.."])
def test_bad_rule_texts_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"->|cannot read"):
        parse(bad)


# ---- shapes at large ----


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_view(shape: list[int], random: Any) -> None:
    factors = [p for size in shape for p in ([2, 2] if size == 4 else [2, 3] if size == 6 else [size] if size > 1 else [])]
    if random.random() < 0.3:
        random.shuffle(factors)
    target: list[int] = []
    while factors:
        take = random.randint(1, len(factors))
        target.append(prod(factors[:take]))
        factors = factors[take:]
        if random.random() < 0.2:
            target.append(1)
    check_cuts(torch.ops.aten.view.default, (torch.arange(prod(shape), dtype=torch.float64).reshape(shape), target), {})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=4), st.integers(0, 4), st.integers(0, 4))
def test_any_broadcast(columns: list[tuple[int, bool, bool]], drop_a: int, drop_b: int) -> None:
    a = [size if keep else 1 for size, keep, _ in columns][drop_a:]
    b = [size if keep else 1 for size, _, keep in columns][drop_b:]
    for target in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor):
        check_cuts(target, (torch.randn(a, dtype=torch.float64), torch.randn(b, dtype=torch.float64)), {})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=2), st.lists(st.integers(1, 3), max_size=2), st.tuples(*[st.integers(1, 4)] * 3))
def test_any_matmul(left: list[int], right: list[int], ijk: tuple[int, int, int]) -> None:
    i, j, k = ijk
    facing = [1] * (len(right) - len(left)) + left[max(len(left) - len(right), 0) :]
    right = [theirs if 1 in (mine, theirs) else mine for mine, theirs in zip(facing, right, strict=True)]
    a, b = torch.randn(*left, i, k, dtype=torch.float64), torch.randn(*right, k, j, dtype=torch.float64)
    check_cuts(torch.ops.aten.matmul.default, (a, b), {})
