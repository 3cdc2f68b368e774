"""What the driver is given: constraints, example inputs, options of a session; everything else is refused by name."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Cluster, Plan
from partitioner.constraints import Constraints, parse
from partitioner.errors import BatchError, ConstraintError, InputError, PartitionerError, PlanError
from partitioner.examples import example_call
from partitioner.runtime.program import Request
from partitioner.session import Session
from tests.driver_models import RANKS, ROWS, Deep, ids, planned, square

# ------------------------------------------------------------------------------------------------------------------- constraints


def test_constraints_are_read_and_written_back() -> None:
    assert parse(None, 4) == parse({}, 4) == Constraints()
    given = {"dp": 4, "micro_batches": 2, "shard": "zero3", "checkpoint": "full"}
    assert parse(given, 4).as_dict() == given
    piped = {"pp": 2, "dp": 2, "schedule": "gpipe", "micro_batches": 8}
    assert parse(piped, 4).as_dict() == piped
    neutral = {"pp": None, "tp": 1, "schedule": None, "shard": "auto", "micro_batches": None}
    assert parse({**given, **neutral}, 4).as_dict() == {"dp": 4, "checkpoint": "full"}
    assert parse(Constraints(shard="zero1").as_dict(), 2).shard == "zero1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["zero3"], r'constraints is a list; write a dict such as \{"shard"'),
        ({"pp": 0}, r"constraints\['pp'\] is 0; write a whole number from 1 to 1,000,000"),
        ({"tp": True}, r"constraints\['tp'\] is True; write a whole number"),
        ({"tp": "2"}, r"constraints\['tp'\] is '2'; write a whole number"),
        ({"pp": 3}, r"\['pp'\] is 3, but 4 devices cannot be dealt to 3 stages evenly; write a divisor of 4"),
        ({"pp": 2, "schedule": "2f2b"}, r"constraints\['schedule'\] is '2f2b'; it may be gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        ({"tp": 2}, r"\['tp'\] is 2, but tensor parallelism is not available yet: .* leave tp out"),
        ({"schedule": "1f1b"}, r"constraints\['schedule'\] is '1f1b', which orders pipeline stages, .* write pp too"),
        ({"shards": "zero3"}, r"unknown constraint 'shards'; known are batch_statistics, checkpoint, dp, micro_batches, pp, schedule, shard"),
        ({3: "zero3"}, r"unknown constraint '3'; known are"),
        ({"shard": "zero4"}, r"constraints\['shard'\] is 'zero4'; it may be none, zero1, zero2, zero3, auto"),
        ({"shard": ["zero3"]}, r"constraints\['shard'\] is \['zero3'\]; it may be"),
        ({"checkpoint": None}, r"constraints\['checkpoint'\] is None; it may be none, full, auto"),
        ({"micro_batches": 0}, r"constraints\['micro_batches'\] is 0; write a whole number from 1 to 1,000,000"),
        ({"micro_batches": 10**7}, r"\['micro_batches'\] is 10000000; write a whole number from 1 to 1,000,000"),
        ({"micro_batches": 2.0}, r"constraints\['micro_batches'\] is 2\.0; write a whole number"),
        ({"dp": False}, r"constraints\['dp'\] is False; write a whole number"),
        ({"dp": 2}, r"constraints\['dp'\] is 2, but 4 devices in 1 stage leave 4 a stage; write gpus=2 or leave dp out"),
    ],
)
def test_constraints_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        parse(given, 4)


# ---------------------------------------------------------------------------------------------------------------- example inputs


class Shown(nn.Module):
    """Says what its inputs look like, as Hugging Face and Lightning modules do."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_given_examples_come_first() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    model = Shown(dummy_inputs={"x": y})
    assert example_call(model, (x,), None) == ((x,), {})
    assert example_call(model, [x, y], {"mask": None}) == ((x, y), {"mask": None})
    assert example_call(model, None, {"x": x}) == ((), {"x": x})


