"""Ops that read or write by index: the indexed dim is whole, the dims of the indices and the dims left alone are free.

Writes at indexed positions of a replicated tensor are whole in the index dims too: two shards would both start from the same tensor.
"""

from collections.abc import Sequence

from partitioner.passes.rules.call import Call, Spec
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.language import apply
from partitioner.passes.rules.pointwise import broadcast, broadcast_shape
from partitioner.passes.rules.registry import rule, text


@rule("embedding")
def embedding(call: Call) -> OpDims | None:
    """Gradients scaled by how often an index occurs in the whole batch would differ on a shard."""
    dims = [f"i{position}{'!' if call['scale_grad_by_freq'] else ''}" for position in range(len(call.shape("indices")))]
    indices = " ".join(dims)
    return apply(call, f"v! d, {indices} -> {indices} d", linear=("weight",))


@rule("embedding_bag", "_embedding_bag")
def embedding_bag(call: Call) -> OpDims | None:
    """Bags are runs of one list of indices, found by offsets into it: nothing may be cut."""
    labels = Labels()
    inputs = {place.name: labels.of(place.spec.shape, whole=True) for place in call.places}
    return describe_by(call, labels, inputs, [None if spec is None else labels.of(spec.shape, whole=True) for spec in call.outputs])


@rule("gather", "take_along_dim")
def gather(call: Call) -> OpDims | None:
    """self [b.., s, c..], index [b.., k, c..] -> [b.., k, c..]; `gather` may read the head of the other dims only: then they are whole."""
    index_name = "indices" if "indices" in call.values else "index"
    shape, index = call.shape("self"), call.shape(index_name)
    labels = Labels()
    if call["dim"] is None:  # take_along_dim of flattened tensors
        out = labels.of(index)
        return describe_by(call, labels, {"self": labels.of(shape, whole=True), index_name: out}, [out]) if len(index) == 1 else None
    if len(shape) != len(index):
        return None
    at = call.dim("dim", len(shape))
    mine, theirs, out = [], [], []
    broadcasts = index_name == "indices"
    for position, (a, b) in enumerate(zip(shape, index, strict=True)):
        if position == at or (a != b and not broadcasts):
            mine.append(labels.new(a, whole=True))
            theirs.append(labels.new(b, whole=position != at))
            out.append(theirs[-1])
        else:
            dim = labels.new(max(a, b) if a and b else 0)
            mine.append(() if a == 1 else dim)
            theirs.append(() if b == 1 else dim)
            out.append(dim)
    return describe_by(call, labels, {"self": mine, index_name: theirs}, [out], linear=("self",))


@rule("scatter", "scatter_add", "scatter_reduce.two")
def scatter(call: Call) -> OpDims | None:
    """Along dim everything is whole; dims in which self, index and src agree are free."""
    labels = Labels()
    shape, index = call.shape("self"), call.shape("index")
    source = call.shape("src") if call.is_tensor("src") else index
    if not len(shape) == len(index) == len(source):
        return None
    at = call.dim("dim", len(shape))
    mine, theirs, sources = [], [], []
    for position, (a, b, c) in enumerate(zip(shape, index, source, strict=True)):
        if position != at and a == b == c:
            dim = labels.new(a)
            mine.append(dim)
            theirs.append(dim)
            sources.append(dim)
        else:
            mine.append(labels.new(a, whole=True))
            theirs.append(labels.new(b, whole=True))
            sources.append(theirs[-1] if b == c else labels.new(c, whole=True))
    inputs = {"self": mine, "index": theirs, "src": sources, "value": []}
    adds = str(call.target._schema.name) == "aten::scatter_add"
    return describe_by(call, labels, inputs, [mine], linear=("self", "src") if adds else ())


