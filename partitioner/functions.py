"""Block classes differentiated, split and emitted: once for all placings that a session looks into, whose blocks are mostly the same.

A class is recorded at a row count of its own, not at that of a mesh. So whoever lowers the same blocks gets the same ops under the same names,
whichever meshes it has looked into before.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from hashlib import sha256

from torch import fx

from partitioner.passes.block import BlockClass, BlockFunction
from partitioner.passes.differentiate import Joint, differentiate
from partitioner.passes.emit import emit
from partitioner.passes.halves import HalfGraphs, halve
from partitioner.passes.split import split

_RECORDED_ROWS = 13  # like no other size of most models


@dataclass(frozen=True)
class Made:
    """A function, and the graphs of its forward, its backward, and the halves of that."""

    function: BlockFunction
    joint: Joint
    forward: fx.Graph
    backward: fx.Graph | None
    halves: HalfGraphs | None


@dataclass
class Functions:
    """What is made of classes; equal ones (BlockClass.structure) of one name share it."""

    _joints: dict[Hashable, Joint] = field(default_factory=dict)
    _made: dict[Hashable, Made] = field(default_factory=dict)

    def joint(self, cls: BlockClass) -> Joint:
        """The class's forward and backward in one graph."""
        key = (cls.name, cls.structure)
        if key not in self._joints:
            self._joints[key] = differentiate(cls, _RECORDED_ROWS)
        return self._joints[key]

    def made(self, cls: BlockClass, saved: frozenset[str], free: frozenset[str], keep: frozenset[str], halves: bool) -> Made:
        """The class split for a saved set and emitted; with `halves` its backward in two functions as well. free, keep: see `passes.split`."""
        key = (cls.name, cls.structure, saved, free, keep, halves)
        if key not in self._made:
            # named by what is saved, not by when it was asked for: a plan gives the same text whether it was searched for or read from a file
            name = f"{cls.name}__{sha256(repr(sorted(saved)).encode()).hexdigest()[:8]}" if saved else cls.name
            joint = self.joint(cls)
            ahead, back = split(joint, saved, free, keep)
            parts = halve(joint, back) if halves and back is not None else None
            self._made[key] = Made(emit(cls, ahead, back, name, parts), joint, ahead.graph, back.graph if back else None, parts)
        return self._made[key]
