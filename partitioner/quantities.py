"""Bytes and seconds as people write and read them. "16GB" is decimal, "16GiB" binary."""

import math
import re

from partitioner.errors import PartitionerError

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{0,9})?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)
MAX_BYTES = 2**50


def parse_bytes(value: int | str, error: type[PartitionerError] = PartitionerError) -> int:
    """Bytes of 17_000_000_000, "17e9"-free text such as "16GB", "512 MiB" or "80 GB"; `error` is raised for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    else:
        match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].upper() not in _SCALES or ("." in match[1] and not match[2]):
            raise error(f'{str(value)[:60]!r} is no amount of memory; write bytes as an integer, or text such as "16GB", "512MB" or "2GiB"')
        amount = int(float(match[1]) * _SCALES[match[2].upper()])
    if not 0 < amount <= MAX_BYTES:
        shown = f"{amount:,}" if abs(amount) < 10**30 else "more than 10^30"
        raise error(f'{shown} bytes is no memory that a device has (it must lie between 1 byte and 1 PiB); write for instance "16GB"')
    return amount


def format_bytes(amount: float) -> str:
    """Three significant digits, decimal prefixes: 12.3 MB."""
    for symbol in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 999.5 or symbol == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {symbol}" if symbol == "B" or abs(amount) >= 99.95 else f"{amount:.1f} {symbol}"


def format_seconds(seconds: float) -> str:
    """Three significant digits: 12.3 ms."""
    if not math.isfinite(seconds):
        return str(seconds)
    for symbol, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 0.9995 or symbol == "us":
            break
    amount = seconds * scale
    return f"{amount:.0f} {symbol}" if abs(amount) >= 99.95 else f"{amount:.1f} {symbol}" if abs(amount) >= 9.995 else f"{amount:.2f} {symbol}"
