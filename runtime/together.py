"""Work that may fail on one rank alone (files, mostly): its error reaches every rank, before any of them enters the next collective."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from partitioner.errors import CheckpointError, PartitionerError
from partitioner.runtime import watch
from partitioner.runtime.wire import guarded

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """This process among the ranks that work together; `group` is None where it is alone."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None

    def together(self, work: Callable[[], T], told: type[PartitionerError] = CheckpointError) -> list[T]:
        """Do `work` on every rank; the results by rank. Where one fails all raise: it its own error, the others `told` with its text.

        However long the work takes, a rank waits for as long as the others live.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = work()
        except Exception as problem:  # whatever it is, the others wait for word of it
            error = problem
        answers = self._gather((None if error is None else _text(error), value))
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                raise told(f"rank {rank}: {text}")
        return [value for _, value in answers]

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0; its result, or its failure, on every rank."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _gather(self, mine: Any) -> list[Any]:
        if self.group is None:
            return [mine]
        if (watched := watch.of(self.group)) is not None:
            watched.meet("what the ranks do before they go on together")
        answers: list[Any] = [None] * self.ranks
        guarded(lambda: dist.all_gather_object(answers, mine, group=self.group), self.group, "what the ranks did")
        return answers


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PartitionerError) else f"{type(error).__name__}: {error}"
