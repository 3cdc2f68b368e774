"""Paper for the drawings: lengths in points, (0, 0) top left, text measured before it is placed, equal files for equal drawings.

The pictures use one palette: a kind of bytes or of work has the same colour in all of them.
"""

import io
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import FancyBboxPatch
from matplotlib.textpath import text_to_path

from partitioner.errors import PlanError

INK, QUIET, RULE, PAPER = "#1f2430", "#5d6675", "#d5d9e0", "#ffffff"
COLORS = {
    "parameters": "#4f6d9b",
    "optimizer state": "#a9bbd6",
    "gathered parameters": "#e3a04f",
    "gradients": "#b85c74",
    "saved values": "#5f9f7e",
    "temporaries": "#c4c4c4",
    "inputs, buffers and constants": "#858b95",
    "forward": "#8cc0c9",
    "backward": "#3f8793",
}
"""By kind. A gather has the colour of gathered parameters, a reduction that of gradients."""

FORMATS = ("svg", "pdf", "png")
Anchor = Literal["start", "middle", "end"]
Box = tuple[float, float, float, float]
"""x, y, width, height."""

_SETTINGS: Any = {
    "svg.hashsalt": "partitioner",
    "svg.fonttype": "none",  # text stays text: it can be searched, and a changed label is one changed line
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
}
_ROOM = 1.04  # hinted text is a little wider than its outlines
_METADATA: Any = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "png": {"Software": None}}


@cache
def _font(bold: bool) -> FontProperties:
    return FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")


@cache
def _drawable(character: str) -> bool:
    return character.isprintable() and bool(get_font(findfont(_font(False))).get_char_index(ord(character)))


def plain(text: str) -> str:
    """The text with what the font cannot draw as question marks; labels may come from a stranger's file."""
    return "".join(character if _drawable(character) else "?" for character in text)


@lru_cache(maxsize=16384)
def text_width(text: str, size: float = 8, bold: bool = False) -> float:
    """Points that a line of text takes."""
    width, _, _ = text_to_path.get_text_width_height_descent(plain(text), _font(bold), ismath=False)
    return _ROOM * float(width) * size / _font(bold).get_size_in_points()


def fitted(text: str, width: float, size: float = 8, bold: bool = False) -> str:
    """The text, shortened in the middle until it takes at most `width` points."""
    if text_width(text, size, bold) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        keep = (low + high + 1) // 2
        low, high = (keep, high) if text_width(_shortened(text, keep), size, bold) <= width else (low, keep - 1)
    return _shortened(text, low)


def _shortened(text: str, keep: int) -> str:
    tail = keep // 2
    return text[: keep - tail] + "…" + (text[-tail:] if tail else "")


def wrapped(words: Sequence[str], width: float, size: float = 8) -> list[str]:
    """The words, with commas between them, in lines of at most `width` points."""
    lines: list[str] = []
    for at, word in enumerate(words):
        piece = fitted(word, width - 4, size) + ("," if at + 1 < len(words) else "")
        if lines and text_width(f"{lines[-1]} {piece}", size) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines


class Canvas:
    """One picture. Everything is given in points; what comes later lies above what came earlier."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=144, facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        self._order = 0

    def _above(self) -> int:
        self._order += 1
        return self._order

    def text(self, x: float, y: float, text: str, size: float = 8, color: str = INK, anchor: Anchor = "start", bold: bool = False) -> None:
        """A line of text whose baseline is at y."""
        side = {"start": "left", "middle": "center", "end": "right"}[anchor]
        self._axes.text(
            x,
            y,
            plain(text),
            size=size,
            color=color,
            ha=side,
            va="baseline",
            weight="bold" if bold else "normal",
            parse_math=False,
            zorder=self._above(),
        )

    def boxes(self, boxes: Sequence[Box], fill: str, edge: str = "none") -> None:
        """Rectangles of one colour."""
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in boxes]
        self._axes.add_collection(PolyCollection(corners, facecolors=fill, edgecolors=edge, linewidths=0.6, zorder=self._above()), autolim=False)

    def polygon(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self._axes.add_collection(PolyCollection([points], facecolors=fill, edgecolors="none", zorder=self._above()), autolim=False)

    def card(self, box: Box, fill: str = PAPER, edge: str = QUIET) -> None:
        """A rectangle with round corners."""
        x, y, width, height = box
        style = "round,pad=0,rounding_size=3"
        patch = FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=0.8, zorder=self._above())
        self._axes.add_patch(patch)

    def line(self, points: Sequence[tuple[float, float]], color: str = QUIET, width: float = 0.8, dashed: bool = False) -> None:
        style = (0, (3, 2)) if dashed else "solid"
        lines = LineCollection([list(points)], colors=color, linewidths=width, linestyles=[style], zorder=self._above())
        lines.set_capstyle("butt")
        self._axes.add_collection(lines, autolim=False)

    def arrow(self, points: Sequence[tuple[float, float]], color: str = QUIET, width: float = 0.8) -> None:
        """A line with a head at its last point; its last piece is level or upright."""
        (x0, y0), (x1, y1) = points[-2:]
        length = max(abs(x1 - x0), abs(y1 - y0), 1e-9)
        size = 4 + width
        dx, dy = size * (x1 - x0) / length, size * (y1 - y0) / length
        self.line([*points[:-1], (x1 - dx, y1 - dy)], color, width)
        head = [(x1, y1), (x1 - dx - dy / 2, y1 - dy + dx / 2), (x1 - dx + dy / 2, y1 - dy - dx / 2)]
        self._axes.add_collection(PolyCollection([head], facecolors=color, edgecolors="none", zorder=self._above()), autolim=False)

    def legend(self, x: float, y: float, names: Sequence[tuple[str, str]], size: float = 7.5) -> None:
        """(name, colour) in a row from x, baseline y."""
        for name, color in names:
            self.boxes([(x, y - 7, 8, 8)], color)
            self.text(x + 12, y, name, size, QUIET)
            x += 12 + text_width(name, size) + 16

    def save(self, path: str | Path) -> Path:
        """Write .svg, .pdf or .png. Raises PlanError for another ending."""
        target = Path(path)
        kind = ending(target, FORMATS)
        file = io.BytesIO()
        with rc_context(_SETTINGS):
            self.figure.savefig(file, format=kind, metadata=_METADATA[kind], facecolor=PAPER)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.getvalue())
        except OSError as error:
            raise PlanError(f"{target} cannot be written: {error.strerror}; draw into a folder that can be written") from error
        return target


def ending(path: Path, known: Sequence[str]) -> str:
    """What the name of a file ends with, one of `known`."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in known:
        raise PlanError(
            f"{path.name} ends in {path.suffix or 'nothing'}, which cannot be drawn; end the name in {' or '.join('.' + k for k in known)}"
        )
    return kind


def legend_width(names: Sequence[tuple[str, str]], size: float = 7.5) -> float:
    """Points that `Canvas.legend` takes."""
    return sum(12 + text_width(name, size) + 16 for name, _ in names) - 16
