"""The command line: every verb, as text and as JSON, and what its exit status means."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from partitioner import Plan
from partitioner.cli import app, main
from partitioner.cli_factory import made_by
from partitioner.cli_output import guarded, working
from partitioner.cluster import Cluster
from partitioner.errors import InputError
from partitioner.progress import tell, told_to
from tests.test_plan import plan_of

ROOT = Path(__file__).parent.parent
FACTORIES = """
import torch
from torch import nn

print("this module talks")

def pair():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.ones(16, 8),)

def small():
    model, args = pair()
    return {"model": model, "args": args, "loss": nn.functional.mse_loss, "targets": torch.ones(16, 4)}

def single():
    return {"model": nn.Linear(8, 4), "args": torch.ones(16, 8)}

def odd():
    return {"model": nn.Linear(8, 4), "batch": 3}

def number():
    return 3

def broken():
    return 1 / 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """factories.py, and plan.json that `partitioner plan` made of it."""
    made = tmp_path_factory.mktemp("cli")
    (made / "factories.py").write_text(FACTORIES)
    status, out, _ = ran("plan", f"{made / 'factories.py'}:small", "--gpus", "2", "--device", "cpu-local", "-o", made / "plan.json")
    assert status == 0, out
    assert out.startswith("Sequential on 2 ranks"), "what the module prints does not mix with the answer"
    return made


def ran(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_plan_is_made_pinned_and_printed(folder: Path) -> None:
    factory = f"{folder / 'factories.py'}:small"
    status, out, _ = ran(
        "plan", factory, "--gpus", "2", "--device", "cpu-local", "--memory", "1MB", "-c", "shard=zero3", "-c", "micro_batches=2", "--json"
    )
    assert status == 0
    made = Plan.from_json(out)
    assert (made.micro_batches, made.memory_bytes, made.constraints) == (2, 10**6, {"shard": "zero3", "micro_batches": 2})
    assert ran("show", folder / "plan.json")[1] == str(Plan.load(folder / "plan.json")) + "\n"
    assert Plan.from_json(ran("show", folder / "plan.json", "--json")[1]) == Plan.load(folder / "plan.json")


def test_a_plan_file_explains_itself(folder: Path) -> None:
    status, out, _ = ran("explain", folder / "plan.json")
    assert status == 0
    assert out == Plan.load(folder / "plan.json").explain() + "\n"
    told = json.loads(ran("explain", folder / "plan.json", "--json")[1])
    assert [way["why"] for way in told["alternatives"]].count("chosen") == 1
    assert {way["shard"] for way in told["alternatives"]} == {"none", "zero1", "zero2", "zero3"}
    plan_of().save(folder / "bare.json")
    assert json.loads(ran("explain", folder / "bare.json", "--json")[1])["alternatives"] is None


def test_plans_are_compared(folder: Path) -> None:
    plan_of().save(folder / "one.json")
    plan_of(micro_batches=4).save(folder / "two.json")
    status, out, _ = ran("diff", folder / "one.json", folder / "two.json")
    assert (status, out.splitlines()[0]) == (0, "micro-batches  2 → 4")
    told = json.loads(ran("diff", folder / "one.json", folder / "two.json", "--json")[1])
    assert (told["same"], told["decisions"]) == (False, {"micro-batches": [2, 4]})


def test_a_plan_is_bound_to_its_model_to_be_simulated_and_drawn(folder: Path) -> None:
    model = ("--model", f"{folder / 'factories.py'}:small")
    told = json.loads(ran("simulate", folder / "plan.json", *model, "--trace", folder / "trace.json", "--json")[1])
    assert [(entry["first_rank"], entry["ranks"]) for entry in told["ranks"]] == [(0, 2)]
    assert 0 < told["ranks"][0]["busy_seconds"]["compute"] <= told["ranks"][0]["step_seconds"]
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    status, out, _ = ran("simulate", folder / "plan.json")
    assert status == 0 and "0 … 1" in out and max(map(len, out.splitlines())) <= 100
    status, out, _ = ran("draw", folder / "plan.json", "-o", folder / "g.svg", "--memory", folder / "m.svg", *model, "--json")
    assert json.loads(out)["files"] == [str(folder / "g.svg"), str(folder / "m.svg")]
    assert (folder / "g.svg").stat().st_size and (folder / "m.svg").stat().st_size
    status, _, problem = ran("draw", folder / "plan.json", "--memory", folder / "n.svg")
    assert status == 1 and "plan=plan" in problem


def test_clusters_are_listed() -> None:
    status, out, _ = ran("clusters")
    assert status == 0 and all(name in out for name in Cluster.presets())
    assert {entry["name"] for entry in json.loads(ran("clusters", "--json")[1])} == set(Cluster.presets())


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("show", "nowhere.json"), 1, "PlanError: the plan file nowhere.json cannot be read"),
        (("show", "{folder}"), 1, "no regular file"),
        (("plan", "{folder}/factories.py:small", "--gpus", "2", "--device", "abacus"), 1, "no cluster preset 'abacus'"),
        (("plan", "{folder}/factories.py:small", "--gpus", "0"), 1, "no such number of devices"),
        (("plan", "{folder}/factories.py:small", "--gpus", "2", "--device", "cpu-local", "--memory", "100B"), 1, "Ways out"),
        (("plan", "{folder}/factories.py:small", "--memory", "1.5"), 1, "'1.5' is no amount of memory"),
        (("plan", "{folder}/factories.py:small", "-c", "colour=red"), 1, "unknown constraint 'colour'"),
        (("plan", "{folder}/factories.py:small", "--gpus", "2", "--device", "cpu-local", "-o", "{folder}/factories.py/plan.json"), 4, "written"),
        (("plan", "{folder}/factories.py:nothing"), 1, "it has broken, number, odd, pair, single, small"),
        (("plan", "{folder}/factories.py:number"), 1, "number() returned a int"),
        (("plan", "{folder}/factories.py:odd"), 1, "the key 'batch'"),
        (("plan", "{folder}/factories.py:broken"), 3, "ZeroDivisionError: division by zero at {folder}/factories.py:24"),
        (("plan", "{folder}/nowhere.py:small"), 1, "there is no file"),
        (("plan", "no_such_module_at_all:small"), 3, "ModuleNotFoundError"),
        (("plan", "no_colon"), 1, "not MODULE:FACTORY"),
        (("plan", "x:y", "-c", "shard"), 2, "KEY=VALUE"),
        (("plan", "x:y", "-c", "shard=none", "-c", "shard=zero1"), 2, "given twice"),
        (("simulate", "{folder}/plan.json", "--trace", "trace.svg"), 2, ".json"),
        (("simulate", "{folder}/plan.json", "--trace", "trace.json"), 1, "plan=plan"),
        (("show",), 2, "Missing argument"),
        (("explode",), 2, "No such command"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    found, out, problem = ran(*(argument.format(folder=folder) for argument in arguments))
    assert found == status, problem
    assert says.format(folder=folder) in " ".join(problem.replace("│", " ").split()), problem
    assert "Traceback" not in problem and not out


def test_errors_are_json_for_scripts() -> None:
    status, out, problem = ran("show", "nowhere.json", "--json")
    told = json.loads(out)
    assert (status, told["status"], told["error"], problem) == (1, 1, "PlanError", "")
    assert "nowhere.json" in told["message"]


def test_a_terminal_is_not_written_to_by_a_file(folder: Path) -> None:
    path = folder / "evil.json"
    path.write_text(plan_of().to_json().replace('"version": 1', '"version": "\\u001b[31m"'))
    status, _, problem = ran("show", path)
    assert status == 1 and "\x1b" not in problem


def test_factories_are_found_by_name_and_by_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert set(made_by("factories:pair")) == {"model", "example_inputs"}
    assert set(made_by("factories:small")) == {"model", "example_inputs", "loss", "example_targets"}
    (given,) = made_by("factories.py:single")["example_inputs"]
    assert given.shape == (16, 8), "a lone tensor is one positional argument"
    with pytest.raises(InputError, match="not MODULE:FACTORY"):
        made_by("factories")


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    with told_to(lambda *told: seen.append(told)):
        tell("solving", 1, 5)
    tell("nobody listens")
    assert seen == [("solving", 1, 5)]
    with working("planning"):
        tell("capturing")
        print("what a model prints")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "what a model prints\n"), "no bar where stderr is no terminal"


