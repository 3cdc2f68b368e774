"""Recurrent layers and cells: rows are free, time, features and gates are whole."""

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.language import apply
from partitioner.passes.rules.registry import rule


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(call: Call) -> OpDims | None:
    """input [t, n, i] (or [n, t, i]), states [layers·directions, n, h] -> output like the input, states."""
    labels = Labels()
    shape = call.shape("input")
    if len(shape) != 3:
        return None
    at = 0 if call["batch_first"] else 1
    mine = labels.of(shape, whole=[position for position in range(3) if position != at])
    row = mine[at]

    def state(size: tuple[int, ...]) -> list[tuple[str, ...]]:
        dims = labels.of(size, whole=True)
        return [dims[0], row, dims[2]]

    inputs = {"input": mine}
    listed = {"params": [labels.of(spec.shape, whole=True) for spec in call.specs("params")]}
    if call.is_tensor("hx"):
        inputs["hx"] = state(call.shape("hx"))
    else:
        listed["hx"] = [state(spec.shape) for spec in call.specs("hx")]
    out = [*mine[:2], labels.new(call.out.shape[2], whole=True)]
    states = [state(spec.shape) for spec in call.outputs[1:] if spec is not None]
    return describe_by(call, labels, inputs, [out, *states], listed=listed)


@rule("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call) -> OpDims | None:
    if len(call.shape("input")) == 1:
        return apply(call, "i!, h!, g! i!, g! h!, g!?, g!? -> h!")
    return apply(call, "n i!, n h!, g! i!, g! h!, g!?, g!? -> n h!")


@rule("lstm_cell")
def lstm_cell(call: Call) -> OpDims | None:
    """States are a list (hidden, cell); both come back."""
    if len(call.shape("input")) == 1:
        return apply(call, "i!, h!, g! i!, g! h!, g!?, g!? -> h!, h!")
    return apply(call, "n i!, n h!, g! i!, g! h!, g!?, g!? -> n h!, n h!")
