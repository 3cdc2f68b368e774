"""Pipelines: the programs of the stages as text, what is refused before start, memory to the byte, tied parameters, buffers and outputs."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partitioner import Cluster, Plan, PlanError, auto_parallelize, make_plan
from partitioner.errors import InfeasibleError, ProgramError
from partitioner.runtime.check import check
from partitioner.runtime.program import Instruction, Program, Request
from partitioner.runtime.text import instruction_text, parse_program, program_text
from partitioner.session import Session
from tests.ranks import run


def square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


class Skip(nn.Module):
    """What the first layer computes is read by the last as well; the first weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.tanh(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            y = torch.relu(layer(y)) + y
        tied: Any = self.layers[0].weight
        return nn.functional.linear(self.norm(y) + first, tied)


def stack(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()) for _ in range(layers)))


def lowered(model: nn.Module, devices: int, rows: int = 8, mode: str = "step", **constraints: Any) -> list[Program]:
    x = torch.zeros(rows, 8)
    constraints = {"schedule": "1f1b", **constraints}
    given = {"example_inputs": (x,), "example_kwargs": None, "loss": square, "example_targets": None, "batch_dim": "auto"}
    options = {"optimizer": "adamw", "precision": "fp32", "memory": None, "constraints": constraints, "verify": False}
    session = Session(model, Cluster.parse(f"1x{devices} h100-sxm"), **given, **options)  # type: ignore[arg-type]
    session.plan()
    return list(session.lower(Request(mode, True, {"args[0]": x}, mode == "step")))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------------------ programs

TWO_STAGES = (
    """
FORWARD block 0 mb 0 on compute
FORWARD block 1 mb 0 on compute drops gelu_default
SEND value gelu_default_1 mb 0 stage 1 on send bytes 128
DROP values gelu_default_1 mb 0 on compute
RECV_GRADIENT value gelu_default_1 mb 0 stage 1 on send bytes 128
FORWARD block 0 mb 1 on compute
FORWARD block 1 mb 1 on compute drops gelu_default
SEND value gelu_default_1 mb 1 stage 1 on send bytes 128
DROP values gelu_default_1 mb 1 on compute
RECV_GRADIENT value gelu_default_1 mb 1 stage 1 on send bytes 128
BACKWARD block 1 mb 0 on compute
BACKWARD block 0 mb 0 on compute
BACKWARD block 1 mb 1 on compute
REDUCE unit 1 on reduce bytes 576
BACKWARD block 0 mb 1 on compute
REDUCE unit 0 on reduce bytes 576
LOSS on reduce bytes 4
""",
    """
RECV value gelu_default_1 mb 0 stage 0 on send bytes 128
FORWARD block 2 mb 0 on compute drops gelu_default_1
FORWARD block 3 mb 0 on compute drops gelu_default_2
FORWARD block 4 mb 0 on compute drops gelu_default_3
RECV value gelu_default_1 mb 1 stage 0 on send bytes 128
BACKWARD block 4 mb 0 on compute
BACKWARD block 3 mb 0 on compute
BACKWARD block 2 mb 0 on compute
SEND_GRADIENT value gelu_default_1 mb 0 stage 0 on send bytes 128
FORWARD block 2 mb 1 on compute drops gelu_default_1
FORWARD block 3 mb 1 on compute drops gelu_default_2
FORWARD block 4 mb 1 on compute drops gelu_default_3
BACKWARD block 4 mb 1 on compute
BACKWARD block 3 mb 1 on compute
REDUCE unit 3 on reduce bytes 576
BACKWARD block 2 mb 1 on compute
SEND_GRADIENT value gelu_default_1 mb 1 stage 0 on send bytes 128
REDUCE unit 2 on reduce bytes 576
LOSS on reduce bytes 4
""",
)


def check_texts(programs: list[Program], texts: tuple[str, ...]) -> None:
    """The programs are these texts, which can be read back."""
    for program, text in zip(programs, texts, strict=True):
        assert "\n" + "".join(f"{instruction_text(instruction)}\n" for instruction in program.instructions) == text
        assert parse_program(program_text(program))[0] == program.instructions


def test_the_programs_of_two_stages_are_these() -> None:
    check_texts(lowered(stack(4), 2, pp=2, micro_batches=2), TWO_STAGES)


