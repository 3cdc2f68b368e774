"""Train a byte-level Llama on the English text that ships with Python, on two ranks, in less memory than plain training needs.

    python examples/train_text.py               starts torchrun on itself; on CPUs in about two minutes
    torchrun --nproc-per-node 2 examples/train_text.py

It prints the plan, compares the first losses with plain PyTorch in one process, trains until the loss lies clearly below the text's unigram
entropy, compares the measured peak memory with the predicted one, and leaves plan.json and the generated source in out/.
"""

import argparse
import copy
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher need not wait for torch
    import torch
    from torch import Tensor, nn

RANKS = 2
MEMORY = "28MB"
ROWS, LENGTH = 16, 128
COMPARED_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument("--memory", default=MEMORY, help="cap of the tensor bytes of one rank")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for plan.json and the generated source")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        threads = str(max(1, (os.cpu_count() or RANKS) // RANKS))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *sys.argv]
        checkout = str(Path(__file__).resolve().parent.parent)  # the package beside this folder, installed or not
        path = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
        return subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}).returncode
    return train(options.steps, options.memory, options.out)


def train(steps: int, memory: str, out: Path) -> int:
    import torch
    import torch.distributed as dist

    from partitioner import InfeasibleError, auto_parallelize, make_plan

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def say(text: object = "") -> None:
        if rank == 0:
            print(text, flush=True)

    text = english()
    entropy = unigram_entropy(text)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    say(f"text: {len(text):,} bytes of English (Python's own help topics), unigram entropy {entropy:.3f} nats a byte")

    def batch(step: int) -> "dict[str, Tensor]":
        starts = torch.randint(len(data) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
        tokens = torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long()
        return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    model = llama()
    say(f"model: Llama of {sum(p.numel() for p in model.parameters()):,} parameters, batches of {ROWS} x {LENGTH} bytes")
    expected = plain_losses(copy.deepcopy(model), batch)

    planning: dict[str, Any] = {"gpus": ranks, "example_kwargs": batch(0), "optimizer": "adamw"}
    if rank == 0:
        plain = {"shard": "none", "checkpoint": "none", "micro_batches": 1}
        needed = make_plan(copy.deepcopy(model), **planning, constraints=plain, verify=False).predicted.peak_bytes
        say(f"\nplain data-parallel training needs {needed / 1e6:.1f} MB a rank; under a cap of {memory} it is refused:")
        try:
            make_plan(copy.deepcopy(model), **planning, memory=memory, constraints=plain, verify=False)
        except InfeasibleError as error:
            say("  InfeasibleError: " + str(error).replace("\n", "\n  "))
        else:
            say(f"this demonstration wants a cap that plain training breaks; write for instance --memory {needed * 6 // 10_000_000}MB")
            return 1

    start = time.perf_counter()
    parallel = auto_parallelize(model, **planning, memory=memory)
    optimizer, schedule = adamw(parallel.parameters())
    say(f"\nplanned in {time.perf_counter() - start:.0f} s:\n\n{parallel.plan}\n")

    losses: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        loss = parallel.train_step(**batch(step))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step < COMPARED_STEPS:
            say(f"step {step:4d}  loss {losses[-1]:.6f}  one process {expected[step]:.6f}  difference {abs(losses[-1] - expected[step]):.1e}")
        elif (step + 1) % 25 == 0:
            say(f"step {step + 1:4d}  loss {losses[-1]:.4f}  {(time.perf_counter() - start) / (step + 1):.2f} s a step")

    peaks: list[int] = [0] * ranks
    dist.all_gather_object(peaks, parallel.measured.peak_bytes)
    for number, (run, measured) in enumerate(zip(parallel.plan.predicted.per_rank, peaks, strict=True)):
        say(f"rank {number}: peak predicted {run.peak_bytes:,} bytes, measured {measured:,} ({measured / run.peak_bytes - 1:+.3%}), cap {memory}")
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        parallel.plan.save(out / "plan.json")
        parallel.plan.emit(out)
        say(f"{out}/ holds " + ", ".join(sorted(path.name for path in out.iterdir())))

    last = sum(losses[-10:]) / len(losses[-10:])
    same = all(abs(a - b) <= 1e-4 * b for a, b in zip(losses, expected, strict=False))
    fell = last < entropy - 0.5
    say(f"the first {COMPARED_STEPS} losses {'equal' if same else 'DIFFER FROM'} those of one process")
    say(f"mean of the last losses {last:.3f}: {'clearly below' if fell else 'NOT clearly below'} the unigram entropy of {entropy:.3f}")
    dist.destroy_process_group()
    return 0 if same and fell else 1


def english() -> bytes:
    """The help topics of the Python reference, as one text."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def unigram_entropy(text: bytes) -> float:
    """Nats a byte of the best predictor that knows only how often each byte occurs."""
    return -sum(count / len(text) * math.log(count / len(text)) for count in Counter(text).values())


def llama() -> "nn.Module":
    """A byte-level Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def adamw(parameters: "Iterable[nn.Parameter]") -> "tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]":
    """torch's own optimizer and schedule, for the plain and for the parallel model."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)


def plain_losses(model: "nn.Module", batch: "Callable[[int], dict[str, Tensor]]") -> list[float]:
    """The first losses of plain PyTorch in one process, on the whole batch."""
    optimizer, schedule = adamw(model.parameters())
    losses = []
    for step in range(COMPARED_STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
