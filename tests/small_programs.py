"""Hand-made block functions with their footprints, and programs of a small chain of them, for the tests of text, executor and simulator.

    prologue: n = count of inputs "w" that are positive, summed over ranks
    layer:    y = tanh(x @ p)                reads parameter p, value or input x
    loss:     l = sum((h - t)^2) / n         reads value h, input t, prologue n
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partitioner.passes.collectives import all_reduce
from partitioner.runtime.inputs import spread
from partitioner.runtime.program import Call, Event, Function, Instruction, Program, Ref, Replay, Shard, Slice, Unit

WIDTH = 16
ITEM = 4


def _layer_forward(arguments: list[object]) -> tuple[Tensor, ...]:
    p, x = arguments
    arguments.clear()
    z = x @ p  # type: ignore[operator]
    del x, p
    y = torch.tanh(z)
    del z
    return y, y


def _layer_backward(arguments: list[object]) -> tuple[Tensor, ...]:
    p, x, y, t = arguments
    arguments.clear()
    square = y * y  # type: ignore[operator]
    del y
    slope = 1 - square
    del square
    g = t * slope
    del t, slope
    gp = x.t() @ g  # type: ignore[attr-defined]
    del x
    gx = g @ p.t()  # type: ignore[attr-defined]
    del g, p
    return gp, gx


def _make(storage: int, per_row: int = 0, fixed: int = 0) -> Event:
    return Event(True, storage, fixed, per_row)


def _drop(storage: int) -> Event:
    return Event(False, storage)


ROW = WIDTH * ITEM
SQUARE = WIDTH * WIDTH * ITEM

LAYER = Function(
    name="layer",
    source="def layer_forward(p, x): ...",
    forward=_layer_forward,
    backward=_layer_backward,
    writes=1,
    saved=(("read", 0), ("read", 1), ("own", 0)),
    tangents=(0,),
    gradients=(0, 1),
    forward_replay=Replay(2, (_make(2, ROW), _drop(1), _drop(0), _make(3, ROW), _drop(2)), (3, 3)),
    backward_replay=Replay(
        4,
        (
            *(_make(4, ROW), _drop(2), _make(5, ROW), _drop(4), _make(6, ROW), _drop(3), _drop(5)),
            *(_make(7, fixed=SQUARE), _drop(1), _make(8, ROW), _drop(6)),
        ),
        (7, 8),
    ),
)


def _loss_forward(arguments: list[object]) -> tuple[Tensor, ...]:
    h, t, n = arguments
    arguments.clear()
    d = h - t  # type: ignore[operator]
    del h, t
    square = d * d
    total = square.sum()
    del square
    loss = total / n
    return loss, d


def _loss_backward(arguments: list[object]) -> tuple[Tensor, ...]:
    n, d, t = arguments
    arguments.clear()
    scale = t / n  # type: ignore[operator]
    del t, n
    twice = d * 2  # type: ignore[operator]
    del d
    return (twice * scale,)


LOSS = Function(
    name="loss",
    source="def loss_forward(h, t, n): ...",
    forward=_loss_forward,
    backward=_loss_backward,
    writes=1,
    saved=(("read", 2), ("own", 0)),
    tangents=(0,),
    gradients=(0,),
    forward_replay=Replay(
        3, (_make(3, ROW), _drop(0), _drop(1), _make(4, ROW), _make(5, fixed=ITEM), _drop(4), _make(6, fixed=ITEM)), (6, 3)
    ),
    backward_replay=Replay(3, (_make(3, fixed=ITEM), _drop(2), _drop(0), _make(4, ROW), _drop(1), _make(5, ROW)), (5,)),
)


def _count_forward(arguments: list[object]) -> tuple[Tensor, ...]:
    (w,) = arguments
    arguments.clear()
    assert isinstance(w, Tensor)
    positive = w > 0
    count = positive.sum()
    del positive
    number = count.float()
    del count
    return (all_reduce(number, "dp"),)


COUNT = Function(
    name="count",
    source="def count_forward(w): ... torch.ops.partitioner.all_reduce ...",
    forward=_count_forward,
    backward=None,
    writes=1,
    saved=(),
    tangents=(),
    gradients=(),
    forward_replay=Replay(1, (_make(1, 1), _make(2, fixed=8), _drop(1), _make(3, fixed=4), _drop(2), _make(4, fixed=4)), (4,)),
    backward_replay=None,
)


def chain(
    layers: int = 3,
    total: int = 10,
    micro_batches: int = 2,
    shard: Shard = "none",
    rank: int = 0,
    ranks: int = 1,
    tied: bool = False,
) -> Program:
    """Layers in a row and a loss; unit i holds layers.i's parameter (tied: the last layer uses the first one's)."""
    names = [f"layers.{0 if tied and index == layers - 1 else index}.weight" for index in range(layers)]
    given = [Ref("input", "args[0]"), *(Ref("value", f"v{index}") for index in range(layers))]
    calls = [
        Call(index, "layer", f"layers.{index}", (Ref("parameter", names[index]), given[index]), (f"v{index}",)) for index in range(layers)
    ]
    calls.append(Call(layers, "loss", "loss", (Ref("value", f"v{layers - 1}"), Ref("input", "targets"), Ref("prologue", "n")), ("l",)))
    calls.append(Call(layers + 1, "count", "prologue", (Ref("input", "args[1]"),), ("n",)))
    units = tuple(Unit(index, shard, (name,)) for index, name in enumerate(dict.fromkeys(names)))
    unit_of = {name: unit.number for unit in units for name in unit.parameters}
    lines = [Instruction("PROLOGUE", block=layers + 1)]
    if shard in ("zero1", "zero2"):
        lines += [Instruction("REFRESH", unit=unit.number, stream="gather", bytes=SQUARE, seconds=1.0) for unit in units]
    whole = shard == "zero3"
    for mb in range(micro_batches):
        for index in range(layers):
            drops = (f"v{index - 1}",) if index else ()
            lines += [Instruction("GATHER", unit=unit_of[names[index]], stream="gather", bytes=SQUARE, seconds=1.0)] if whole else []
            lines.append(Instruction("FORWARD", block=index, mb=mb, drops=drops, seconds=1.0))
            lines += [Instruction("FREE", unit=unit_of[names[index]], bytes=SQUARE)] if whole else []
        lines.append(Instruction("FORWARD", block=layers, mb=mb, drops=(f"v{layers - 1}",), seconds=0.5))
        lines.append(Instruction("BACKWARD", block=layers, mb=mb, seconds=0.5))
        for index in reversed(range(layers)):
            lines += [Instruction("GATHER", unit=unit_of[names[index]], stream="gather", bytes=SQUARE, seconds=1.0)] if whole else []
            lines.append(Instruction("BACKWARD", block=index, mb=mb, seconds=2.0))
            lines += [Instruction("FREE", unit=unit_of[names[index]], bytes=SQUARE)] if whole else []
            last_use = names.index(names[index]) == index
            each = shard in ("zero2", "zero3")
            if last_use and (each or mb == micro_batches - 1):
                lines.append(
                    Instruction("REDUCE", unit=unit_of[names[index]], mb=mb if each else None, stream="reduce", bytes=SQUARE, seconds=1.0)
                )
    lines.append(Instruction("LOSS", stream="reduce", bytes=ITEM))
    counts = spread(total, ranks)
    rows = spread(counts[rank], micro_batches)
    first = sum(counts[:rank])
    return Program(
        mode="step",
        training=True,
        rank=rank,
        ranks=ranks,
        axis="dp",
        instructions=tuple(lines),
        calls=tuple(calls),
        functions={"layer": LAYER, "loss": LOSS, "count": COUNT},
        units=units,
        inputs=(Slice("args[0]", 0), Slice("args[1]", 0), Slice("targets", 0)),
        total=total,
        rows=tuple(rows),
        starts=tuple(first + sum(rows[:mb]) for mb in range(micro_batches)),
        whole_rows=counts[rank],
        whole_start=first,
        share=1 / (ranks * micro_batches),
        keyed=False,
        loss="l",
    )


def forward_chain(layers: int = 2, total: int = 6) -> Program:
    """The chain without its loss, as a forward program with its backward: the output is the last layer's value."""
    step = chain(layers, total, micro_batches=1)
    forward = [line for line in step.instructions if line.op == "FORWARD" and line.block != layers]
    after = [line for line in step.instructions if line.op in ("BACKWARD", "REDUCE") and line.block != layers]
    return replace(
        step,
        mode="forward",
        instructions=(*forward, Instruction("OUTPUT", stream="gather", bytes=total * ROW)),
        after=tuple(after),
        loss=None,
        outputs=((Ref("value", f"v{layers - 1}"), Slice("", 0)),),
        output_placements=("shard",),
    )


