"""Cut parameters over groups that come and go within a process."""

from typing import Any

import torch.distributed as dist
from torch import nn

from partitioner.runtime.parameters import UnitStore
from partitioner.runtime.program import Unit
from tests import ranks as pool


def _gathered(groups_before: int) -> float:
    """The sum of a cut parameter, over a group whose name depends on how many there were."""
    for _ in range(groups_before):
        dist.new_group()
    layer, unit = nn.Linear(4, 4), Unit(0, "zero1", ("weight", "bias"))
    UnitStore(layer, (unit,), ranks=2, rank=dist.get_rank(), group=dist.new_group())
    weight: Any = layer.weight
    return float((weight.detach() * 2).full_tensor().sum())


def test_a_group_of_the_same_ranks_that_is_gone_is_forgotten() -> None:
    for groups_before in (3, 0):
        assert len(set(pool.run(2, _gathered, groups_before))) == 1
