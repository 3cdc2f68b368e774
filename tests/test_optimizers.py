"""torch's optimizers on cut parameters equal torch's optimizers on whole ones; others are refused; their memory is foretold to the byte."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partitioner.errors import OptimizerError
from partitioner.runtime.memory import Tracker, storage_bytes
from partitioner.runtime.optimizer_bytes import KINDS, instance_bytes, state_bytes, temporary_bytes
from partitioner.runtime.optimizers import ELEMENTWISE, is_elementwise
from partitioner.runtime.parameters import UnitStore
from partitioner.runtime.program import Unit
from tests import ranks as pool

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("Adam", {"foreach": True, "capturable": False}),
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("ASGD", {}),
    ("Rprop", {}),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(201, 103, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(1, 3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.still = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.idle = nn.Parameter(torch.randn(6, dtype=torch.float64))


def build() -> Model:
    torch.manual_seed(1)
    return Model()


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model = build()
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for name, parameter in model.named_parameters()
        if name not in ("still", "idle")
    }


def store_of(model: nn.Module, shard: Any) -> tuple[UnitStore, Unit]:
    unit = Unit(0, shard, tuple(name for name, _ in model.named_parameters()))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return UnitStore(model, (unit,), ranks=ranks, rank=rank, group=dist.group.WORLD if ranks > 1 else None), unit


def put_gradients(store: UnitStore, unit: Unit, step: int, rank: int) -> None:
    for name, gradient in gradients(step, rank).items():
        store.accumulate(name, gradient)
    store.reduce(unit, True)
    store.finish()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [named["weight"], named["scale"]], "lr": 0.05},
        {"params": [value for name, value in named.items() if name not in ("weight", "scale")]},
    ]


def make(name: str, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups_of(model), lr=0.01, **options)
    return made


def _train(name: str, options: dict[str, Any], shard: str) -> dict[str, Tensor]:
    """Four steps; the optimizer's state goes through state_dict and into a new optimizer halfway."""
    model = build()
    store, unit = store_of(model, shard)
    optimizer = make(name, options, model)
    rank = dist.get_rank()
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            assert not any(isinstance(value, DTensor) for held in state["state"].values() for value in held.values())
            optimizer = make(name, options, model)
            optimizer.load_state_dict(state)
        put_gradients(store, unit, step, rank)
        before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.step()
        assert all(one is other for one, other in zip(before, (p for g in optimizer.param_groups for p in g["params"]), strict=True))
        assert set(map(id, optimizer.state)) <= set(map(id, before))
        assert model.idle.grad is None
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return store.full_state()


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_steps_on_rows_equal_steps_on_the_whole(name: str, options: dict[str, Any], shard: str) -> None:
    model = build()
    optimizer = make(name, options, model)
    for step in range(4):
        for key, parameter in model.named_parameters():
            if key in gradients(step, 0):
                total = gradients(step, 0)[key] + gradients(step, 1)[key]
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        if step == 2:  # loading rounds or widens what torch keeps in another dtype, so do it here too
            state = optimizer.state_dict()
            optimizer = make(name, options, model)
            optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    for state in pool.run(2, _train, name, options, shard):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)


def _closure() -> tuple[Tensor, float, bool]:
    model = build()
    store, unit = store_of(model, "zero2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def closure() -> float:
        optimizer.zero_grad()
        put_gradients(store, unit, 0, dist.get_rank())
        return 7.0

    put_gradients(store, unit, 5, dist.get_rank())  # to be zeroed by the closure
    loss = optimizer.step(closure)
    return store.full_state()["weight"], loss, isinstance(optimizer.param_groups[0]["params"][0], DTensor)


def test_a_closure_sees_the_users_parameters() -> None:
    expected = build().weight - gradients(0, 0)["weight"] - gradients(0, 1)["weight"]
    for weight, loss, restored in pool.run(2, _closure):
        torch.testing.assert_close(weight, expected)
        assert loss == 7.0 and restored


class Failing(torch.optim.SGD):
    """Inherits SGD's step, so it is known; fails when told to."""

    fail = False

    def _init_group(self, *args: Any) -> Any:
        if self.fail:
            raise RuntimeError("halfway")
        return super()._init_group(*args)  # type: ignore[no-untyped-call]


def _failing() -> list[bool]:
    model = build()
    store, unit = store_of(model, "zero3")
    optimizer = Failing(model.parameters(), lr=1.0)
    put_gradients(store, unit, 0, dist.get_rank())
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="halfway"):
        optimizer.step()
    optimizer.fail = False
    optimizer.step()
    expected = build().weight - gradients(0, 0)["weight"] - gradients(0, 1)["weight"]
    return [isinstance(optimizer.param_groups[0]["params"][0], DTensor), torch.allclose(store.full_state()["weight"], expected)]


