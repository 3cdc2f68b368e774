"""When the solver takes pipeline stages by itself, and what it keeps where memory binds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Cluster, make_plan
from partitioner.cluster import Link
from partitioner.errors import ConstraintError, InfeasibleError
from tests.test_pipeline import square, stack


def test_the_solver_takes_stages_by_itself_only_where_nothing_fits_without() -> None:
    asked = {"gpus": "1x2 h100-sxm", "example_inputs": (torch.zeros(2, 512),), "loss": square}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.GELU()) for _ in range(6)))
    free = make_plan(model, **asked)  # type: ignore[arg-type]
    assert free.mesh == {"dp": 2}
    staged = make_plan(model, **asked, constraints={"pp": 2, "shard": "none"})  # type: ignore[arg-type]
    one = make_plan(model, **asked, constraints={"pp": 1, "shard": "none"})  # type: ignore[arg-type]
    assert staged.predicted.peak_bytes < 0.6 * one.predicted.peak_bytes
    memory = (staged.predicted.peak_bytes + one.predicted.peak_bytes) // 2
    chosen = make_plan(model, **asked, memory=memory, constraints={"shard": "none"})  # type: ignore[arg-type]
    assert chosen.mesh == {"pp": 2, "dp": 1} and chosen.predicted.peak_bytes <= memory
    with pytest.raises(InfeasibleError, match="Ways out"):
        make_plan(model, **asked, memory=memory // 8, constraints={"shard": "none"})  # type: ignore[arg-type]


def test_stages_keep_less_where_memory_binds_and_the_bound_holds() -> None:
    model = stack(12)
    asked = {"gpus": "1x4 h100-sxm", "example_inputs": (torch.zeros(64, 8),), "loss": square}
    pins = {"pp": 4, "micro_batches": 4, "schedule": "1f1b"}
    free = make_plan(model, **asked, constraints=pins)  # type: ignore[arg-type]
    lean = make_plan(model, **asked, constraints={**pins, "checkpoint": "full"})  # type: ignore[arg-type]
    memory = (free.predicted.peak_bytes + lean.predicted.peak_bytes) // 2
    tight = make_plan(model, **asked, constraints=pins, memory=memory)  # type: ignore[arg-type]
    assert tight.predicted.peak_bytes <= memory < free.predicted.peak_bytes
    assert free.bound_seconds <= free.predicted.step_seconds <= tight.predicted.step_seconds * (1 + 1e-9)


def test_where_asked_the_quickest_mesh_is_taken() -> None:
    """Large parameters and little data between slow nodes: their gradients take longer to sum than a few values to send."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.GELU()) for _ in range(6)))
    asked = {"example_inputs": (torch.zeros(64, 512),), "loss": square}
    slow = Link(alpha_seconds=1e-6, bytes_per_second=1e8)
    nodes = Cluster.preset("h100-sxm", 2, 1).model_copy(update={"inter": slow})
    unasked = make_plan(model, gpus=nodes, **asked)  # type: ignore[arg-type]
    staged = make_plan(model, gpus=nodes, **asked, constraints={"pp": "auto"})  # type: ignore[arg-type]
    assert unasked.mesh == {"dp": 2} and staged.mesh == {"pp": 2, "dp": 1}
    assert staged.bound_seconds <= staged.predicted.step_seconds < unasked.predicted.step_seconds
    near = make_plan(model, gpus=nodes.model_copy(update={"inter": nodes.intra}), **asked, constraints={"pp": "auto"})  # type: ignore[arg-type]
    alone = make_plan(model, gpus=nodes.model_copy(update={"inter": nodes.intra}), **asked, constraints={"pp": 1})  # type: ignore[arg-type]
    assert near.predicted.step_seconds <= alone.predicted.step_seconds
    with pytest.raises(ConstraintError, match="or \"auto\""):
        make_plan(model, gpus=nodes, **asked, constraints={"pp": "many"})  # type: ignore[arg-type]


class Table(nn.Module):
    """Made of the positions alone, as rotary embeddings are."""

    def forward(self, positions: Tensor) -> Tensor:
        angles = positions.float()[..., None] * torch.arange(16, dtype=torch.float32)
        return torch.cos(angles) + torch.sin(angles)


class Turned(nn.Module):
    """Layers that all read one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table = self.table(positions)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * table
        return x.square().mean()


@pytest.mark.parametrize(("alpha", "anew"), [(1e-3, True), (0.0, False)])
def test_what_costs_less_than_its_messages_is_run_anew_on_the_stages_that_read_it(alpha: float, anew: bool) -> None:
    cluster = Cluster.preset("cpu-local", 1, 3).model_copy(update={"intra": Link(alpha_seconds=alpha, bytes_per_second=1e19)})
    asked = {"gpus": cluster, "example_inputs": (torch.zeros(8, 32, 16), torch.zeros(8, 32, dtype=torch.int64))}
    plan = make_plan(Turned(), **asked, constraints={"pp": 3, "schedule": "1f1b", "micro_batches": 2})  # type: ignore[arg-type]
    lowered: Any = plan._bound("a test")
    programs = lowered.programs
    (table,) = {call for program in programs for call in program.calls if call.label.startswith("table")}
    assert all(any(call.number == table.number for call in program.calls) for program in programs) == anew
    sent = {i.value for program in programs for i in program.instructions if i.op == "SEND"}
    assert sent.isdisjoint(table.writes) == anew
