"""Runs an asynchronous program on tensors, step after step: what is trained is another rule than one process's, see steps.py."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor

from partitioner.runtime.executor import Executor, TensorMachine, mix
from partitioner.runtime.recorder import Recorder, Recording
from partitioner.runtime.steps import Steps


class AsynchronousExecutor(Executor):
    """An executor whose steps leave backwards of their batch to the next one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps = Steps[Tensor](self.program)
        self._first_seed = 0

    @property
    def _before(self) -> TensorMachine | None:
        """The machine of the batch under way."""
        older = self._steps.older
        return None if older is None else cast(TensorMachine, older.machine)

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
            if before is None:
                return machine.blank(self.program.loss or "").fill_(math.nan)
            loss, value = self._total(before)
        return self._finite(loss, value, number - 1, before)

    def drain(self, number: int) -> Tensor | None:
        """Run the backwards that are owed: `.grad` and the loss returned are those of the last batch. None: there are none."""
        before = self._before
        if before is None:
            return None
        with torch.no_grad(), self.playing():
            before.recorder = None
            self._steps.drain()
            loss, value = self._total(before)
        return self._finite(loss, value, number - 1, before)

    def _non_finite(self, value: float, number: int, machine: TensorMachine) -> str:
        return (
            f"step {number}: the loss of its batch is {value}, which shows a step later (where it came up is not sought: the batch is gone). "
            "The parameters are those of before that batch's gradient, which is in .grad. To go on, call optimizer.zero_grad() and take the next "
            "batch. Lower the learning rate, clip gradients, or look at the inputs"
        )

    def _seed(self) -> int:
        """Drawn where the pipeline is empty. Later ones follow from that: to share one out would be to wait for the last stage."""
        if self._before is None:
            self._first_seed = super()._seed()
            return self._first_seed
        return mix(self._first_seed, self._steps.first)
