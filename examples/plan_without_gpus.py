"""Plan a 1.1-billion-parameter Llama for sixteen H100s on a machine that has none: nothing is allocated, nothing is run.

    python examples/plan_without_gpus.py [--gpus "2x8 h100-sxm"] [--memory 40GB] [--out out/llama-1b]
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import make_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="2x8 h100-sxm", help="nodes x devices, and a preset; `partitioner clusters` lists them")
    parser.add_argument("--memory", default="40GB", help="cap of one device")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--out", type=Path, default=Path("out/llama-1b"))
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
    )
    with torch.device("meta"):  # shapes without weights
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(64, 2048, dtype=torch.int64)
    plan = make_plan(model, options.gpus, example_kwargs={"input_ids": tokens, "labels": tokens}, memory=options.memory)
    print(plan)
    options.out.mkdir(parents=True, exist_ok=True)
    plan.save(options.out / "plan.json")
    plan.emit(options.out)
    print(f"{options.out} holds {', '.join(sorted(path.name for path in options.out.iterdir()))}")


if __name__ == "__main__":
    main()
