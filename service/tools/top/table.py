"""The table of a model's workers, and numbers and bars for people.

A narrow terminal gets fewer columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from inferpool.service.checks.findings import in_words
from inferpool.service.telemetry.logs import escape
from inferpool.service.tools.trial.health import ModelState, WorkerState

STATE_STYLES = {
    "ready": "green",
    "starting": "cyan",
    "backoff": "yellow",
    "stalled": "magenta",
    "failed": "bold red",
    "stopped": "dim",
}
_DROPPED_FIRST = ("speed", "batches", "device", "memory")
"""Columns to leave out on a narrow terminal, in this order."""
_GAP = "  "
_REASON_WIDTH = 24
"""Width that the reason of a worker that is not ready gets before other columns."""
_DOING_WIDTH = len("at work")
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"


@dataclass(frozen=True)
class _WorkerColumn:
    title: str
    cells: list[str]
    is_right: bool = False

    @cached_property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))

    def cell(self, text: str) -> str:
        return text.rjust(self.width) if self.is_right else set_cell_size(text, self.width)


def worker_lines(
    model: ModelState, batches_per_s: Mapping[str, float], width: int, num_lines: int
) -> list[Text]:
    """Return a heading and one line per worker; if not all fit, workers not ready come first."""
    workers = [*model.workers, *model.other_workers]
    if num_lines < len(workers) + 1:
        workers = sorted(workers, key=lambda worker: worker.state == "ready")
    wanted = _REASON_WIDTH if any(worker.reason for worker in workers) else 0
    columns = _columns(workers, batches_per_s)
    for title in _DROPPED_FIRST:
        if _width(columns) + wanted > width:
            columns = [column for column in columns if column.title != title]
    has_last = width - _width(columns) >= _DOING_WIDTH
    head = _GAP.join(column.cell(column.title) for column in columns)
    lines = [Text(head + (f"{_GAP}doing" if has_last else ""), style="dim")]
    for number, worker in enumerate(workers):
        line = Text()
        for column in columns:
            style = STATE_STYLES.get(worker.state, "") if column.title == "state" else ""
            line.append(column.cell(column.cells[number]), style=style)
            line.append(_GAP)
        if has_last:
            line.append(_doing(worker, batches_per_s), style="" if worker.reason else "dim")
        lines.append(line)
    if len(lines) > num_lines:
        num_hidden = len(lines) - num_lines + 1
        lines[num_lines - 1 :] = [Text(f"... and {num_hidden} more workers", style="dim")]
    return lines


def _columns(workers: list[WorkerState], batches_per_s: Mapping[str, float]) -> list[_WorkerColumn]:
    memory = [in_words(each.rss_bytes) if each.rss_bytes is not None else "-" for each in workers]
    batches = [
        rate(batches_per_s[each.name]) if each.name in batches_per_s else "-" for each in workers
    ]
    return [
        _WorkerColumn("worker", [escape(each.name.partition("/")[2]) for each in workers]),
        _WorkerColumn("state", [escape(each.state) for each in workers]),
        _WorkerColumn("device", [escape(each.device) for each in workers]),
        _WorkerColumn("memory", memory, is_right=True),
        _WorkerColumn("batches", batches, is_right=True),
        _WorkerColumn("speed", [escape(each.speed or "-") for each in workers]),
        _WorkerColumn("restarts", [f"{each.restarts:,}" for each in workers], is_right=True),
    ]


def _width(columns: list[_WorkerColumn]) -> int:
    return sum(column.width + len(_GAP) for column in columns)


def _doing(worker: WorkerState, batches_per_s: Mapping[str, float]) -> str:
    if worker.reason:
        return escape(worker.reason)
    if worker.state != "ready" or worker.name not in batches_per_s:
        return ""
    return "at work" if batches_per_s[worker.name] else "idle"


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
