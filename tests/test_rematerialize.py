"""The frontier against exhaustive search on small random graphs, and against torch's own options on a Llama block."""

import time
import warnings
from collections.abc import Callable
from functools import cache
from itertools import combinations

import pytest
import torch
import torch._functorch.config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import flop_registry

from partitioner.passes.block import BlockClass
from partitioner.passes.differentiate import Joint, differentiate, root
from partitioner.passes.emit import emit
from partitioner.passes.remat_encode import communications, draws
from partitioner.passes.rematerialize import Point, RematProblem, Value, encode, frontier, price
from partitioner.passes.split import split

torch.set_num_threads(1)
aten = torch.ops.aten


@st.composite
def problems(draw: st.DrawFn) -> RematProblem:
    """Random graphs with views, multi-output ops, free and unrepeatable values, and values that only backward's formulas use."""
    values: list[Value] = []
    storage_bytes: dict[str, int] = {}
    for k in range(draw(st.integers(1, 9))):
        name = f"v{k}"
        inputs = tuple(v.name for v in values if draw(st.integers(0, 2)) == 0)
        late = any(v.late for v in values if v.name in inputs) or draw(st.integers(0, 3)) == 0
        kind = draw(st.sampled_from(["op", "op", "op", "op", "view", "tuple", "free", "once"]))
        bases, picks = [v for v in values if v.storage], [v for v in values if v.storage is None]
        if kind == "view" and bases:
            base = draw(st.sampled_from(bases))
            values.append(Value(name, (base.name,), 0.0, base.storage, late=late or base.late))
            continue
        if kind == "tuple":
            values.append(Value(name, inputs, float(draw(st.integers(0, 9))), None, late=late))
            continue
        storage_bytes[name] = draw(st.integers(0, 9))
        if kind == "free":
            values.append(Value(name, storage=name, free=True))
        elif draw(st.booleans()) and picks:
            pick = draw(st.sampled_from(picks))
            values.append(Value(name, (pick.name,), 0.0, name, late=late or pick.late))
        else:
            values.append(Value(name, inputs, float(draw(st.integers(0, 9))), name, recomputable=kind != "once", late=late))
    needed = frozenset(v.name for v in values if draw(st.booleans()))
    return RematProblem(tuple(values), storage_bytes, needed)


def everything(problem: RematProblem) -> list[tuple[int, float]]:
    """The Pareto frontier by trying every set of storages."""
    representatives = {v.storage: v.name for v in reversed(problem.values) if v.storage is not None}
    points = set()
    for size in range(len(representatives) + 1):
        for names in combinations(representatives.values(), size):
            try:
                point = price(problem, names)
            except ValueError:
                continue
            points.add((point.saved_bytes, point.recompute_seconds))
    return sorted(p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equals_exhaustive_search(problem: RematProblem) -> None:
    points = frontier(problem)
    assert [(p.saved_bytes, p.recompute_seconds) for p in points] == everything(problem)
    for point in points:
        assert price(problem, point.saved) == point


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 4))
def test_a_limit_thins_but_every_point_stays_optimal(problem: RematProblem, limit: int) -> None:
    every = everything(problem)
    points = [(p.saved_bytes, p.recompute_seconds) for p in frontier(problem, limit)]
    assert len(points) == min(limit, len(every))
    assert points[0] == every[0] and points[-1] == every[-1]
    assert set(points) <= set(every)


def test_work_that_only_backward_does_is_no_recomputation() -> None:
    """x -> a (forward) -> z (late): from x everything is made again; z costs its seconds only where it is made twice."""
    values = (Value("x", (), 0, "x", recomputable=False), Value("a", ("x",), 5.0, "a"), Value("z", ("a",), 3.0, "z", late=True))
    problem = RematProblem(values, {"x": 10, "a": 100, "z": 20}, frozenset({"z"}))
    assert [(p.saved_bytes, p.recompute_seconds) for p in frontier(problem)] == [(10, 5.0), (20, 0.0)]


def test_refusals() -> None:
    stuck = RematProblem((Value("t", (), 1.0, None, recomputable=False),), {}, frozenset({"t"}))
    with pytest.raises(ValueError, match="neither be saved nor recomputed"):
        frontier(stuck)
    with pytest.raises(ValueError, match="two ends"):
        frontier(RematProblem((), {}, frozenset()), limit=1)
    with pytest.raises(ValueError, match="topological order"):
        RematProblem((Value("a", ("b",)), Value("b")), {}, frozenset())


