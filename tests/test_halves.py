"""A backward in two halves: together they are backward to the bit, their footprints are what happens to the byte, and each does its share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partitioner.cluster import Cluster
from partitioner.cost import op_cost
from partitioner.passes.block import BlockFunction, Blocks, Footprint
from partitioner.passes.differentiate import differentiate
from partitioner.passes.emit import compile_source, emit
from partitioner.passes.halves import halve
from partitioner.passes.liveness import peak
from partitioner.passes.split import split
from partitioner.prepare import Prepared, prepare
from tests import lockstep
from tests.blocks_support import measured_peak, placed_blocks
from tests.models import MODELS, Case, cast
from tests.test_differentiate import one_block
from tests.test_emit import MODELS as SMALL
from tests.test_emit import bytes_of, own

torch.set_num_threads(1)
aten = torch.ops.aten
ZOO = ("hf_llama", "hf_t5", "unet", "hf_gpt2", "resnet")
CLUSTER = Cluster.preset("h100-sxm")

GOLDEN = """\
@torch.no_grad()
def small_backward_input(arguments):
    # hand: the gradients of reads 0, then values for the other half (2)
    (
        x,  # value [8, 6] f32
        scale,  # parameter [6] f32
        weight,  # parameter [4, 6] f32
        tanh,  # saved [8, 4] f32
        tangent_0,  # tangent [8, 4] f32
    ) = arguments
    arguments.clear()
    tanh_backward = aten_tanh_backward(tangent_0, tanh)  # [8, 4] f32
    del tanh, tangent_0
    mm_2 = aten_mm(tanh_backward, weight)  # [8, 6] f32
    del weight
    mul_1 = aten_mul_Tensor(mm_2, x)  # [8, 6] f32
    del x
    mul_2 = aten_mul__Tensor(mm_2, scale)  # [8, 6] f32
    del scale, mm_2
    sum_1 = aten_sum_dim_IntList(mul_1, [0], True)  # [1, 6] f32
    del mul_1
    return (mul_2, tanh_backward, sum_1)


@torch.no_grad()
def small_backward_weight(arguments):
    # hand: the gradients of reads 1, 2
    (
        x,  # value [8, 6] f32
        scale,  # parameter [6] f32
        tanh_backward,  # carried [8, 4] f32
        sum_1,  # carried [1, 6] f32
    ) = arguments
    arguments.clear()
    t_1 = aten_t(tanh_backward)  # [4, 8] f32
    del tanh_backward
    mul = aten_mul_Tensor(x, scale)  # [8, 6] f32
    del x, scale
    mm_1 = aten_mm(t_1, mul)  # [4, 6] f32
    del t_1, mul
    view = aten_reshape(sum_1, [6])  # [6] f32
    del sum_1
    return (view, mm_1)
