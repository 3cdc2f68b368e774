"""Train on two ranks, save halfway, and go on from the file on three ranks and in one plain process, with the same losses.

python examples/resume.py               starts torchrun on itself, twice; on CPUs in a minute or two
python examples/resume.py --folder ckpt  keeps the checkpoint there
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher need not wait for torch
    from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package beside this folder, installed or not

TRAINED_ON, RESUMED_ON = 2, 3
HALF, STEPS = 4, 8
ROWS, WORDS = 24, 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes; without it, nothing is kept")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint instead of starting anew (the launcher does this)")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        return on_this_rank(options.folder, options.resume)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for ranks, more in ((TRAINED_ON, []), (RESUMED_ON, ["--resume"])):
            if code := launch(ranks, ["--folder", str(folder), *more]):
                return code
        return in_one_process(folder)


def launch(ranks: int, options: list[str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__, *options]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


def on_this_rank(folder: Path, resume: bool) -> int:
    """What every rank does: the plan of the first run shards everything, the second nothing but the optimizer's state."""
    import torch
    import torch.distributed as dist

    from partitioner import auto_parallelize

    torch.manual_seed(7 if resume else 0)  # the resumed run starts from other weights, which the checkpoint replaces
    ranks = int(os.environ["WORLD_SIZE"])
    constraints = {"shard": "zero1" if resume else "zero3"}
    words, answers = batch(0)
    parallel = auto_parallelize(build(), gpus=ranks, example_inputs=(words,), example_targets=answers, loss=loss_of, constraints=constraints)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    start = parallel.load(folder, optimizer) if resume else 0
    losses = []
    for step in range(start, STEPS):
        if not resume and step == HALF:
            saved = parallel.save(folder, optimizer)
            if dist.get_rank() == 0:
                print(f"saved {saved.name} on {ranks} ranks: {', '.join(sorted(path.name for path in saved.iterdir()))}", flush=True)
        words, answers = batch(step)
        losses.append(parallel.train_step(words, targets=answers).item())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        show(f"{ranks} ranks", start, losses)
        (folder / f"losses-{ranks}.json").write_text(json.dumps(losses[-(STEPS - HALF) :]))
    dist.destroy_process_group()
    return 0


def in_one_process(folder: Path) -> int:
    """The same from plain PyTorch, and the comparison of all three."""
    import torch

    from partitioner import load_checkpoint

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = load_checkpoint(folder, model, optimizer)
    losses = []
    for step in range(start, STEPS):
        words, answers = batch(step)
        loss: Any = loss_of(model(words), answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    show("one process", start, losses)
    expected = json.loads((folder / f"losses-{TRAINED_ON}.json").read_text())
    resumed = json.loads((folder / f"losses-{RESUMED_ON}.json").read_text())
    most = max(abs(a - b) / abs(b) for other in (resumed, losses) for a, b in zip(other, expected, strict=True))
    print(f"largest difference from the undisturbed run: {most:.1e}")
    return 0 if most < 1e-5 else 1


def build() -> "nn.Module":
    from torch import nn

    return nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, WORDS))


def loss_of(logits: "Tensor", words: "Tensor") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, 1), words.flatten())


def batch(step: int) -> "tuple[Tensor, Tensor]":
    """Words, and the words to answer: the next in the alphabet."""
    import torch

    words = torch.randint(WORDS, (ROWS, 8), generator=torch.Generator().manual_seed(step))
    return words, (words + 1) % WORDS


def show(who: str, start: int, losses: list[float]) -> None:
    print(f"{who:12s} steps {start} … {STEPS - 1}: " + "  ".join(f"{loss:.6f}" for loss in losses), flush=True)


if __name__ == "__main__":
    sys.exit(main())