def test_interrupting_is_not_a_failure_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def verb() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as left:
        verb()
    assert left.value.exit_code == 130
    assert "interrupted" in capsys.readouterr().err


def process(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "partitioner", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **options.pop("env", {})}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120, check=False, **options)


def test_help_is_enough_to_work_from() -> None:
    told = process("--help")
    assert told.returncode == 0
    for word in ("plan", "show", "explain", "diff", "draw", "simulate", "clusters", "--gpus 16x8", "Exit status", "4 a file could not be written"):
        assert word in " ".join(told.stdout.split())
    for verb, word in (("plan", "--constraint"), ("simulate", "--trace"), ("draw", "--timeline"), ("clusters", "--json")):
        assert word in ran(verb, "--help")[1]


def test_reading_a_plan_needs_no_torch(folder: Path) -> None:
    show = f"import sys; from partitioner.cli import app; app(['show', {str(folder / 'plan.json')!r}], standalone_mode=False)"
    code = f"{show}; assert 'torch' not in sys.modules"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr


def test_a_reader_that_leaves_and_a_terminal_without_arrows(folder: Path) -> None:
    plan_of(layers=1000).save(folder / "long.json")
    command = f"'{sys.executable}' -m partitioner show '{folder / 'long.json'}' --json | head -c 100; exit ${{PIPESTATUS[0]}}"
    left = subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
    assert (left.returncode, left.stderr) == (141, ""), "no traceback where the reader of a pipe leaves"
    plan_of(micro_batches=4).save(folder / "two.json")
    plan_of().save(folder / "one.json")
    told = process("diff", folder / "one.json", folder / "two.json", env={"PYTHONIOENCODING": "ascii"})
    assert told.returncode == 0 and "2 \\u2192 4" in told.stdout


def test_the_console_script_is_declared() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"partitioner": f"{main.__module__}:{main.__name__}"}
