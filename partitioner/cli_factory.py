"""MODULE:FACTORY of the command line: the user's own function that makes the model and one example batch."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from partitioner.cli_output import ModelFailed
from partitioner.errors import InputError

KEYS = {"model": "model", "args": "example_inputs", "kwargs": "example_kwargs", "loss": "loss", "targets": "example_targets"}
FORM = 'FACTORY() returns (model, args), or a dict with "model" and any of "args", "kwargs", "loss", "targets"'


def made_by(spec: str) -> dict[str, Any]:
    """What FACTORY() returns, as arguments of `make_plan`.

    MODULE is a dotted name, looked up from the current folder first, or the path of a .py file. Raises InputError where FACTORY is not there or
    returns something else, ModelFailed where it raises.
    """
    name, _, factory = spec.rpartition(":")
    if not name or not factory:
        raise InputError(f"{spec!r} is not MODULE:FACTORY; write for instance my_package.models:make_llama, or train.py:make_llama")
    module = _ran(f"importing {name}", lambda: _module(name))
    function = module
    for part in factory.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        near = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))[:8])
        raise InputError(f"{name} has no function {factory!r}; it has {near or 'none'}. {FORM}")
    return _arguments(_ran(f"{factory}()", function), factory)


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    path = Path(name).resolve()
    if not path.is_file():
        raise InputError(f"there is no file {name}; MODULE is a module's dotted name or the path of a .py file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes of the module are looked up by its name
    spec.loader.exec_module(module)
    return module


def _ran(what: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        last = frames[-1] if frames else None
        where = f" at {last.filename}:{last.lineno}" if last is not None and last.filename != __file__ else ""
        raise ModelFailed(f"{what} failed: {type(error).__name__}: {error}{where}") from error


def _arguments(made: object, factory: str) -> dict[str, Any]:
    import torch

    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "args": made[1]}
    if not isinstance(made, Mapping) or not isinstance(made.get("model"), torch.nn.Module):
        raise InputError(f"{factory}() returned a {type(made).__name__} without an nn.Module at its place; {FORM}")
    if unknown := sorted(str(key) for key in made if key not in KEYS):
        raise InputError(f"{factory}() returned the key {unknown[0]!r}; {FORM}")
    args = made.get("args")
    single = args is not None and not isinstance(args, (tuple, list))
    return {KEYS[key]: (value,) if key == "args" and single else value for key, value in made.items()}