def test_a_value_goes_straight_to_the_stage_that_reads_it_and_its_gradient_back() -> None:
    first, second, third = lowered(Skip(), 3, pp=3, micro_batches=1)
    skipped = {i.value for i in first.instructions if i.op == "SEND" and i.stage == 2}
    assert skipped and {i.value for i in third.instructions if i.op == "RECV" and i.stage == 0} == skipped
    assert {i.value for i in third.instructions if i.op == "SEND_GRADIENT" and i.stage == 0} == skipped
    assert not skipped & {i.value for i in second.instructions}


def test_a_parameter_of_two_stages_is_a_unit_that_both_hold_and_tie() -> None:
    programs = lowered(Skip(), 4, pp=2, micro_batches=1, shard="zero3")
    (shared,) = {unit for unit in programs[0].units if len(unit.stages) > 1}
    assert shared.parameters == ("layers.0.weight",) and shared.stages == (0, 1)
    for program in programs:
        ops = [(i.op, i.unit) for i in program.instructions]
        assert ops.index(("TIE", shared.number)) > ops.index(("REDUCE", shared.number))


def test_every_rank_holds_its_own_stage_alone() -> None:
    programs = lowered(stack(8), 4, pp=4, micro_batches=4)
    owned = [unit.number for program in programs for unit in program.units]
    assert len(owned) == len(set(owned)) and [program.stage for program in programs] == [0, 1, 2, 3]
    assert all({call.number for call in program.calls} for program in programs)


# ---------------------------------------------------------------------------------------------------------------- refused before start


def sabotaged(programs: list[Program], stage: int, change: Callable[[list[Instruction]], None]) -> list[Program]:
    lines = list(programs[stage].instructions)
    change(lines)
    return [replace(program, instructions=tuple(lines)) if program.stage == stage else program for program in programs]


def drop(op: str, number: int = 0) -> Callable[[list[Instruction]], None]:
    def change(lines: list[Instruction]) -> None:
        del lines[[at for at, line in enumerate(lines) if line.op == op][number]]

    return change


def double(op: str) -> Callable[[list[Instruction]], None]:
    def change(lines: list[Instruction]) -> None:
        at = next(at for at, line in enumerate(lines) if line.op == op)
        lines.insert(at, lines[at])

    return change


def swap(op: str) -> Callable[[list[Instruction]], None]:
    def change(lines: list[Instruction]) -> None:
        one, other, *_ = [at for at, line in enumerate(lines) if line.op == op]
        lines[one], lines[other] = lines[other], lines[one]

    return change


def late(op: str) -> Callable[[list[Instruction]], None]:
    """Move the first such line to just before the loss."""

    def change(lines: list[Instruction]) -> None:
        at = next(at for at, line in enumerate(lines) if line.op == op)
        lines.insert(next(at for at, line in enumerate(lines) if line.op == "LOSS") - 1, lines.pop(at))

    return change


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (0, drop("SEND"), r"message 0 from stage 0 to stage 1: stage 0 sends .* of micro-batch 1 .* receives .* of micro-batch 0"),
        (0, drop("SEND", 3), r"stage 0 sends nothing more, but stage 1 receives .* micro-batch 3"),
        (0, double("SEND"), r"message 1 from stage 0 to stage 1"),
        (1, swap("RECV"), r"read before anything wrote it"),
        (1, drop("RECV"), r"read before anything wrote it"),
        (1, double("RECV"), r"it is or was here already"),
        (1, drop("SEND_GRADIENT"), r"message 0 from stage 1 to stage 0"),
        (0, drop("RECV_GRADIENT"), r"message 0 from stage 1 to stage 0"),
        (0, swap("RECV_GRADIENT"), r"message 0 from stage 1 to stage 0"),
        (1, drop("LOSS"), r"has no LOSS"),
        (0, swap("SEND"), r"read before anything wrote it"),
    ],
)
def test_a_sabotaged_stage_is_refused_with_an_arrow_at_the_fault(stage: int, change: Callable[[list[Instruction]], None], says: str) -> None:
    programs = lowered(stack(4), 2, pp=2, micro_batches=4)
    check(programs)
    with pytest.raises(ProgramError, match=says) as error:
        check(sabotaged(programs, stage, change))
    assert "-->" in str(error.value)


