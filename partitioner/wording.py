"""How texts for people are put: counts, shares, runs of names, and lines that a terminal can show."""

import re
import textwrap
from collections.abc import Sequence

_UNIT = re.compile(r"(?<=\d) (?=[kMGT]?B\b|[mu]?s\b|%)")


class Text(str):
    """Text that a prompt shows as it is, not as one quoted line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def counted(count: int, word: str, plural: str = "s") -> str:
    return f"{count:,} {word}" + ("" if count == 1 else plural)


def listed(items: Sequence[str], most: int) -> str:
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def change(before: float, after: float) -> str:
    """`+8.4 %`, `-12 %`, `x3.1`; empty where there is nothing to compare with."""
    if before <= 0 or after == before:
        return ""
    ratio = after / before
    return f"x{ratio:.2g}" if ratio >= 2 else ("+" if ratio > 1 else "-") + percent(abs(ratio - 1))


def span(first: str, last: str, count: int) -> str:
    """`model.layers.0 … 31` of the labels of the ends of a run."""
    first, last = first or "(model)", last or "(model)"
    if count == 1 or first == last:
        return first
    common = 0
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    cut = max(first.rfind(".", 0, common), 0)
    return f"{first} … {last[cut:].lstrip('.')}"


def printable(text: str) -> str:
    """Escaped where a terminal would not print it: texts may come from a file."""
    return re.sub(r"[^\x20-\x7e…]", lambda match: match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode(), text)


def fitted(line: str, width: int) -> str:
    """One printable line of at most `width` characters."""
    clean = printable(line)
    return clean if len(clean) <= width else clean[: width - 1] + "…"


def wrapped(line: str, width: int, indent: int) -> list[str]:
    """A printable paragraph; lines after the first are indented, and no number is parted from its unit."""
    joined = _UNIT.sub("\0", printable(line))
    return [part.replace("\0", " ") for part in textwrap.wrap(joined, width, subsequent_indent=" " * indent, break_on_hyphens=False)]
