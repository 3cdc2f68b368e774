"""The executor, the autograd bridge and ParallelModule on hand-made programs, against eager torch on one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner.errors import InputError, NonFiniteError
from partitioner.runtime.executor import Executor, mix
from partitioner.runtime.inputs import Expected, join, narrow, narrow_copies, spread
from partitioner.runtime.program import Call, Function, Instruction, Program, Ref, Replay, Slice
from tests import ranks
from tests.small_programs import Chain, WholeStore, chain, eager, leaves

CPU = torch.device("cpu")


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("total", "micro_batches"), [(10, 1), (10, 3), (2, 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_step_equals_eager(shard: str, total: int, micro_batches: int, tied: bool) -> None:
    program = chain(3, total, micro_batches, shard, tied=tied)  # type: ignore[arg-type]
    module, plain, given = Chain(3, tied), Chain(3, tied), leaves(total)
    loss = Executor(program, module, WholeStore(module, program.units), None, CPU).step(given)
    torch.testing.assert_close(loss, eager(plain, given))
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_second_step_adds_to_gradients() -> None:
    program, module, given = chain(), Chain(), leaves()
    executor = Executor(program, module, WholeStore(module, program.units), None, CPU)
    executor.step(given)
    once = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    executor.step(given)
    for first, parameter in zip(once, module.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * first)


def test_error_names_rank_instruction_and_block() -> None:
    def broken(arguments: list[object]) -> tuple[Tensor, ...]:
        raise ValueError("no")

    program = chain()
    program = replace(program, functions={**program.functions, "layer": replace(program.functions["layer"], forward=broken)})
    module = Chain()
    with pytest.raises(ValueError, match="no") as caught:
        Executor(program, module, WholeStore(module, program.units), None, CPU).step(leaves())
    assert caught.value.__notes__ == ["on rank 0 of 1, at FORWARD block 0 mb 0 on compute (layers.0)"]


def test_non_finite_loss_is_refused() -> None:
    program, module = chain(), Chain()
    given = leaves() | {"targets": torch.full((10, 16), float("inf"))}
    with pytest.raises(NonFiniteError, match="loss of this batch is inf"):
        Executor(program, module, WholeStore(module, program.units), None, CPU).step(given)


def scalar_program(keyed: bool, rank: int = 0, ranks: int = 1, micro_batches: int = 2) -> tuple[Program, list[list[object]]]:
    """One block that reads every scalar; what it was given is appended to the list."""
    seen: list[list[object]] = []

    def forward(arguments: list[object]) -> tuple[Tensor, ...]:
        seen.append(list(arguments))
        arguments.clear()
        return (torch.zeros(()),)

    names = ("rows", "start", "share", "key_local", "key_shared")
    function = Function("scalars", "", forward, None, 1, (), (), (), Replay(5, (), ()), None)
    calls = (
        Call(0, "scalars", "one", tuple(Ref("scalar", name) for name in names), ("l",)),
        Call(1, "scalars", "two", tuple(Ref("scalar", name) for name in names), ("m",)),
    )
    lines = [Instruction("FORWARD", block=block, mb=mb) for mb in range(micro_batches) for block in (0, 1)]
    lines += [Instruction("LOSS", stream="reduce", bytes=4)]
    base = chain(1, 10, micro_batches, rank=rank, ranks=ranks)
    return replace(base, calls=calls, functions={"scalars": function}, units=(), instructions=tuple(lines), keyed=keyed), seen


def test_scalars() -> None:
    program, seen = scalar_program(keyed=True)
    executor = Executor(program, torch.nn.Module(), WholeStore(torch.nn.Module(), ()), None, CPU)
    torch.manual_seed(11)
    executor.step({})
    first = [list(values) for values in seen]
    assert [values[:3] for values in first] == [[5, 0, 0.5], [5, 0, 0.5], [5, 5, 0.5], [5, 5, 0.5]]
    local = [values[3] for values in first]
    shared = [values[4] for values in first]
    assert len({*local, *shared}) == 6  # one local key per block and micro-batch, one shared key per block
    assert shared[0] == shared[2] != shared[1] == shared[3]
    executor.step({})
    assert not {values[3] for values in seen[4:]} & set(local)  # another step draws anew
    torch.manual_seed(11)
    executor.step({})
    assert seen[8:] == first  # the same seed, the same keys
    assert all(isinstance(key, int) and 0 <= key < 2**62 for key in (*local, *shared))


def test_unkeyed_program_draws_no_seed() -> None:
    program, seen = scalar_program(keyed=False)
    before = torch.get_rng_state()
    Executor(program, torch.nn.Module(), WholeStore(torch.nn.Module(), ()), None, CPU).step({})
    assert torch.equal(before, torch.get_rng_state())
    assert all(values[3:] == [-1, -1] for values in seen)


def test_mix_spreads() -> None:
    assert len({mix(seed, block, mb) for seed in range(10) for block in range(10) for mb in range(10)}) == 1000
    from partitioner.passes.randomness import mix as theirs

    assert mix(3, 4, 5) == theirs(3, 4, 5)


def two_ranks(rank: int, size: int) -> tuple[Tensor, list[Tensor], list[list[object]]]:
    """Loss of an uneven batch over ranks, outputs joined, and the keys that a rank sees."""
    import torch.distributed as dist

    group = dist.group.WORLD
    given = leaves(7)
    program, module = chain(2, 7, 1, rank=rank, ranks=size), Chain(2)
    program = replace(program, instructions=tuple(line for line in program.instructions if line.op != "PROLOGUE"))
    executor = Executor(program, module, WholeStore(module, program.units), group, CPU)
    count = Function("count", "", lambda _: (torch.tensor(2.0),), None, 1, (), (), (), Replay(0, (), ()), None)
    prologue = Call(3, "count", "prologue", (), ("n",))
    executor.program = replace(
        program,
        calls=(*program.calls[:3], prologue),
        functions={**program.functions, "count": count},
        instructions=(Instruction("PROLOGUE", block=3), *program.instructions),
    )
    loss = executor.step(given)
    pieces, cut = spread(7, size), Slice("out", 1, outer=2, inner=3)
    whole = torch.arange(5 * 42).view(5, 42)
    mine = narrow(whole, cut, sum(pieces[:rank]), pieces[rank], 7)
    halves = spread(pieces[rank], 2)
    first = narrow(mine, cut, 0, halves[0], pieces[rank])
    second = narrow(mine, cut, halves[0], halves[1], pieces[rank])
    joined = join([first, second], cut, halves, 7, size, group)
    flags = join([narrow(whole, cut, sum(pieces[:rank]), pieces[rank], 7) > 40], cut, [pieces[rank]], 7, size, group)
    torch.manual_seed(rank)  # rank 0's seed counts
    keyed, seen = scalar_program(keyed=True, rank=rank, ranks=size, micro_batches=1)
    Executor(keyed, torch.nn.Module(), WholeStore(torch.nn.Module(), ()), group, CPU).step({})
    return loss, [joined, flags], seen


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sum_join_and_agree(size: int) -> None:
    results = ranks.run(size, two_ranks_task, size)
    module, given = Chain(2), leaves(7)
    x, _ = module(given["args[0]"], given["args[1]"], given["targets"])
    expected = (x - given["targets"]).pow(2).sum().detach() / 2
    whole = torch.arange(5 * 42).view(5, 42)
    for loss, (joined, flags), _ in results:
        torch.testing.assert_close(loss, expected)
        assert torch.equal(joined, whole) and torch.equal(flags, whole > 40)
    keys = [[values[3:] for values in seen] for _, _, seen in results]
    assert all(own[0][1] == keys[0][0][1] for own in keys)
    assert len({own[0][0] for own in keys}) == size


def two_ranks_task(size: int) -> Any:
    import torch.distributed as dist

    return two_ranks(dist.get_rank(), size)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [((12, 3), Slice("a", 0)), ((2, 12), Slice("a", 1, 1, 2, before=2)), ((2, 12), Slice("a", 1, 2, 1, before=2)), ((24, 2), Slice("a", 0, 2, 2))],
)
def test_narrow_takes_rows(shape: tuple[int, ...], cut: Slice) -> None:
    leaf = torch.arange(torch.Size(shape).numel()).view(shape)
    dim = cut.dim or 0
    total = shape[dim] // (cut.outer * cut.inner)
    for start, rows in ((0, total), (1, 2), (total - 1, 1), (2, 0)):
        found = narrow(leaf, cut, start, rows, total)
        picked = [o * total * cut.inner + r * cut.inner + i for o in range(cut.outer) for r in range(start, start + rows) for i in range(cut.inner)]
        assert torch.equal(found, leaf.index_select(dim, torch.tensor(picked, dtype=torch.int64)))
        shares = found.numel() == 0 or found.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
        assert shares == (not narrow_copies(cut, rows, total))
        assert torch.equal(join([found], cut, [rows], rows, 1, None), found)


def test_narrow_refuses_another_batch() -> None:
    with pytest.raises(InputError, match=r"args\[0\] has shape \(5, 2\), but dim 0 should have 6"):
        narrow(torch.zeros(5, 2), Slice("args[0]", 0), 0, 3, 6)


def test_expected_names_the_path() -> None:
    planned = Expected.of({"args[0]": torch.zeros(2), "kwargs['flag']": True, "kwargs['mask']": None})
    planned.check({"args[0]": torch.zeros(5), "kwargs['flag']": True, "kwargs['mask']": None})
    for wrong, text in (
        ({"kwargs['flag']": True, "kwargs['mask']": None}, r"args\[0\] is missing"),
        ({"args[0]": torch.zeros(2).double(), "kwargs['flag']": True, "kwargs['mask']": None}, r"args\[0\] has dtype torch.float64"),
        ({"args[0]": torch.zeros(2), "kwargs['flag']": False, "kwargs['mask']": None}, r"kwargs\['flag'\] is False, but was True"),
        ({"args[0]": torch.zeros(2), "kwargs['flag']": 1, "kwargs['mask']": None}, r"kwargs\['flag'\] is 1, but was True"),
        ({"args[0]": torch.zeros(2), "kwargs['flag']": True, "kwargs['mask']": torch.zeros(2)}, r"kwargs\['mask'\] is a tensor"),
        ({"args[0]": 1, "kwargs['flag']": True, "kwargs['mask']": None}, r"args\[0\] is 1, but was a tensor"),
        ({"args[0]": torch.zeros(2), "kwargs['flag']": True, "kwargs['mask']": None, "args[1]": 3}, r"args\[1\] was not there"),
        ({"args[0]": torch.zeros(2, requires_grad=True), "kwargs['flag']": True, "kwargs['mask']": None}, r"pass args\[0\].detach\(\)"),
    ):
        with pytest.raises(InputError, match=text):
            planned.check(wrong)
