"""Whether the other ranks live and what they do. A thread of every rank beats on the launch's store; it reads the others' beats once one is missed.

    beat/<rank>       how often it has beaten, where it stands, and why it left, if it did (`beat.py`); written every period
    here/<n>/<rank>   the rank has come to the n-th meeting
    said/<n>          rank 0 has its n-th message ready

Messages and meetings are awaited for as long as those live on whom one waits: they may be planning, or writing a file, for minutes. A rank is gone if
it says so, or if its beat has stood still; it is late if it lives but stands before the instruction at which this rank waits for it. A rank that
gives up because another is missing says so before it ends, and whom it blames: others, which may have waited for it alone, follow that to its root.

What ends the wait for a collective is the backend. gloo: a closed connection at once, else the group's timeout. NCCL queues operations long before
they run, so that its timeout says nothing; there the thread watches a place that does not move, and aborts the group where a peer is gone or late.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from partitioner.errors import PeerError
from partitioner.runtime.beat import Beat, Place, Sight

SECONDS_VARIABLE = "PARTITIONER_PEER_SECONDS"
_RESUME = (
    "Start all ranks again and go on from the last checkpoint, with parallel.load(folder, optimizer); torchrun --max-restarts=3 starts them again by "
    "itself"
)
_SLOW = f". If a rank was only slow, allow it more than {{seconds:g}} s in the environment variable {SECONDS_VARIABLE}"
_QUICKEST, _SLOWEST = 0.002, 0.05  # seconds between two looks at whether something awaited has come
_MISSED = 2.2  # periods without a beat, where something has failed already


class Watch:
    """One rank's view of all ranks of a launch. `store` is shared by them; a peer may be missing for `seconds`.

    abort: what frees a main thread that waits for a peer in vain, where the backend does not.
    """

    def __init__(self, store: Any, rank: int, ranks: int, seconds: float, abort: Callable[[], object] | None = None) -> None:
        self.rank, self.ranks, self.seconds = rank, ranks, seconds
        self.place = Place()
        self.found: PeerError | None = None
        self._store, self._abort, self._period = store, abort, min(1.0, seconds / 6)
        self._number = self._messages = self._meetings = 0
        self._left, self._follows, self._stopped = "", False, False
        self._blames: tuple[tuple[int, str], ...] = ()
        # What the main thread asks of the other one, and the answer: who is missing, (rank, in words).
        self._asked_at: float | None = None
        self._awaited: tuple[str, ...] = ()
        self._awaited_of: Sequence[int] = ()
        self._answer: list[tuple[int, str]] | None = None
        self._lost = ""
        # The thread's own.
        self._sights: dict[int, Sight] = {}
        self._sights_since = 0.0
        self._served: object = None
        self._written = 0
        self._stands, self._stands_since = (0, 0), time.monotonic()
        self._beats_at, self._turned_at = 0.0, time.monotonic()
        self._wake, self._turned = threading.Event(), threading.Condition()
        self._beat()
        self._thread = threading.Thread(target=self._live, name="partitioner-watch", daemon=True)
        self._thread.start()

    # --- the main thread ---------------------------------------------------------------------------------------

    def explain(self, what: str, error: BaseException | None = None) -> PeerError:
        """The error to raise where `what` failed: who is gone or late, where this rank stood, how to go on. Takes three or four beats."""
        if self.found is None:
            with self._turned:
                self._asked_at, self._answer, self._beats_at = time.monotonic(), None, 0.0
                self._wake.set()
                self._turned.wait_for(lambda: self._answer is not None or self._lost, timeout=5 * self._period + 1)
                answer, self._asked_at = self._answer, None
            if answer is None:
                silence = self._lost or f"silent for {time.monotonic() - self._turned_at:.0f} s"
                answer = [(0, f"the store of the launch, which rank 0 serves unless torchrun does, does not answer ({silence})")]
            self._find(what, answer, error)
            self._tell()
        assert self.found is not None
        return self.found

    def fail(self, error: BaseException) -> None:
        """Let the peers know that this rank cannot finish what it is doing."""
        self._left, self._follows = f"failed {self.place.text()} with {_short(error)}", isinstance(error, PeerError)
        self._tell()

    def recovered(self) -> None:
        """Take back what `fail` said: all ranks failed alike and go on together."""
        self._left = ""

    def say(self) -> None:
        """Rank 0 has its next message ready."""
        self._messages += 1
        self._store.set(f"said/{self._messages}", "")

    def listen(self, what: str) -> None:
        """Wait until rank 0 has its next message ready, for as long as it lives. Raises PeerError once it does not."""
        self._messages += 1
        self._await((f"said/{self._messages}",), (0,), what)

    def meet(self, what: str) -> None:
        """Wait until every rank is here, for as long as all live. Raises PeerError once one does not."""
        self._meetings += 1
        self._store.set(f"here/{self._meetings}/{self.rank}", "")
        if self.rank == 0:
            self._await(tuple(f"here/{self._meetings}/{rank}" for rank in range(self.ranks)), range(self.ranks), what)
            self.say()
        else:
            self.listen(what)

    def close(self) -> None:
        """Say goodbye and stop the thread. At the end of the process, tell the error that ended it."""
        if not self._left:
            error = None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)
            self._left = "left the process group or came to its end" if error is None else f"ended with {_short(error)}"
            self._follows = self._follows or isinstance(error, PeerError)
        self._stopped, self._beats_at = True, 0.0
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _tell(self) -> None:
        """Wait until the peers can know how this rank stands now: the process may end at once."""
        with self._turned:
            told, self._beats_at = self._number, 0.0
            self._wake.set()
            self._turned.wait_for(lambda: self._written > told or self._lost, timeout=1.0)

    def _await(self, keys: tuple[str, ...], of: Sequence[int], what: str) -> None:
        if self.found is not None:
            raise self.found
        with self._turned:
            self._awaited, self._awaited_of, self._answer = keys, of, None
            self._wake.set()
            while self._awaited and not self._answer and not self._lost and time.monotonic() < self._turned_at + self.seconds:
                self._turned.wait(self._period)
            came, self._awaited = not self._awaited, ()
        if not came:
            raise self.explain(what)

    def _find(self, what: str, missing: list[tuple[int, str]], error: BaseException | None) -> None:
        listed = "; ".join(text for _, text in missing[:8]) or "all ranks live and have come as far as this one, so it was the network between them"
        more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
        said = "" if error is None else f" ({_short(error)})"
        self._left, self._follows, self._blames = f"gave up {self.place.text()}", True, tuple(missing[:8])
        told_why = bool(missing) and all(rank in self._sights and self._sights[rank].beat.left for rank, _ in missing)
        resume = _RESUME + ("" if told_why else _SLOW.format(seconds=self.seconds))
        self.found = PeerError(
            f"rank {self.rank} of {self.ranks} waited {self.place.text()} for {what}: {listed}{more}{said}. {resume}",
            tuple(rank for rank, _ in missing),
        )

    # --- the thread --------------------------------------------------------------------------------------------

    def _live(self) -> None:
        delay = _QUICKEST
        try:
            while True:
                self._turn()
                if self._stopped:
                    return
                delay = min(2 * delay, _SLOWEST) if self._awaited else _QUICKEST
                self._wake.wait(delay if self._awaited else max(_QUICKEST, self._beats_at - time.monotonic()))
                self._wake.clear()
        except Exception as error:  # the process that served the store is gone
            self._lost = _short(error)
            self._notify()

    def _turn(self) -> None:
        now, asked_at, awaited = time.monotonic(), self._asked_at, self._awaited
        if (asked_at, awaited) != self._served:
            self._served = (asked_at, awaited)
            self._sights.clear()
            self._sights_since = now
        beats = now >= self._beats_at
        if beats:
            self._beats_at = now + self._period
            self._beat()
        if awaited and self._store.check(list(awaited)):
            self._awaited = ()
        elif awaited and beats:
            self._look(self._awaited_of, now)
            self._answer = self._gone(self.seconds) or self._followers()
        elif asked_at is not None and beats:
            self._look(range(self.ranks), now)
            decided = now - self._sights_since > _MISSED * self._period  # then whose beat has not changed meanwhile is gone
            missing = self._gone(_MISSED * self._period) or (self._blamed() or self._late(0.0) or self._followers() if decided else [])
            if missing or decided:
                self._answer = missing
        elif beats and self._abort is not None and self.found is None:
            self._stand_guard(self._abort, now)
        self._turned_at = time.monotonic()
        self._notify()

    def _stand_guard(self, abort: Callable[[], object], now: float) -> None:
        """Where the backend does not end a wait: look at the peers once this rank has stood still for some time."""
        stands = (self.place.call, self.place.line)
        if stands != self._stands or self.place.instruction is None:
            self._stands, self._stands_since = stands, now
            self._sights.clear()
        elif now - self._stands_since > self.seconds / 3:
            self._look(range(self.ranks), now)
            if missing := self._gone(self.seconds) or self._blamed() or self._late(self.seconds):
                self._find("the collectives under way", missing, None)
                self._beat()
                abort()

    def _beat(self) -> None:
        self._number += 1
        self._store.set(f"beat/{self.rank}", Beat.of(self._number, self.place, self._left, self._follows, self._blames).write())
        self._written = self._number

    def _notify(self) -> None:
        with self._turned:
            self._turned.notify_all()

    def _look(self, ranks: Sequence[int], now: float) -> None:
        for rank in ranks:
            if rank != self.rank:
                beat = Beat.read(self._store.get(f"beat/{rank}"))
                sight = self._sights.setdefault(rank, Sight(beat, now, now))
                sight.update(beat, now)

    def _gone(self, patience: float) -> list[tuple[int, str]]:
        """Those that left of their own, and those whose beat has stood still for `patience` seconds; of several those that others blame."""
        now, missing = time.monotonic(), []
        for rank, sight in sorted(self._sights.items()):
            if sight.beat.left and not sight.beat.follows:
                missing.append((rank, f"rank {rank} {sight.beat.left}"))
            elif not sight.beat.left and now - sight.changed > patience:
                missing.append((rank, f"rank {rank} is gone: its process died or is stopped; it was last seen {sight.beat.text}"))
        blamed = {rank for rank, _ in self._blamed()}  # who was ended by that may have had no time to say so
        return [(rank, text) for rank, text in missing if rank in blamed] or missing

    def _late(self, patience: float) -> list[tuple[int, str]]:
        """Those that live and have stood furthest behind this rank for `patience` seconds."""
        now, here = time.monotonic(), (self.place.call, self.place.line)
        living = {rank: sight for rank, sight in sorted(self._sights.items()) if not sight.beat.left}
        last = min((sight.beat.place for sight in living.values()), default=here)
        return [
            (rank, f"rank {rank} did not arrive: it lives, and is still {sight.beat.text}")
            for rank, sight in living.items()
            if last < here and sight.beat.place == last and now - sight.moved >= patience
        ]

    def _blamed(self) -> list[tuple[int, str]]:
        """Those whom ranks that gave up blame, and who did not give up themselves."""
        blamed = {rank: text for sight in self._sights.values() for rank, text in sight.beat.blames}
        followers = {self.rank, *(rank for rank, sight in self._sights.items() if sight.beat.follows)}
        return [(rank, text) for rank, text in sorted(blamed.items()) if rank not in followers]

    def _followers(self) -> list[tuple[int, str]]:
        return [(rank, f"rank {rank} {sight.beat.left}") for rank, sight in sorted(self._sights.items()) if sight.beat.left]


# --- watches and groups ----------------------------------------------------------------------------------------

_watches: "weakref.WeakKeyDictionary[dist.ProcessGroup, Watch]" = weakref.WeakKeyDictionary()


def attach(watch: Watch, group: dist.ProcessGroup) -> None:
    """Let `watch` stand for `group` until that is destroyed or the process ends."""
    _watches[group] = watch
    weakref.finalize(group, watch.close)


def sweep() -> None:
    """Close the watches of groups that were destroyed and yet live on: torch's caches of DTensor operations may hold them for ever."""
    for group, watch in list(_watches.items()):
        if group not in dist.distributed_c10d._world.pg_map:
            watch.close()
            del _watches[group]


