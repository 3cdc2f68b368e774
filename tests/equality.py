"""Does a parallel run equal one process? Compositions of decisions, how a rank trains under one, and how far the result is from the plain model's.

Two comparisons: fp64 with AdamW is the proof (rounding is far below any mistake), fp32 with SGD is what users run. AdamW in fp32 proves nothing: it
divides by the size of the gradient, so the rounding noise of a gradient that is truly zero becomes a whole step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor

from tests.models import MODELS, Case, Trained, cast, clone, rows_of, train, train_plain
from tests.ranks import run

RANKS = (1, 2, 3, 4)
SHARDS = ("none", "zero1", "zero2", "zero3")
CHECKPOINTS = ("none", "auto", "full")
MICRO_BATCHES = (1, 2, 3)
SMALLEST = 1e-3  # below this size a value is compared absolutely


@dataclass(frozen=True)
class Kind:
    """A comparison: number format, optimizer (as `optimizer=` names it) and the flag of a case that holds its relative tolerance."""

    dtype: torch.dtype
    optimizer: str
    tolerance: str


PROOF = Kind(torch.float64, "adamw", "fp64")
USUAL = Kind(torch.float32, "sgd_momentum", "fp32")


@dataclass(frozen=True)
class Composition:
    """One point of the space that the planner chooses from."""

    ranks: int
    shard: str
    checkpoint: str
    micro_batches: int
    pp: int = 1
    schedule: str | None = None

    def constraints(self) -> dict[str, Any]:
        stages = {} if self.pp == 1 else {"pp": self.pp, "schedule": self.schedule}
        return {"shard": self.shard, "checkpoint": self.checkpoint, "micro_batches": self.micro_batches, **stages}


@dataclass(frozen=True)
class Verdict:
    """Relative distances of the losses, of the worst gradient and of the worst entry of the final state; or what the planner said where it refused.

    The gradients matter: AdamW's first steps are the same for a gradient that is twice too large.
    """

    loss: float = 0.0
    gradient: float = 0.0
    state: float = 0.0
    where: str = ""
    refused: str = ""

    def within(self, tolerance: float) -> bool:
        return max(self.loss, self.gradient, self.state) <= tolerance


def most_micro_batches(rows: int, ranks: int) -> int:
    """Each micro-batch has a row on each rank."""
    return max(1, rows // ranks)


def everything(rows: int) -> Iterator[Composition]:
    """The full product for a batch of so many rows."""
    for ranks, shard, checkpoint, micro in product(RANKS, SHARDS, CHECKPOINTS, MICRO_BATCHES):
        if micro <= most_micro_batches(rows, ranks):
            yield Composition(ranks, shard, checkpoint, micro)


def deal(number: int, rows: int) -> tuple[Composition, ...]:
    """Four compositions for the number-th model: each rank count and each shard level once, every checkpoint and micro-batch count.

    Twelve models in a row see every pair of settings (a test counts them), so the zoo sees each several times.
    """
    hands = []
    for k, ranks in enumerate(RANKS):
        shard, checkpoint, micro = SHARDS[(k + number) % 4], CHECKPOINTS[(k + number // 4) % 3], MICRO_BATCHES[(2 * k + number) % 3]
        hands.append(Composition(ranks, shard, checkpoint, min(micro, most_micro_batches(rows, ranks))))
    return tuple(hands)


def train_parallel(name: str, kind: Kind, composition: Composition) -> Trained:
    """What each rank does: the user's own loop, through the public interface."""
    from partitioner import auto_parallelize

    case = cast(MODELS[name](), kind.dtype)
    loss_fn, targets = case["loss_fn"], case["targets"]
    asked: Case = {"batch_dim": case["batch_dim"], "optimizer": kind.optimizer, "constraints": composition.constraints()}
    if targets is not None:
        asked.update(loss=loss_fn, example_targets=targets)
    elif loss_fn is not None:
        asked.update(loss=lambda output: loss_fn(output, None))
    torch.manual_seed(7)
    model = case["model"].train()
    parallel = auto_parallelize(model, gpus=composition.ranks, example_inputs=case["args"], example_kwargs=case["kwargs"], **asked)

    def step() -> Tensor:
        keywords = {**clone(case["kwargs"]), **({} if targets is None else {"targets": clone(targets)})}
        return parallel.train_step(*clone(case["args"]), **keywords)

    return train(kind.optimizer, parallel, step, parallel.full_state_dict)


