"""Where values are, how named dims carry a cut, and what a placed graph is."""

from dataclasses import dataclass
from math import prod

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from partitioner.passes.batch import Fit
from partitioner.passes.dims import Cut
from partitioner.passes.graph import Graph
from partitioner.passes.rules.describe import Dim

Where = Placement | Cut  # Replicate(), Partial(), or where the batch is cut
Places = Where | tuple[Where, ...]  # a multi-output op has one for each result
REPLICATE, PARTIAL = Replicate(), Partial()
SCALARS = ("rows", "start", "key_local", "key_shared", "share", "part")


@dataclass(frozen=True)
class Fallback:
    """An op that runs replicated although its inputs are cut, and why."""

    op: str
    module: str
    source: str
    why: str


@dataclass(frozen=True)
class Placed:
    """`graph` in local shapes. `cuts[i]` says how input i is cut (None: whole); `outputs[i]` where output i is placed.

    Every node that holds tensors has meta["placement"], and meta["cut"] where that is a Cut; meta["val"] keeps the global shape.
    `prologue` runs once on this rank's whole share of the batch; its outputs are inputs of kind "prologue" of `graph`.
    `epilogue` runs once after all micro-batches; its inputs of kind "total" are sums over them of outputs of `graph`.
    `collectives` names those left in `graph`: with any, the batch cannot be cut in time; `statistics` those that make statistics of a micro-batch.
    `batch_norms`: module with a BatchNorm that takes the statistics of the batch -> values of a channel in a row.
    `whole` is the share of the work on inputs (FLOPs and elements written) that every rank does whole.
    """

    graph: Graph
    prologue: Graph | None
    epilogue: Graph | None
    cuts: tuple[Cut | None, ...]
    outputs: tuple[Where, ...]
    fallbacks: tuple[Fallback, ...]
    collectives: tuple[str, ...]
    statistics: tuple[str, ...]
    batch_norms: dict[str, int]
    whole: float

    @property
    def fit(self) -> Fit:
        """How the cut fits the model (see batch.infer)."""
        return Fit(self.whole, len(self.collectives) + len(self.statistics) + len(self.fallbacks))


def unplaced(graph: Graph) -> Placed:
    """One rank, one micro-batch: nothing is cut."""
    whole: tuple[Cut | None, ...] = (None,) * len(graph.inputs)
    return Placed(graph, None, None, whole, (REPLICATE,) * len(graph.outputs), (), (), (), {}, 1.0)


def locate(cut: Cut, names: tuple[Dim, ...], sizes: dict[str, int]) -> tuple[str, int, int] | None:
    """The label that a cut falls into, with outer and inner sizes inside that label; None where it straddles labels."""
    dim = names[cut.dim]
    before = 1
    for position, label in enumerate(dim):
        after = prod(sizes[later] for later in dim[position + 1 :])
        if cut.outer % before == 0 and cut.inner % after == 0:
            rest = (cut.outer // before) * (cut.inner // after)
            if sizes[label] % rest == 0 and sizes[label] > rest:
                return label, cut.outer // before, cut.inner // after
        before *= sizes[label]
    return None


def carried(found: tuple[str, int, int], names: tuple[Dim, ...], sizes: dict[str, int]) -> Cut | None:
    """Where a tensor with these named dims carries a cut of the label (with outer and inner sizes inside it)."""
    label, outer, inner = found
    for position, dim in enumerate(names):
        if label in dim:
            at = dim.index(label)
            return Cut(position, prod(sizes[x] for x in dim[:at]) * outer, inner * prod(sizes[x] for x in dim[at + 1 :]))
    return None