def test_an_order_in_which_stages_wait_for_each_other_is_refused() -> None:
    programs = lowered(stack(4), 2, pp=2, micro_batches=1)

    def gradient_first(lines: list[Instruction]) -> None:
        at = next(at for at, line in enumerate(lines) if line.op == "SEND")
        back = next(at for at, line in enumerate(lines) if line.op == "BACKWARD")
        lines.insert(back, lines.pop(at))

    changed = sabotaged(programs, 0, gradient_first)
    with pytest.raises(ProgramError, match=r"read, but line \d+ gave it up|wait for each other forever") as error:
        check(changed)
    assert "-->" in str(error.value)


def test_more_stages_than_ops_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="blocks, but 8 stages need one each"):
        make_plan(nn.Linear(8, 8), gpus=8, example_inputs=(torch.zeros(8, 8),), loss=square, constraints={"pp": 8})
    with pytest.raises(InfeasibleError, match=r"interleaved gives each of 8 stages 2 runs of blocks; use .* stages or fewer, or schedule 1f1b"):
        make_plan(nn.Linear(8, 8), gpus=8, example_inputs=(torch.zeros(8, 8),), loss=square, constraints={"pp": 8, "schedule": "interleaved"})


# ------------------------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_file_holds_the_stages_and_an_edited_cut_is_priced_anew() -> None:
    asked = {"gpus": 2, "example_inputs": (torch.zeros(8, 8),), "loss": square}
    plan = make_plan(stack(8), **asked, constraints={"pp": 2, "micro_batches": 4, "schedule": "1f1b"})  # type: ignore[arg-type]
    assert plan.mesh == {"pp": 2, "dp": 1} and plan.schedule == "1f1b" and len(plan.predicted.per_rank) == 2
    again = Plan.from_json(plan.to_json())
    bound = make_plan(stack(8), **asked, plan=again)  # type: ignore[arg-type]
    assert (bound.blocks, bound.predicted, bound.mesh) == (plan.blocks, plan.predicted, plan.mesh)
    first = next(at for at, block in enumerate(plan.blocks) if block.stage == 1)
    moved = tuple(block.model_copy(update={"stage": 1}) if at == first - 1 else block for at, block in enumerate(plan.blocks))
    other = make_plan(stack(8), **asked, plan=plan.model_copy(update={"blocks": moved}))  # type: ignore[arg-type]
    assert other.predicted.per_rank[0].peak_bytes < plan.predicted.per_rank[0].peak_bytes
    with pytest.raises(PlanError, match=r"no plan: the blocks' stages must ascend from 0 to 1 without a gap .* but block 0 \(.*\) is on stage 1"):
        Plan.from_json(plan.model_copy(update={"blocks": plan.blocks[::-1]}).to_json())
    with pytest.raises(PlanError, match=r"to 3 without a gap \(zb-v over a mesh with pp 2, 2 runs of blocks a rank\), but the last block is on"):
        Plan.from_json(plan.model_copy(update={"schedule": "zb-v"}).to_json())
    data = json.loads(plan.to_json())
    del data["blocks"][1]["stage"]
    with pytest.raises(PlanError, match=r"block 1 \(.*\) has no stage, but the mesh has 2"):
        Plan.from_json(json.dumps(data))


# --------------------------------------------------------------------------------------------------------------------------- on ranks


def train(pp: int, schedule: str, shard: str, micro_batches: int, rows: tuple[int, ...]) -> dict[str, Any]:
    """Losses, outputs and buffers of a few steps on batches of so many rows, and predicted and measured bytes of the first."""
    torch.manual_seed(3)
    model, ranks = Skip().double(), dist.get_world_size()
    model.norm.eval()  # by running statistics, so that micro-batches are legal
    x = torch.randn(max(rows), 8, dtype=torch.float64)
    stages = {"pp": pp, "schedule": schedule} if pp > 1 else {}
    constraints = {**stages, "shard": shard, "micro_batches": micro_batches}
    parallel = auto_parallelize(model, gpus=ranks, example_inputs=(x,), loss=square, constraints=constraints)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": []}
    for count in rows:
        loss = parallel.train_step(x[:count])  # kept until the optimizer has stepped, as is predicted
        found["losses"].append(loss.item())
        found["norm"] = parallel.clip_grad_norm_(0.1).item()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    found["bytes"] = parallel.plan.predicted.per_rank[dist.get_rank()].peak_bytes, parallel.measured.peak_bytes
    found["output"] = parallel(x)
    found["state"] = parallel.full_state_dict()
    return found