"""


def work(node: Any, rows: int | None, typical: int | None) -> float:
    return float(op_cost(node, CLUSTER).flops)


def prepared(name: str, change: Callable[[Case], Case] = lambda case: case) -> tuple[Prepared, dict[str, Any]]:
    """A zoo model on one rank, ops priced by their FLOPs, and the values of its inputs."""
    case = change(MODELS[name]())
    given = lockstep.captured(case["model"], case["args"], case["kwargs"], case["loss_fn"], case["targets"])
    values = {n: v.detach() if isinstance(v, Tensor) else v for n, v in given.values.items()}
    return prepare(given.original, batch_dim="auto", ranks=1, in_time=False, keyed=False, seconds=work), {**values, "key_local": -1, "key_shared": -1}


def with_halves(blocks: Blocks, rows: int, keep_all: bool) -> dict[str, BlockFunction]:
    functions = {}
    for name, cls in blocks.classes.items():
        joint = differentiate(cls, rows)
        kinds = {n.name: n.meta.get("kind") for n in joint.placeholders[: joint.reads]}
        saved = {n for n, kind in kinds.items() if kind == "value"}
        if keep_all:
            saved |= {n for n in joint.forward if isinstance(joint.nodes[n].meta["val"], Tensor)}
        ahead, back = split(joint, saved, kinds.keys() - saved)
        functions[name] = emit(cls, ahead, back, name, None if back is None else halve(joint, back))
    return functions


def exactly(run: Callable[[list[object]], tuple[Tensor, ...]], footprint: Footprint, arguments: list[Any], rows: int) -> tuple[Tensor, ...]:
    """Run on the only references to the arguments; what is held must be as foretold."""
    foretold = peak(footprint, rows, bytes_of(arguments))
    out, measured = measured_peak(run, arguments)
    assert arguments == [] and measured == foretold
    return out


def compare(function: BlockFunction, saved: list[Any], tangents: list[Tensor], rows: int) -> None:
    """Backward and the two halves on the same arguments."""
    halves, arguments = function.halves, [*saved, *tangents]
    assert function.backward is not None and halves is not None
    copies = [own(one) for one in arguments]
    expected = dict(zip(function.gradients, function.backward(list(arguments)), strict=True))
    first = exactly(halves.backward_input, halves.input_footprint, [own(one) for one in arguments], rows)
    assert len(first) == len(halves.values) + halves.carried
    found = dict(zip(halves.values, first, strict=False))
    if halves.backward_weight is not None:
        assert halves.weight_footprint is not None
        carried = first[len(halves.values) :]
        before = [own(one) for one in found.values()]
        given: list[Any] = [own(arguments[at]) for at in halves.handed]
        given += carried
        del carried, first
        last = exactly(halves.backward_weight, halves.weight_footprint, given, rows)
        assert all(torch.equal(now, then) for now, then in zip(found.values(), before, strict=True))  # it writes into nothing of the caller's
        found |= zip(halves.parameters, last, strict=True)
        assert len({one.untyped_storage()._cdata for one in last}) == len(last)
        assert all(one.is_contiguous() for one in last)
    assert found.keys() == expected.keys()
    for read, gradient in expected.items():
        assert torch.equal(found[read].nan_to_num(), gradient.nan_to_num()), (function.name, read)
    for one, copy in zip(arguments, copies, strict=True):
        assert not isinstance(one, Tensor) or torch.equal(one.nan_to_num(), copy.nan_to_num())


def check(blocks: Blocks, functions: dict[str, BlockFunction], given: dict[str, Any], rows: int) -> None:
    """Every class at its first instance, on values as they come in forward and on random tangents."""
    values: dict[str, Tensor] = {}
    seen: set[str] = set()
    for block in blocks.blocks:
        function = functions[block.cls]
        reads = [own(values[p.name] if p.kind == "value" else given[p.name]) for p in block.reads]
        out = function.forward(list(reads))
        values |= dict(zip(block.writes, out, strict=False))
        if function.backward is None or block.cls in seen:
            continue
        seen.add(block.cls)
        saved = [reads[s.index] if s.kind == "read" else out[function.writes + s.index] for s in function.saved]
        compare(function, saved, [torch.randn_like(values[block.writes[i]]) for i in function.tangents], rows)
    assert seen


@pytest.mark.parametrize("name", SMALL)
def test_halves_are_backward_at_any_number_of_rows(name: str) -> None:
    torch.manual_seed(0)
    model, x, loss = SMALL[name]()
    blocks, _ = placed_blocks(model, (x,), loss)
    state = {n: v.detach() for n, v in (*model.named_parameters(), *model.named_buffers())}
    for keep_all in (True, False) if name != "batch_norm" else (True,):  # its collectives are not to be made again
        functions = with_halves(blocks, 2, keep_all)
        for rows in (0, 1, 3):
            check(blocks, functions, {**state, "args[0]": x[:rows], "rows": rows, "start": 0, "share": 1.0, "key_local": 1, "key_shared": 1}, rows)


@pytest.mark.parametrize("name", ZOO)
def test_halves_are_backward_for_any_saved_set(name: str) -> None:
    torch.manual_seed(0)
    plan, given = prepared(name, lambda case: cast(case, torch.float64))
    points = {cls: plan.frontier(cls, 3) for cls in plan.blocks.classes}
    for at in range(max(map(len, points.values()))):
        functions = {cls: plan.function(cls, found[min(at, len(found) - 1)].saved, halves=True) for cls, found in points.items()}
        check(plan.blocks, functions, given, 0)


def test_golden_text() -> None:
    """A product in each half; what is reduced of a scale's gradient is carried finished, a view of it made again; x is handed over, not a copy."""

    def make(graph: fx.Graph, n: dict[str, fx.Node]) -> list[fx.Node]:
        scaled = graph.call_function(aten.mul.Tensor, (n["x"], n["scale"]))
        turned = graph.call_function(aten.t.default, (n["weight"],))
        return [graph.call_function(aten.tanh.default, (graph.call_function(aten.mm.default, (scaled, turned)),))]

    cls = one_block(make, {"x": ((8, 6), True, None), "scale": ((6,), True, None), "weight": ((4, 6), True, None)})
    for node in cls.module.graph.nodes:
        if node.name in ("scale", "weight"):
            node.meta["kind"] = "parameter"
    joint = differentiate(cls, None)
    ahead, back = split(joint, ("x", "tanh"), ("scale", "weight"))
    assert back is not None
    function = emit(cls, ahead, back, "small", halve(joint, back))
    assert function.source.endswith("\n\n\n" + GOLDEN)
    assert function.halves is not None
    assert (function.halves.values, function.halves.parameters, function.halves.handed, function.halves.carried) == ((0,), (1, 2), (0, 1), 2)
    plain = emit(cls, ahead, back, "small")
    assert plain.halves is None and "backward_input" not in plain.source
    made = compile_source(plain.source, "small")
    assert made.backward_input is made.backward and made.backward_weight is None


@pytest.mark.parametrize("name", ["hf_llama", "unet"])
def test_the_halves_share_the_flops(name: str) -> None:
    plan, _ = prepared(name)
    both = 0
    for cls in plan.blocks.classes:
        function = plan.function(cls, plan.frontier(cls, 2)[-1].saved, halves=True)
        forward, backward = plan.price(function, False, 1), plan.price(function, True, 1)
        first, last = plan.price_half(function, False, 1), plan.price_half(function, True, 1)
        assert first + last == backward
        if function.halves is not None and function.halves.values and forward:
            assert abs(first / forward - 1) < 0.35 and abs(last / forward - 1) < 0.35
            both += 1
    assert both >= 2
