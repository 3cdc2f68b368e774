"""ParallelModule and its autograd bridge on hand-made programs, against eager torch on one process."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_structure

from partitioner.errors import InputError, PartitionerError
from partitioner.passes import collectives
from partitioner.runtime.module import ParallelModule
from partitioner.runtime.optimizer_bytes import state_bytes, temporary_bytes
from partitioner.runtime.parameters import UnitStore, shapes_of
from partitioner.runtime.program import Program, Request, Shard
from partitioner.runtime.shards import local
from partitioner.runtime.simulator import Lasting, simulate, storage_bytes
from partitioner.runtime.unit_bytes import UnitBytes
from tests import ranks
from tests.small_programs import Chain, WholeStore, chain, eager, forward_chain, leaves

CPU = torch.device("cpu")


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], has_targets: bool, targets: Any) -> Any:
    tree = {"args": args, "kwargs": kwargs, **({"targets": targets} if has_targets else {})}
    pairs, spec = tree_flatten_with_path(tree)
    return [(keystr(path)[2:].replace("']", "", 1), leaf) for path, leaf in pairs], spec


class Requests(list[Request]):
    """A driver of one layout: lowers the chain for whatever batch comes."""

    def __call__(self, request: Request) -> Program:
        self.append(request)
        total = request.leaves["args[0]"].shape[0]
        if request.mode == "step":
            return chain(2, total, 2)
        program = replace(forward_chain(2, total), out_spec=tree_structure([0]))
        return program if request.grad else replace(program, after=())


def parallel(lower: Any = None, module: torch.nn.Module | None = None) -> ParallelModule:
    module = module or Chain(2)
    store = WholeStore(module, chain(2).units)
    return ParallelModule(module, store, Requests() if lower is None else lower, "plan", rank=0, ranks=1, group=None, device=CPU, flatten=flatten)


def test_module_keeps_the_users_names() -> None:
    user, model = Chain(2), parallel()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in user.named_parameters()]
    assert list(model.state_dict()) == list(user.state_dict()) == list(model.full_state_dict())
    assert model.layers[1].weight is dict(model.named_parameters())["layers.1.weight"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    with pytest.raises(PartitionerError, match="before auto_parallelize"):
        model.double()


def test_training_equals_eager_and_programs_are_cached() -> None:
    from torch.optim import optimizer

    hooks = [dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)]
    lower, plain = Requests(), Chain(2)
    model = parallel(lower)
    mine = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with pytest.raises(PartitionerError, match="call train_step first"):
        _ = model.measured.peak_bytes
    for total in (10, 10, 7, 10):
        given = leaves(total)
        mine.zero_grad()
        theirs.zero_grad()
        loss = model.train_step(given["args[0]"], given["args[1]"], targets=given["targets"])
        torch.testing.assert_close(loss, eager(plain, given))
        torch.testing.assert_close(model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        mine.step()
        theirs.step()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    assert [request.leaves["args[0]"].shape[0] for request in lower] == [10, 7]
    peak = model.measured.peak_bytes
    # parameters, gradients and two moments of two 16 x 16 layers, at least
    assert peak >= 4 * 2 * 1024
    assert hooks == [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]


def train_over_ranks(size: int) -> list[tuple[str, int, int]]:
    """Three AdamW steps and an evaluation with every shard, equal to eager; returns simulated and measured peaks."""
    import torch.distributed as dist

    rank, group = dist.get_rank(), dist.group.WORLD
    collectives.bind("dp", group)
    peaks: list[tuple[str, int, int]] = []
    shards: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
    for shard in shards:
        programs: list[Program] = []

        def lower(request: Request, shard: Shard = shard, programs: list[Program] = programs) -> Program:
            programs.append(chain(2, 7, 1, shard, rank, size))
            return programs[-1]

        module, plain, given = Chain(2), Chain(2), leaves(7)
        units = chain(2, shard=shard).units
        shapes = shapes_of(module)
        store = UnitStore(module, units, ranks=size, rank=rank, group=group)
        model = ParallelModule(module, store, lower, None, rank=rank, ranks=size, group=group, device=CPU, flatten=flatten)
        mine, theirs = torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)
        for _ in range(3):
            mine.zero_grad()
            theirs.zero_grad()
            loss = model.train_step(given["args[0]"], given["args[1]"], targets=given["targets"])
            torch.testing.assert_close(loss, eager(plain, given))
            torch.testing.assert_close(model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            mine.step()
            theirs.step()
            del loss  # held over optimizer.step, as the simulator assumes, and not into the next step
        with torch.no_grad():  # as an averaged copy is swapped in: nothing tells the store
            for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
                local(parameter).data.mul_(0.5)
                other.mul_(0.5)
        torch.testing.assert_close(model.train_step(given["args[0]"], given["args[1]"], targets=given["targets"]), eager(plain, given))
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        ghosts = UnitBytes.of(units, shapes, size, rank)
        stepped: Any = [shape for ghost in ghosts.values() for shape in ghost.local_shapes()]
        simulation = simulate(
            programs[0],
            Lasting(
                bytes_of=storage_bytes(given),
                unit_bytes=ghosts,
                optimizer_state_bytes=state_bytes("adamw", stepped),
                optimizer_temporary_bytes=temporary_bytes("adamw", stepped),
            ),
        )
        peaks.append((shard, simulation.peak_bytes, model.measured.peak_bytes))
    collectives.bind("dp", None)
    return peaks


@pytest.mark.parametrize("size", [2])
def test_training_over_ranks_equals_eager_and_its_peak_the_simulated_one(size: int) -> None:
    for peaks in ranks.run(size, train_over_ranks, size):
        assert [(shard, peak) for shard, peak, _ in peaks] == [(shard, peak) for shard, _, peak in peaks]


def test_forward_backward_through_autograd() -> None:
    model, plain, given = parallel(), Chain(2), leaves(6)
    (out,) = model(given["args[0]"])
    expected, _ = plain(given["args[0]"], given["args[1]"], given["targets"])
    torch.testing.assert_close(out, expected)
    (out * given["targets"]).sum().backward()
    (expected * given["targets"]).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        (alone,) = model(given["args[0]"])
    assert not alone.requires_grad and torch.equal(alone, out)


def test_two_forwards_before_their_backwards() -> None:
    model, plain = parallel(), Chain(2)
    one, two = torch.randn(6, 16), torch.randn(6, 16)
    first, second = model(one)[0], model(two)[0]
    (first.sum() - second.pow(2).sum()).backward()
    eager_first, _ = plain(one, torch.ones(6), torch.zeros(6, 16))
    eager_second, _ = plain(two, torch.ones(6), torch.zeros(6, 16))
    (eager_first.sum() - eager_second.pow(2).sum()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_second_backward_is_refused_and_outputs_are_not_kept() -> None:
    model, given = parallel(), leaves(6)
    (out,) = model(given["args[0]"])
    loss = out.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="saved values are gone"):
        loss.backward()
    gc.collect()
    gc.disable()
    try:
        storage = weakref.ref(out.untyped_storage())
        del out, loss
        assert storage() is None  # no circle of output, graph and run
    finally:
        gc.enable()


def test_what_the_user_does_to_an_output_does_not_reach_backward() -> None:
    model, plain, given = parallel(), Chain(2), leaves(6)
    (out,) = model(given["args[0]"])
    kept = out.sum()
    with torch.no_grad():
        out.zero_()
    kept.backward()
    eager_out, _ = plain(given["args[0]"], given["args[1]"], given["targets"])
    eager_out.sum().backward()
    torch.testing.assert_close(model.layers[0].weight.grad, plain.layers[0].weight.grad)


def test_evaluation_is_another_program() -> None:
    lower = Requests()
    model = parallel(lower)
    given = leaves(6)
    model(given["args[0]"])
    model.eval()
    assert not model.layers[0].training
    model(given["args[0]"])
    model.train()
    model(given["args[0]"])
    assert [request.training for request in lower] == [True, False]


def test_wrong_call_names_the_path() -> None:
    model, given = parallel(), leaves()
    model.train_step(given["args[0]"], given["args[1]"], targets=given["targets"])
    with pytest.raises(InputError, match="targets is missing"):
        model.train_step(given["args[0]"], given["args[1]"])
    with pytest.raises(InputError, match=r"args\[0\] has dtype torch.float64"):
        model.train_step(given["args[0]"].double(), given["args[1]"], targets=given["targets"])


def test_full_state_comes_back() -> None:
    model, other = parallel(), parallel()
    with torch.no_grad():
        model.layers[0].weight.add_(1)
    other.load_full_state_dict(model.full_state_dict())
    assert torch.equal(other.layers[0].weight, model.layers[0].weight)