# --- a Llama block


@cache
def llama() -> tuple[Joint, frozenset[str]]:
    """The joint graph of one decoder layer, and the names of its parameters."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(hidden_size=256, intermediate_size=688, num_attention_heads=8, num_key_value_heads=4, attn_implementation="sdpa")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, 0)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return self.layer(x, position_embeddings=(cos, sin))  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = (torch.randn(4, 128, 256, requires_grad=True), torch.randn(1, 128, 32), torch.randn(1, 128, 32))
        module = torch.export.export(Layer(), inputs, strict=False).graph_module
    for node in list(module.graph.nodes):
        if "_assert_tensor_metadata" in str(node.target):
            module.graph.erase_node(node)
    reads = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in reads:
        node.meta["kind"] = "parameter" if node.name.startswith("p_") else "value"
    wants = tuple(node.name not in ("cos", "sin") for node in reads)
    return differentiate(BlockClass("llama", module, wants, (0,), {}), None), frozenset(n.name for n in reads if n.name.startswith("p_"))


def seconds(node: fx.Node) -> float:
    """A roofline: 50 Gflop/s, 10 GB/s, 2 µs a launch."""
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    moved = sum(t.numel() * t.itemsize for t in (*results, *(i.meta.get("val") for i in node.all_input_nodes)) if isinstance(t, torch.Tensor))
    formula: Callable[..., int] | None = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    return max(formula(*values, **node.kwargs, out_val=node.meta["val"]) / 5e10 if formula else 0.0, moved / 1e10) + 2e-6


@cache
def llama_problem() -> RematProblem:
    joint, parameters = llama()
    return encode(joint, seconds, parameters, frozenset())


def test_a_llama_block_takes_no_long_time() -> None:
    problem = llama_problem()
    start = time.process_time()
    every = frontier(problem)
    assert time.process_time() - start < 4
    assert len(every) > 50
    start = time.process_time()
    some = frontier(problem, limit=24)
    assert time.process_time() - start < 2
    assert len(some) == 24 and {(p.saved_bytes, p.recompute_seconds) for p in some} <= {(p.saved_bytes, p.recompute_seconds) for p in every}
    assert every[-1].recompute_seconds == 0
    assert every[0].saved == {"x", "cos", "sin"}  # the block's own inputs: whole-block checkpoint


@cache
def llama_frontier() -> tuple[Point, ...]:
    return frontier(llama_problem())


def least_seconds(within_bytes: int) -> float:
    return min(p.recompute_seconds for p in llama_frontier() if p.saved_bytes <= within_bytes)


def test_no_more_recomputation_than_a_full_checkpoint_for_its_memory() -> None:
    full = price(llama_problem(), {"x", "cos", "sin"})
    assert least_seconds(full.saved_bytes) <= full.recompute_seconds


POLICIES = {
    "matmuls": {aten.mm.default, aten.bmm.default, aten.addmm.default},
    "attention": {aten._scaled_dot_product_flash_attention_for_cpu.default},
    "matmuls and attention": {aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default},
    "matmuls and pointwise": {aten.mm.default, aten.mul.Tensor, aten.silu.default},
    "norms": {aten.rsqrt.default},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_dominates_selective_checkpoint_policies(policy: str) -> None:
    """What create_selective_checkpoint_contexts(list of ops) saves: the block's inputs and the results of these ops."""
    joint, _ = llama()
    chosen = [n for n in joint.module.graph.nodes if n.name in joint.forward and n.target in POLICIES[policy]]
    names = {"x", "cos", "sin"} | {user.name for n in chosen for user in ((n,) if isinstance(n.meta["val"], torch.Tensor) else n.users)}
    theirs = price(llama_problem(), names)
    assert least_seconds(theirs.saved_bytes) <= theirs.recompute_seconds + 1e-12


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.6, 1.0])
def test_dominates_torch_min_cut(budget: float) -> None:
    joint, _ = llama()
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(joint.placeholders):
        env[node] = graph.placeholder(f"primals_{index + 1}" if index < joint.reads else f"tangents_{index - joint.reads + 1}")
        env[node].meta = dict(node.meta)
    for node in joint.module.graph.nodes:
        if node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in joint.results))
    names = {new.name: old.name for old, new in env.items()}
    module = fx.GraphModule(torch.nn.Module(), graph)
    with torch._functorch.config.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops"):
        forward, _ = min_cut_rematerialization_partition(module, None, num_fwd_outputs=joint.writes)
    saved = list(next(iter(reversed(forward.graph.nodes))).args[0])[joint.writes :]
    theirs = price(llama_problem(), {names[node.name] for node in saved})
    assert least_seconds(theirs.saved_bytes) <= theirs.recompute_seconds + 1e-12


