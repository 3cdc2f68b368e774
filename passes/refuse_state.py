"""Python state that forward changes: found by comparing the modules before and after, judged by watching one more run.

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


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, _PLAIN):
        return bool(before == after)
    if isinstance(before, tuple):
        return len(before) == len(after) and all(_same(a, b) for a, b in zip(before, after, strict=True))
    return False


def _same_content(before: Any, after: Any) -> bool:
    if len(before) != len(after):
        return False
    if isinstance(before, dict):
        return all(k in after and _same(v, after[k]) for k, v in before.items())
    if isinstance(before, set):
        return bool(before == after)
    return all(_same(a, b) for a, b in zip(before, after, strict=True))


class Snapshot:
    """The attributes of every module, with the contents of the containers among them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, module) for path, module in model.named_modules()]
        self._attributes = [dict(module.__dict__) for _, module in self._modules]
        self._registries = [{name: dict(module.__dict__[name]) for name in _REGISTRIES} for _, module in self._modules]
        self._contents = [
            {name: copy.copy(value) for name, value in attributes.items() if name not in _REGISTRIES and type(value) in _CONTAINERS}
            for attributes in self._attributes
        ]

    def changes(self) -> list[Change]:
        """What is another now. The flat weights of recurrent modules follow their parameters and do not count."""
        found = []
        for (path, module), attributes, registries, contents in zip(
            self._modules, self._attributes, self._registries, self._contents, strict=True
        ):
            now = module.__dict__
            for name in attributes.keys() | now.keys():
                if name in _REGISTRIES or (isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")):
                    continue
                same = name in attributes and name in now and _same(attributes[name], now[name])
                if not same or (name in contents and not _same_content(contents[name], now[name])):
                    found.append(Change(module, path, name, now.get(name)))
            for registry, before in registries.items():
                after = now[registry]
                for name in before.keys() | after.keys():
                    if before.get(name) is not after.get(name):
                        found.append(Change(module, path, name, after.get(name)))
        return sorted(found, key=lambda change: change.name)

    def restore(self) -> None:
        """Put everything back, in the same containers."""
        for (_, module), attributes, registries, contents in zip(
            self._modules, self._attributes, self._registries, self._contents, strict=True
        ):
            for registry, before in registries.items():
                live = module.__dict__[registry]
                if list(live.items()) != list(before.items()) if registry == "_modules" else any(live.get(k) is not v for k, v in before.items()):
                    live.clear()
                    live.update(before)
                for name in live.keys() - before.keys():
                    del live[name]
            for name in list(module.__dict__.keys() - attributes.keys()):
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, content in contents.items():
                value = attributes[name]
                if _same_content(content, value):
                    continue
                if isinstance(value, (list, deque)):
                    value.clear()
                    value.extend(content)
                else:
                    value.clear()
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


def judge(model: nn.Module, snapshot: Snapshot, rehearse: Callable[[], object]) -> None:
    """Restore the modules; raise CaptureError where forward's changes carry state from call to call.

    `rehearse` runs forward a second time under fake tensors; it is called only if something changed.
    """
    changed = snapshot.changes()
    if not changed:
        return
    structural = [c.name for c in changed if isinstance(c.after, (nn.Module, nn.Parameter))]
    if structural:
        raise CaptureError(f"forward adds or replaces {', '.join(structural)}; a plan cannot know it. Build all modules in __init__.")
    after_one = Snapshot(model)
    with _watch({(id(c.module), c.attribute) for c in changed}) as first:
        rehearse()
    again = {(id(c.module), c.attribute) for c in after_one.changes()}
    snapshot.restore()
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
