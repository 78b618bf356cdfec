"""Writes the findings of `inferpool doctor` as a table or as JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TextIO

from inferpool.service.checks.findings import LEVELS, Finding

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_WIDTH = 100


def write_table(findings: Sequence[Finding], stream: TextIO) -> None:
    """Write each finding's level, check and message, the worst first, with the advice below."""
    from rich.console import Console, RenderableType
    from rich.padding import Padding
    from rich.table import Column, Table
    from rich.text import Text

    names = [
        max((len(finding.level) for finding in findings), default=0),
        max((len(finding.check) for finding in findings), default=0),
    ]

    def grid(*widths: int) -> Table:
        columns = (Column(min_width=width, no_wrap=True) for width in widths)
        return Table.grid(*columns, Column(), padding=(0, 2))

    table = grid(*names)
    tables: list[RenderableType] = [table]
    for level in LEVELS:
        for finding in findings:
            if finding.level == level:
                table.add_row(
                    Text(level, style=_STYLES[level]),
                    Text(finding.check, style="bold", no_wrap=True),
                    Text(finding.message, overflow="fold"),
                )
                if finding.rows:
                    *figures, _ = zip(*finding.rows, strict=True)
                    inner = grid(*(max(map(len, column)) for column in figures))
                    for number, row in enumerate(finding.rows):
                        style = "" if number else "dim"
                        inner.add_row(*(Text(cell, style, overflow="fold") for cell in row))
                    table = grid(*names)
                    tables += [Padding(inner, (0, 0, 0, names[0] + 2)), table]
                if finding.advice:
                    table.add_row("", "", Text(f"-> {finding.advice}", overflow="fold"))
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(*tables, sep="")
    lines = [line.rstrip() for line in capture.get().splitlines()]
    summary = ", ".join(
        f"{num} {level}{'s' if num != 1 and level != 'ok' else ''}"
        for level, num in _counts(findings).items()
        if num
    )
    stream.write("\n".join([*lines, "", summary]) + "\n")


def write_json(findings: Sequence[Finding], stream: TextIO) -> None:
    """Write one JSON object: the findings in the order of the checks, and counts by level."""
    counts = _counts(findings)
    json.dump({"counts": counts, "findings": [asdict(f) for f in findings]}, stream, indent=2)
    stream.write("\n")


def _counts(findings: Iterable[Finding]) -> dict[str, int]:
    counted = Counter(finding.level for finding in findings)
    return {level: counted[level] for level in LEVELS}
