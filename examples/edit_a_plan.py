"""A plan is data: save it, change decisions in the file, and have the changed plan priced.

    python examples/edit_a_plan.py [--out out/edited]

The solver's plan for two ranks is written to plan.json; then every block that the solver left unsharded, or sharded in another way, is set to zero3
by editing the JSON, and the same model is planned again with the edited decisions taken over. Where a decision cannot be, the error names it.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from partitioner import Plan, make_plan


class Tower(nn.Module):
    """Residual MLP blocks."""

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/edited"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, x = Tower(), torch.randn(64, 512)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    chosen = make_plan(model, gpus="2 cpu-local", example_inputs=(x,), loss=loss)
    path = options.out / "plan.json"
    chosen.save(path)

    data = json.loads(path.read_text())
    for block in data["blocks"]:
        block["shard"] = "zero3"
    path.write_text(json.dumps(data, indent=1))

    edited = make_plan(model, gpus="2 cpu-local", example_inputs=(x,), loss=loss, plan=Plan.load(path))
    for title, plan in (("the solver's", chosen), ("edited", edited)):
        print(f"{title:14} {1e3 * plan.predicted.step_seconds:7.1f} ms a step   {plan.predicted.peak_bytes / 1e6:6.1f} MB a rank")


if __name__ == "__main__":
    main()
