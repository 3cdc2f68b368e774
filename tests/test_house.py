"""The house rules: one installed name, an import contract, short files, nothing left undone, pins for what is needed."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parent.parent
FOLDERS = ("partitioner", "passes", "runtime", "tests", "examples", "benchmarks")
MOST_LINES = 400


def sources() -> list[Path]:
    """Every Python file of ours once: the links partitioner/passes and partitioner/runtime are not followed."""
    return sorted(path for folder in FOLDERS for path in (HOUSE / folder).rglob("*.py") if (HOUSE / "partitioner" / "passes") not in path.parents)


def shell(*command: object, cwd: Path = HOUSE, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a user gets: built from the source distribution, which is built from this checkout."""
    out = tmp_path_factory.mktemp("dist")
    built = shell(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, HOUSE)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_installs_one_name_with_passes_and_runtime_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"partitioner"}
    assert len(names) == len(set(names))
    shipped = {name for name in names if name.endswith(".py")}
    ours = {path.relative_to(HOUSE).as_posix() for path in sources() if path.relative_to(HOUSE).parts[0] in ("partitioner", "passes", "runtime")}
    assert shipped == {name if name.startswith("partitioner/") else f"partitioner/{name}" for name in ours}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    data = {path.relative_to(HOUSE).as_posix() for path in (HOUSE / "partitioner").rglob("*.toml")}
    assert data <= set(names)


def test_a_users_own_passes_and_runtime_folders_do_no_harm(wheel: Path, tmp_path: Path) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("passes", "runtime"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("MINE = True\n")
    script = project / "train.py"
    script.write_text(
        "import passes, runtime, partitioner\n"
        "from partitioner.passes import graph\n"
        "from partitioner.runtime import program\n"
        "assert passes.MINE and runtime.MINE\n"
        f"home = {str(site)!r}\n"
        "for module in (partitioner, graph, program):\n"
        "    assert module.__file__.startswith(home), module.__file__\n"
        "print('well')\n"
    )
    done = shell(sys.executable, script, cwd=project, env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"})
    assert done.stdout.strip() == "well", done.stderr


def test_importing_the_package_is_instant_and_names_its_door() -> None:
    code = "import sys, partitioner; assert 'torch' not in sys.modules; print(*dir(partitioner))"
    done = shell(sys.executable, "-c", code)
    assert {"auto_parallelize", "make_plan", "Plan", "Cluster", "PartitionerError", "CaptureError"} <= set(done.stdout.split()), done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("partitioner", "passes", "runtime"):
        shutil.copytree(HOUSE / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HOUSE / "pyproject.toml", tmp_path)
    return tmp_path


def contract(folder: Path) -> subprocess.CompletedProcess[str]:
    return shell(Path(sys.executable).parent / "lint-imports", "--no-cache", cwd=folder)


def test_passes_and_runtime_import_neither_each_other_nor_the_driver(copy: Path) -> None:
    done = contract(copy)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("passes/rules/describe.py", "from partitioner.runtime.program import Program"),
        ("passes/graph.py", "from partitioner.plan import Plan"),
        ("passes/graph.py", "from partitioner import make_plan"),
        ("runtime/program.py", "import partitioner.passes.graph"),
        ("runtime/program.py", "def late():\n    from partitioner.cluster import Cluster"),
        ("partitioner/errors.py", "from partitioner.passes import graph"),
    ],
)
def test_a_forbidden_import_breaks_the_contract(copy: Path, file: str, line: str) -> None:
    with (copy / file).open("a") as text:
        text.write(f"\n\n{line}\n")
    done = contract(copy)
    assert done.returncode != 0
    assert file.removesuffix(".py").replace("/", ".").removeprefix("partitioner.") in done.stdout


@pytest.mark.parametrize("line", ["from passes.graph import Graph", "import runtime.program", "import passes"])
def test_a_bare_import_is_refused_with_the_name_to_write(line: str) -> None:
    ruff = [str(Path(sys.executable).parent / "ruff"), "check", "--select", "TID251", "--stdin-filename", "x.py", "-"]
    found = subprocess.run(ruff, input=f"{line}\n", cwd=HOUSE, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert re.search(r"write `partitioner\.(passes|runtime)`", found.stdout)


def test_the_links_are_relative_and_lead_home() -> None:
    for name in ("passes", "runtime"):
        link = HOUSE / "partitioner" / name
        assert not link.is_symlink() or link.readlink() == Path("..", name)


def test_no_file_is_longer_than_it_may_be() -> None:
    long = {str(path.relative_to(HOUSE)): lines for path in sources() if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_nothing_is_left_to_do() -> None:
    mark = re.compile("|".join((r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b", "raise NotImplemented" + "Error")))
    found = [f"{path}:{number}" for path in sources() for number, line in enumerate(path.read_text().splitlines(), 1) if mark.search(line)]
    assert not found


def test_no_test_folder_shadows_the_package() -> None:
    assert not (HOUSE / "tests" / "passes" / "__init__.py").exists()
    assert not (HOUSE / "tests" / "runtime" / "__init__.py").exists()


def test_every_dependency_is_pinned_and_allowed_by_its_range() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    lines = [line for line in (HOUSE / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    assert pins["torch"] == "2.13.0"
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text
