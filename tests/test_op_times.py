"""Op times: what is timed, at which size, and that they are remembered; the work of an optimizer's step."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import make_plan
from partitioner.op_times import PATIENCE_SECONDS, OpTimes
from partitioner.passes.differentiate import differentiate
from partitioner.runtime.optimizer_bytes import KINDS
from partitioner.runtime.optimizer_work import step_work
from tests.blocks_support import placed_blocks

EXPECTED = 1e-3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_PARTITIONER_CACHE", str(tmp_path))
    return tmp_path


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, 64), nn.Linear(64, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.softmax(self.linear(self.table(tokens)).flatten(1), -1)


def ops(rows: int = 8) -> list[fx.Node]:
    blocks, count = placed_blocks(Classifier(), (torch.randint(50, (rows, 32)),), lambda out: out.square().sum())
    joints = [differentiate(cls, count) for cls in blocks.classes.values()]
    return [node for joint in joints for node in joint.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def test_each_call_is_timed_once_and_remembered(_cache: Path) -> None:
    nodes = ops()
    times = OpTimes(CPU, 1.0)
    found = [times.seconds(node, 8, EXPECTED) for node in nodes]
    assert all(0 < seconds != EXPECTED for seconds in found)
    assert [times.seconds(node, 8, EXPECTED) for node in nodes] == found
    times.save()
    assert [OpTimes(CPU, 1.0).seconds(node, 8, EXPECTED) for node in nodes] == found
    assert [OpTimes(CPU, 0.5).seconds(node, 8, EXPECTED) for node in nodes] == [2 * seconds for seconds in found]


def test_more_rows_take_longer() -> None:
    times = OpTimes(CPU, 1.0)
    few, many = (sum(times.seconds(node, rows, EXPECTED) for node in ops()) for rows in (4, 256))
    assert many > 4 * few


def test_what_is_free_long_or_communicates_keeps_its_formula() -> None:
    node = ops()[0]
    times = OpTimes(CPU, 1.0)
    assert times.seconds(node, 8, 0.0) == 0.0
    assert times.seconds(node, 8, 2 * PATIENCE_SECONDS) == 2 * PATIENCE_SECONDS
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    assert times.seconds(graph.call_function(torch.ops.partitioner.all_reduce.default, (x, "dp")), None, EXPECTED) == EXPECTED
    assert times.seconds(graph.call_function(torch.ops.aten.mm.default, (x, x)), None, EXPECTED) == EXPECTED  # no such call: 1-d
    unknown = graph.call_function(torch.ops.aten.add.Tensor, (x, graph.placeholder("y")))
    assert times.seconds(unknown, None, EXPECTED) == EXPECTED


@pytest.mark.parametrize("text", ["", "[1]", '{"a": "b", "c": null}', "\x00", "[" * 10_000])
def test_a_damaged_cache_is_measured_again(_cache: Path, text: str) -> None:
    times = OpTimes(CPU, 1.0)
    node = ops()[0]
    times.seconds(node, 8, EXPECTED)
    times.save()
    (path,) = _cache.iterdir()
    assert len(json.loads(path.read_text())) == 2  # the op, and the usual pace
    path.write_text(text)
    assert OpTimes(CPU, 1.0).seconds(node, 8, EXPECTED) > 0


def test_a_plan_for_devices_at_hand_times_its_ops(_cache: Path) -> None:
    model, tokens = Classifier(), torch.randint(50, (8, 32))

    def loss(out: Tensor) -> Tensor:
        return out.square().sum()

    make_plan(model, gpus="2 h100-sxm", example_inputs=(tokens,), loss=loss)
    assert not [path for path in _cache.iterdir() if path.name.startswith("ops-")]
    make_plan(model, gpus=2, example_inputs=(tokens,), loss=loss)
    (path,) = (path for path in _cache.iterdir() if path.name.startswith("ops-"))
    assert any(key.startswith("aten.addmm") for key in json.loads(path.read_text()))
    assert any(key.startswith("adamw ") for key in json.loads(path.read_text()))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_work_of_an_optimizer(kind: str, device: str) -> None:
    one, two = ([((1000,), torch.float32)] * count for count in (1, 2))
    single, double = step_work(kind, one, device), step_work(kind, two, device)
    assert double.bytes == 2 * single.bytes >= 2 * 3 * 4000  # reads parameter and gradient, writes the parameter
    assert single.launches <= double.launches <= 2 * single.launches
    assert step_work(kind, [], device).bytes == step_work(kind, [((0, 3), torch.float32)], device).launches == 0