def share(watch: Watch, group: dist.ProcessGroup) -> None:
    """Let `watch` stand for a smaller group of its ranks as well."""
    _watches[group] = watch


def of(group: dist.ProcessGroup | None) -> Watch | None:
    """What watches the ranks of `group`; None for one rank, and for a group that `launch.join` has not made."""
    return None if group is None else _watches.get(group)


def failure(watch: Watch | None, what: str, error: BaseException) -> PeerError:
    """The error to raise where the collective `what` failed with `error`."""
    if watch is not None:
        return watch.explain(what, error)
    return PeerError(f"{what} could not be completed, because a peer died, stopped or left the program: {_short(error)}")


class Playing:
    """What the peers learn of this rank, and this rank of them, while it plays a program."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.watch = of(group)
        self.place = Place() if self.watch is None else self.watch.place

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one play. Raises PeerError, naming who is missing, where a peer takes no part; the peers are told of an error of this rank's own."""
        watch = self.watch
        if watch is not None and watch.found is not None:
            raise watch.found
        self.place.enter()
        try:
            yield
        except BaseException as error:  # sys.exit too ends what the peers wait for
            if watch is None or error is watch.found:
                raise
            if watch.found is not None or isinstance(error, PeerError):  # an aborted collective may fail with anything
                raise watch.explain(str(error)) from error
            watch.fail(error)
            raise
        finally:
            self.place.leave()
        if watch is not None:
            if watch.found is not None:
                raise watch.found
            watch.recovered()


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}"
