"""Formats numbers for people, and draws rows of bars."""

from collections.abc import Sequence
from math import ceil

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"


def rate(per_s: float) -> str:
    """Format a rate per second."""
    return f"{per_s:,.1f}/s" if per_s < 100 else f"{per_s:,.0f}/s"


def duration(ms: float) -> str:
    """Format a short duration."""
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"


def span(seconds: float) -> str:
    """Format a long duration in two units, such as 1 h 5 min."""
    whole = int(max(0.0, seconds))
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s} {part}"
    return f"{whole // 60} min" if whole >= 60 else f"{whole} s"


def bars(values: Sequence[float | None], *, is_plain: bool) -> str:
    """Draw one bar per value from 0 to the largest; None leaves a gap."""
    marks = _PLAIN_BARS if is_plain else _BARS
    greatest = max((value for value in values if value), default=1.0)
    top = len(marks) - 1
    return "".join(
        " " if value is None else marks[min(top, ceil(value / greatest * top))] for value in values
    )
