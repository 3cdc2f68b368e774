"""Losses: reduction "none" keeps the rows, "sum" is Partial over a cut row label, "mean" has whole rows and a decomposition (loss_means.py)."""

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.pointwise import broadcast
from partitioner.passes.rules.registry import rule, words

NONE, MEAN, SUM = 0, 1, 2

ELEMENTWISE = words("""mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
    hinge_embedding_loss margin_ranking_loss poisson_nll_loss""")


@rule(*ELEMENTWISE)
def elementwise_loss(call: Call) -> OpDims | None:
    """Inputs, targets and weights broadcast together."""
    labels = Labels()
    dims = broadcast(labels, [place.spec.shape for place in call.places])
    inputs = {place.name: dims(place.spec.shape) for place in call.places}
    if call["reduction"] == NONE:
        return describe_by(call, labels, inputs, [dims(call.out.shape)])
    if call["reduction"] == MEAN:
        labels.whole.update(labels.sizes)
    return describe_by(call, labels, inputs, [[]])


def class_dims(call: Call, labels: Labels) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """(input, rows, class) dims of a loss over classes: input [c], [n, c] or [n, c, positions…]."""
    shape = call.shape("self")
    at = 0 if len(shape) == 1 else 1
    mine = labels.of(shape, whole=(at,))
    return mine, [dim for position, dim in enumerate(mine) if position != at], [mine[at]]


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def class_loss(call: Call) -> OpDims | None:
    """Targets are class indices per row, or (cross entropy) probabilities of the shape of the input."""
    labels = Labels()
    mine, rows, classes = class_dims(call, labels)
    target = mine if call.shape("target") == call.shape("self") and call["target"].dtype.is_floating_point else rows
    inputs = {"self": mine, "target": target, "weight": classes}
    if call["reduction"] == MEAN:
        labels.whole.update(labels.sizes)
    out = rows if call["reduction"] == NONE else []
    return describe_by(call, labels, inputs, [out])


@rule("multi_margin_loss", "multilabel_margin_loss")
def margin_loss(call: Call) -> OpDims | None:
    """Rows of class scores [n, c]; each row is divided by its number of classes."""
    labels = Labels()
    mine, rows, classes = class_dims(call, labels)
    target = mine if str(call.target._schema.name) == "aten::multilabel_margin_loss" else rows
    if len(call.shape("target")) != len(target):  # a scalar target of one row, written as [1]
        return None
    if call["reduction"] == MEAN:
        labels.whole.update(labels.sizes)
    return describe_by(call, labels, {"self": mine, "target": target, "weight": classes}, [rows if call["reduction"] == NONE else []])


@rule("cosine_embedding_loss", "triplet_margin_loss")
def embedding_loss(call: Call) -> OpDims | None:
    """Vectors [n, d] or [d] in every argument but the cosine loss's target [n]."""
    labels = Labels()
    names = [place.name for place in call.places]
    shape = call.shape(names[0])
    if any(call.shape(name) != shape for name in names if name != "target"):
        return None
    mine = labels.of(shape, whole=(len(shape) - 1,))
    rows = mine[:-1]
    inputs = {name: rows if name == "target" else mine for name in names}
    if call["reduction"] == MEAN:
        labels.whole.update(labels.sizes)
    return describe_by(call, labels, inputs, [rows if call["reduction"] == NONE else []])
