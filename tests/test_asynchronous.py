"""The asynchronous schedule: it trains what a one-process simulation of its rule trains, and what it cannot take is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partitioner import Plan, PlanError, auto_parallelize, make_plan
from partitioner.errors import ConstraintError, InfeasibleError, InputError, NonFiniteError, PartitionerError, ProgramError
from partitioner.runtime.check import check
from partitioner.runtime.program import Instruction, Program
from partitioner.schedules import ASYNCHRONOUS, NAMES, Turn, in_flight, makespan, repeated, schedule
from tests import ranks
from tests.test_pipeline import Skip, check_texts, drop, lowered, sabotaged, square, stack

STEPS = 5
ASKED: dict[str, Any] = {"schedule": "2bw", "pp": 2, "micro_batches": 2}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "stack":
        return stack(5).double()
    model = Skip().double()
    model.norm.eval()
    return model


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2) if name == "adamw" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(step: int, rows: int = 12) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------------- the rule


def simulated(kind: str, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """W(t+1) = opt(W(t), gradient of batch t-1 at W(t-1)): losses by batch, and the weights after the last gradient."""
    model = model_of(kind)
    steps = optimizer_of(optimizer, model.parameters())
    owed: list[Tensor] | None = None
    losses = []
    for step in range(STEPS + 1):
        gradients = None
        if step < STEPS:
            loss = square(model(batch(step)))
            losses.append(loss.item())
            gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        if owed is not None:
            for parameter, gradient in zip(model.parameters(), owed, strict=True):
                parameter.grad = gradient
            steps.step()
        owed = gradients
    return losses, model.state_dict()


def train(kind: str, optimizer: str, constraints: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], tuple[int, int], bool]:
    """Losses as train_step and drain return them, the weights at the end, predicted and measured bytes, and whether the first step gave none."""
    given: dict[str, Any] = {"example_inputs": (batch(0),), "loss": square, "optimizer": optimizer}
    parallel = auto_parallelize(model_of(kind), gpus=dist.get_world_size(), constraints={"schedule": "2bw", **constraints}, **given)
    steps = optimizer_of(optimizer, parallel.parameters())
    losses, empty = [], False
    for step in range(STEPS):
        x = batch(step)
        loss = parallel.train_step(x)  # both kept until the optimizer has stepped, as is predicted
        losses.append(loss.item())
        if not step:
            empty = all(parameter.grad is None for parameter in parallel.parameters())
        steps.step()
        steps.zero_grad()
        del loss
    last = parallel.drain()
    assert last is not None and parallel.drain() is None
    losses.append(last.item())
    steps.step()
    figures = parallel.plan.predicted.per_rank[dist.get_rank()].peak_bytes, parallel.measured.peak_bytes
    return losses, parallel.full_state_dict(), figures, empty


@pytest.mark.parametrize(
    ("count", "kind", "optimizer", "constraints"),
    [
        (2, "skip", "adamw", {"pp": 2, "micro_batches": 3, "checkpoint": "full"}),
        (3, "stack", "adamw", {"pp": 3, "micro_batches": 4, "checkpoint": "none"}),
        (4, "stack", "sgd_momentum", {"pp": 4, "micro_batches": 4}),
        (4, "skip", "adamw", {"pp": 2, "micro_batches": 2, "shard": "zero1"}),
        (4, "stack", "sgd_momentum", {"pp": 2, "micro_batches": 3, "shard": "none", "checkpoint": "full"}),
    ],
)
def test_it_trains_what_its_rule_says(count: int, kind: str, optimizer: str, constraints: dict[str, Any]) -> None:
    losses, state = simulated(kind, optimizer)
    bytes_of = []
    for found, weights, figures, empty in ranks.run(count, train, kind, optimizer, constraints):
        assert empty and found[0] != found[0]  # no gradient yet, and NaN
        assert found[1:] == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
        bytes_of.append(figures)
    assert [measured for _, measured in bytes_of] == [predicted for predicted, _ in bytes_of]


def use(folder: str) -> tuple[list[str], str, list[float]]:
    """What is refused while a batch is under way, what is said of a loss that is not finite, and losses of drains and of an evaluation."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8)).double()
    parallel = auto_parallelize(model, gpus=2, example_inputs=(batch(0),), loss=square, constraints=ASKED)
    assert parallel.drain() is None
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step(batch(0))
    state, said = parallel.full_state_dict(), []
    attempts: list[Callable[[], Any]] = [
        lambda: parallel.save(folder, optimizer),
        lambda: parallel.load(folder, optimizer),
        lambda: parallel.load_full_state_dict(state),
        lambda: parallel(batch(1)),
        lambda: parallel.train_step(batch(1, 8)),
        lambda: parallel.train_step(batch(1).float()),
    ]
    for attempt in attempts:
        with pytest.raises(PartitionerError) as refused:
            attempt()
        said.append(f"{type(refused.value).__name__}: {refused.value}")
    parallel.train_step(batch(1) * torch.nan)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(NonFiniteError) as found:
        parallel.train_step(batch(2))
    optimizer.zero_grad()
    loss = parallel.drain()
    assert loss is not None
    optimizer.step()
    optimizer.zero_grad()
    assert parallel.train_step(batch(3, 8)).isnan()  # another shape
    last = parallel.drain()
    assert last is not None
    optimizer.step()
    with pytest.raises(InputError, match=r"this batch is too short: .* there are 1 for 2 stages"):
        parallel.train_step(batch(3, 1))
    parallel.save(folder, optimizer)
    parallel.eval()
    evaluated = square(parallel(batch(4))).item()
    parallel.train()
    parallel.train_step(batch(5))  # and the processes end without a drain
    return said, str(found.value), [loss.item(), last.item(), evaluated]