def test_examples_are_found_on_the_model() -> None:
    x = torch.ones(2)
    assert example_call(Shown(dummy_inputs={"x": x}, example_input_array=torch.zeros(1)), None, None) == ((), {"x": x})
    assert example_call(Shown(dummy_inputs={}, example_input_array=x), None, None) == ((x,), {})
    assert example_call(Shown(example_input_array=(x, 3)), None, None) == ((x, 3), {})
    assert example_call(Shown(example_input_array={"x": x}), None, None) == ((), {"x": x})


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Embedding(5, 4), (8, 8)),
        (nn.Linear(6, 2, dtype=torch.float64), (8, 6)),
        (nn.Conv1d(2, 3, 3), (8, 2, 32)),
        (nn.Conv2d(3, 4, 3), (8, 3, 32, 32)),
        (nn.Conv3d(1, 2, 3), (8, 1, 32, 32, 32)),
        (nn.Linear(6, 2, device="meta"), (8, 6)),
    ],
)
def test_a_sequential_takes_what_its_first_layer_takes(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, before = nn.Sequential(layer, nn.ReLU()), torch.get_rng_state()
    (x,), kwargs = example_call(model, None, None)
    assert x.shape == shape and not kwargs and torch.equal(before, torch.get_rng_state())
    assert x.device == next(layer.parameters()).device
    assert isinstance(layer, nn.Embedding) or x.dtype == next(layer.parameters()).dtype
    model(x)


@pytest.mark.parametrize("model", [Shown(), nn.Sequential(), nn.Sequential(nn.ReLU()), nn.Linear(2, 2)])
def test_without_examples_the_call_to_write_is_shown(model: nn.Module) -> None:
    with pytest.raises(InputError, match=rf"^{type(model).__name__} does not say .*auto_parallelize\(model, gpus=…, example_inputs=\(tokens,\)"):
        example_call(model, None, None)


def test_examples_of_another_form_are_refused() -> None:
    with pytest.raises(InputError, match=r"example_inputs is a Tensor; .* write example_inputs=\(value,\)"):
        example_call(Shown(), torch.ones(2), None)
    with pytest.raises(InputError, match=r"example_kwargs is a tuple; write a dict"):
        example_call(Shown(), None, (torch.ones(2),))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------- session


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "bf16"}, PartitionerError, r"precision='bf16' is not available yet; write precision='fp32'"),
        ({"loss": 3}, PartitionerError, r"loss is a int; pass a function"),
        ({"memory": "much"}, PartitionerError, r"'much' is no amount of memory"),
        ({"batch_dim": "first"}, BatchError, r"batch_dim is 'first'; write an int"),
        ({"batch_dim": True}, BatchError, r"batch_dim is True; write an int"),
        ({"batch_dim": {"tokens": 0}}, BatchError, r"batch_dim speaks of kwargs\['tokens'\], which is no input; the inputs are args\[0\]"),
        ({"batch_dim": ("0",)}, BatchError, r"batch_dim says '0' for args\[0\]; write the number of the batch dim, or None"),
        ({"constraints": {"micro_batches": ROWS}}, BatchError, r"16 rows on 2 ranks leave a rank with 8; use micro_batches=8 or fewer"),
        ({"constraints": {"dp": 3}}, ConstraintError, r"2 devices in 1 stage leave 2"),
        ({"plan": "plan.json"}, PlanError, r"plan is a str; pass what make_plan\(…\) or Plan\.load\(…\) returned"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[PartitionerError], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(**options)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(InputError, match=r"model is a function; pass an nn\.Module"):
        planned(square)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def edited(plan: Plan, **changes: Any) -> Plan:
    return Plan.from_json(json.dumps({**json.loads(plan.to_json()), **changes}))


def test_a_plan_for_other_ranks_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"the plan is for 2 ranks, but gpus asks for 3; write gpus=2 or make a new plan"):
        planned(gpus="3 cpu-local", plan=plan)