def train_twice(name: str, kind: Kind, composition: Composition) -> bool:
    """Whether two runs from the same seed give the same bits."""
    one, two = train_parallel(name, kind, composition), train_parallel(name, kind, composition)
    return one.losses == two.losses and all(torch.equal(one.state[key], two.state[key]) for key in one.state)


@cache
def plain(name: str, kind: Kind) -> Trained:
    return train_plain(cast(MODELS[name](), kind.dtype), kind.optimizer)


def noise_floor(gradients: Mapping[str, Tensor | None]) -> float:
    """Below a tenth of the model's largest gradient, compare absolutely: a gradient that is truly zero is the rounding of terms that are not."""
    return max([SMALLEST, *(0.1 * g.abs().max().item() for g in gradients.values() if g is not None and g.numel())])


def distance(expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None], smallest: float = SMALLEST) -> tuple[float, str]:
    """The largest difference of two sets of tensors, relative to the tensor's own size but at least `smallest`, and the name it is at.

    Infinite where a name, a None, a shape or a dtype differs.
    """
    if expected.keys() != found.keys():
        return inf, f"names {sorted(expected.keys() ^ found.keys())}"
    worst, where = 0.0, ""
    for name, want in expected.items():
        have = found[name]
        if want is None or have is None:
            if want is not have:
                return inf, f"{name} is {'None' if have is None else 'a tensor'}, expected {'None' if want is None else 'a tensor'}"
            continue
        if have.shape != want.shape or have.dtype != want.dtype:
            return inf, f"{name} is {have.dtype}{list(have.shape)}, expected {want.dtype}{list(want.shape)}"
        if not want.numel():
            continue
        gap = (have.double() - want.double()).abs().max().item() / max(smallest, want.double().abs().max().item())
        if not gap <= worst:  # a NaN is worse than anything
            worst, where = gap if gap == gap else inf, name
    return worst, where


def compare(name: str, kind: Kind, composition: Composition) -> Verdict:
    """Train on the ranks of the pool and compare with the plain model. Raises what the product raises."""
    results: list[Trained] = run(composition.ranks, train_parallel, name, kind, composition)
    losses, expected = results[0].losses, plain(name, kind)
    if any(other.losses != losses for other in results):
        return Verdict(loss=inf, where=f"ranks report different losses: {[other.losses for other in results]}")
    loss = max(abs(a - b) / max(SMALLEST, abs(b)) for a, b in zip(losses, expected.losses, strict=True))
    floor = noise_floor(expected.gradients)
    if composition.pp > 1:
        gradient, first = distance(expected.gradients, over_stages(results), floor)
    else:
        gradient, first = max((distance(expected.gradients, found.gradients, floor) for found in results), key=lambda pair: pair[0])
    state, second = max((distance(expected.state, found.state) for found in results), key=lambda pair: pair[0])
    return Verdict(loss if loss == loss else inf, gradient, state, f"gradient of {first}, state {second}")


def over_stages(results: list[Trained]) -> dict[str, Tensor | None]:
    """The gradients of a pipeline: each is where its parameter is, and where several ranks have it they have the same."""
    found: dict[str, Tensor | None] = {}
    for name in results[0].gradients:
        here = [gradient for gradient in (result.gradients[name] for result in results) if gradient is not None]
        assert all(torch.allclose(here[0], other, rtol=1e-12, atol=0.0) for other in here[1:]), f"ranks have different gradients of {name}"
        found[name] = here[0] if here else None
    return found


def compare_or_refuse(name: str, kind: Kind, composition: Composition) -> Verdict:
    """As `compare`; a refusal of micro-batches that names the constraint is a verdict where one row's result depends on other rows."""
    from partitioner import PartitionerError

    try:
        return compare(name, kind, composition)
    except PartitionerError as error:
        if composition.micro_batches > 1 and "micro_batches" in str(error) and MODELS[name]()["mixes_batch"]:
            return Verdict(refused=str(error))
        raise


def rows_in(name: str) -> int:
    return rows_of(MODELS[name]())
