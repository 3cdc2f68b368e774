"""Whether all ranks make the same call with the same batch: looked at before every step, in one small all-reduce.

What is compared is a number of the call (mode, shapes, flags) and one of the batch's bits. Only where these differ do ranks tell each other more:
the rows' sums to six digits, so that a batch that kernels of two kinds have prepared is still one. An asynchronous pipeline cannot stop for the
answer; it gets it before its next step.
"""

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.errors import RankError
from partitioner.runtime.inputs import row_sums
from partitioner.runtime.launch import Ranks, agree
from partitioner.runtime.wire import guarded

_CHUNK = 2**18
_ODD = 0x9E3779B97F4A7C15 - 2**64  # of the golden ratio: odd, with bits of both kinds everywhere
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WHAT = "the comparison of the ranks' inputs"


class Same:
    """Compares this rank's calls with the others'."""

    def __init__(self, peers: Ranks) -> None:
        self._peers = peers
        self._late: tuple[Any, Tensor, Mapping[str, Any]] | None = None

    def call(self, key: Hashable, leaves: Mapping[str, Any]) -> None:
        """Raise RankError on every rank together where the ranks differ: their collectives would never meet, or mix batches."""
        if self._peers.group is None:
            return
        both = self._numbers(key, leaves)
        guarded(lambda: dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._peers.group), self._peers.group, _WHAT)
        self._judge(both, leaves, key)

    def later(self, leaves: Mapping[str, Any]) -> None:
        """Ask whether the batch is the same without waiting for the answer, which `settle` looks at."""
        if self._peers.group is None:
            return
        both = self._numbers(None, leaves)
        work = guarded(lambda: dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._peers.group, async_op=True), self._peers.group, _WHAT)
        self._late = work, both, leaves

    def settle(self) -> None:
        """Raise RankError on every rank together where the batch that `later` asked about was not the same."""
        if self._late is None:
            return
        (work, both, leaves), self._late = self._late, None
        guarded(work.wait, self._peers.group, _WHAT)
        self._judge(both, leaves, None)

    def _numbers(self, key: Hashable, leaves: Mapping[str, Any]) -> Tensor:
        """Of the call and of the batch, and their negatives: of all ranks the most, and less the least."""
        number = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
        of_call = torch.tensor(number, dtype=torch.int64, device=self._peers.device)
        of_batch = digest(leaves, self._peers.device)
        return torch.stack([of_call, of_batch, -of_call, -of_batch])

    def _judge(self, both: Tensor, leaves: Mapping[str, Any], key: Hashable) -> None:
        call, batch, less_call, less_batch = both.tolist()
        if call != -less_call:
            agree(_in_words(key), self._peers)
        elif batch != -less_batch:
            try:
                agree({"the rows, by their sums, of": row_sums(leaves)}, self._peers)
            except RankError as error:
                raise RankError(f"{error}: all take the same global batch and use their share; train_step_local takes own rows") from None


def digest(leaves: Mapping[str, Any], device: torch.device) -> Tensor:
    """A number below 2^62 of the bits of all tensors and their places, int64 on `device`."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    tensors = [leaf.detach().resolve_conj().resolve_neg() for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.numel()]
    reals = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in tensors]
    most = min(_CHUNK, max((real.numel() for real in reals), default=0))
    weights = 2 * torch.arange(most, dtype=torch.int64, device=device) + 1
    for real in reals:
        flat = real.contiguous().reshape(-1)
        for part in torch.split(flat.view(_INTEGERS[flat.element_size()]), _CHUNK):
            bits = part.long()  # mixed before they are summed, so that small differences do not make up for each other
            total = total * _ODD + (bits * _ODD).bitwise_xor_(bits).mul_(weights[: bits.numel()]).sum()
    return total & (2**62 - 1)


def _in_words(key: Hashable) -> dict[str, Any]:
    """A call, for a comparison of ranks."""
    if not isinstance(key, tuple):
        return {"the call": str(key)}
    mode, flags, grad, leaves = key
    training = [str(place) for place, flag in enumerate(flags) if flag]
    some = f"the submodules {', '.join(training)}" if training else "nothing"
    return {
        "the call": f"{mode} {'with' if grad else 'without'} gradients",
        "the inputs:": {path: ", ".join(str(part) for part in rest) for path, *rest in leaves},
        "what of the model is in training mode": "all" if all(flags) else some,
    }
