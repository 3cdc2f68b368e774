"""Seconds of ops and of optimizer steps: by formulas, or as timed where the devices are at hand."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from partitioner.cluster import Cluster
from partitioner.cost import op_seconds, optimizer_seconds
from partitioner.op_times import OpTimes
from partitioner.passes.layout import value_at
from partitioner.trial import Local


@dataclass(frozen=True)
class Prices:
    """`times` is None where the devices are not at hand. ranks: among which the collectives of a placed graph communicate."""

    cluster: Cluster
    ranks: int
    optimizer: str
    times: OpTimes | None

    def op(self, node: fx.Node, rows: int | None, recorded: int | None) -> float:
        """At so many rows, where the node's meta["val"] has `recorded` (None: it does not depend on them)."""
        seconds = op_seconds(node, self.cluster, self.ranks)  # 0 for what turns out to be a view: only recorded tensors share storages
        if rows and recorded and rows != recorded and seconds:
            seconds = op_seconds(node, self.cluster, self.ranks, lambda source: value_at(source, rows))
        return self.times.seconds(node, rows, seconds) if self.times is not None else seconds

    def step(self, shapes: Sequence[Local]) -> float:
        """One `optimizer.step` on local parameters of these shapes and dtypes."""
        seconds = optimizer_seconds(self.optimizer, shapes, self.cluster)
        return self.times.step_seconds(self.optimizer, shapes, seconds) if self.times is not None else seconds

    def save(self) -> None:
        """Remember what was timed for the next plan on this machine."""
        if self.times is not None:
            self.times.save()
