"""Which values may a block save for its backward, and what does a saved set cost? Numbers only (remat_encode.py makes them)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import fsum


@dataclass(frozen=True)
class Value:
    """A value that does not depend on the incoming gradients.

    inputs: names of the values it is computed from. seconds: to compute it once; 0 for views and for picking a result of a multi-output op.
    storage: where its bytes lie, shared by views; None for what is no tensor (a size, the tuple of a multi-output op): never saved.
    free: backward can read it again at no price (parameters, constants, the user's inputs).
    recomputable: False for what the block cannot make again (its inputs from other blocks, draws in eager order, collectives).
    late: the forward does not need it, only backward's formulas do; forward computes it only if it, or something made from it, is saved.
    """

    name: str
    inputs: tuple[str, ...] = ()
    seconds: float = 0.0
    storage: str | None = None
    free: bool = False
    recomputable: bool = True
    late: bool = False


@dataclass(frozen=True)
class RematProblem:
    """Values in topological order, the bytes of every storage, and the values that backward reads."""

    values: tuple[Value, ...]
    storage_bytes: dict[str, int]
    needed: frozenset[str]
    by_name: dict[str, Value] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, Value] = {}
        for value in self.values:
            for name in value.inputs:
                if name not in by_name:
                    raise ValueError(f"value {value.name} is computed from {name}, which does not stand before it; list values in topological order")
                if by_name[name].late and not value.late:
                    raise ValueError(f"forward needs {value.name} and so its input {name}, which is marked late; late values have late users only")
            if value.storage is not None and value.storage not in self.storage_bytes:
                raise ValueError(f"value {value.name} lies in storage {value.storage}, whose bytes are not given")
            if not value.seconds >= 0:
                raise ValueError(f"value {value.name} takes {value.seconds} seconds; seconds are never negative")
            by_name[value.name] = value
        if unknown := self.needed - by_name.keys():
            raise ValueError(f"backward needs {sorted(unknown)}, which are no values of the block")
        object.__setattr__(self, "by_name", by_name)


@dataclass(frozen=True)
class Point:
    """A saved set. `saved` names one value per kept storage that backward starts from (the others that it reads are views of it).

    saved_bytes: held from forward to backward. recompute_seconds: more than a step that computes every value once.
    """

    saved: frozenset[str]
    saved_bytes: int
    recompute_seconds: float


def price(problem: RematProblem, saved: Iterable[str]) -> Point:
    """What saving the storages of `saved` costs; storages that backward never comes to are left out.

    Raises ValueError where a name is none of the problem's, and where backward needs a value that is neither saved nor can be recomputed.
    """
    names = frozenset(saved)
    if unknown := sorted(names - problem.by_name.keys()):
        raise ValueError(f"{unknown[0]} cannot be saved: the block computes no such value, or only once gradients arrive")
    storages = {problem.by_name[name].storage for name in names} - {None}
    wanted, recomputed, starts = set(problem.needed), set[str](), set[str]()
    for value in reversed(problem.values):
        if value.name not in wanted or value.free:
            continue
        if value.storage in storages:
            starts.add(value.name)
        elif value.recomputable:
            recomputed.add(value.name)
            wanted.update(value.inputs)
        else:
            raise ValueError(f"backward needs {value.name}, which cannot be recomputed and is not saved")
    kept = {problem.by_name[name].storage for name in starts}
    early = {name for name in names if problem.by_name[name].storage in kept}  # what forward computes for backward's sake
    for value in reversed(problem.values):
        if value.name in early:
            early.update(value.inputs)
    seconds = fsum(problem.by_name[name].seconds for name in recomputed if not problem.by_name[name].late or name in early)
    used = frozenset(name for name in names if problem.by_name[name].storage in kept)
    return Point(used, sum(problem.storage_bytes[s] for s in kept if s is not None), seconds)