def test_split_does_what_the_point_says() -> None:
    joint, parameters = llama()
    problem = llama_problem()
    late = {v.name for v in problem.values if v.late}
    for point in frontier(problem, limit=12):
        _, backward = split(joint, point.saved, parameters)
        assert backward is not None
        again = [n for n in backward.recomputed if n not in late]
        assert sum(problem.by_name[n].seconds for n in again) == pytest.approx(point.recompute_seconds, abs=1e-12)
        handed = [n for n in backward.graph.nodes if n.op == "placeholder"][: len(backward.saved)]
        storages = {root(joint.nodes[n.name]) for n in handed if n.name not in parameters}
        assert sum(maker.meta["storages"][index].at(0) for maker, index in storages) == point.saved_bytes


# --- draws and collectives


def scaled_by(op: Callable[[fx.Graph, fx.Node], fx.Node]) -> Joint:
    """sigmoid(x) times what `op` makes of it, differentiated with respect to x."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(8, 4, device="meta"), kind="value")
    base = graph.call_function(aten.sigmoid.default, (x,))
    out = graph.call_function(aten.mul.Tensor, (base, op(graph, base)))
    out.meta["val"] = torch.empty(8, 4, device="meta")
    graph.output((out,))
    return differentiate(BlockClass("test", fx.GraphModule(torch.nn.Module(), graph), (True,), (0,), {}), None)


def test_eager_draws_are_kept_and_keyed_ones_need_not_be() -> None:
    arguments = ([8, 4], torch.float32, torch.device("meta"), "uniform", 0.0, 1.0, 3, 1)
    joint = scaled_by(lambda graph, _: graph.call_function(torch.ops.partitioner.random.default, arguments))
    (draw,) = draws(joint)
    kept, keyed = (frontier(encode(joint, lambda node: 1.0, frozenset(), keep)) for keep in (draws(joint), frozenset[str]()))
    assert all(draw in point.saved for point in kept)
    assert not any(draw in point.saved for point in keyed if point.recompute_seconds)


def test_a_collective_that_is_kept_is_never_run_again() -> None:
    joint = scaled_by(lambda graph, x: graph.call_function(torch.ops.partitioner.all_reduce.default, (x, "dp")))
    (reduced,) = communications(joint) & joint.forward
    kept = frontier(encode(joint, lambda node: 1.0, frozenset(), communications(joint)))
    again = frontier(encode(joint, lambda node: 1.0, frozenset(), frozenset()))
    assert all(reduced in point.saved for point in kept)
    assert reduced not in again[0].saved and again[0].saved_bytes < kept[0].saved_bytes


def test_a_mask_of_backwards_formula_is_saved_instead_of_its_float_input() -> None:
    """The derivative of clamp needs x only for a mask: a quarter of the bytes, made by forward on backward's behalf."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(8, 4), kind="value")
    out = graph.call_function(aten.clamp.default, (x, -1.0, 1.0))
    out.meta["val"] = torch.empty(8, 4)
    graph.output((out,))
    cls = BlockClass("clamp", fx.GraphModule(torch.nn.Module(), graph), (True,), (0,), {})
    joint = differentiate(cls, None)
    (point,) = frontier(encode(joint, lambda node: 1.0, frozenset(), frozenset()))
    assert (point.saved_bytes, point.recompute_seconds) == (8 * 4, 0.0)
    function = emit(cls, *split(joint, point.saved), "clamp")
    assert function.backward is not None
    leaf, tangent = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
    _, mask = function.forward([leaf.detach()])
    (gradient,) = function.backward([mask, tangent])
    leaf.clamp(-1.0, 1.0).backward(tangent)  # type: ignore[no-untyped-call]
    assert torch.equal(gradient, leaf.grad)  # type: ignore[arg-type]
