"""Company while something is timed: ranks that share a machine compute at the same time, and each is slower for it.

Cores that are hyperthreads of one share its units, all share caches and memory. So what is timed for one of several CPU ranks is timed beside
threads that do what a training step mostly does: multiply matrices, and stream tensors through memory.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ROWS, _WIDTH, _STREAMED = 256, 512, 2**18  # a millisecond each: the interpreter lock is asked for rarely


class Neighbours:
    """So many threads that compute within `with neighbours.busy():` and rest otherwise."""

    def __init__(self, count: int) -> None:
        self.count = count

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Returns with all of them at work, ends with all of them gone."""
        stop, at_work = threading.Event(), threading.Barrier(self.count + 1)
        threads = [threading.Thread(target=_compute, args=(stop, at_work), daemon=True) for _ in range(self.count)]
        for thread in threads:
            thread.start()
        try:
            at_work.wait(timeout=10.0)
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _compute(stop: threading.Event, at_work: threading.Barrier) -> None:
    with torch.no_grad():
        a, b = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
        x, y = torch.ones(_STREAMED), torch.ones(_STREAMED)
        product, total = torch.mm(a, b), x + y
        at_work.wait(timeout=10.0)
        while not stop.is_set():
            torch.mm(a, b, out=product)
            torch.add(x, y, out=total)
