"""Ops that make tensors: a constant fill may be cut anywhere (sizes.py makes it smaller), values that depend on their position may not."""

from partitioner.passes.rules.call import Call
from partitioner.passes.rules.describe import OpDims
from partitioner.passes.rules.labels import Labels, describe_by
from partitioner.passes.rules.registry import rule


@rule(
    "zeros ones full empty.memory_format rand.default randn.default randint.default randint.low new_zeros new_ones new_full new_empty",
    "scalar_tensor partitioner::random",
)
def filled(call: Call) -> OpDims | None:
    """The tensor whose `new_…` is called lends only dtype and device."""
    labels = Labels()
    inputs = {place.name: None if place.name == "self" else [() for _ in place.spec.shape] for place in call.places}
    return describe_by(call, labels, inputs, [labels.of(call.out.shape)])


@rule("zeros_like ones_like full_like empty_like rand_like.default randn_like.default randint_like.default randint_like.low_dtype")
def like(call: Call) -> OpDims | None:
    labels = Labels()
    mine = labels.of(call.shape("self"))
    return describe_by(call, labels, {"self": mine}, [mine])


@rule(
    "arange linspace.default logspace.default range eye tril_indices triu_indices randperm.default empty_strided new_empty_strided",
    "hann_window hamming_window blackman_window bartlett_window kaiser_window fft_fftfreq fft_rfftfreq empty_permuted",
)
def positional(call: Call) -> OpDims | None:
    labels = Labels()
    inputs = {place.name: None for place in call.places}
    return describe_by(call, labels, inputs, [labels.of(call.out.shape, whole=True)])