def leaves(total: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(total, generator=generator) - 0.3
    return {
        "args[0]": torch.randn(total, WIDTH, generator=generator),
        "args[1]": weights,
        "targets": torch.randn(total, WIDTH, generator=generator),
    }


class Chain(torch.nn.Module):
    """The same in eager torch; returns (output, loss)."""

    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        with torch.no_grad():
            for weight in self.layers.parameters():
                weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(x @ layer.get_parameter("weight"))
        return x, (x - targets).pow(2).sum() / (w > 0).sum()


def eager(module: Chain, given: dict[str, Tensor]) -> Tensor:
    loss: Tensor = module(given["args[0]"], given["args[1]"], given["targets"])[1]
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


class WholeStore:
    """A store on one rank: parameters are whole; a zero3 unit's are copied by `gather` and forgotten by `free`, as if they had travelled."""

    def __init__(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters())
        self.units = {name: unit for unit in units for name in unit.parameters}
        self.gathered: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}
        self.results: dict[str, Tensor] = {}
        self.stale = False

    def whole(self, name: str) -> Tensor:
        return self.gathered[name] if self.units[name].shard == "zero3" else self.parameters[name].detach()

    def refresh(self, unit: Unit) -> None:
        self.stale = False

    def gather(self, unit: Unit) -> None:
        for name in unit.parameters:
            self.gathered[name] = self.parameters[name].detach().clone()

    def free(self, unit: Unit) -> None:
        for name in unit.parameters:
            del self.gathered[name]

    def accumulate(self, name: str, gradient: Tensor, batch: int = 0) -> None:
        if name in self.pending:
            self.pending[name].add_(gradient)
        else:
            self.pending[name] = gradient

    def tie(self, unit: Unit, batch: int = 0) -> None:
        raise AssertionError("these programs have one stage")

    def reduce(self, unit: Unit, last: bool, batch: int = 0) -> None:
        for name in unit.parameters:
            gradient = self.pending.pop(name)
            if name in self.results:
                self.results[name].add_(gradient)
            else:
                self.results[name] = gradient

    def finish(self, batch: int = 0) -> None:
        for name, gradient in self.results.items():
            parameter = self.parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.results.clear()

    def mark_stale(self) -> None:
        self.stale = True

    def held(self) -> list[Tensor]:
        return [*(parameter.detach() for parameter in self.parameters.values()), *self.gathered.values()]

    def full_state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def load_full_state(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm, norm_type)


class WholeBytes:
    """The bytes of `WholeStore`."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.results: set[str] = set()

    def following(self) -> "WholeBytes":
        raise AssertionError("these programs are synchronous")

    def persistent(self) -> int:
        return SQUARE * len(self.unit.parameters)

    def events(self, op: str) -> list[tuple[str, str, int]]:
        names = self.unit.parameters
        if op in ("GATHER", "FREE") and self.unit.shard == "zero3":
            return [("make" if op == "GATHER" else "drop", f"whole:{name}", SQUARE) for name in names]
        if op.startswith("ACCUMULATE:") and op.endswith(":first"):
            return [("make", f"gradient:{op.split(':')[1]}", SQUARE)]
        if op == "REDUCE":
            first = not self.results
            self.results.update(names)
            dropped = [("drop", f"gradient:{name}", SQUARE) for name in names]
            return dropped + [("make", f"result:{name}", SQUARE) for name in names] if first else dropped
        return []
