"""Runs an asynchronous program on tensors, step after step: what is trained is another rule than one process's, see steps.py."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from partitioner.errors import NonFiniteError, ProgramError
from partitioner.runtime.executor import Executor, TensorMachine, mix
from partitioner.runtime.recorder import Recorder, Recording
from partitioner.runtime.steps import Steps


class AsynchronousExecutor(Executor):
    """An executor whose steps leave backwards of their batch to the next one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps = Steps[Tensor](self.program)
        self._before: TensorMachine | None = None  # that of the batch under way
        self._first_seed = 0

    @property
    def under_way(self) -> bool:
        """Whether backwards of the last batch are owed."""
        return self._before is not None

    def step(self, leaves: Mapping[str, Any], number: int = 0, recording: Recording | None = None, own_rows: bool = False) -> Tensor:
        """Forward of this batch, backward of as much of it as is there; `.grad` and the loss returned are those of the batch before.

        The first step, and the first after `drain`, gives no gradient, and NaN. Other arguments and errors as in `Executor.step`.
        """
        with torch.no_grad(), self.playing(), ExitStack() as stack:
            machine, before = self._machine(leaves, own_rows, self._steps.first), self._before
            recorder = None if recording is None else Recorder(self.program, self.device)
            if recording is not None and recorder is not None:
                recording.recorder = recorder
                stack.enter_context(recorder.step())
            for each in (machine, before):
                if each is not None:
                    each.recorder = recorder
            player = self._steps.player(machine)
            self._steps.play(player)
            self._steps.end(player)
            self._before = machine
            if before is None:
                wire = self.program.wires[self.program.loss or ""]
                return torch.full(wire.shape(0), math.nan, dtype=wire.dtype, device=self.device)
        return self._loss(before, number - 1)

    def drain(self, number: int) -> Tensor | None:
        """Run the backwards that are owed: `.grad` and the loss returned are those of the last batch. None: there are none."""
        before, self._before = self._before, None
        if before is None:
            return None
        with torch.no_grad(), self.playing():
            before.recorder = None
            self._steps.drain()
        return self._loss(before, number - 1)

    def _loss(self, machine: TensorMachine, number: int) -> Tensor:
        loss = machine.total_loss
        if loss is None:
            raise ProgramError("a step program must contain LOSS; this one has none")
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteError(
                f"step {number}: the loss of its batch is {value}, which shows a step later (where it came up is not sought: the batch is gone). "
                "The parameters are those of before that batch's gradient, which is in .grad. To go on, call optimizer.zero_grad() and take the next "
                "batch. Lower the learning rate, clip gradients, or look at the inputs"
            )
        return loss

    def _seed(self) -> int:
        """Drawn where the pipeline is empty. Later ones follow from that: to share one out would be to wait for the last stage."""
        if self._before is None:
            self._first_seed = super()._seed()
            return self._first_seed
        return mix(self._first_seed, self._steps.first)
