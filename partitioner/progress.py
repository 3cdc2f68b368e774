"""How far planning is, for whoever wants to know: nobody, unless `told_to` says who. The command line draws a bar from it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much; of 0 where that is not known."""

_listener: ContextVar[Listener | None] = ContextVar("progress", default=None)


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Whatever reports inside this context reports to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(what: str, done: int = 0, of: int = 0) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(what, done, of)
