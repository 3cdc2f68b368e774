"""For every range of blocks at once: a proven lower bound of the seconds of a stage that holds it.

Within a stage of blocks a … b-1 with room R (capacity less what the cut before it holds) the problem is a multiple-choice knapsack. Charging
every held byte a price of λ seconds gives for any λ >= 0, transients apart, the Lagrangian bound

    seconds >= sum_i min_o (c_io + λ h_io) - λ (R - transient)             h_io = persistent + in_flight * saved

whose sums are differences of prefix sums: one numpy operation bounds all ranges (`_level`). Where λ runs over the slopes of the options' convex
hulls (`_prices`), the best of the bounds is the value of the linear relaxation. The transient of a stage lies in one of a few levels
lo … hi: there only options up to hi are allowed and lo is charged, so the least over the levels is a bound.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partitioner.balance_problem import Option

Table = NDArray[np.float64]
LEVELS = 8
EPSILON = float(np.finfo(float).eps)
PRICES = 48


def lower_bounds(kinds: Sequence[Sequence[Option]], kind: NDArray[np.intp], in_flight: int, room: NDArray[np.float64] | None) -> Table:
    """[a, b] -> a lower bound of the seconds of blocks a … b-1, cuts apart; infinite where they cannot fit or b <= a.

    kinds: the distinct blocks' options; kind[i]: which one block i is; room[a]: bytes for a stage that begins at block a (None: no limit).
    """
    if room is None:
        table = _differences(np.array([min(option.seconds for option in options) for options in kinds])[kind])
    else:
        transients = sorted({option.transient_bytes for options in kinds for option in options})
        levels = [group for group in np.array_split(np.array(transients, dtype=float), min(LEVELS, len(transients))) if len(group)]
        table = np.full((len(kind) + 1, len(kind) + 1), np.inf)
        for group in levels:
            allowed = [[option for option in options if option.transient_bytes <= group[-1]] for options in kinds]
            np.minimum(table, _level(allowed, kind, in_flight, np.append(room, room[-1]) - group[0]), out=table)
    table[np.tril_indices(len(table))] = np.inf
    return table


def least_bytes(kinds: Sequence[Sequence[Option]], kind: NDArray[np.intp], in_flight: int) -> Table:
    """[a, b] -> the least peak of a stage of blocks a … b-1, what its cut holds apart; infinite where b <= a."""
    table = np.full((len(kind) + 1, len(kind) + 1), np.inf)
    for level in sorted({option.transient_bytes for options in kinds for option in options}):
        allowed = [[option for option in options if option.transient_bytes <= level] for options in kinds]
        np.minimum(table, _leanest(allowed, kind, in_flight) + level, out=table)
    table[np.tril_indices(len(table))] = np.inf
    return table


def _leanest(kinds: Sequence[Sequence[Option]], kind: NDArray[np.intp], in_flight: int) -> Table:
    """[a, b] -> the least bytes held by blocks a … b-1 with these options alone; infinite where a block has none."""
    least = np.array([min((option.held(in_flight) for option in options), default=-1) for options in kinds], dtype=float)
    table = _differences(np.maximum(least, 0.0)[kind])
    table[_differences((least < 0)[kind].astype(float)) > 0] = np.inf
    return table


def _level(kinds: Sequence[Sequence[Option]], kind: NDArray[np.intp], in_flight: int, room: NDArray[np.float64]) -> Table:
    """The bound with these options alone, infinite where a block has none."""
    impossible = _leanest(kinds, kind, in_flight) > room[:, None]
    table = np.zeros(impossible.shape)
    for price in _prices(kinds, in_flight):
        charged = np.array([min((option.seconds + price * option.held(in_flight) for option in options), default=0.0) for options in kinds])
        total = np.concatenate([[0.0], np.cumsum(charged[kind])])
        rounding = EPSILON * len(total) * (total[-1] + price * np.abs(room).max())
        np.maximum(table, total[None, :] - (total + price * room)[:, None] - rounding, out=table)
    table[impossible] = np.inf
    return table


def _prices(kinds: Sequence[Sequence[Option]], in_flight: int) -> list[float]:
    """Seconds per byte at which a block of some kind goes on to a leaner option, and 0; a sample where there are many."""
    slopes = {0.0}
    for options in kinds:
        points = sorted((option.seconds, option.held(in_flight)) for option in options)
        while points:
            seconds, held = points[0]
            points = [(s, h) for s, h in points if h < held]
            if points:
                slope, _, at = min(((s - seconds) / (held - h), h, (s, h)) for s, h in points)
                slopes.add(slope)
                points = [at, *(point for point in points if point[1] < at[1])]
    ordered = sorted(slopes)
    return ordered if len(ordered) <= PRICES else [ordered[i] for i in np.linspace(0, len(ordered) - 1, PRICES).astype(int)]


def _differences(values: NDArray[np.float64]) -> Table:
    """[a, b] -> the sum of values a … b-1."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    table: Table = total[None, :] - total[:, None]
    return table