def test_what_needs_an_empty_pipeline_is_refused_and_the_drain_gives_it(tmp_path: Path) -> None:
    for said, found, losses in ranks.run(2, use, str(tmp_path)):
        for text, what in zip(said, ("save", "load", "load_full_state_dict", "calling the model"), strict=False):
            assert text.startswith(f"PartitionerError: {what} needs an empty pipeline") and "parallel.drain()" in text
        assert said[4].startswith("InputError: this batch has other shapes") and "parallel.drain()" in said[4]
        assert said[5].startswith("InputError")
        assert "step 1: the loss of its batch is nan" in found
        assert all(loss == loss for loss in losses)


# ------------------------------------------------------------------------------------------------------------------------ never unasked


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        calls: Any = self.calls
        calls += 1
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def planned(model: nn.Module, gpus: Any = 2, **constraints: Any) -> Plan:
    return make_plan(model, gpus=gpus, example_inputs=(torch.zeros(8, 8),), loss=square, verify=False, constraints=constraints)


def test_it_is_taken_only_where_it_is_asked_for() -> None:
    assert not set(ASYNCHRONOUS) & set(NAMES)
    free = planned(stack(4), "1x2 h100-sxm", pp=2)
    assert free.schedule in NAMES and "asynchronous" not in str(free)
    plan = planned(stack(4), "1x2 h100-sxm", pp=2, schedule="2bw")
    assert plan.schedule == "2bw" and plan.micro_batches >= 2
    for text in (str(plan), str(plan.explain())):
        assert "W(t+1) = W(t) - lr * grad f(W(t-1))" in text and "2bw" in text
    assert {block.shard for block in planned(stack(4), "1x4 h100-sxm", **ASKED).blocks} <= {"none", "zero1"}


def test_what_it_cannot_take_is_refused_by_name() -> None:
    with pytest.raises(ConstraintError, match=r"as many micro-batches as stages: there are 3 for 4 stages"):
        planned(stack(8), 4, pp=4, schedule="2bw", micro_batches=3)
    for shard in ("zero2", "zero3"):
        with pytest.raises(ConstraintError, match=rf"2bw cannot be taken with shard {shard} yet"):
            planned(stack(4), 4, **ASKED, shard=shard)
    with pytest.raises(ConstraintError, match="changes the buffer 'calls'"):
        planned(Counter(), **ASKED)
    with pytest.raises(InfeasibleError, match="as many micro-batches as stages"):
        model = Skip()  # a BatchNorm in training: one micro-batch
        planned(model, pp=2, schedule="2bw")


def test_a_plan_file_says_it_and_is_held_to_its_terms() -> None:
    plan = planned(stack(4), **ASKED)
    again = Plan.from_json(plan.to_json())
    assert again == plan and "asynchronous" in str(again)
    bound = make_plan(stack(4), gpus=2, example_inputs=(torch.zeros(8, 8),), loss=square, verify=False, plan=again)
    assert bound.predicted == plan.predicted and "asynchronous" in str(bound.explain())
    with pytest.raises(PlanError, match="as many micro-batches as stages"):
        Plan.from_json(plan.model_copy(update={"micro_batches": 1}).to_json())


# ---------------------------------------------------------------------------------------------------------------------- order and time

