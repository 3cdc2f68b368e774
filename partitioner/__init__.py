"""auto_parallelize(model, gpus=8): plan and train a plain PyTorch model on many devices, with the mathematics of one."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partitioner.api import auto_parallelize as auto_parallelize
    from partitioner.api import make_plan as make_plan
    from partitioner.cluster import Cluster as Cluster
    from partitioner.plan import Plan as Plan
    from partitioner.runtime.checkpoint import load_checkpoint as load_checkpoint

if not (Path(__file__).parent / "passes").is_dir():  # a checkout without working symbolic links
    __path__.append(str(Path(__file__).parent.parent))

_HOMES = {"auto_parallelize": "api", "make_plan": "api", "Plan": "plan", "Cluster": "cluster", "load_checkpoint": "runtime.checkpoint"}


__all__ = ["Cluster", "Plan", "auto_parallelize", "load_checkpoint", "make_plan"]


def __getattr__(name: str) -> Any:
    errors = importlib.import_module("partitioner.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(f"partitioner.{_HOMES[name]}"), name)
    if name.endswith("Error") and hasattr(errors, name):
        return getattr(errors, name)
    raise AttributeError(f"module 'partitioner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_HOMES, *(name for name in dir(importlib.import_module("partitioner.errors")) if name.endswith("Error"))]