def test_a_step_that_raised_does_no_lasting_harm() -> None:
    assert pool.run(2, _failing) == [[True, True]] * 2


class Own(torch.optim.Optimizer):
    """A user's optimizer that the package cannot know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _refused() -> list[str]:
    texts = []
    for shard in ("none", "zero1", "zero3"):
        model = build()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        store, unit = store_of(model, shard)
        put_gradients(store, unit, 0, dist.get_rank())
        made: list[torch.optim.Optimizer] = [Own(model.parameters()), torch.optim.LBFGS(model.parameters()), early]
        for optimizer in made:
            try:
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
                else:
                    optimizer.step()
            except OptimizerError as error:
                texts.append(str(error))
        try:
            made[1].step()
        except OptimizerError as error:
            texts.append(str(error))
    return texts


def test_optimizers_that_cannot_step_on_rows_are_refused_and_name_the_way_out() -> None:
    texts = pool.run(2, _refused)[1]
    assert len(texts) == 9
    for bare in texts[::4]:
        assert bare.startswith("LBFGS.step was called without the closure") and "optimizer.step(closure)" in bare
    del texts[::4]  # with shard "none" the other three work
    for own, quasi_newton, early in (texts[:3], texts[3:]):
        assert own.startswith("Own was given 'weight'") and '{"shard": "none"}' in own and "AdamW" in own
        assert quasi_newton.startswith("LBFGS was given 'weight'")
        assert "before the model was parallelized" in early and "optimizer = torch.optim.SGD(parallel.parameters()" in early


def test_known_classes_and_their_heirs() -> None:
    assert all(is_elementwise(kind) for kind in ELEMENTWISE)
    assert is_elementwise(Failing)
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, Own):
        assert not is_elementwise(kind)


def _warned(planned: str, name: str) -> list[str]:
    model = build()
    store, unit = store_of(model, "zero1")
    store.planned_optimizer = planned
    optimizer = make(name, {}, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            put_gradients(store, unit, step, dist.get_rank())
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_a_hungrier_optimizer_than_planned_warns_once() -> None:
    (text,) = pool.run(2, _warned, "sgd", "AdamW")[0]
    assert 'optimizer="sgd"' in text and "AdamW holds" in text
    assert pool.run(2, _warned, "adamw", "SGD") == [[], []]


SIZES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((100, 30), torch.float32),
    ((7,), torch.float32),
    ((300, 20), torch.float32),
    ((), torch.float32),
    ((0, 3), torch.float32),
    ((50, 10), torch.float64),
    ((5000,), torch.bfloat16),
    ((40, 70), torch.float32),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_state_and_temporaries_to_the_byte(kind: str, foreach: bool) -> None:
    cls, options = KINDS[kind]
    sizes = [(shape, torch.float32 if foreach else dtype) for shape, dtype in SIZES]
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    made: Any = cls
    optimizer = made(parameters, lr=0.001, **({"foreach": True} if foreach else {}), **dict(options))
    tracker = Tracker().track(parameters).track([parameter.grad for parameter in parameters])
    start = tracker.now_bytes
    tracker.track([value for held in optimizer.state.values() for value in held.values()])
    most = 0
    for step in range(8):
        tracker.reset_peak()
        with tracker:
            optimizer.step()
        state = storage_bytes(value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor))
        assert tracker.now_bytes == start + state
        if step:
            most = max(most, tracker.peak_bytes - tracker.now_bytes)
    device = "cuda" if foreach else "cpu"
    assert state_bytes(kind, sizes) == state
    assert temporary_bytes(kind, sizes, device) == most
    assert instance_bytes(optimizer, sizes, device) == (state, most)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptimizerError, match=r"optimizer='adafactor' is not one .* adamw"):
        state_bytes("adafactor", SIZES)
    assert temporary_bytes("adamw", []) == state_bytes("adamw", []) == 0


def test_the_readme_names_the_optimizers() -> None:
    assert ", ".join(KINDS) in (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
