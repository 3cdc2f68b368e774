"""Emitted functions: their text, that they empty their arguments, and that their footprints are what happens, to the byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner.errors import CaptureError
from partitioner.passes.block import BlockFunction, Bytes, Footprint
from partitioner.passes.differentiate import differentiate
from partitioner.passes.emit import emit, emit_source_file
from partitioner.passes.liveness import peak
from partitioner.passes.split import split
from tests.blocks_support import function_of, functions_of, measured_peak, placed_blocks, run_chain
from tests.test_differentiate import CONV, Attention, squares

torch.set_num_threads(1)

GOLDEN = '''\
import torch

aten_addmm = torch.ops.aten.addmm.default
aten_expand = torch.ops.aten.expand.default
aten_mm = torch.ops.aten.mm.default
aten_mul_Scalar = torch.ops.aten.mul.Scalar
aten_mul__Tensor = torch.ops.aten.mul_.Tensor
aten_pow_Tensor_Scalar = torch.ops.aten.pow.Tensor_Scalar
aten_reshape = torch.ops.aten.reshape.default
aten_sum = torch.ops.aten.sum.default
aten_sum_dim_IntList = torch.ops.aten.sum.dim_IntList
aten_t = torch.ops.aten.t.default
aten_tanh_ = torch.ops.aten.tanh_.default
aten_tanh_backward = torch.ops.aten.tanh_backward.default


@torch.no_grad()
def small_forward(arguments):
    # block_0: the writes (1)
    (
        args_0,  # input [rows, 4, 6] f32
        weight,  # parameter [8, 6] f32
        bias,  # parameter [8] f32
        rows,  # scalar
    ) = arguments
    arguments.clear()
    view = aten_reshape(args_0, [rows * 4, 6])  # [rows*4, 6] f32  0
    del args_0
    t = aten_t(weight)  # [6, 8] f32  0
    del weight
    addmm = aten_addmm(bias, view, t)  # [rows*4, 8] f32  0
    del bias, view, t
    view_1 = aten_reshape(addmm, [rows, 4, 8])  # [rows, 4, 8] f32  0
    del rows, addmm
    tanh = aten_tanh_(view_1)  # [rows, 4, 8] f32  1
    del view_1
    pow_1 = aten_pow_Tensor_Scalar(tanh, 2)  # [rows, 4, 8] f32
    del tanh
    sum_1 = aten_sum(pow_1)  # [] f32
    del pow_1
    return (sum_1,)


@torch.no_grad()
def small_backward(arguments):
    # block_0: the gradients of reads 1, 2; 2 ops run again
    (
        args_0,  # input [rows, 4, 6] f32
        weight,  # parameter [8, 6] f32
        bias,  # parameter [8] f32
        rows,  # scalar
        tangent_0,  # tangent [] f32
    ) = arguments
    arguments.clear()
    expand = aten_expand(tangent_0, [rows, 4, 8])  # [rows, 4, 8] f32
    del tangent_0
    view = aten_reshape(args_0, [rows * 4, 6])  # [rows*4, 6] f32  0
    del args_0
    t = aten_t(weight)  # [6, 8] f32  0
    del weight
    addmm = aten_addmm(bias, view, t)  # [rows*4, 8] f32  0
    del bias, t
    view_1 = aten_reshape(addmm, [rows, 4, 8])  # [rows, 4, 8] f32  0
    del addmm
    tanh = aten_tanh_(view_1)  # [rows, 4, 8] f32  1
    del view_1
    mul_1 = aten_mul_Scalar(tanh, 2.0)  # [rows, 4, 8] f32
    mul_2 = aten_mul__Tensor(mul_1, expand)  # [rows, 4, 8] f32
    del expand, mul_1
    tanh_backward = aten_tanh_backward(mul_2, tanh)  # [rows, 4, 8] f32  1
    del tanh, mul_2
    view_2 = aten_reshape(tanh_backward, [rows * 4, 8])  # [rows*4, 8] f32  0
    del rows, tanh_backward
    t_1 = aten_t(view_2)  # [8, rows*4] f32  0
    mm = aten_mm(t_1, view)  # [8, 6] f32  0
    del view, t_1
    sum_2 = aten_sum_dim_IntList(view_2, [0], True)  # [1, 8] f32  0
    del view_2
    view_3 = aten_reshape(sum_2, [8])  # [8] f32  0
    del sum_2
    return (mm, view_3)
'''


def small(name: str = "small") -> BlockFunction:
    torch.manual_seed(0)
    blocks, _ = placed_blocks(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), (torch.randn(5, 4, 6),), squares)
    (cls,) = blocks.classes.values()
    joint = differentiate(cls, 3)
    return emit(cls, *split(joint, (), free={p.name for p in joint.placeholders[: joint.reads]}), name)


def test_golden_text() -> None:
    assert small().source == GOLDEN


def test_the_text_alone_makes_the_functions() -> None:
    function = small()
    namespace: dict[str, Any] = {}
    exec(function.source, namespace)
    arguments = [torch.randn(2, 4, 6), torch.randn(8, 6), torch.randn(8), 2]
    torch.testing.assert_close(namespace["small_forward"](list(arguments)), function.forward(list(arguments)))


def test_one_file_holds_all_functions_and_each_op_once() -> None:
    first, second = small("first"), small("second")
    text = emit_source_file([first, second])
    assert text.count("aten_reshape = ") == 1 and text.count("import torch\n") == 1
    assert text == GOLDEN.replace("small", "first") + "\n\n" + GOLDEN.split("\n\n\n", 1)[1].replace("small", "second")
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    assert all(callable(namespace[f"{name}_{half}"]) for name in ("first", "second") for half in ("forward", "backward"))


def test_arguments_are_emptied_and_parameters_that_require_gradients_record_nothing() -> None:
    box: list[object] = [torch.randn(2, 4, 6), nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8)), 2]
    (out,) = small().forward(box)
    assert box == [] and not out.requires_grad


def test_footprint_of_the_golden_text() -> None:
    function = small()
    rows = 4 * 8 * 4  # bytes of one row of the hidden layer
    made = [(s, b) for kind, s, b in function.forward_footprint.events if kind == "make"]
    assert function.forward_footprint.arguments == 4
    assert made == [(4, Bytes(0, rows)), (5, Bytes(0, rows)), (6, Bytes(4))]  # tanh writes into what addmm made
    assert function.forward_footprint.results == (6,)
    assert {s for kind, s, _ in function.forward_footprint.events if kind == "drop"} == {0, 1, 2, 3, 4, 5}
    assert function.backward_footprint is not None and len(function.backward_footprint.results) == 2


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(CaptureError, match="no Python name"):
        small("not a name")


def llama() -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    import transformers as hf

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    loss = lambda out: F.cross_entropy(out.logits.flatten(0, 1), out.logits.argmax(-1).flatten(), reduction="sum")  # noqa: E731
    return model, torch.randint(0, 64, (4, 6)), loss


class Dropped(nn.Module):
    """Several results of one op, some unused; values read by name and by view; a list of views."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.out = nn.LSTM(6, 8, batch_first=True), nn.LayerNorm(8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        left, right = self.norm(out).chunk(2, -1)
        top, _ = right.topk(2, -1)
        return self.out(left * hidden[0, :, None, :4]) + top.sum(-1, keepdim=True) + torch.sort(left, -1)[0]  # type: ignore[no-any-return]