def plainly(rows: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Skip().double()
    model.norm.eval()
    x = torch.randn(max(rows), 8, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": []}
    for count in rows:
        loss = square(model(x[:count]))
        loss.backward()  # type: ignore[no-untyped-call]
        found["losses"].append(loss.item())
        found["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
        optimizer.zero_grad()
    return {**found, "output": model(x), "state": model.state_dict()}


@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (2, (2, "1f1b", "none", 3)),
        (2, (2, "interleaved", "none", 2)),
        (4, (2, "gpipe", "zero3", 2)),
        (4, (2, "1f1b", "zero1", 3)),
        (4, (4, "1f1b", "none", 8)),
    ],
)
def test_uneven_and_short_batches_ties_clipping_and_outputs_equal_one_process(ranks: int, asked: tuple[int, str, str, int]) -> None:
    rows = (9, 9, 5, 2)
    expected = plainly(rows)
    for found in run(ranks, train, *asked, rows):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-9)
        torch.testing.assert_close(found["output"], expected["output"], rtol=1e-9, atol=1e-12)
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-9, atol=1e-12)
        predicted, measured = found["bytes"]
        assert predicted == measured


def own_rows(pp: int) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank brings rows of its own, ranks unequally many."""
    torch.manual_seed(3)
    model, ranks, rank = stack(4).double(), dist.get_world_size(), dist.get_rank()
    x = torch.randn(12, 8, dtype=torch.float64)
    parallel = auto_parallelize(model, gpus=ranks, example_inputs=(x,), loss=square, constraints={"pp": pp, "micro_batches": 2})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    borders, losses = [0, 5, 6, 10, 12] if ranks == 4 else [0, 5, 12], []
    for _ in range(2):
        losses.append(parallel.train_step_local(x[borders[rank] : borders[rank + 1]]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, parallel.full_state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_ranks_bring_are_the_global_batch_of_all_stages(ranks: int) -> None:
    torch.manual_seed(3)
    model, losses = stack(4).double(), []
    x = torch.randn(12, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = square(model(x))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found, state in run(ranks, own_rows, 2):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def with_batchnorm() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(4)
    model, x = Skip().double(), torch.randn(8, 8, dtype=torch.float64)
    parallel = auto_parallelize(model, gpus=dist.get_world_size(), example_inputs=(x,), loss=square, constraints={"pp": 2})
    losses = [parallel.train_step(x * scale).item() for scale in (1.0, 2.0)]
    return losses, {name: buffer.clone() for name, buffer in parallel.named_buffers()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_that_one_stage_computes_are_the_same_on_every_rank(ranks: int) -> None:
    torch.manual_seed(4)
    model, x = Skip().double(), torch.randn(8, 8, dtype=torch.float64)
    losses = [square(model(x * scale)).item() for scale in (1.0, 2.0)]
    for found, buffers in run(ranks, with_batchnorm):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-12)



def with_targets() -> tuple[int, int]:
    """Predicted and measured bytes where every micro-batch's loss is torch's, which leaves its sum in a storage as large as its input."""
    x, mse = torch.randn(8, 8), nn.functional.mse_loss
    constraints = {"pp": 2, "schedule": "gpipe", "micro_batches": 4}
    parallel = auto_parallelize(stack(), gpus=2, example_inputs=(x,), loss=mse, example_targets=x, constraints=constraints)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(2):
        loss = parallel.train_step(x, targets=x)  # kept until the optimizer has stepped, as is predicted
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return parallel.plan.predicted.per_rank[dist.get_rank()].peak_bytes, parallel.measured.peak_bytes


def test_losses_of_micro_batches_take_no_more_than_is_predicted() -> None:
    for predicted, measured in run(2, with_targets):
        assert predicted == measured
