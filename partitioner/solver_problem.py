"""What the solver is asked: a chain of blocks, what each may cost, and the memory there is. Numbers only."""

from dataclasses import dataclass

Choices = tuple[tuple[int, ...], ...]
"""Per run, per block in forward order, the index of an option."""


@dataclass(frozen=True)
class Option:
    """One way to run a block; seconds per instance and step, bytes per instance and rank. `key` is the caller's own.

    persistent_bytes: parameters, gradients, optimizer state: held over the whole step.
    saved_bytes: held from the block's forward to its backward.
    forward_bytes, backward_bytes: the peak above what is held (persistent and saved) during the block's forward or backward, gathered
    parameters included. forward_bytes counts what the forward itself will leave as saved; backward_bytes does not (it is held already).
    """

    key: str
    compute_seconds: float
    communication_seconds: float = 0.0
    persistent_bytes: int = 0
    saved_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def all_bytes(self) -> tuple[int, int, int, int]:
        return self.persistent_bytes, self.saved_bytes, self.forward_bytes, self.backward_bytes

    @property
    def peak_bytes(self) -> int:
        """t: the peak of the block's forward and backward above what is held before its forward."""
        return max(self.forward_bytes, self.saved_bytes + self.backward_bytes)

    @property
    def tail_bytes(self) -> int:
        """q: that peak above what is held after its forward."""
        return max(self.forward_bytes - self.saved_bytes, self.backward_bytes)


@dataclass(frozen=True)
class Run:
    """`count` consecutive equal blocks."""

    count: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Problem:
    """A chain of runs in forward order. capacity_bytes None: memory does not limit.

    overlap: communication runs beside compute (a step takes at least the longer of the two sums), else after it (it takes both).
    """

    runs: tuple[Run, ...]
    base_bytes: int = 0
    capacity_bytes: int | None = None
    overlap: bool = False


def undominated(run: Run, overlap: bool) -> list[int]:
    """Indices of the options that no other replaces at no loss, by descending tail: the order in which a run's blocks take them."""

    def prices(option: Option) -> tuple[float, ...]:
        compute, communication = option.compute_seconds, option.communication_seconds
        seconds = (compute, communication) if overlap else (compute + communication,)
        return (*seconds, option.persistent_bytes, option.saved_bytes, option.peak_bytes)

    priced = sorted((prices(option), index) for index, option in enumerate(run.options))
    kept: list[tuple[tuple[float, ...], int]] = []
    for price, index in priced:  # lexicographic order: nobody later dominates anybody earlier; of equals the first stays
        if not any(all(a <= b for a, b in zip(other, price, strict=True)) for other, _ in kept):
            kept.append((price, index))
    return sorted((index for _, index in kept), key=lambda index: (-run.options[index].tail_bytes, index))