MLP = (nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 6), nn.Softmax(-1))
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Callable[..., Tensor]]]] = {
    "llama": llama,
    "conv": lambda: (nn.Sequential(*CONV), torch.randn(4, 3, 14, 14), squares),
    "mlp": lambda: (nn.Sequential(*MLP), torch.randn(4, 5, 6), squares),
    "attention": lambda: (Attention(), torch.randn(4, 6, 16), squares),
    "upsample": lambda: (
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.InstanceNorm2d(4, affine=True), nn.Upsample(scale_factor=2), nn.AvgPool2d(2)),
        torch.randn(4, 3, 6, 6),
        squares,
    ),
    "batch_norm": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)), torch.randn(4, 3, 6, 6), squares),
    "several results": lambda: (Dropped(), torch.randn(4, 3, 6), squares),
}


def bytes_of(arguments: list[Any]) -> Callable[[int], int]:
    sizes = [one.untyped_storage().nbytes() if isinstance(one, Tensor) else 0 for one in arguments]
    return sizes.__getitem__


@pytest.mark.parametrize("name", MODELS)
def test_footprints_are_what_happens_to_the_byte(name: str) -> None:
    torch.manual_seed(0)
    model, x, loss = MODELS[name]()
    blocks, _ = placed_blocks(model, (x,), loss)
    joints = {c: differentiate(cls, 2) for c, cls in blocks.classes.items()}
    state: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for keep_all in (True, False) if name != "batch_norm" else (True,):  # its collectives are not to be made again
        functions = {c: function_of(blocks.classes[c], joint, keep_all) for c, joint in joints.items()}
        for rows in (0, 1, 3):
            given: dict[str, Any] = {n: v.detach() for n, v in state.items()}
            given |= {"args[0]": x[:rows], "rows": rows, "start": 0, "share": 1.0, "key_local": 1, "key_shared": 1}
            values: dict[str, Tensor] = {}
            kept: list[list[Any]] = []
            for block in blocks.blocks:
                function = functions[block.cls]
                box = [own(values[p.name] if p.kind == "value" else given[p.name]) for p in block.reads]
                reads = [own(one) for one in box]
                foretold = peak(function.forward_footprint, rows, bytes_of(box))
                out, measured = measured_peak(function.forward, box)
                assert measured == foretold, (block.label, rows, keep_all)
                check_results(function.forward_footprint, out, rows, reads)
                values |= dict(zip(block.writes, out, strict=False))
                kept.append([reads[s.index] if s.kind == "read" else out[function.writes + s.index] for s in function.saved])
            for block in reversed(blocks.blocks):
                function, saved = functions[block.cls], kept.pop()
                if function.backward is None or function.backward_footprint is None:
                    continue
                box = [own(one) for one in saved] + [torch.ones_like(values[block.writes[i]]) for i in function.tangents]
                foretold = peak(function.backward_footprint, rows, bytes_of(box))
                out, measured = measured_peak(function.backward, box)
                assert measured == foretold, (block.label, rows, keep_all)
                assert len({one.untyped_storage()._cdata for one in out}) == len(out)
                assert all(one.is_contiguous() for one in out)


