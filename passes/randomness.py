"""One random op for all: a draw is a function of (key, index), so recomputing it needs no saved state.

key -1 draws from torch's default generator of the device, in eager order and with eager's bits; such a draw must be kept, never recomputed.
Any other key seeds a generator of its own with (key, index): the same on every rank that passes the same key.
"""

import torch
from torch import Tensor

EAGER_KEY = -1
_ODD = 0x9E3779B97F4A7C15


def mix(*numbers: int) -> int:
    """One 62-bit number from several (a multiply-xorshift hash); never EAGER_KEY."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & 0xFFFFFFFFFFFFFFFF)) * _ODD + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state >> 2


def _draw(out: Tensor, kind: str, a: float, b: float, generator: torch.Generator | None) -> Tensor:
    match kind:
        case "bernoulli":
            return out.bernoulli_(a, generator=generator)
        case "uniform":
            return out.uniform_(a, b, generator=generator)
        case "normal":
            return out.normal_(a, b, generator=generator)
        case "normal_serial":
            return torch.stack((out, out), -1)[..., 0].normal_(a, b, generator=generator).contiguous()
        case "exponential":
            return out.exponential_(a, generator=generator)
        case "integer":
            return out.random_(int(a), int(b), generator=generator)
    raise ValueError(f"unknown kind of draw {kind!r}")


@torch.library.custom_op("partitioner::random", mutates_args=())
def random(size: list[int], dtype: torch.dtype, device: torch.device, kind: str, a: float, b: float, key: int, index: int) -> Tensor:
    """A tensor of independent draws: bernoulli(a), uniform(a, b), normal(a, b), exponential(a), integer(a, b).

    Kind normal_serial is normal(a, b) as eager fills a tensor that is not contiguous, by another algorithm.
    """
    generator = None
    if key != EAGER_KEY:
        generator = torch.Generator(device=device)
        generator.manual_seed(mix(key, index))
    return _draw(torch.empty(size, dtype=dtype, device=device), kind, a, b, generator)


@random.register_fake
def _(size: list[int], dtype: torch.dtype, device: torch.device, kind: str, a: float, b: float, key: int, index: int) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)
