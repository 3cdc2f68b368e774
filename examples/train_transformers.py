"""Train an unmodified `transformers` model, a T5 from its config, on two ranks: two lines of it are ours.

    torchrun --nproc-per-node 2 examples/train_transformers.py [--steps 5]

It learns to reverse words. `gpus` is however many ranks torchrun started; with `--memory` the planner shards and recomputes until the step fits.
"""

import argparse
import os

import torch
from transformers import T5Config, T5ForConditionalGeneration

from partitioner import auto_parallelize

WORDS = ("partition", "gradient", "pipeline", "parallel", "checkpoint", "optimizer", "momentum", "schedule")


def batch() -> dict[str, torch.Tensor]:
    """Words and their reversals as bytes, padded with 0 (labels with -100, which the loss leaves out)."""
    pad = torch.nn.utils.rnn.pad_sequence
    forward = [torch.tensor(list(word.encode())) for word in WORDS]
    backward = [torch.tensor(list(word[::-1].encode())) for word in WORDS]
    tokens = pad(forward, batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": pad(backward, batch_first=True, padding_value=-100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--memory", help="cap of one rank, for instance 8MB")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False)
    model = T5ForConditionalGeneration(config).train()

    parallel = auto_parallelize(model, gpus=int(os.environ.get("WORLD_SIZE", 1)), example_kwargs=batch(), memory=options.memory)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    for step in range(options.steps):
        loss = parallel.train_step(**batch())
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if int(os.environ.get("RANK", 0)) == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
