"""What a collective leaves behind: the result, and nobody who holds its memory."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.memory import Tracker
from partitioner.runtime.wire import Handle, all_gather, all_reduce, reduce_scatter
from tests import ranks


class Late:
    """A backend whose thread lets go of the memory a while after it has reported completion."""

    def __init__(self, holds: str) -> None:
        self.holds = holds
        self.held: list[Any] = []
        self.thread = threading.Thread(target=self._let_go)

    def issue(self, tensor: Tensor) -> Any:
        if self.holds == "the wrapper":
            self.held = [tensor]
        else:
            future = torch.futures.Future[Tensor]()  # holds it in C++ alone
            future.set_result(tensor if self.holds == "the tensor" else torch.empty(0).set_(tensor.untyped_storage()))
            self.held = [future]
        return SimpleNamespace(wait=self.thread.start)

    def _let_go(self) -> None:
        time.sleep(0.05)
        self.held.clear()


@pytest.mark.parametrize("holds", ["the wrapper", "the tensor", "the storage"])
def test_memory_is_given_back_where_the_caller_lets_go_of_it(holds: str) -> None:
    backend = Late(holds)
    group: Any = None
    with Tracker() as tracker:
        tensor = torch.zeros(1000)
        Handle(backend.issue, (tensor,), group, "a test").wait()
        assert tracker.now_bytes == 4000
        del tensor
        assert tracker.now_bytes == 0
    backend.thread.join()


def collectives(times: int) -> list[tuple[int, int, int]]:
    """What is held once each collective is over and its tensors are let go of."""
    group = dist.group.WORLD
    assert group is not None
    count, found = group.size(), []
    with Tracker() as tracker:
        for _ in range(times):
            whole, piece = torch.empty(count * 5000), torch.ones(5000)
            all_gather(whole, piece, group, "a test").wait()
            del whole, piece
            after_gather = tracker.now_bytes
            whole, piece = torch.ones(count * 5000), torch.empty(5000)
            reduce_scatter(piece, whole, group, "a test").wait()
            del whole, piece
            after_scatter = tracker.now_bytes
            whole = torch.ones(5000)
            all_reduce(whole, group, "a test").wait()
            del whole
            found.append((after_gather, after_scatter, tracker.now_bytes))
    return found


def test_no_thread_of_the_backend_outlasts_a_collective() -> None:
    for found in ranks.run(2, collectives, 300):
        assert {at: held for at, held in enumerate(found) if held != (0, 0, 0)} == {}
