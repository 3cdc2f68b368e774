"""How long planning takes, stage by stage, for a 4- and a 96-layer Llama of equal width, and capture against `torch.export` alone.

    python benchmarks/plan.py [--layers 4 96] [--gpus "2x8 h100-sxm"] [--json out/plan_seconds.json]

Models are on meta: nothing is allocated and the capture is not verified. Two bars: all but the capture takes less than 1.5x for the deeper model, and
the capture at most 1.3x `torch.export.export(strict=False)` of the same model and loss. Exit status 1 where one is missed.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from partitioner import make_plan

STAGES = {
    "capture": ("partitioner.session.capture",),
    "place": ("partitioner.prepare.analyse", "partitioner.prepare.infer", "partitioner.prepare.place"),
    "blocks": ("partitioner.prepare.cut_blocks",),
    "differentiate": ("partitioner.prepare.differentiate",),
    "frontier": ("partitioner.prepare.encode", "partitioner.prepare.frontier", "partitioner.prepare.price"),
    "emit": ("partitioner.prepare.split", "partitioner.prepare.emit"),
    "solve": ("partitioner.planner.solve",),
    "lower": ("partitioner.trial.lower",),
    "simulate": ("partitioner.trial.simulate",),
}
DEPTH_BAR, CAPTURE_BAR = 1.5, 1.3
ROWS, LENGTH = 16, 128


class Stopwatch:
    """Seconds per stage, without those of stages inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[stage] += spent - self._inner.pop()
                self._inner[-1] += spent

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put the watch around the functions that the stages name."""
        with ExitStack() as stack:
            for stage, places in STAGES.items():
                for place in places:
                    module, _, name = place.rpartition(".")
                    __import__(module)
                    stack.enter_context(patch(place, self.timed(stage, getattr(sys.modules[module], name))))
            yield


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


class _Loss(nn.Module):
    """Model and loss as one module, as `torch.export` alone would be given them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Tensor) -> Tensor:
        loss: Tensor = self.model(**kwargs).loss
        return loss


def export_seconds(layers: int) -> float:
    model, inputs = _Loss(llama(layers)), batch()
    start = time.perf_counter()
    torch.export.export(model, (), inputs, strict=False)
    return time.perf_counter() - start


def plan_seconds(layers: int, gpus: str) -> dict[str, float]:
    """Seconds of every stage, of the whole, and of the whole but the capture."""
    model, inputs, watch = llama(layers), batch(), Stopwatch()
    with watch.watching():
        start = time.perf_counter()
        make_plan(model, gpus=gpus, example_kwargs=inputs, verify=False)
        whole = time.perf_counter() - start
    found = {stage: watch.seconds[stage] for stage in STAGES}
    return {**found, "other": whole - sum(found.values()), "whole": whole, "without capture": whole - found["capture"]}


def fastest(layers: int, gpus: str, repeats: int) -> dict[str, float]:
    """The fastest planning, with the fastest capture and the fastest export of the same runs, which take turns."""
    runs = [{**plan_seconds(layers, gpus), "torch.export": export_seconds(layers)} for _ in range(repeats)]
    best = min(runs, key=lambda run: run["without capture"])
    return {**best, **{stage: min(run[stage] for run in runs) for stage in ("capture", "torch.export")}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 96])
    parser.add_argument("--gpus", default="2x8 h100-sxm")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each, of which the fastest counts")
    parser.add_argument("--json", type=Path, default=Path("out/plan_seconds.json"))
    options = parser.parse_args()
    export_seconds(1), plan_seconds(1, options.gpus)  # what is done once in a process is no part of either
    found: dict[int, dict[str, float]] = {}
    for layers in options.layers:
        found[layers] = fastest(layers, options.gpus, options.repeats)
    shallow, deep = options.layers
    print(f"{'seconds':18} {shallow:>6} layers {deep:>6} layers   ratio")
    for stage, seconds in found[deep].items():
        few = found[shallow][stage]
        print(f"{stage:18} {few:13.3f} {seconds:13.3f} {seconds / few if few else float('nan'):7.2f}")
    depth = found[deep]["without capture"] / found[shallow]["without capture"]
    capture = max(found[layers]["capture"] / found[layers]["torch.export"] for layers in options.layers)
    print(f"without capture {depth:.2f}x (bar {DEPTH_BAR}); capture {capture:.2f}x torch.export (bar {CAPTURE_BAR})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "gpus": options.gpus, "seconds": found, "depth": depth, "capture": capture}
    options.json.write_text(json.dumps(about, indent=1))
    return 0 if depth < DEPTH_BAR and capture <= CAPTURE_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
