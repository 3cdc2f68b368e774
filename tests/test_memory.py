"""The tracker counts storages: once each, views free, from first sight to last reference."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from partitioner.runtime.memory import Tracker, storage_bytes
from tests import ranks as pool


@pytest.fixture(params=["cpu", "meta"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_peak_and_now_follow_references(device: str) -> None:
    tracker = Tracker()
    with tracker:
        one = torch.empty(1000, device=device)
        two = one + 1
        assert tracker.now_bytes == tracker.peak_bytes == 8000
        view = two.view(10, 100)[3:]
        del two
        assert tracker.now_bytes == 8000
        del view
        assert tracker.now_bytes == 4000
        one.add_(1)
        three = (one * 2).sum()
        assert (tracker.now_bytes, tracker.peak_bytes) == (4004, 8004)
    del one, three
    assert (tracker.now_bytes, tracker.peak_bytes) == (0, 8004)


def test_what_was_there_before_counts_only_when_tracked() -> None:
    before = torch.zeros(100)
    model = nn.Linear(10, 10)
    with Tracker() as tracker:
        assert before.view(-1).mul_(2) is not None and tracker.now_bytes == 0
        tracker.track(before).track(before.view(10, 10)).track(model.parameters()).track({"w": [model.weight]})
        assert tracker.now_bytes == 400 + 440
    del before
    assert tracker.now_bytes == 440


def test_it_can_be_left_and_entered_again() -> None:
    tracker = Tracker()
    with tracker:
        kept = torch.ones(10)
    unseen = torch.ones(1000)
    with tracker:
        more = kept + 1
        assert tracker.now_bytes == 80
        del kept, more
    assert (tracker.now_bytes, tracker.peak_bytes) == (0, 80)
    tracker.reset_peak()
    assert tracker.peak_bytes == 0
    assert unseen.numel() == 1000


def test_numbers_out_arguments_and_resizing_are_seen() -> None:
    with Tracker() as tracker:
        scalar = torch.tensor(1.0)
        assert tracker.now_bytes == 4
        out = torch.empty(0)
        torch.add(torch.ones(4), 1, out=out)
        assert tracker.now_bytes == 4 + 16
    assert storage_bytes([scalar, out, out.view(2, 2)]) == 20


def test_backward_is_seen() -> None:
    weight = nn.Parameter(torch.randn(50, 50))
    with Tracker().track(weight) as tracker:
        torch.autograd.backward((weight @ weight).sum())
        assert tracker.now_bytes == 2 * 10000
    assert tracker.peak_bytes >= 3 * 10000


def test_storages_may_die_on_another_thread() -> None:
    tracker = Tracker()
    with tracker:
        box = [torch.ones(10) for _ in range(1000)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    with tracker:
        for _ in range(1000):
            torch.ones(1)
    thread.join()
    assert tracker.now_bytes == 0


def _wrapped() -> list[int]:
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    local = torch.ones(10, 10)
    wrapper = DTensor.from_local(local, mesh, [Shard(0)])
    with Tracker() as tracker:
        tracker.track([wrapper, local])
        counts = [tracker.now_bytes]
        other = wrapper * 2
        counts.append(tracker.now_bytes)
        del other
        counts.append(tracker.now_bytes)
    return counts


def test_a_wrapper_counts_as_its_local_tensor_once() -> None:
    assert pool.run(2, _wrapped) == [[400, 800, 400]] * 2
