"""Step time against what an expert would write by hand, on the same ranks under the same memory cap, interleaved in one run.

    python benchmarks/step.py [--ranks 2] [--steps 30] [--json out/step.json]

The model is a Llama of about 15 M parameters with AdamW in fp32. The peers: DDP, DDP with every layer checkpointed, ZeroRedundancyOptimizer, and
`fully_shard` per layer without and with checkpointing; each with gradients as bucket views where it can. First every peer's peak is measured alone;
three caps follow from them: roomy (all fit), tight (a tenth above `fully_shard`: what is not sharded no longer fits) and barely feasible
(a fiftieth above the leanest peer). For each cap our plan and the peers that fit take turns, step by step. A round's ratio is our seconds over
those of the peer that is quickest by its median. The bars: the 95 % lower bound of the median ratio (bootstrap) at most 1.0, the median at most
1.03, and at least one peer that the barely feasible cap excludes. Exit status 1 where one is missed.

A peak is what a dispatch tracker sees of tensor storages, resizes included. Buckets that a peer allocates below the dispatcher and does not show in
a gradient are not seen, which is in the peer's favour.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from partitioner import auto_parallelize
from partitioner.quantities import format_bytes
from partitioner.runtime.memory import Tracker
from partitioner.runtime.shards import local
from tests import ranks as pool

LAYERS, WIDTH, INNER, HEADS, VOCABULARY = 7, 384, 1024, 6, 4096
ROWS, LENGTH = 8, 128
WARM, SECONDS = 3, 1200.0
MEDIAN_BAR, BOUND_BAR = 1.03, 1.0


@dataclass(frozen=True)
class Contender:
    """One way to train. `step(tokens)` runs a whole step on the global batch; `resident()` are the tensors that it holds between steps."""

    step: Callable[[Tensor], Tensor]
    resident: Callable[[], Iterator[Tensor]]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------------------------------------------------- the peers


def _checkpointed(model: Any) -> None:
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))


def _peer(name: str) -> Contender:
    model: Any = llama()
    make = torch.optim.AdamW
    if name.endswith("checkpoint"):
        _checkpointed(model)
    if name.startswith("fully_shard"):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), make, lr=1e-4) if name == "zero" else make(model.parameters(), lr=1e-4)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(batch: Tensor) -> Tensor:
        mine = batch.chunk(ranks)[rank]
        loss: Tensor = model(input_ids=mine, labels=mine).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def resident() -> Iterator[Tensor]:
        for parameter in model.parameters():
            yield local(parameter)
            if parameter.grad is not None:
                yield local(parameter.grad)
        yield from model.buffers()
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        for state in inner.state.values():
            yield from (local(value) for value in state.values() if isinstance(value, Tensor))

    return Contender(step, resident)


def _ours(cap_bytes: int) -> tuple[Contender, Any]:
    batch = tokens()
    parallel = auto_parallelize(
        llama(), gpus=dist.get_world_size(), example_kwargs={"input_ids": batch, "labels": batch}, optimizer="adamw", memory=f"{cap_bytes}B"
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = parallel.train_step(input_ids=batch, labels=batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Contender(step, lambda: iter(())), parallel


PEERS = ("ddp", "ddp + checkpoint", "zero", "fully_shard", "fully_shard + checkpoint")

# ---------------------------------------------------------------------------------------------------------------- on every rank


@contextmanager
def _resizes(tracker: Tracker) -> Iterator[None]:
    """Let the tracker see storages that grow and shrink in place, as `fully_shard` gathers and frees parameters."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", watched):
        yield


def peak(name: str) -> int:
    """Peak tensor bytes of a peer's third step on this rank."""
    contender, batch = _peer(name), tokens()
    for _ in range(2):
        contender.step(batch)
    gc.collect()
    tracker = Tracker().track(list(contender.resident())).track(batch)
    with _resizes(tracker), tracker:
        contender.step(batch)
    return tracker.peak_bytes


