"""How ranks that start at different times find each other on a store where an earlier try may have left its words.

torchrun --max-restarts keeps one store for all tries, so that a rank could read there the address of a process that is gone. Here no word counts
that is not an answer to one's own:

    rank r   hello/r = its mark ──────▶ rank 0   roll/r = r's mark and rank 0's ──────▶ rank r   here/r = rank 0's mark
    rank 0   once all are here: go/<rank 0's mark>

What follows lies under rank 0's mark, which no other try has.
"""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from partitioner.errors import LaunchError

_PAUSE_SECONDS = 0.01


def meet(store: Any, rank: int, ranks: int, seconds: float) -> str:
    """The mark of this try, the same on all ranks, once all of them are here. Raises LaunchError, naming who is missing, after `seconds`."""
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank:
        return _wait_for_go(store, rank, mine, seconds)
    missing, answered = set(range(1, ranks)), dict.fromkeys(range(ranks), "")
    for late in _until(seconds):
        for other in sorted(missing):
            hello = _read(store, f"hello/{other}")
            if hello != answered[other]:
                store.set(f"roll/{other}", f"{hello} {mine}")
                answered[other] = hello
            if _read(store, f"here/{other}") == mine:
                missing.discard(other)
        if not missing:
            break
        if late:
            listed = ", ".join(map(str, sorted(missing)[:8])) + (" …" if len(missing) > 8 else "")
            raise LaunchError(f"of {ranks} ranks, {listed} did not call auto_parallelize within {seconds:g} s of rank 0; every rank must call it")
    store.set(f"go/{mine}", "")
    return mine


def _wait_for_go(store: Any, rank: int, mine: str, seconds: float) -> str:
    mark = ""
    for late in _until(seconds):
        if not mark:
            hello, _, answer = _read(store, f"roll/{rank}").partition(" ")
            if hello == mine:
                mark = answer
                store.set(f"here/{rank}", mark)
        if mark and store.check([f"go/{mark}"]):
            break
        if late:
            who = "some other rank" if mark else "rank 0"
            raise LaunchError(f"{who} did not call auto_parallelize within {seconds:g} s of rank {rank}; every rank must call it")
    return mark


def _until(seconds: float) -> Iterator[bool]:
    """Turns with a pause between them; True once the time is over."""
    end = time.monotonic() + seconds
    while True:
        yield time.monotonic() > end
        time.sleep(_PAUSE_SECONDS)


def _read(store: Any, key: str) -> str:
    """What is written there; "" where nothing is."""
    return store.get(key).decode() if store.check([key]) else ""
