"""Writes texts and sizes for people. Imports nothing of ours."""

import re
import time
from collections.abc import Sequence

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line breaks, and characters that reorder the text around them."""


def escape(text: str) -> str:
    r"""Return a text on one line: control characters and lone surrogates as \n, \x1b or \u2028."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "backslashreplace").decode("ascii")


def in_words(num_bytes: float) -> str:
    """Format a size: "1.5 GiB", "300 MiB"."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / 2**30:.1f} GiB"
    if num_bytes >= 1 << 20:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB"


def moment(time_s: float | None) -> str:
    """Format seconds of the Unix epoch in local time; None is an empty text."""
    if time_s is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, a line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)
