"""Training that survives the death of a rank: torchrun starts all ranks again, and they go on from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/survive_a_failure.py --kill-at 7

Rank 1 kills itself in the middle of that step, once. The losses that rank 0 prints are those of a run without the accident.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from partitioner import auto_parallelize

ROWS, WIDTH = 12, 8


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.flip(1).tanh()


def train(folder: Path, steps: int, every: int, kill_at: int | None = None) -> list[tuple[int, float]]:
    """(step, loss) of the steps that this process ran."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, WIDTH))
    x, y = batch(0)
    ranks = int(os.environ["WORLD_SIZE"])
    parallel = auto_parallelize(model, gpus=ranks, example_inputs=(x,), example_targets=y, loss=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    first = parallel.load(folder, optimizer) if folder.exists() else 0
    losses = []
    for step in range(first, steps):
        if step == kill_at and os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step)
        losses.append((step, parallel.train_step(x, targets=y).item()))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            parallel.save(folder, optimizer)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--kill-at", type=int, help="the step in which rank 1 kills itself at the first try")
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoint"), help="where checkpoints lie; one that is there is gone on from")
    options = parser.parse_args()
    for step, loss in train(options.folder, options.steps, options.every, options.kill_at):
        if os.environ["RANK"] == "0":
            print(f"step {step:3d}  loss {loss:.9f}", flush=True)


if __name__ == "__main__":
    main()
