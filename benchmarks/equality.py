"""The full product: every model of the zoo × ranks × shard level × checkpoint × micro-batches, each compared with the plain model in one process.

    python -m benchmarks.equality [--pipelines] [--models gpt2 unet] [--ranks 2 3] [--kinds fp64 fp32] [--part 1/4] [--json out/equality.json]

With `--pipelines` instead: a Llama, a T5, a U-Net and a model with tied embeddings × schedule × 2, 3 and 4 stages × 1, 2, 5 and 8 micro-batches ×
checkpoint × zero none, 1 and 3 (where there are two stages, of two ranks each; else none on one rank a stage). `--part k/n` runs every n-th
composition from the k-th, so that the product can be spread over several evenings. Prints one line a model and, at the end, JSON: how many
compositions were equal, refused or bad, the worst relative distance of each model, and what went wrong where. Exit status 1 if anything did.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from partitioner import PartitionerError
from partitioner.schedules import NAMES as SCHEDULES
from tests.equality import CHECKPOINTS, PROOF, RANKS, USUAL, Composition, Kind, compare_or_refuse, everything, most_micro_batches, rows_in
from tests.models import MODELS

KINDS = {"fp64": PROOF, "fp32": USUAL}
DISTANCES = ("loss", "gradient", "state")
PIPELINED = ("hf_llama", "hf_t5", "unet", "tied_language_model")
SHARDED_STAGES = ((2, 1, "none"), (3, 1, "none"), (4, 1, "none"), (2, 2, "none"), (2, 2, "zero1"), (2, 2, "zero3"))  # stages, ranks of each, shard
MICRO_BATCHES = (1, 2, 5, 8)


def pipelines(rows: int) -> Iterator[Composition]:
    """The full product of pipelines for a batch of so many rows."""
    for (stages, dp, shard), micro, checkpoint, schedule in product(SHARDED_STAGES, MICRO_BATCHES, CHECKPOINTS, SCHEDULES):
        if micro <= most_micro_batches(rows, dp):
            yield Composition(stages * dp, shard, checkpoint, micro, stages, schedule)


def examine(name: str, kind: Kind, compositions: Sequence[Composition]) -> dict[str, Any]:
    """Compositions of one model under one comparison."""
    tolerance = MODELS[name]()[kind.tolerance]
    found: dict[str, Any] = {"equal": 0, "refused": 0, "bad": [], "tolerance": tolerance, **{f"worst_{what}": 0.0 for what in DISTANCES}}
    for composition in compositions:
        try:
            verdict = compare_or_refuse(name, kind, composition)
        except Exception as error:  # one composition that fails must not hide the others
            said = f"{type(error).__name__}: {error}" if isinstance(error, PartitionerError) else repr(error)
            found["bad"].append({**asdict(composition), "error": said[:500]})
            continue
        if verdict.refused:
            found["refused"] += 1
            continue
        for what in DISTANCES:
            found[f"worst_{what}"] = max(found[f"worst_{what}"], getattr(verdict, what))
        if verdict.within(tolerance):
            found["equal"] += 1
        else:
            found["bad"].append({**asdict(composition), **{what: getattr(verdict, what) for what in DISTANCES}, "where": verdict.where})
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pipelines", action="store_true", help="the product of pipelines instead")
    options.add_argument("--models", nargs="*", default=[], help="only models whose name contains one of these")
    options.add_argument("--ranks", nargs="*", type=int, default=list(RANKS))
    options.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=sorted(KINDS, reverse=True))
    options.add_argument("--part", default="1/1", help="k/n: every n-th composition, from the k-th")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    part, parts = (int(number) for number in chosen.part.split("/"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report: dict[str, dict[str, Any]] = {}
    product_of = pipelines if chosen.pipelines else everything
    for name in PIPELINED if chosen.pipelines else MODELS:
        if MODELS[name]()["random"] or (chosen.models and not any(word in name for word in chosen.models)):
            continue
        mine = [composition for composition in product_of(rows_in(name)) if composition.ranks in chosen.ranks][part - 1 :: parts]
        for kind in chosen.kinds:
            start = time.perf_counter()
            found = report.setdefault(name, {})[kind] = examine(name, KINDS[kind], mine)
            counts = f"{found['equal']:4d} equal {found['refused']:4d} refused {len(found['bad']):4d} bad"
            distances = " ".join(f"{what} {found[f'worst_{what}']:.1e}" for what in DISTANCES)
            print(f"{name:28s} {kind} {counts}  {distances}  {time.perf_counter() - start:6.1f} s", file=sys.stderr, flush=True)
    parts_of_it = [found for kinds in report.values() for found in kinds.values()]
    total = {key: sum(found[key] for found in parts_of_it) for key in ("equal", "refused")} | {"bad": sum(len(found["bad"]) for found in parts_of_it)}
    text = json.dumps({"total": total, "models": report}, indent=1)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(text)
    print(text)
    return 1 if total["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
