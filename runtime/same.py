"""Whether all ranks make the same call with the same batch: looked at before every step, in one small all-reduce.

What is compared is a number of the call (mode, shapes, flags) and one of the batch's bits. Only where these differ do ranks tell each other more:
the rows' sums to six digits, so that a batch that kernels of two kinds have prepared is still one. An asynchronous pipeline cannot stop for the
answer; it gets it before its next step.
"""

import hashlib
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.errors import RankError
from partitioner.runtime.inputs import row_sums
from partitioner.runtime.launch import Ranks, agree
from partitioner.runtime.wire import Handle, bits

_CHUNK = 2**18
_ODD = 0x9E3779B97F4A7C15 - 2**64  # of the golden ratio: odd, with bits of both kinds everywhere
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Same:
    """Compares this rank's calls with the others'."""

    def __init__(self, peers: Ranks) -> None:
        self._peers = peers
        self._asked: tuple[Handle, Tensor, Hashable, Mapping[str, Any]] | None = None

    def ask(self, key: Hashable, leaves: Mapping[str, Any]) -> None:
        """Ask whether all ranks make this call with these leaves; `settle` takes the answer."""
        group = self._peers.group
        if group is not None:
            both = self._numbers(key, leaves)
            issue = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group, async_op=True)
            self._asked = Handle(issue, (both,), group, "the comparison of the ranks' inputs", listed=False), both, key, leaves

    def settle(self) -> None:
        """Raise RankError on every rank together where what was asked about differs: collectives would never meet, or batches be mixed."""
        if self._asked is None:
            return
        (answer, both, key, leaves), self._asked = self._asked, None
        answer.wait()
        call, batch, less_call, less_batch = both.tolist()
        if call != -less_call:
            agree(_in_words(key), self._peers)
        elif batch != -less_batch:
            try:
                agree({"the rows, by their sums, of": row_sums(leaves)}, self._peers)
            except RankError as error:
                raise RankError(f"{error}: all take the same global batch and use their share; train_step_local takes own rows") from None

    def _numbers(self, key: Hashable, leaves: Mapping[str, Any]) -> Tensor:
        """Of the call and of the batch, and their negatives: of all ranks the most, and less the least."""
        number = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
        of_call = torch.tensor(number, dtype=torch.int64, device=self._peers.device)
        of_batch = digest(leaves, self._peers.device)
        return torch.stack([of_call, of_batch, -of_call, -of_batch])


def digest(leaves: Mapping[str, Any], device: torch.device) -> Tensor:
    """A number below 2^62 of the bits of all tensors and their places, int64 on `device`."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    tensors = [leaf.detach().resolve_conj().resolve_neg() for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.numel()]
    flats = [bits(tensor).contiguous().reshape(-1) for tensor in tensors]
    most = min(_CHUNK, max((flat.numel() for flat in flats), default=0))
    weights = 2 * torch.arange(most, dtype=torch.int64, device=device) + 1
    for flat in flats:
        for part in torch.split(flat.view(_INTEGERS[flat.element_size()]), _CHUNK):
            number = part.long()  # mixed before they are summed, so that small differences do not make up for each other
            total = total * _ODD + (number * _ODD).bitwise_xor_(number).mul_(weights[: number.numel()]).sum()
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