@rule("index_select")
def index_select(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    if not shape:
        return None
    at = call.dim("dim", len(shape))
    mine = labels.of(shape, whole=(at,))
    chosen = labels.new(call.out.shape[at])
    index = [chosen] if call.shape("index") else []
    out = [chosen if position == at else dim for position, dim in enumerate(mine)]
    return describe_by(call, labels, {"self": mine, "index": index}, [out], linear=("self",))


@rule("index_add", "index_copy", "index_fill", "index_reduce")
def index_write(call: Call) -> OpDims | None:
    labels = Labels()
    shape = call.shape("self")
    if not shape:
        return None
    at = call.dim("dim", len(shape))
    mine = labels.of(shape, whole=(at,))
    positions = labels.of(call.shape("index"), whole=True)
    inputs: dict[str, Sequence[Dim] | None] = {"self": mine, "index": positions, "value": []}
    if call.is_tensor("source"):
        if len(call.shape("source")) != len(shape):
            return None
        inputs["source"] = [positions[0] if position == at and positions else () if position == at else dim for position, dim in enumerate(mine)]
    adds = str(call.target._schema.name) == "aten::index_add"
    return describe_by(call, labels, inputs, [mine], linear=("self", "source") if adds else ())


def _indexed(indices: Sequence[Spec | None], rank: int) -> tuple[list[int], int] | None:
    """The indexed dims and where the index dims go in x[indices]; None with boolean masks, whose result has no fixed shape."""
    if any(index is not None and not index.dtype.is_signed for index in indices):
        return None
    at = [position for position, index in enumerate(indices) if index is not None]
    if not at or len(indices) > rank:
        return None
    adjacent = at == list(range(at[0], at[-1] + 1))
    return at, at[0] if adjacent else 0


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(call: Call) -> OpDims | None:
    """x[i, :, j]: index tensors broadcast together; their dims stand where they are adjacent, else in front."""
    labels = Labels()
    shape, indices = call.shape("self"), call["indices"]
    found = _indexed(indices, len(shape))
    if found is None:
        return None
    at, front = found
    mine = labels.of(shape, whole=at)
    specs = [spec for spec in indices if spec is not None]
    dims = broadcast(labels, [spec.shape for spec in specs])
    rank = max(len(spec.shape) for spec in specs)
    rest = [dim for position, dim in enumerate(mine) if position not in at]
    chosen = dims(call.out.shape[front : front + rank])
    out = [*rest[:front], *chosen, *rest[front:]]
    return describe_by(call, labels, {"self": mine}, [out], linear=("self",), listed={"indices": [dims(spec.shape) for spec in specs]})


@rule("index_put", "_unsafe_index_put")
def index_put(call: Call) -> OpDims | None:
    """x[indices] = values. A single mask with a single value acts element by element: nothing is whole."""
    shape, indices = call.shape("self"), call["indices"]
    labels = Labels()
    specs = call.specs("indices")
    if len(indices) == 1 and len(specs) == 1 and specs[0].dtype.itemsize == 1 and call["values"].numel == 1:
        mine = labels.of(shape)
        mask = mine[: len(specs[0].shape)]
        if not _same(specs[0].shape, shape):
            return None
        return describe_by(call, labels, {"self": mine, "values": [() for _ in call.shape("values")]}, [mine], listed={"indices": [mask]})
    found = _indexed(indices, len(shape))
    if found is None:
        return None
    at, front = found
    mine = labels.of(shape, whole=at)
    dims = broadcast(labels, [spec.shape for spec in specs])
    listed = [dims(spec.shape) for spec in specs]
    for entry in listed:
        labels.keep(*entry)
    rest = [dim for position, dim in enumerate(mine) if position not in at]
    chosen = dims(broadcast_shape([spec.shape for spec in specs]))
    full = [*rest[:front], *chosen, *rest[front:]]
    values = call.shape("values")
    if len(values) > len(full):
        return None
    given = [() if size == 1 else dim for size, dim in zip(values, full[len(full) - len(values) :], strict=True)]
    adds = ("self", "values") if call["accumulate"] else ()
    return describe_by(call, labels, {"self": mine, "values": given}, [mine], linear=adds, listed={"indices": listed})


def _same(mask: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return mask == shape[: len(mask)]


@rule("masked_scatter", "put")
def ordered_write(call: Call) -> OpDims | None:
    """The order of all positions decides which value goes where."""
    labels = Labels()
    mine = labels.of(call.shape("self"), whole=True)
    inputs: dict[str, Sequence[Dim] | None] = {place.name: labels.of(place.spec.shape, whole=True) for place in call.places}
    inputs["self"] = mine
    return describe_by(call, labels, inputs, [mine])


@rule("take")
def take(call: Call) -> OpDims | None:
    labels = Labels()
    positions = labels.of(call.shape("index"))
    return describe_by(call, labels, {"self": labels.of(call.shape("self"), whole=True), "index": positions}, [positions], linear=("self",))


text("one_hot", "b.. -> b.. c!")