def test_a_plan_for_another_model_is_refused(plan: Plan) -> None:
    frozen = Deep()
    frozen.embed.requires_grad_(False)
    for other in (Deep(3), Deep(width=8), frozen):
        with pytest.raises(PlanError, match=r"the plan is for another model or other inputs .*planned for Deep; make a new plan"):
            planned(other, plan=plan)
    with pytest.raises(PlanError, match="another model or other inputs"):
        planned(plan=plan, example_inputs=None, example_kwargs={"ids": ids()})
    with pytest.raises(PlanError, match="another model"):
        planned(plan=edited(plan, fingerprint="0" * 64))


def test_a_plan_that_does_not_fit_is_refused(plan: Plan) -> None:
    peak = plan.predicted.peak_bytes
    assert planned(plan=plan, memory=peak).predicted.peak_bytes == peak
    with pytest.raises(PlanError, match=rf"the plan takes {peak:,} bytes per device, but there are {peak - 1:,}; raise memory"):
        planned(plan=plan, memory=peak - 1)


def test_an_edited_plan_is_refused_where_it_contradicts_the_model(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    with pytest.raises(PlanError, match=r"the plan has 1 blocks and this model is cut into 4: block 1 is missing in the plan"):
        planned(plan=edited(plan, blocks=data["blocks"][:1]))
    with pytest.raises(BatchError, match=r"16 micro-batches were asked for, but 16 rows on 2 ranks"):
        planned(plan=edited(plan, micro_batches=16))
    layer = data["blocks"][1]
    for values, message in (
        (["nonsense"], r"block 'layers\.0' cannot save 'nonsense': it computes no such value"),
        (["mm"], r"block 'layers\.0' cannot run its backward .*: mm cannot be saved: .*only once gradients arrive"),
        ([], r"block 'layers\.0' cannot run its backward from the planned saved values: backward needs"),
    ):
        data["classes"][layer["class"]]["saved_sets"][layer["saved"]]["values"] = values
        with pytest.raises(PlanError, match=message):
            planned(plan=edited(plan, classes=data["classes"]))


def test_an_edited_plan_is_followed(plan: Plan) -> None:
    blocks = [{**block, "shard": "zero3"} for block in json.loads(plan.to_json())["blocks"]]
    followed = planned(plan=edited(plan, blocks=blocks, micro_batches=4))
    assert {block.shard for block in followed.blocks if block.label != "model"} == {"zero3"} and followed.micro_batches == 4
    assert followed.predicted.peak_bytes < plan.predicted.peak_bytes


def session(**changes: Any) -> Session:
    given: dict[str, Any] = {
        "example_inputs": (ids(),),
        "example_kwargs": None,
        "loss": square,
        "example_targets": None,
        "batch_dim": "auto",
        "optimizer": "adamw",
        "precision": "fp32",
        "memory": None,
        "constraints": {"micro_batches": 4},
        "verify": False,
    }
    return Session(Deep(), Cluster.parse(RANKS), **{**given, **changes})


def test_other_batches_follow_the_plan() -> None:
    """A short batch takes fewer micro-batches; a call in evaluation is a program of its own; another tree of inputs is refused."""
    made = session()
    with pytest.raises(PlanError, match="there is no plan yet"):
        _ = made.units
    assert made.plan().micro_batches == 4
    rows = {}
    for total in (ROWS, 11, 4, 1):
        programs = made.lower(Request("step", True, {"args[0]": ids(total)}, True))
        rows[total] = [program.rows for program in programs]
    assert rows == {16: [(2, 2, 2, 2)] * 2, 11: [(2, 2, 1, 1), (2, 1, 1, 1)], 4: [(1, 1)] * 2, 1: [(0,)] * 2}
    (first, _) = made.lower(Request("forward", True, {"args[0]": ids(6)}, False))
    assert first.instructions[-1].op == "OUTPUT" and not first.after and first.output_placements == ("shard",)
    assert made.units == first.units
    with pytest.raises(InputError, match=r"the inputs are kwargs\['ids'\], but the model was planned with args\[0\]"):
        made.lower(Request("step", True, {"kwargs['ids']": ids()}, True))