TWO_STAGES = (
    """
RECV_GRADIENT value gelu_default_1 mb -1 stage 1 on send bytes 128
FORWARD block 0 mb 0 on compute
FORWARD block 1 mb 0 on compute drops gelu_default
SEND value gelu_default_1 mb 0 stage 1 on send bytes 128
DROP values gelu_default_1 mb 0 on compute
BACKWARD block 1 mb -1 on compute
UNSTASH unit 1 mb -1 on compute bytes 512
REDUCE unit 1 mb -1 on reduce bytes 576
BACKWARD block 0 mb -1 on compute
UNSTASH unit 0 mb -1 on compute bytes 256
REDUCE unit 0 mb -1 on reduce bytes 576
RECV_GRADIENT value gelu_default_1 mb 0 stage 1 on send bytes 128
FORWARD block 0 mb 1 on compute
FORWARD block 1 mb 1 on compute drops gelu_default
SEND value gelu_default_1 mb 1 stage 1 on send bytes 128
DROP values gelu_default_1 mb 1 on compute
BACKWARD block 1 mb 0 on compute
BACKWARD block 0 mb 0 on compute
STASH unit 0 on compute bytes 256
STASH unit 1 on compute bytes 512
LOSS on reduce bytes 4
""",
    """
RECV value gelu_default_1 mb 0 stage 0 on send bytes 128
FORWARD block 2 mb 0 on compute drops gelu_default_1
REDUCE unit 2 mb -1 on reduce bytes 576
FORWARD block 3 mb 0 on compute drops gelu_default_2
REDUCE unit 3 mb -1 on reduce bytes 576
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
BACKWARD block 2 mb 1 on compute
SEND_GRADIENT value gelu_default_1 mb 1 stage 0 on send bytes 128
LOSS on reduce bytes 4
""",
)


def test_the_programs_of_two_stages_are_these() -> None:
    check_texts(lowered(stack(4), 2, **ASKED), TWO_STAGES)


def test_all_stages_share_the_seed_where_one_of_them_draws() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for name in ("1f1b", "2bw"):
        programs = lowered(model, 2, **{**ASKED, "schedule": name})
        drawing = [any(ref.name == "key_local" for call in program.calls for ref in call.reads) for program in programs]
        assert drawing.count(True) == 1 and all(program.draws for program in programs)


def early(op: str) -> Callable[[list[Instruction]], None]:
    """Move the first such line to the start."""

    def change(lines: list[Instruction]) -> None:
        lines.insert(0, lines.pop(next(at for at, line in enumerate(lines) if line.op == op)))

    return change


def this_batch(op: str) -> Callable[[list[Instruction]], None]:
    """Let the first such line be of this batch."""

    def change(lines: list[Instruction]) -> None:
        at = next(at for at, line in enumerate(lines) if line.op == op)
        lines[at] = replace(lines[at], mb=None if op == "REDUCE" else 1)

    return change


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (0, drop("STASH"), r"an owed backward reads the parameter 0.2.weight|was not stashed"),
        (0, drop("UNSTASH"), r"stashed already|still stashed from the step before"),
        (0, early("UNSTASH"), r"was not stashed, or is no longer"),
        (0, early("STASH"), r"not whole here|stashed already|is still stashed|was not stashed"),
        (0, drop("REDUCE"), r"gradients of the batch before are not summed"),
        (1, drop("REDUCE"), r"gradients of the batch before are not summed"),
        (0, this_batch("REDUCE"), r"has no gradient to sum here"),
        (0, drop("BACKWARD"), r"nothing is saved|BACKWARD"),
        (0, this_batch("BACKWARD"), r"nothing is saved for the backward of block 1 on micro-batch 1"),
        (0, drop("RECV_GRADIENT"), r"message \d from stage 1 to stage 0"),
        (0, this_batch("RECV_GRADIENT"), r"message \d from stage 1 to stage 0"),
        (1, drop("SEND_GRADIENT"), r"message 0 from stage 1 to stage 0"),
    ],
)
def test_a_sabotaged_stage_is_refused(stage: int, change: Callable[[list[Instruction]], None], says: str) -> None:
    programs: list[Program] = lowered(stack(4), 2, **ASKED)
    check(programs)
    with pytest.raises(ProgramError, match=says) as error:
        check(sabotaged(programs, stage, change))
    assert "-->" in str(error.value)


def seconds(turn: Turn) -> float:
    return 2.0 if turn.op == "B" else 1.0


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 3), (4, 4), (4, 9), (8, 11)])
def test_a_further_step_takes_no_longer_than_its_turns(stages: int, micro_batches: int) -> None:
    turns = schedule("2bw", stages, micro_batches)
    ends = [makespan("2bw", repeated(turns, micro_batches, steps), seconds) for steps in (2, 3, 4)]
    assert ends[2] - ends[1] == ends[1] - ends[0] == 3.0 * micro_batches
    assert in_flight("2bw", stages, micro_batches) == tuple(range(stages, 0, -1))
    for order in turns:
        assert sorted(turn.mb % micro_batches for turn in order if turn.op == "B") == list(range(micro_batches))


def test_the_simulated_step_has_no_bubble_to_speak_of() -> None:
    cluster, blocks = "1x4 h100-sxm", nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)))
    x = torch.zeros(4096, 512)
    pins = {"pp": 4, "micro_batches": 4, "shard": "none", "checkpoint": "none"}
    late, early = (
        make_plan(blocks, gpus=cluster, example_inputs=(x,), loss=square, verify=False, constraints={**pins, "schedule": name})
        for name in ("2bw", "1f1b")
    )
    assert late.predicted.step_seconds < 0.75 * early.predicted.step_seconds
    busiest = max(rank.compute_seconds for rank in late.predicted.per_rank)
    assert busiest <= late.predicted.step_seconds < 1.1 * busiest
