"""The thread that watches the other ranks, without ranks: several watches of one process on one store."""

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # defined, but not declared as exported

from partitioner.errors import LaunchError, PeerError
from partitioner.runtime import launch, watch
from partitioner.runtime.program import Instruction


@pytest.mark.parametrize("beats", [True, False])
def test_where_the_backend_does_not_end_a_wait_the_watch_does(beats: bool) -> None:
    """As on NCCL: the main thread hangs in a step, its peer stays behind or is gone, and the group is aborted."""
    store, aborted = HashStore(), threading.Event()
    peer = watch.Watch(store, 1, 2, 0.6)
    waiting = watch.Watch(store, 0, 2, 0.6, aborted.set)
    waiting.place.enter()
    waiting.place.instruction = Instruction("LOSS", stream="reduce")
    if not beats:
        peer._stopped = True
        peer._wake.set()
    assert aborted.wait(10.0) and waiting.found is not None and waiting.found.ranks == (1,)
    expected = "rank 1 did not arrive: it lives, and is still before its first step" if beats else "rank 1 is gone"
    assert expected in str(waiting.found) and "rank 0 of 2 waited at LOSS on reduce of program run 1" in str(waiting.found)
    peer.close()
    waiting.close()


def silent(peer: watch.Watch) -> None:
    """As a process that was killed."""
    peer._stopped = True
    peer._wake.set()
    peer._thread.join()


def test_ranks_that_gave_up_are_not_taken_for_the_one_that_is_gone() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1: it hears of that when rank 0 has ended, without a goodbye, as rank 3 has."""
    store = HashStore()
    watches = [watch.Watch(store, rank, 4, 0.6) for rank in range(4)]
    silent(watches[1])
    for rank in (0, 3):
        assert watches[rank].explain("a value").ranks == (1,)
        silent(watches[rank])
    found = watches[2].explain("a value")
    assert found.ranks == (1,) and "rank 1 is gone" in str(found)
    watches[2].close()


def test_a_message_of_a_rank_that_gave_up_is_not_waited_for() -> None:
    store = HashStore()
    watches = [watch.Watch(store, rank, 3, 0.6) for rank in range(3)]
    silent(watches[1])
    watches[0].explain("a value")  # it lives on, and its thread beats
    with pytest.raises(PeerError, match="rank 1 is gone") as caught:
        watches[2].listen("what rank 0 decides")
    assert caught.value.ranks == (1,)
    for rank in (0, 2):
        watches[rank].close()


def test_the_watch_does_not_end_a_step_that_takes_long_on_all() -> None:
    store, aborted = HashStore(), threading.Event()
    watches = [watch.Watch(store, rank, 2, 0.3, aborted.set) for rank in range(2)]
    for each in watches:
        each.place.enter()
        each.place.instruction = Instruction("LOSS", stream="reduce")
    assert not aborted.wait(1.5)
    for each in watches:
        each.close()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_seconds_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(watch.SECONDS_VARIABLE, text)
    with pytest.raises(LaunchError, match=f"PARTITIONER_PEER_SECONDS is '{text}'; write the seconds"):
        launch.peer_seconds()
