"""Without the cyclic garbage collector, for work that makes many objects and no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Graphs of thousands of nodes, or a file of thousands of values, live to the end: walking them again and again takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
