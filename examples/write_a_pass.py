"""A pass of your own: facts about the captured graph, by named modules.

    python examples/write_a_pass.py

A pass is a function of a `Graph`. Its module is a plain torch.fx graph of ATen ops whose nodes say which user module and line they come from
(meta["module"], meta["source"]) and what they make (meta["val"]). This one tells which modules make the most bytes, and a second one rewrites: it
folds a division by a constant into a multiplication, and the rewritten graph still computes the same.
"""

from collections import Counter

import torch
from torch import fx, nn

from partitioner.passes.capture import capture
from partitioner.passes.graph import Graph, module_of

aten = torch.ops.aten


def bytes_by_module(graph: Graph) -> Counter[str]:
    """Bytes of all results, views left out, by the dotted name of the module that makes them."""
    found: Counter[str] = Counter()
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and not value._is_view():
            found[node.meta.get("module") or "the root"] += value.numel() * value.element_size()
    return found


def multiply_instead_of_divide(graph: Graph) -> tuple[Graph, int]:
    """x / c as x * (1 / c) where c is a power of two, so that not a bit changes. Returns the new graph and how many were found."""
    new, env, count = fx.Graph(), dict[fx.Node, fx.Node](), 0
    for node in graph.module.graph.nodes:
        copied = env[node] = new.node_copy(node, env.__getitem__)
        divides = node.target is aten.div.Tensor and isinstance(node.args[1], int | float)
        if divides and node.args[1] > 0 and torch.frexp(torch.tensor(float(node.args[1])))[0] == 0.5:
            copied.target, copied.args = aten.mul.Tensor, (copied.args[0], 1 / node.args[1])
            count += 1
    return graph.with_module(module_of(new)).check(), count


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / 8.0
        mixed: torch.Tensor = scores.softmax(-1) @ self.value(x)
        return mixed


def main() -> None:
    model, x = Attention(), torch.randn(4, 32, 64)
    graph = capture(model, (x,), {}, loss=lambda y: y.square().mean())
    for module, size in bytes_by_module(graph).most_common():
        print(f"{module:12} {size / 1e3:8.1f} kB")
    changed, count = multiply_instead_of_divide(graph)
    parameters = dict(model.named_parameters())
    arguments = [parameters[given.name] if given.kind == "parameter" else x for given in graph.inputs if given.kind != "scalar"]
    before, after = (g.module(*arguments)[0] for g in (graph, changed))
    print(f"{count} division rewritten; loss {before.item():.6f} before, {after.item():.6f} after, equal: {torch.equal(before, after)}")


if __name__ == "__main__":
    main()
