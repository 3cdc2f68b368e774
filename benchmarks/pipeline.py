"""Pipeline schedules on two ranks: seconds, bytes and busy shares, predicted and measured, against torch.distributed.pipelining's 1F1B.

    python benchmarks/pipeline.py [--steps 15] [--json out/pipeline.json]

The model is a stack of eight equal Llama layers with AdamW in fp32, cut into few micro-batches, so that the bubble is a fifth of a step. All
contenders take turns in one run, step by step, in changing order; torch's has the same layers as two `nn.Sequential` halves, the same micro-batches,
loss and optimizer, and gradients that are checked equal once. Ours are the five schedules and three more configurations.

The bars, exit status 1 where one is missed: zero-bubble quicker than 1F1B; 1F1B within 2 % of GPipe's seconds and below its peak; the 95 % lower
bound of the median ratio of our 1F1B to torch's at most 1.0; predicted seconds within 15 % of measured (median), predicted peaks within 1 % (each);
busy shares within 8 points of the simulated ones (median).

A shared machine runs a third faster or slower from one minute to the next. So its pace is taken in turns with the contenders, by the small product by
which op times are kept (`partitioner/pace.py`), and predicted seconds are compared at the pace of the run; as they were planned they stand beside.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.step import WARM, lower_bound
from partitioner import auto_parallelize
from partitioner.calibrate import neighbours
from partitioner.draw_timeline import simulated
from partitioner.op_times import OpTimes
from partitioner.pace import Pace
from partitioner.quantities import format_bytes
from tests import ranks as pool

RANKS, LAYERS, WIDTH, INNER, HEADS = 2, 8, 256, 704, 4
ROWS, LENGTH, MICRO_BATCHES = 8, 128, 4
RECORDED = 7  # steps whose timelines are looked at
TORCH = "torch 1f1b"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name, "micro_batches": MICRO_BATCHES, "checkpoint": "none"} for name in SCHEDULES},
    "1f1b, 8 micro-batches": {"schedule": "1f1b", "micro_batches": 8, "checkpoint": "none"},
    "1f1b, full checkpoint": {"schedule": "1f1b", "micro_batches": MICRO_BATCHES, "checkpoint": "full"},
    "zb-h1, 2 micro-batches": {"schedule": "zb-h1", "micro_batches": 2, "checkpoint": "none"},
}
GPIPE_BAR, RATIO_BAR, SECONDS_BAR, PEAK_BAR, BUSY_BAR = 1.02, 1.0, 0.15, 0.01, 0.08


class Layer(nn.Module):
    """A Llama layer without rotary positions: RMS norm, causal attention, RMS norm, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.joined, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.joined(self.attention_norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm(x)
        added: Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + added


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets, [rows, length, width] each."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=chance), torch.randn(ROWS, LENGTH, WIDTH, generator=chance)


# ---------------------------------------------------------------------------------------------------------------- on every rank


@dataclass(frozen=True)
class Contender:
    """One way to train: `backward()` leaves the gradients of the parameters that are here, `optimizer` steps on them."""

    backward: Callable[[], object]
    optimizer: torch.optim.Optimizer
    parameters: Callable[[], dict[str, nn.Parameter]]

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """A step, and the gradients it was made with."""
        self.backward()
        found = {name: parameter.grad.clone() for name, parameter in self.parameters().items() if parameter.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def _torch() -> Contender:
    rank, per_stage = dist.get_rank(), LAYERS // RANKS
    layers = dict(list(stack().named_children())[rank * per_stage : (rank + 1) * per_stage])
    half = nn.Sequential()
    for name, layer in layers.items():
        half.add_module(name, layer)
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, nn.functional.mse_loss)
    inputs, targets = batch()

    def backward() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])

    return Contender(backward, torch.optim.AdamW(half.parameters(), lr=1e-4), lambda: dict(half.named_parameters()))


