"""Recurrent layers and cells: rows are free, time, features and gates are whole."""

from collections.abc import Sequence
from dataclasses import replace

import sympy

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import Dim, OpDims
from partitioner.passes.rules.labels import ZERO, Labels, describe_by, product
from partitioner.passes.rules.language import apply
from partitioner.passes.rules.registry import rule

RECURRENT = frozenset(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"))


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(call: Call) -> OpDims | None:
    """input [t, n, i] (or [n, t, i]), states [layers·directions, n, h] -> output [t, n, directions·h], states.

    Weights by layer and direction: [gates·c, i or directions·h], [gates·c, h], biases [gates·c] twice, projection [h, c] where h is not the cell's c.
    """
    labels = Labels()
    shape = call.shape("input")
    if len(shape) != 3:
        return None
    at = 0 if call["batch_first"] else 1
    mine = labels.of(shape, whole=[position for position in range(3) if position != at])
    row = mine[at]
    states = [call["hx"]] if call.is_tensor("hx") else call.specs("hx")
    stack = labels.new(states[0].shape[0], whole=True)
    hidden = labels.new(states[0].shape[2], "h", whole=True)
    projects = states[-1].shape[2] != states[0].shape[2]
    cell = labels.new(states[-1].shape[2], "c", whole=True) if projects else hidden
    directions = labels.new(2 if call["bidirectional"] else 1, whole=True)
    params = call.specs("params")
    gates = labels.new(params[0].shape[0] // max(states[-1].shape[2], 1), "g", whole=True)
    each = 2 + 2 * bool(call["has_biases"]) + projects
    dims: list[list[Dim]] = []
    for number, spec in enumerate(params):
        kind, above = number % each, number // each >= len(params) // each // call["num_layers"]
        if len(spec.shape) == 1:
            dims.append([(*gates, *cell)])
        elif kind < 2:
            dims.append([(*gates, *cell), hidden if kind else (*directions, *hidden) if above else mine[2]])
        else:
            dims.append([hidden, cell])
    ends = [[stack, row, hidden], [stack, row, cell]]
    listed, inputs = {"params": dims}, {"input": mine}
    if call.is_tensor("hx"):
        inputs["hx"] = ends[0]
    else:
        listed["hx"] = ends
    out = [*mine[:2], (*directions, *hidden)]
    flops = sum((product(2, *mine[:2], *dim) for dim in dims if len(dim) == 2), ZERO)
    return describe_by(call, labels, inputs, [out, *ends[: len(states)]], listed=listed, flops=flops)


def recurrent_backward_flops(call: Call, dims: OpDims, needs: Sequence[bool]) -> sympy.Expr:
    """Every matrix once for its own gradient and once for that of what it multiplies: the input of the layer if something below wants one, the
    states of all time steps but the first, which is the caller's.
    """
    entries = dict(zip([(place.name, place.index or 0) for place in call.places], zip(dims.inputs, needs, strict=True), strict=True))
    (first, wants_input), (_, wants_state) = entries["input", 0], entries["hx", 0]
    weights = [entry for (name, _), entry in entries.items() if name == "params"]
    layer = len(weights) // call["num_layers"]
    each = layer // (2 if call["bidirectional"] else 1)
    time, row = (first or ())[:2] if not call["batch_first"] else (first or ())[1::-1]
    total: sympy.Expr = ZERO
    for number, (dim, wanted) in enumerate(weights):
        if dim is None or len(dim) != 2:
            continue
        below = wants_input or any(want for _, want in weights[: number // layer * layer])
        own = any(want for _, want in weights[number // each * each :][:each])
        step = product(2, row, *dim)
        steps = product(1, time)
        total += step * steps * int(wanted)
        if number % each == 1:
            total += step * (steps - int(not wants_state)) * int(own or below or wants_state)
        else:
            total += step * steps * int(below if number % each == 0 else own or below or wants_state)
    return total


CELLS = frozenset(("aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell", "aten::lstm_cell"))


def _cell_flops(found: OpDims) -> tuple[sympy.Expr, sympy.Expr]:
    """FLOPs of the products with the input and with the state."""
    first, second = (product(2, *[(label,) for label in ("n", "g", other) if label in found.sizes]) for other in ("i", "h"))
    return first, second


def _counted(found: OpDims | None) -> OpDims | None:
    return None if found is None else replace(found, flops=sum(_cell_flops(found), ZERO))


@rule("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call) -> OpDims | None:
    if len(call.shape("input")) == 1:
        return _counted(apply(call, "i!, h!, g! i!, g! h!, g!?, g!? -> h!"))
    return _counted(apply(call, "n i!, n h!, g! i!, g! h!, g!?, g!? -> n h!"))


@rule("lstm_cell")
def lstm_cell(call: Call) -> OpDims | None:
    """States are a list (hidden, cell); both come back."""
    if len(call.shape("input")) == 1:
        return _counted(apply(call, "i!, h!, g! i!, g! h!, g!?, g!? -> h!, h!"))
    return _counted(apply(call, "n i!, n h!, g! i!, g! h!, g!?, g!? -> n h!, n h!"))


def cell_backward_flops(call: Call, dims: OpDims, needs: Sequence[bool]) -> sympy.Expr:
    """Both products once for each factor that wants a gradient."""
    wanted = {(place.name, place.index or 0): int(need) for place, need in zip(call.places, needs, strict=True)}
    first, second = _cell_flops(dims)
    return first * (wanted["input", 0] + wanted["w_ih", 0]) + second * (wanted["hx", 0] + wanted["w_hh", 0])
