"""The rank pool itself: results, environment, isolation between tasks, and every way to fail."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from partitioner.errors import RankError
from tests import ranks
from tests.ranks import RankDied, RankFailure, RankHung, run


def whoami(offset: int) -> tuple[int, int, int, int]:
    return int(os.environ["RANK"]) + offset, int(os.environ["WORLD_SIZE"]), dist.get_rank(), dist.get_world_size()


def total(value: float) -> torch.Tensor:
    x = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(x)
    return x


def own_group() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return int(x.item())


def draw() -> torch.Tensor:
    return torch.rand(3)


def threads() -> int:
    return torch.get_num_threads()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise RankError(f"rank {rank} will not")
    dist.barrier()


def fail_together() -> None:
    raise RankError("we will not")


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_unpicklable() -> None:
    raise Unpicklable(1, 2)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn() -> None:
    warnings.warn("something is off", UserWarning, stacklevel=1)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_rank_sees_its_own_environment_and_group(n: int) -> None:
    assert run(n, whoami, 10) == [(rank + 10, n, rank, n) for rank in range(n)]


def test_collectives_work_in_a_fresh_group_each_time() -> None:
    for n in (2, 4, 3, 2):
        for x in run(n, total, 2.0):
            torch.testing.assert_close(x, torch.full((3,), 2.0 * sum(range(1, n + 1))))


def test_a_task_may_initialise_the_group_itself_or_be_named_by_its_address() -> None:
    assert run(2, f"{__name__}:own_group", group=False) == [2, 2]


def test_workers_stay_alive_use_one_thread_and_start_from_one_seed() -> None:
    first = run(2, draw)
    before = ranks._pool.pids
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], run(2, draw)[0])
    assert run(2, threads) == [1, 1]
    assert ranks._pool.pids == before


def test_the_first_failing_rank_is_raised_with_its_traceback_and_the_pool_lives_on() -> None:
    with pytest.raises(RankError, match="rank 1 will not") as caught:
        run(3, fail_on, 1)
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "rank 1 failed first" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)
    assert run(3, whoami, 0)[2] == (2, 3, 2, 3)


def test_ranks_that_refuse_together_leave_the_workers_as_they_are() -> None:
    run(2, draw)
    before = ranks._pool.pids
    with pytest.raises(RankError, match="we will not"):
        run(2, fail_together)
    assert ranks._pool.pids == before


def test_an_exception_that_cannot_be_pickled_is_told_as_text() -> None:
    with pytest.raises(RankFailure, match="Unpicklable: 1 and 2"):
        run(1, fail_unpicklable)


def test_a_warning_on_a_rank_is_treated_as_in_the_test_process() -> None:
    with pytest.raises(UserWarning, match="something is off"):
        run(1, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(1, warn) == [None]


def test_a_hung_rank_is_reported_with_its_stack_and_replaced() -> None:
    run(2, draw)
    before = ranks._pool.pids
    with pytest.raises(RankHung, match=r"ranks \[1\] of 2(.|\n)*in hang_on"):
        run(2, hang_on, 1, seconds=1.0)
    assert run(2, whoami, 0)[1] == (1, 2, 1, 2)
    assert not set(before) & set(ranks._pool.pids)


def test_a_killed_rank_is_reported_and_replaced() -> None:
    with pytest.raises((RankDied, RankFailure, RuntimeError)) as caught:
        run(2, die_on, 1)
    assert "exit code -9" in str(caught.value) + str(caught.value.__cause__) or "Connection" in str(caught.value)
    assert run(2, whoami, 0)[1] == (1, 2, 1, 2)


def test_more_ranks_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="5 ranks asked of a pool of 4"):
        run(5, draw)
