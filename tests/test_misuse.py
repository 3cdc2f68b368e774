"""What newcomers do wrong, and what they are told: one error of ours that names what was found and what to write instead."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Plan, auto_parallelize, make_plan
from partitioner.errors import (
    BatchError,
    CaptureError,
    ClusterError,
    ConstraintError,
    InfeasibleError,
    InputError,
    LaunchError,
    OptimizerError,
    PartitionerError,
    PlanError,
)
from partitioner.passes.capture import capture
from partitioner.passes.trained import trained
from tests import ranks as pool

mse = nn.functional.mse_loss
X, Y = torch.ones(16, 8), torch.ones(16, 4)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def plan(model: nn.Module | None = None, gpus: Any = "2 cpu-local", **options: Any) -> Plan:
    given: dict[str, Any] = {"example_inputs": (X,), "loss": mse, "example_targets": Y, **options}
    return make_plan(Own() if model is None else model, gpus, **given)


def frozen() -> nn.Module:
    return Own().requires_grad_(False)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: make_plan(Own()), InputError, "pass one global batch"),
        (lambda: plan(example_inputs=X), InputError, r"example_inputs=\(value,\)"),
        (lambda: plan(example_inputs=None, example_kwargs=(X,)), InputError, "write a dict of keyword arguments"),
        (lambda: plan(example_inputs=(X, X)), CaptureError, "^module Own: .* takes 2 positional arguments but 3"),
        (lambda: plan(example_inputs=(torch.ones(16, 9),)), CaptureError, r"test_misuse.py:\d+ in forward, module Linear \(linear\).*\[16, 9\]"),
        (lambda: plan(example_inputs=(X.long(),)), CaptureError, "module Linear .*dtype"),
        (lambda: plan(example_inputs=(X[:0],)), BatchError, "nothing to compute"),
        (lambda: plan(example_targets=torch.ones(16, 5)), CaptureError, r"loss fails on an output of shape \(16, 4\) and targets of shape \(16, 5\)"),
        (lambda: plan(example_targets=None), CaptureError, r"loss fails on an output of shape \(16, 4\).*pass example_targets"),
        (lambda: plan(loss=None), CaptureError, "Pass loss=callable"),
        (lambda: plan(loss="mse"), InputError, "pass a function"),
        (lambda: plan(loss=lambda out, to: 1.0), CaptureError, "returned a float"),
        (lambda: plan(loss=lambda out, to: (out - to).sum(1)), CaptureError, r"shape \(16,\)"),
        (lambda: plan(loss=lambda out, to: to.sum()), CaptureError, "does not depend on any of the 2 trainable parameters"),
        (lambda: plan(loss=lambda out, to: (out - to).detach().sum()), CaptureError, "only through detached values"),
        (lambda: plan(frozen()), CaptureError, "no parameter with requires_grad=True"),
        (lambda: plan(nn.ReLU(), example_targets=X), CaptureError, "ReLU has no parameter"),
        (lambda: plan(Own), InputError, "pass an nn.Module"),  # type: ignore[arg-type]
        (lambda: plan(gpus=0), ClusterError, "no such number of devices"),
        (lambda: plan(gpus="2 h900"), ClusterError, "write one of"),
        (lambda: plan(memory=100), InfeasibleError, r"Ways out: \(1\) allow .* a device"),
        (lambda: plan(memory=1.5), PartitionerError, "'1.5' is no amount of memory"),
        (lambda: plan(memory="1.5"), PartitionerError, "'1.5' is no amount of memory"),
        (lambda: plan(memory="plenty"), PartitionerError, '"16GB"'),
        (lambda: plan(memory=-1), PartitionerError, "between 1 byte"),
        (lambda: plan(gpus="2 h100-sxm", memory="80GiB"), ConstraintError, "85,899,345,920 bytes a device, but 2 h100-sxm .* have 84,900,000,000"),
        (lambda: plan(gpus=2, memory=2**50), ConstraintError, r"1,125,899,906,842,624 bytes a device, but 2 .* have \d"),
        (lambda: plan(nn.Sequential(nn.LazyLinear(4))), CaptureError, "parameter 0.weight has no shape yet .* Run the model once on an example"),
        (lambda: plan(constraints={"dp": 3}), ConstraintError, "gpus=3"),
        (lambda: plan(constraints={"micro_batches": 9}), BatchError, "micro_batches=8 or fewer"),
        (lambda: plan(constraints={"shard": "none", "checkpoint": "none", "micro_batches": 1}, memory=1400), InfeasibleError, "pinned: .*shard=none"),
        (lambda: plan(constraints=["zero3"]), ConstraintError, "write a dict"),
        (lambda: plan(optimizer="adamax9"), OptimizerError, "write one of sgd"),
        (lambda: plan(optimizer=torch.optim.AdamW(Own().parameters())), OptimizerError, "optimizer is AdamW; .*parallel.parameters"),
        (lambda: plan(optimizer=torch.optim.SGD), OptimizerError, "optimizer is SGD; "),
        (lambda: plan(batch_dim=7), BatchError, "no input has such a dim"),
        (lambda: plan(plan="plan.json"), PlanError, "plan is a str"),
    ],
)
def test_planning_is_refused(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as told:
        call()
    assert "\n" not in str(told.value)


@pytest.fixture(scope="module")
def parallel() -> Any:
    return auto_parallelize(Own(), 1, example_inputs=(X,), loss=mse, example_targets=Y)


@pytest.mark.parametrize(
    ("inputs", "targets", "error", "says"),
    [
        ((torch.ones(16, 9),), Y, InputError, r"args\[0\] has shape \(16, 9\), planned with \(16, 8\)"),
        ((X,), torch.ones(16, 5), InputError, r"targets has shape \(16, 5\), planned with \(16, 4\)"),
        ((X[:3],), Y[:4], InputError, r"args\[0\] has shape \(3, 8\), .*targets has shape \(4, 4\)"),
        ((X.double(),), Y, InputError, r"pass args\[0\].to\(torch.float32\)"),
        ((X, X), Y, InputError, "was not there when this model was planned"),
        ((), Y, InputError, r"args\[0\] is missing"),
        ((X[:0],), Y[:0], BatchError, "nothing to compute"),
    ],
)  # fmt: skip
def test_a_later_call_is_refused_by_its_inputs(parallel: Any, inputs: Any, targets: Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parallel.train_step(*inputs, targets=targets)
    assert parallel.train_step(X[:5], targets=Y[:5]).isfinite(), "another number of rows is no mistake"


def test_one_process_is_not_two() -> None:
    unlaunched = auto_parallelize(Own(), 2, example_inputs=(X,), loss=mse, example_targets=Y)
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node 2"):
        unlaunched.train_step(X, targets=Y)


@pytest.fixture(scope="module")
def good() -> Plan:
    return plan()


def edited(good: Plan, change: Callable[[dict[str, Any]], object]) -> Plan:
    data = json.loads(good.to_json())
    change(data)
    return Plan.from_json(json.dumps(data))


def nonsense(data: dict[str, Any]) -> None:
    for planned in data["classes"].values():
        for saved in planned["saved_sets"].values():
            saved["values"] = ["nonsense"]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (nonsense, PlanError, "cannot save 'nonsense'"),
        (lambda data: data["blocks"].append(data["blocks"][0]), PlanError, "the plan has 2 blocks .* cut into 1: block 1 is .* missing here"),
        (lambda data: data["blocks"].clear(), PlanError, "the plan has 0 blocks"),
        (lambda data: data["blocks"][0].update(label="elsewhere"), PlanError, "block 0 is 'elsewhere' in the plan"),
        (lambda data: data.update(micro_batches=16), BatchError, "micro_batches=8 or fewer"),
        (lambda data: data.update(mesh={"pp": 2}), PlanError, "must ascend from 0 to 1 without a gap"),
        (lambda data: data.update(precision="bf16"), PlanError, "precision bf16"),
        (lambda data: data.update(training=False), PlanError, "mode evaluation"),
        (lambda data: data.update(fingerprint="0" * 64), PlanError, "another model"),
        (lambda data: data["batch"]["leaves"][0].update(dim=1), PlanError, r"cuts args\[0\] along dim 1, but here it is cut along dim 0"),
        (lambda data: data["batch"]["leaves"].clear(), PlanError, "along no dim"),
    ],
)
def test_an_edited_plan_is_refused_where_it_is_used(
    good: Plan, change: Callable[[dict[str, Any]], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan(plan=edited(good, change))


def test_an_edited_plan_is_priced_anew(good: Plan) -> None:
    def lie(data: dict[str, Any]) -> None:
        data["predicted"]["runs"][0].update(step_seconds=1e-9, peak_bytes=1)

    assert plan(plan=edited(good, lie)).predicted == good.predicted
    sharded = plan(plan=edited(good, lambda data: [block.update(shard="zero3") for block in data["blocks"]]))
    assert sharded.predicted == plan(constraints={"shard": "zero3", "checkpoint": "none"}).predicted != good.predicted
    with pytest.raises(PlanError, match="raise memory or make a new plan"):
        plan(plan=good, memory=good.predicted.peak_bytes - 1)


def test_a_plan_has_an_optimizer_and_a_cap_of_its_own() -> None:
    made = plan(optimizer="sgd", memory="1MB")
    followed = plan(plan=made)
    assert (followed.optimizer, followed.memory_bytes, followed.predicted) == ("sgd", 1_000_000, made.predicted)
    assert plan(plan=made, optimizer="sgd", memory=1_000_000) == followed
    with pytest.raises(PlanError, match="optimizer='adamw' was given, but the plan was made for 'sgd'; leave optimizer out"):
        plan(plan=made, optimizer="adamw")
    with pytest.raises(PlanError, match="memory='2MB' was given, but the plan was made for 1000000; leave memory out"):
        plan(plan=made, memory="2MB")
    parallel = auto_parallelize(Own(), 1, example_inputs=(X,), loss=mse, example_targets=Y, plan=plan(gpus="1 cpu-local", optimizer="sgd"))
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.train_step(X, targets=Y)
    with pytest.warns(UserWarning, match='more than optimizer="sgd", which memory was planned for'):
        optimizer.step()


def test_the_missing_part_of_the_call_is_named(good: Plan) -> None:
    with pytest.raises(PlanError, match=r"for Own with args\[0\], targets, but here there are args\[0\], so its loss and .* missing"):
        plan(plan=good, loss=None, example_targets=None)


def test_the_wrong_plan_is_named(good: Plan) -> None:
    with pytest.raises(PlanError, match="for 2 ranks, but gpus asks for 3"):
        plan(gpus="3 cpu-local", plan=good)
    with pytest.raises(PlanError, match="planned for Own"):
        plan(nn.Linear(8, 4), plan=good)
    with pytest.raises(PlanError, match="mode training, but here it is evaluation"):
        plan(Own().eval(), plan=good)
    with pytest.raises(ConstraintError, match="leave one of them out"):
        plan(plan=good, constraints={"shard": "zero1"})


def called_itself() -> str:
    torch.manual_seed(0)
    model = Own()
    given: dict[str, Any] = {"example_inputs": (X,), "loss": mse, "example_targets": Y, "constraints": {"shard": "zero3"}, "verify": False}
    parallel = auto_parallelize(model, "2 cpu-local", **given)  # nothing is timed
    with pytest.raises(InputError) as caught:
        model(X)
    parallel.train_step(X[:4], targets=Y[:4])  # another capture
    assert parallel.eval()(X).shape == Y.shape
    assert torch.equal(parallel.train()(X), parallel(X))
    return str(caught.value)


def test_the_model_that_was_parallelized_says_what_to_call_instead() -> None:
    for text in pool.run(2, called_itself, group=False):
        assert text.startswith("the model was called itself") and "of 'linear.weight' this rank" in text and "parallel.train_step" in text


def test_what_a_loss_can_teach() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taught, self.detached, self.chooses, self.unused = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            choice = self.chooses(x).argmax(-1, keepdim=True)
            loss: Tensor = (self.taught(x) * self.detached(x).detach()).gather(1, choice).mean()
            return loss

    graph = capture(Half(), (X,), {}, loss=None, targets=None, has_targets=False, mode="loss", training=True)
    assert trained(graph) == {"taught.weight", "taught.bias"}
