"""Every example runs and says what it promises."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

from tests import ranks as pool

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def script(name: str, *arguments: str) -> str:
    """Runs on every rank, as `python examples/NAME ARGUMENTS`; returns what it printed."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [str(EXAMPLES / name), *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def test_plan_without_gpus(tmp_path: Path) -> None:
    text = script("plan_without_gpus.py", "--layers", "2", "--out", str(tmp_path))
    assert "on 16 ranks (dp 16) of 2x8 h100-sxm" in text
    assert {"plan.json", "functions.py", "rank_0.txt"} <= {path.name for path in tmp_path.iterdir()}


def test_edit_a_plan(tmp_path: Path) -> None:
    chosen, edited = (line.split() for line in script("edit_a_plan.py", "--out", str(tmp_path)).splitlines())
    assert float(edited[-4]) < float(chosen[-4])  # everything sharded holds less


def test_write_a_pass() -> None:
    text = script("write_a_pass.py")
    assert "query" in text and "1 division rewritten" in text and "equal: True" in text


def test_train_transformers() -> None:
    first, second = pool.run(2, script, "train_transformers.py", "--steps", "11", "--memory", "8MB", group=False)
    losses = [float(line.split()[-1]) for line in first.splitlines()]
    assert len(losses) == 2 and losses[1] < 0.7 * losses[0] and not second
