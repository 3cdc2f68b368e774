"""The pace of a CPU at the moment against its usual one: virtual machines share cores and caches with others, and clocks rise and fall.

A machine that has just been woken may take twice its usual time for a second or two, and a quarter more now and then later on. What is timed in such
a moment would be remembered for good. So a small matrix product is timed in turns with it: what counts is how much longer than that it takes.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from partitioner.neighbours import Neighbours

_SHAPE = (128, 256, 256)  # a tenth of a millisecond
_LISTEN_SECONDS = 2.0


class Pace:
    """Times the product by `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        rows, inner, columns = _SHAPE
        self._clock = clock
        self._a, self._b, self._out = torch.ones(rows, inner), torch.ones(inner, columns), torch.empty(rows, columns)

    def now(self) -> float:
        """Seconds of the product."""
        start = self._clock()
        torch.mm(self._a, self._b, out=self._out)
        return self._clock() - start

    def listen(self, neighbours: Neighbours) -> float:
        """Its usual seconds: the middle of the second half of two seconds, beside busy neighbours."""
        with torch.no_grad(), neighbours.busy():
            found, end = [self.now()], time.monotonic() + _LISTEN_SECONDS
            while time.monotonic() < end:
                found.append(self.now())
        return median(found[len(found) // 2 :])