def _ours(constraints: dict[str, Any]) -> tuple[Contender, Any]:
    inputs, targets = batch()
    parallel = auto_parallelize(
        stack(),
        gpus=RANKS,
        example_inputs=(inputs,),
        loss=nn.functional.mse_loss,
        example_targets=targets,
        optimizer="adamw",
        constraints={"pp": RANKS, "shard": "none", **constraints},
        verify=False,
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    return Contender(lambda: parallel.train_step(inputs, targets=targets), optimizer, lambda: dict(parallel.named_parameters())), parallel


def race(steps: int) -> dict[str, Any]:
    """Seconds of every round (of the slowest rank), this rank's peaks and busy shares, and the largest difference from torch's gradients."""
    ours = {name: _ours(constraints) for name, constraints in CONFIGURATIONS.items()}
    contenders = {name: contender for name, (contender, _) in ours.items()} | {TORCH: _torch()}
    expected, found = contenders[TORCH].gradients(), contenders["1f1b"].gradients()
    both = expected.keys() & found.keys()  # a rank's layers may be others than torch's halves
    apart = max(((expected[name] - found[name]).abs().max() / expected[name].abs().max()).item() for name in both)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order, chance = list(contenders), random.Random(0)
    pace, products = Pace(time.thread_time), []
    for turn in range(WARM + steps):
        chance.shuffle(order)
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            contenders[name].step()
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            products += [pace.now() for _ in range(40)]
            if turn >= WARM:
                seconds[name].append(spent.item())
    rank, rows = dist.get_rank(), {}
    usual = OpTimes(torch.device("cpu"), 1.0, neighbours(RANKS, "cpu")).usual_pace()
    for name, (contender, parallel) in ours.items():
        busy = []
        for _ in range(RECORDED):
            dist.barrier()
            with parallel.measured.record() as recording:
                contender.step()
            busy.append(recording.timeline.busy["compute"] / recording.timeline.step_seconds)
        rows[name] = {
            "predicted_seconds": parallel.plan.predicted.step_seconds,
            "predicted_peak_bytes": parallel.plan.predicted.per_rank[rank].peak_bytes,
            "peak_bytes": parallel.measured.peak_bytes,
            "busy": statistics.median(busy),
            "layers": sorted({name.split(".")[0] for name, parameter in parallel.named_parameters() if parameter.device.type != "meta"}),
        }
        if rank == 0:  # which planned, and so knows the programs
            rows[name]["simulated_busy"] = [timeline.busy["compute"] / timeline.step_seconds for timeline in simulated(parallel.plan)]
    slower = statistics.mean(products) / usual  # no median: a step has slow moments too
    return {"seconds": seconds, "rows": rows, "compared": len(both), "apart": apart, "pace": slower}


# ---------------------------------------------------------------------------------------------------------------- figures


def judge(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what the ranks saw, a row for each contender."""
    seconds, table = found[0]["seconds"], {}
    pace = statistics.mean(each["pace"] for each in found)
    for name, spent in seconds.items():
        ratios = [mine / other for mine, other in zip(spent, seconds[TORCH], strict=True)]
        row = table[name] = {"seconds": statistics.median(spent), "ratio": statistics.median(ratios), "lower_bound": lower_bound(ratios)}
        if name != TORCH:
            row["planned_seconds"] = found[0]["rows"][name]["predicted_seconds"]
            row["predicted_seconds"] = row["planned_seconds"] * pace
            row["simulated_busy"] = found[0]["rows"][name]["simulated_busy"]
            for key in ("peak_bytes", "predicted_peak_bytes", "busy", "layers"):
                row[key] = [each["rows"][name][key] for each in found]
    return table


def bars(table: dict[str, Any], apart: float) -> dict[str, tuple[str, bool]]:
    """Bar -> what was seen, and whether it is met."""
    seconds = {name: row["seconds"] for name, row in table.items()}
    quickest = min(("zb-h1", "zb-v"), key=seconds.__getitem__)
    level = seconds["1f1b"] / seconds["gpipe"]
    peaks = {name: max(row["peak_bytes"]) for name, row in table.items() if name != TORCH}
    ratio = table["1f1b"]["lower_bound"]
    ours = [row for name, row in table.items() if name != TORCH]
    error, planned = (statistics.median(abs(row[key] / row["seconds"] - 1) for row in ours) for key in ("predicted_seconds", "planned_seconds"))
    pairs = [pair for row in ours for pair in zip(row["predicted_peak_bytes"], row["peak_bytes"], strict=True)]
    bytes_error = max(abs(predicted / measured - 1) for predicted, measured in pairs)
    shares = [abs(m - s) for row in ours for m, s in zip(row["busy"], row["simulated_busy"], strict=True)]
    apart_in_share = statistics.median(shares)
    return {
        "gradients equal to torch's": (f"largest relative difference {apart:.0e}", apart < 1e-4),
        "zero-bubble quicker than 1F1B": (f"{quickest} / 1f1b {seconds[quickest] / seconds['1f1b']:.3f}", seconds[quickest] < seconds["1f1b"]),
        "1F1B within 2 % of GPipe's seconds": (f"1f1b / gpipe {level:.3f}", level <= GPIPE_BAR),
        "1F1B's peak below GPipe's": (f"{format_bytes(peaks['1f1b'])}, {format_bytes(peaks['gpipe'])}", peaks["1f1b"] < peaks["gpipe"]),
        "our 1F1B / torch's, 95 % lower bound, at most 1": (f"{ratio:.3f}", ratio <= RATIO_BAR),
        "predicted seconds within 15 % (median)": (f"{error:.1%} at the pace of this run, {planned:.1%} as planned", error <= SECONDS_BAR),
        "predicted peaks within 1 %": (f"{bytes_error:.2%}", bytes_error <= PEAK_BAR),
        "busy shares within 8 points of the simulated (median)": (
            f"{100 * apart_in_share:.1f} points, at most {100 * max(shares):.0f}",
            apart_in_share <= BUSY_BAR,
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="timed rounds")
    parser.add_argument("--json", type=Path, default=Path("out/pipeline.json"))
    options = parser.parse_args()
    found = pool.run(RANKS, race, options.steps, seconds=1800.0)
    pool.close()
    table = judge(found)
    print(f"{'':24} {'measured':>9} {'predicted':>9} {'/ torch (bound)':>16}  {'peak of every rank (predicted)':44} busy of every rank (simulated)")
    for name, row in table.items():
        line = f"{name:24} {1e3 * row['seconds']:6.0f} ms "
        if name != TORCH:
            peaks = ", ".join(f"{format_bytes(m)} ({format_bytes(p)})" for m, p in zip(row["peak_bytes"], row["predicted_peak_bytes"], strict=True))
            busy = ", ".join(f"{m:.0%} ({s:.0%})" for m, s in zip(row["busy"], row["simulated_busy"], strict=True))
            line += f"{1e3 * row['predicted_seconds']:6.0f} ms {row['ratio']:7.3f} ({row['lower_bound']:.3f})  {peaks:44} {busy}"
        print(line)
    print("the machine took " + " and ".join(f"{each['pace']:.2f}" for each in found) + " of its usual seconds, by rank")
    judged = bars(table, max(each["apart"] for each in found))
    for bar, (seen, met) in judged.items():
        print(f"{'pass' if met else 'MISS'}  {bar}: {seen}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    by_rank = {"compared_gradients": [each["compared"] for each in found], "pace": [each["pace"] for each in found]}
    about = {"torch": torch.__version__, "table": table, "seconds": found[0]["seconds"], **by_rank}
    options.json.write_text(json.dumps({**about, "bars": judged}, indent=1))
    return 0 if all(met for _, met in judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
