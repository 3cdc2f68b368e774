"""Python state that forward changes: found by comparing the modules before and after, judged by watching two more runs.

    written before it is read            an output left on a module: the graph computes the same; a tensor left there is warned about
    read first, unchanged the next time  a memo made at the first call: the graph computes the same
    read first, changed every time       state that carries over from call to call (a counter, a hidden state): a graph would freeze it. Refused
"""

import contextlib
import copy
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partitioner.errors import CaptureError

_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)  # hooks live in ordered dicts
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Change:
    """An attribute (or buffer, or submodule) that is another after forward."""

    module: nn.Module
    path: str
    attribute: str
    after: Any

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


Values = dict[str, Any]
Inside = dict[int, tuple[Any, Any]]  # id of a container -> the container and a shallow copy of it


def _items(content: Any) -> tuple[Any, ...]:
    return tuple(content.values() if isinstance(content, dict) else content)


class Snapshot:
    """The attributes of every module, with the contents of all containers among them, at any depth."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, module) for path, module in model.named_modules()]
        self._attributes: list[Values] = [{n: v for n, v in module.__dict__.items() if n not in _REGISTRIES} for _, module in self._modules]
        self._registries: list[dict[str, Values]] = [{name: dict(module.__dict__[name]) for name in _REGISTRIES} for _, module in self._modules]
        self._inside: Inside = {}
        left = [value for attributes in self._attributes for value in attributes.values()]
        while left:
            value = left.pop()
            if type(value) in _CONTAINERS and id(value) not in self._inside:
                content = copy.copy(value)
                self._inside[id(value)] = value, content
                left += _items(content)
            elif type(value) is tuple:
                left += value

    def changes(self, after: "Snapshot") -> list[Change]:
        """Attributes that are another in a later snapshot. The flat weights of recurrent modules follow their parameters and do not count."""
        found = []
        later = {id(module): attributes for (_, module), attributes in zip(after._modules, after._attributes, strict=True)}
        for (path, module), old in zip(self._modules, self._attributes, strict=True):
            new = later.get(id(module), old)
            for name in old.keys() | new.keys():
                if isinstance(module, nn.RNNBase) and name.startswith("_flat_weight"):
                    continue
                if name not in old or name not in new or not self._same(old[name], after, new[name], set()):
                    found.append(Change(module, path, name, new.get(name)))
        return sorted(found, key=lambda change: change.name)

    def registered(self) -> list[Change]:
        """Parameters, buffers and submodules that are others now."""
        found = []
        for (path, module), registries in zip(self._modules, self._registries, strict=True):
            for registry, before in registries.items():
                now = module.__dict__[registry]
                found += [Change(module, path, n, now.get(n)) for n in before.keys() | now.keys() if before.get(n) is not now.get(n)]
        return sorted(found, key=lambda change: change.name)

    def _same(self, old: Any, after: "Snapshot", new: Any, compared: set[tuple[int, int]]) -> bool:
        """Whether a value then and one now say the same; a container may be another one, or the same with other contents."""
        if type(old) is not type(new):
            return False
        if type(old) in _CONTAINERS:
            if (id(old), id(new)) in compared:  # inside itself
                return True
            compared.add((id(old), id(new)))
            before, now = self._inside[id(old)][1], after._inside[id(new)][1]
            if len(before) != len(now):
                return False
            if isinstance(before, set):
                return bool(before == now)
            if isinstance(before, dict):
                return all(key in now and self._same(value, after, now[key], compared) for key, value in before.items())
            return all(self._same(a, after, b, compared) for a, b in zip(before, now, strict=True))
        if type(old) is tuple:
            return len(old) == len(new) and all(self._same(a, after, b, compared) for a, b in zip(old, new, strict=True))
        return old is new or (isinstance(old, _PLAIN) and bool(old == new))

    def restore(self) -> None:
        """Put everything back, in the same containers."""
        for (_, module), attributes, registries in zip(self._modules, self._attributes, self._registries, strict=True):
            for registry, before in registries.items():
                live = module.__dict__[registry]
                if list(live.items()) != list(before.items()) if registry == "_modules" else any(live.get(k) is not v for k, v in before.items()):
                    live.clear()
                    live.update(before)
                for name in live.keys() - before.keys():
                    del live[name]
            for name in list(module.__dict__.keys() - attributes.keys() - _REGISTRIES):
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for value, content in self._inside.values():
            same = len(value) == len(content) and all(a is b for a, b in zip(_items(value), _items(content), strict=True))
            if same and list(value) == list(content):  # a dict's keys too
                continue
            value.clear()
            if isinstance(value, (list, deque)):
                value.extend(content)
            else:
                value.update(content)


@contextlib.contextmanager
def _watch(pairs: set[tuple[int, str]]) -> Iterator[dict[tuple[int, str], str]]:
    """Record whether each (module id, attribute) is read or written first."""
    first: dict[tuple[int, str], str] = {}
    set_attribute = nn.Module.__setattr__

    def watched_get(self: nn.Module, name: str) -> Any:
        if (id(self), name) in pairs:
            first.setdefault((id(self), name), "read")
        return object.__getattribute__(self, name)

    def watched_set(self: nn.Module, name: str, value: Any) -> None:
        if (id(self), name) in pairs:
            first.setdefault((id(self), name), "write")
        set_attribute(self, name, value)

    nn.Module.__getattribute__ = watched_get  # type: ignore[assignment]
    nn.Module.__setattr__ = watched_set  # type: ignore[method-assign]
    try:
        yield first
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]


def judge(model: nn.Module, before: Snapshot, after: Snapshot, rehearse: Callable[[], object]) -> None:
    """Restore the modules; raise CaptureError where forward's changes carry state from call to call.

    `after` was taken at the end of the forward that was traced: torch.export puts attributes back. `rehearse` runs forward once more under fake
    tensors; it is called only if something changed.
    """
    registered = before.registered()
    changed = sorted([*before.changes(after), *registered], key=lambda change: change.name)
    if not changed:
        return
    structural = [c.name for c in registered if isinstance(c.after, (nn.Module, nn.Parameter))]
    if structural:
        raise CaptureError(f"forward adds or replaces {', '.join(structural)}; a plan cannot know it. Build all modules in __init__.")
    before.restore()
    rehearse()
    after_one = Snapshot(model)
    with _watch({(id(c.module), c.attribute) for c in changed}) as first:
        rehearse()
    again = {(id(c.module), c.attribute) for c in (*after_one.changes(Snapshot(model)), *after_one.registered())}
    before.restore()
    state = [c for c in changed if first.get((id(c.module), c.attribute)) == "read" and (id(c.module), c.attribute) in again]
    if state:
        names = ", ".join(c.name for c in state)
        where = type(state[0].module).__qualname__ + (f" ({state[0].path})" if state[0].path else "")
        raise CaptureError(
            f"forward of {where} reads and changes {names}: Python state that carries over from call to call, which a captured program would freeze "
            "at its first value. Make it a buffer (self.register_buffer) that forward updates with tensor ops, or pass it as an input and return it."
        )
    stashed = [c.name for c in changed if isinstance(c.after, Tensor) and first.get((id(c.module), c.attribute)) == "write"]
    if stashed:
        warnings.warn(
            f"forward leaves tensors on the model ({', '.join(stashed)}). The captured program computes with them but does not leave them there: "
            "return what you want to see.",
            stacklevel=3,
        )
