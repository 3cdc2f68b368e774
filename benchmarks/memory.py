"""Predicted against measured peak tensor bytes of every rank: 10 models x 6 plans, three steps of training with AdamW.

    python benchmarks/memory.py [--ranks 2] [--models NAME …] [--json out/memory.json]

Predicted is the simulator's peak over a step and `optimizer.step`, measured is what a dispatch tracker saw of tensor storages. Exit status 1 where
a difference exceeds 1 % or a plan was refused. A model that mixes its batch (BatchNorm) has one micro-batch in every plan.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from partitioner import PartitionerError, auto_parallelize  # noqa: E402
from tests import ranks as pool  # noqa: E402
from tests.models import MODELS, clone  # noqa: E402

PLANS: dict[str, dict[str, Any]] = {
    "none": {"shard": "none", "checkpoint": "none"},
    "none, full checkpoint, 2 micro-batches": {"shard": "none", "checkpoint": "full", "micro_batches": 2},
    "zero1": {"shard": "zero1", "checkpoint": "none"},
    "zero2, full checkpoint, 2 micro-batches": {"shard": "zero2", "checkpoint": "full", "micro_batches": 2},
    "zero3": {"shard": "zero3", "checkpoint": "none"},
    "zero3, full checkpoint, 2 micro-batches": {"shard": "zero3", "checkpoint": "full", "micro_batches": 2},
}
STEPS = 3
TOLERANCE = 0.01
WANTED = (
    "tied_language_model",
    "lstm_and_gru",
    "unet",
    "resnet",
    "vision_transformer",
    "hf_gpt2",
    "hf_llama",
    "hf_bert",
    "hf_t5",
    "hf_mamba",
)


def measure(name: str, constraints: Mapping[str, Any]) -> dict[str, int]:
    """Runs on every rank: plan, train, and say what this rank was predicted and seen to hold, in bytes."""
    case = MODELS[name]()
    loss_fn, targets = case["loss_fn"], case["targets"]
    extra: dict[str, Any] = {} if targets is None else {"example_targets": targets}
    if loss_fn is not None:
        extra["loss"] = loss_fn if targets is not None else lambda output: loss_fn(output, None)
    wanted = {key: value for key, value in constraints.items() if key != "micro_batches" or not case["mixes_batch"]}
    parallel = auto_parallelize(
        case["model"].train(),
        gpus=int(os.environ["WORLD_SIZE"]),
        example_inputs=case["args"],
        example_kwargs=case["kwargs"],
        batch_dim=case["batch_dim"],
        constraints=wanted,
        **extra,
    )
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad])
    for _ in range(STEPS):
        call = dict(clone(case["kwargs"])) | ({} if targets is None else {"targets": clone(targets)})
        parallel.train_step(*clone(case["args"]), **call)
        optimizer.step()
        optimizer.zero_grad()
    predicted = parallel.plan.predicted.per_rank[int(os.environ["RANK"])].peak_bytes
    return {"predicted_bytes": predicted, "measured_bytes": parallel.measured.peak_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(WANTED), choices=list(MODELS))
    parser.add_argument("--json", type=Path, default=Path("out/memory.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'model':24} {'plan':42} {'predicted':>12} {'measured':>12} {'worst':>9}")
    for name in options.models:
        for plan, constraints in PLANS.items():
            try:
                found = pool.run(options.ranks, measure, name, constraints, group=False)
            except PartitionerError as error:
                rows.append({"model": name, "plan": plan, "refused": f"{type(error).__name__}: {error}"})
                print(f"{name:24} {plan:42} {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            errors = [rank["measured_bytes"] / rank["predicted_bytes"] - 1 for rank in found]
            worst = max(errors, key=abs)
            rows.append({"model": name, "plan": plan, "ranks": found, "worst_error": worst})
            fullest = max(found, key=lambda rank: int(rank["measured_bytes"]))
            print(f"{name:24} {plan:42} {fullest['predicted_bytes']:12,} {fullest['measured_bytes']:12,} {worst:+9.3%}", flush=True)
    pool.close()
    compared = [row for row in rows if "worst_error" in row]
    bad = [row for row in compared if abs(row["worst_error"]) > TOLERANCE]
    exact = sum(row["worst_error"] == 0 for row in compared)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"torch": torch.__version__, "ranks": options.ranks, "rows": rows}, indent=1))
    print(f"{len(compared)} compared: {exact} equal to the byte, {len(bad)} beyond {TOLERANCE:.0%}; {len(rows) - len(compared)} refused")
    return 1 if bad or len(compared) < len(options.models) * len(PLANS) else 0


if __name__ == "__main__":
    sys.exit(main())
