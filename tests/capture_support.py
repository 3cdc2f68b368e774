"""A model made of a function, and what every test of captured graphs asks of one."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from partitioner.passes.capture import capture
from partitioner.passes.graph import Graph
from partitioner.passes.tree import named_leaves, outputs_of
from partitioner.passes.verify import SEEDS, verify


class Fn(nn.Module):
    """A model made of a function of (module, x), with a linear layer and what else is registered."""

    def __init__(self, function: Any, width: int = 6, **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, width)
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def small(function: Any) -> Fn:
    """Of width 4, as `rows` are."""
    return Fn(function, 4)


def rows() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def ok(model: nn.Module, *args: Any, loss: Any = square, **kwargs: Any) -> Graph:
    """Captured with a loss, and verified."""
    graph = capture(model, args, kwargs, loss=loss)
    assert verify(model, graph, args, kwargs, loss=loss) is None
    return graph


def names(graph: Graph, kind: str) -> list[str]:
    return [given.name for given in graph.inputs if given.kind == kind]


def example(rows: int = 4, width: int = 6) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def checked(model: nn.Module, *args: Any, exact: bool = True, mode: Any = "forward", training: bool = True, **kwargs: Any) -> Graph:
    """Capture, verify, and compare outputs bit for bit under a seed."""
    graph = capture(model, args, kwargs, mode=mode, training=training)
    assert verify(model, graph, args, kwargs) is None
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            assert "module" in node.meta and "source" in node.meta
            assert node.meta["val"] is not None
    if exact:
        want, have = outputs(model, graph, args, kwargs)
        for a, b in zip(want, have, strict=True):
            assert torch.equal(a, b)
    return graph


def outputs(model: nn.Module, graph: Graph, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """User outputs of eager and of the graph, under one seed."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    if model.training != graph.training:
        model.train(graph.training)
    torch.manual_seed(SEEDS[0] + 1)
    want = [value for _, value in outputs_of(model(*args, **kwargs))[0]]
    model.load_state_dict(state)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants, "key_shared": -1}
    named.update(dict(named_leaves(args, kwargs)[0]))
    torch.manual_seed(SEEDS[0] + 1)
    results = fx.Interpreter(graph.module).run(*[named[given.name] for given in graph.inputs])
    return want, results[: len(want)]


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.module.graph.nodes if node.op == "call_function"]