def race(cap_bytes: int, names: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Seconds of every round of every contender (of the slowest rank), the losses, and what was planned and seen of ours."""
    ours, parallel = _ours(cap_bytes)
    contenders = {"ours": ours} | {name: _peer(name) for name in names}
    batch, seconds, losses = tokens(), {name: list[float]() for name in contenders}, dict[str, float]()
    order = list(contenders)
    shuffle = random.Random(0)
    for turn in range(WARM + steps):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            loss = contenders[name].step(batch)
            spent = torch.tensor([time.perf_counter() - start, loss.item()])
            slowest = spent.clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            if turn == 0:
                losses[name] = loss.item() if name == "ours" else spent[1].item() / dist.get_world_size()
            elif turn >= WARM:
                seconds[name].append(slowest[0].item())
    return {
        "seconds": seconds,
        "losses": losses,
        "peak_bytes": parallel.measured.peak_bytes,
        "predicted_seconds": parallel.plan.predicted.step_seconds,
        "predicted_peak_bytes": parallel.plan.predicted.peak_bytes,
        "plan": str(parallel.plan),
    }


# ---------------------------------------------------------------------------------------------------------------- figures


def lower_bound(ratios: list[float], draws: int = 2000) -> float:
    """The 2.5 % quantile of the median's bootstrap distribution: the lower end of its 95 % interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)]


def judge(cap: int, peaks: dict[str, int], found: dict[str, Any]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = found["seconds"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((name for name in seconds if name != "ours"), key=medians.__getitem__)
    ratios = [mine / other for mine, other in zip(seconds["ours"], seconds[best], strict=True)]
    return {
        "cap_bytes": cap,
        "fit": [name for name in peaks if peaks[name] <= cap],
        "best_peer": best,
        "median_seconds": medians,
        "median_ratio": statistics.median(ratios),
        "lower_bound": lower_bound(ratios),
        "losses": found["losses"],
        "our_peak_bytes": found["peak_bytes"],
        "predicted_peak_bytes": found["predicted_peak_bytes"],
        "predicted_seconds": found["predicted_seconds"],
        "plan": found["plan"],
    }


def caps_of(peaks: dict[str, int]) -> dict[str, int]:
    return {
        "roomy": int(1.2 * max(peaks.values())),
        "tight": int(1.1 * peaks["fully_shard"]),
        "barely feasible": int(1.02 * min(peaks.values())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="timed rounds a cap")
    parser.add_argument("--caps", nargs="*", choices=("roomy", "tight", "barely feasible"), default=["roomy", "tight", "barely feasible"])
    parser.add_argument("--json", type=Path, default=Path("out/step.json"))
    options = parser.parse_args()
    peaks = {name: max(pool.run(options.ranks, peak, name, seconds=SECONDS)) for name in PEERS}
    print("measured peaks: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in peaks.items()), flush=True)
    report: dict[str, Any] = {}
    for label, cap in caps_of(peaks).items():
        if label not in options.caps:
            continue
        fit = tuple(name for name in peaks if peaks[name] <= cap)
        row = report[label] = judge(cap, peaks, pool.run(options.ranks, race, cap, fit, options.steps, seconds=SECONDS)[0])
        times = "  ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in row["median_seconds"].items())
        print(f"{label}, {format_bytes(cap)} a rank, our peak {format_bytes(row['our_peak_bytes'])}: {times}")
        print(
            f"  ours / {row['best_peer']}: median {row['median_ratio']:.3f}, 95 % lower bound {row['lower_bound']:.3f}; "
            f"predicted {1e3 * row['predicted_seconds']:.0f} ms",
            flush=True,
        )
    pool.close()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"torch": torch.__version__, "ranks": options.ranks, "peaks": peaks, "caps": report}, indent=1))
    missed = [label for label, row in report.items() if row["lower_bound"] > BOUND_BAR or row["median_ratio"] > MEDIAN_BAR]
    missed += [label for label, row in report.items() if row["our_peak_bytes"] > row["cap_bytes"]]
    missed += ["barely feasible"] if "barely feasible" in report and len(report["barely feasible"]["fit"]) == len(PEERS) else []
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
