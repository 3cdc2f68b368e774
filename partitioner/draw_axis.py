"""An axis of time, with round steps."""

import math

from partitioner.draw_canvas import QUIET, RULE, Canvas


def axis(canvas: Canvas, left: float, y: float, seconds: float, width: float, top: float, bottom: float) -> None:
    """Times at baseline y, and lines from top to bottom, over `width` points."""
    step = nice(seconds / 8)
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if step >= unit), (1e-6, "us"))
    for number in range(int(seconds / step * 1.0001) + 1):
        x = left + width * number * step / seconds
        canvas.line([(x, top), (x, bottom)], RULE, 0.6)
        canvas.text(x, y, f"{number * step / unit:g} {name}" if number else "0", 7.5, QUIET, "middle")


def nice(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, … times a power of ten."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(digit * scale for digit in (1, 2, 5, 10) if digit * scale >= value * 0.9999)
