"""Writes the settings in force, for `inferpool config`: as a table, as TOML or as JSON."""

import json
from collections.abc import Mapping, Sequence
from datetime import date, time
from itertools import groupby
from typing import TextIO

from inferpool.service.settings.keys import Keys
from inferpool.service.settings.names import Key, dotted
from inferpool.service.settings.tracing import TraceHeaders

Row = tuple[Key, object, str]
"""The key, the value and the origin of a setting."""


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write aligned columns, with colours and line breaks on a terminal."""
    cells = [(dotted(key), cell(value), origin) for key, value, origin in rows]
    if stream.isatty():
        _write_rich(cells, stream)
        return
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    for key, value, origin in cells:
        stream.write(f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}\n")


def write_toml(rows: Sequence[Row], stream: TextIO) -> None:
    """Write a file that works as `inferpool.toml`, with the origins as comments."""
    for table, members in groupby(rows, key=lambda row: row[0][:-1]):
        if table:
            stream.write(f"\n[{dotted(table)}]\n")
        for key, value, origin in members:
            if value is None:  # TOML has no null; leaving it out means the same
                continue
            if isinstance(value, Keys | TraceHeaders):  # secrets, which a file may not hold
                continue
            note = "" if origin == "default" else f"  # {origin}"
            stream.write(f"{dotted(key[-1:])} = {_toml(value)}{note}\n")


def write_json(rows: Sequence[Row], stream: TextIO) -> None:
    """Write one JSON object: dotted key to value and origin."""
    stream.write(f"{json_of(rows)}\n")


def json_of(rows: Sequence[Row]) -> str:
    """Return one JSON object: dotted key to value and origin."""
    body = {dotted(key): {"value": value, "origin": origin} for key, value, origin in rows}
    return json.dumps(body, indent=2, default=str)


def _write_rich(cells: Sequence[tuple[str, str, str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "set by", box=None, pad_edge=False, header_style="bold")
    for key, value, origin in cells:
        style = "dim" if origin == "default" else "cyan"
        table.add_row(Text(key), Text(value, overflow="fold"), Text(origin, style=style))
    Console(file=stream).print(table)


def cell(value: object) -> str:
    """Return a value on one line."""
    if isinstance(value, Keys | TraceHeaders):
        return str(value)
    return "-" if value is None else _toml(value)


def _toml(value: object) -> str:
    """Return a value as TOML on one line (https://toml.io/en/v1.0.0)."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML has the escapes of JSON, and also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = (f"{dotted((str(key),))} = {_toml(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)
