"""Predicted against measured seconds of a step, `optimizer.step` included, for ten plans of one model that take turns.

    python benchmarks/predict.py [--crowded] [--ranks 2] [--steps 9] [--json out/predict.json]

The model is the Llama of `benchmarks/step.py`. With `--crowded` there are 4 ranks (more than the cores of a machine of two), and half of the plans
are pipelines, whose ranks take turns at the cores. The bars: the median of |predicted / measured - 1| at most 15 %, and of the pairs of plans whose
measured times differ by more than 10 % at least nine in ten ranked right. Exit status 1 where one is missed.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.step import WARM, llama, tokens
from partitioner import auto_parallelize
from tests import ranks as pool

PLANS: dict[str, dict[str, Any]] = {
    "none": {"shard": "none", "checkpoint": "none", "micro_batches": 1},
    "none, full checkpoint": {"shard": "none", "checkpoint": "full", "micro_batches": 1},
    "none, 4 micro-batches": {"shard": "none", "checkpoint": "none", "micro_batches": 4},
    "zero1": {"shard": "zero1", "checkpoint": "none", "micro_batches": 1},
    "zero1, full checkpoint, 2 micro-batches": {"shard": "zero1", "checkpoint": "full", "micro_batches": 2},
    "zero2": {"shard": "zero2", "checkpoint": "none", "micro_batches": 1},
    "zero2, full checkpoint, 4 micro-batches": {"shard": "zero2", "checkpoint": "full", "micro_batches": 4},
    "zero3": {"shard": "zero3", "checkpoint": "none", "micro_batches": 1},
    "zero3, full checkpoint": {"shard": "zero3", "checkpoint": "full", "micro_batches": 1},
    "zero3, 4 micro-batches": {"shard": "zero3", "checkpoint": "none", "micro_batches": 4},
}
CROWDED: dict[str, dict[str, Any]] = {
    "none": {"shard": "none", "checkpoint": "none", "micro_batches": 1},
    "none, full checkpoint": {"shard": "none", "checkpoint": "full", "micro_batches": 1},
    "zero1": {"shard": "zero1", "checkpoint": "none", "micro_batches": 1},
    "zero3": {"shard": "zero3", "checkpoint": "none", "micro_batches": 1},
    "2 stages of 2, 1f1b": {"pp": 2, "schedule": "1f1b", "shard": "none", "checkpoint": "none", "micro_batches": 2},
    "2 stages of 2, zero-bubble, full checkpoint": {"pp": 2, "schedule": "zb-h1", "shard": "none", "checkpoint": "full", "micro_batches": 2},
    "4 stages, gpipe": {"pp": 4, "schedule": "gpipe", "checkpoint": "none", "micro_batches": 4},
    "4 stages, 1f1b": {"pp": 4, "schedule": "1f1b", "checkpoint": "none", "micro_batches": 4},
    "4 stages, 1f1b, 2 micro-batches": {"pp": 4, "schedule": "1f1b", "checkpoint": "none", "micro_batches": 2},
    "4 stages, 1f1b, 1 micro-batch": {"pp": 4, "schedule": "1f1b", "checkpoint": "none", "micro_batches": 1},
}
MEDIAN_BAR, RANKING_BAR, APART = 0.15, 0.9, 0.10


def race(steps: int, plans: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """On every rank: predicted and median measured seconds of every plan (of the slowest rank)."""
    batch, contenders = tokens(), {}
    for name, constraints in plans.items():
        call = {"input_ids": batch, "labels": batch}
        parallel = auto_parallelize(llama(), gpus=dist.get_world_size(), example_kwargs=call, constraints=constraints, verify=False)
        contenders[name] = parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    order, chance = list(plans), random.Random(0)
    for turn in range(WARM + steps):
        chance.shuffle(order)
        for name in order:
            parallel, optimizer = contenders[name]
            dist.barrier()
            start = time.perf_counter()
            parallel.train_step(input_ids=batch, labels=batch)
            optimizer.step()
            optimizer.zero_grad()
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn >= WARM:
                seconds[name].append(spent.item())
    predicted = {name: parallel.plan.predicted.step_seconds for name, (parallel, _) in contenders.items()}
    return {name: {"predicted": predicted[name], "measured": statistics.median(spent), "least": min(spent)} for name, spent in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowded", action="store_true", help="4 ranks and pipelines instead")
    parser.add_argument("--ranks", type=int, help="2, or 4 where crowded")
    parser.add_argument("--steps", type=int, default=9, help="timed rounds")
    parser.add_argument("--json", type=Path, default=Path("out/predict.json"))
    options = parser.parse_args()
    ranks = options.ranks or (4 if options.crowded else 2)
    found = pool.run(ranks, race, options.steps, CROWDED if options.crowded else PLANS, seconds=1800.0)[0]
    pool.close()
    print(f"{'plan':42} {'predicted':>10} {'measured':>10} {'error':>8}")
    for name, row in found.items():
        print(f"{name:42} {1e3 * row['predicted']:7.0f} ms {1e3 * row['measured']:7.0f} ms {row['predicted'] / row['measured'] - 1:+8.1%}")
    error = statistics.median(abs(row["predicted"] / row["measured"] - 1) for row in found.values())
    apart = [(a, b) for a, b in combinations(found.values(), 2) if abs(a["measured"] - b["measured"]) > APART * min(a["measured"], b["measured"])]
    right = sum((a["measured"] < b["measured"]) == (a["predicted"] < b["predicted"]) for a, b in apart)
    ranked = right / len(apart) if apart else 1.0
    print(f"median error {error:.1%} (bar {MEDIAN_BAR:.0%}); {right} of {len(apart)} pairs ranked right (bar {RANKING_BAR:.0%})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "ranks": ranks, "plans": found, "median_error": error, "ranked_right": ranked, "pairs": len(apart)}
    options.json.write_text(json.dumps(about, indent=1))
    return 1 if error > MEDIAN_BAR or ranked < RANKING_BAR else 0


if __name__ == "__main__":
    sys.exit(main())
