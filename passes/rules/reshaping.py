"""How the dims of a view correspond: both shapes are read left to right and split into common factors."""

from collections.abc import Sequence
from math import gcd

from partitioner.passes.rules.describe import Dim
from partitioner.passes.rules.labels import Labels


def regroup(labels: Labels, before: Sequence[int], after: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """Dims of a tensor of shape `before` and of its view of shape `after`.

        [8, 10, 32] -> [80, 4, 8]   (d0, d1, d2 d3) -> (d0 d1, d2, d3)

    The leading factors of both are compared; their greatest common divisor is one label of both. Where two remainders share no factor
    (6x4 -> 3x8 shares 3, then 2x4 against 8; 3x4 -> 4x3 shares none) the dims up to the next common boundary are whole.
    """
    if 0 in before:
        return labels.of(before, whole=True), labels.of(after, whole=True)
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    i = j = 0
    mine = before[0] if before else 1
    theirs = after[0] if after else 1
    while i < len(before) and j < len(after):
        if mine == 1:
            i += 1
            mine = before[i] if i < len(before) else 1
            continue
        if theirs == 1:
            j += 1
            theirs = after[j] if j < len(after) else 1
            continue
        common = gcd(mine, theirs)
        if common > 1:
            label = labels.new(common)
            left[i] += label
            right[j] += label
            mine, theirs = mine // common, theirs // common
            continue
        left[i] += labels.new(mine, whole=True)
        right[j] += labels.new(theirs, whole=True)
        a, b = mine, theirs
        while a != b:
            if a < b:
                i += 1
                a *= before[i]
                left[i] += labels.new(before[i], whole=True)
            else:
                j += 1
                b *= after[j]
                right[j] += labels.new(after[j], whole=True)
        mine = theirs = 1
    return [tuple(dim) for dim in left], [tuple(dim) for dim in right]