def own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def check_results(footprint: Footprint, results: tuple[Tensor, ...], rows: int, reads: list[Any]) -> None:
    """Results that share a storage are foretold to, and their storages have the foretold sizes."""
    made = {s: size for kind, s, size in footprint.events if kind == "make" and size is not None}
    seen: dict[int, int] = {}
    for result, storage in zip(results, footprint.results, strict=True):
        expected = made[storage].at(rows) if storage in made else reads[storage].untyped_storage().nbytes()
        assert result.untyped_storage().nbytes() == expected
        assert seen.setdefault(result.untyped_storage()._cdata, storage) == storage


def test_ops_write_only_into_storages_that_die_with_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = y.sigmoid()  # y is read again
            return (y * z + x.exp()).neg() * self.b(x)[:, :1]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 6)
    blocks, _ = placed_blocks(model, (x,), squares)
    given: dict[str, Any] = {**{n: p.detach() for n, p in model.named_parameters()}, "args[0]": x, "rows": 3, "start": 0, "share": 1.0}
    functions = functions_of(blocks, 2)
    copies = {n: own(v) for n, v in given.items()}
    results, gradients = run_chain(blocks, functions, given)
    loss = squares(model(x))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(results[0], loss)
    assert all(torch.equal(gradients[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)
    assert all(torch.equal(given[n], copies[n]) for n in given if isinstance(given[n], Tensor))
    text = emit_source_file(functions.values())
    assert "aten_neg_(" in text and "aten_sigmoid_(" not in text


def test_depth_adds_no_source() -> None:
    def text(depth: int) -> str:
        torch.manual_seed(0)
        parts = lambda: (nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softmax(-1), nn.SiLU())  # noqa: E731
        layers = nn.Sequential(*[nn.Sequential(*parts()) for _ in range(depth)])  # type: ignore[no-untyped-call]
        blocks, _ = placed_blocks(layers, (torch.randn(4, 6),), squares)
        return emit_source_file(functions_of(blocks, 2).values())

    assert text(4) == text(9)
