"""What every verb of the command line shares: how it prints, how it refuses, and what its exit status means."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from partitioner.errors import PartitionerError
from partitioner.progress import told_to
from partitioner.wording import printable

REFUSED, USAGE, MODEL_FAILED, NOT_WRITTEN, INTERRUPTED, READER_LEFT = 1, 2, 3, 4, 130, 141
STATUSES = """Exit status: 0 done; 1 refused, with the reason (no plan fits, a file is no plan, …); 2 wrong usage; 3 the module of the model or its
factory failed; 4 a file could not be written; 130 interrupted; 141 the reader of a pipe left."""
WIDTH = 100

P = ParamSpec("P")


class ModelFailed(Exception):
    """The user's own code raised; the message says what and where."""


def guarded(verb: Callable[P, None]) -> Callable[P, None]:
    """A verb whose errors are one message and one exit status, never a traceback. With `as_json` the message is an object on stdout."""

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has gone (`partitioner show … | head`): what is still to be written goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(READER_LEFT) from None
        except PartitionerError as error:
            _refuse(type(error).__name__, str(error), REFUSED, kwargs)
        except ModelFailed as error:
            _refuse("ModelFailed", str(error), MODEL_FAILED, kwargs)
        except OSError as error:
            _refuse("OSError", f"{error.filename or 'a file'} could not be written: {error.strerror or error}", NOT_WRITTEN, kwargs)
        except KeyboardInterrupt:
            _refuse("KeyboardInterrupt", "interrupted", INTERRUPTED, kwargs)

    return run


def _refuse(kind: str, message: str, status: int, options: dict[str, Any]) -> None:
    if options.get("as_json"):
        print_json({"error": kind, "message": message, "status": status})
    else:
        lines = (printable(line) for line in message.split("\n"))
        print(f"partitioner: {kind}: " + "\n".join(lines), file=sys.stderr)
    raise typer.Exit(status) from None


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def print_table(table: Table) -> None:
    """As wide as the terminal, and WIDTH columns elsewhere."""
    screen = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    with screen.capture() as drawn:
        screen.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def written(path: Path) -> None:
    """Say on stderr what was written, so that stdout holds the answer alone."""
    print(f"wrote {printable(str(path))}", file=sys.stderr)


@contextmanager
def working(title: str) -> Iterator[None]:
    """A bar on stderr while planning, where that is a terminal. What the model prints goes to stderr as well."""
    screen = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn()
    with redirect_stdout(sys.stderr), Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        shown = bar.add_task(title, total=None)

        def tell(what: str, done: int, of: int) -> None:
            bar.update(shown, description=f"{title}: {what}", completed=done, total=of or None)

        with told_to(tell):
            yield
