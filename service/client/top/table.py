"""The tables of a model's workers and of the hosts, and numbers and bars for people.

A narrow terminal gets fewer columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..health import KnownHost, ModelState, ServiceHealth, WorkerState
from ..texts import escape, in_words

STATE_STYLES = {
    "ready": "green",
    "starting": "cyan",
    "backoff": "yellow",
    "stalled": "magenta",
    "degraded": "magenta",
    "failed": "bold red",
    "stopped": "dim",
    "connected": "green",
    "silent": "magenta",
    "lost": "bold red",
    "left": "dim",
}
_DROPPED_FIRST = ("speed", "batches", "device", "host", "memory")
"""Columns of workers to leave out on a narrow terminal, in this order."""
_DROPPED_OF_HOSTS = ("address", "version", "clock", "devices", "beat", "round trip")
"""Columns of hosts to leave out then."""
_GAP = "  "
_REASON_WIDTH = 24
"""Width that the reason of a worker that is not ready gets before other columns."""
_DOING_WIDTH = len("at work")
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"


@dataclass(frozen=True)
class _TableColumn:
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
    columns = _fitting(_columns(workers, batches_per_s), _DROPPED_FIRST, width - wanted)
    has_last = width - _width(columns) >= _DOING_WIDTH
    lines = _rows(columns, [worker.state for worker in workers])
    if has_last:
        lines[0].append("doing")
        for line, worker in zip(lines[1:], workers, strict=True):
            line.append(_doing(worker, batches_per_s), style="" if worker.reason else "dim")
    return _cut(lines, num_lines, "workers")


def host_lines(health: ServiceHealth, width: int, num_lines: int) -> list[Text]:
    """Return a heading and one line per host, those in trouble first; nothing for no cluster."""
    if health.cluster_address is None:
        return []
    if health.standby:
        return [Text(escape(health.standby), style="cyan")]
    if not health.hosts and not health.lost_hosts:
        return [Text(f"no host has joined at {escape(health.cluster_address)}", style="yellow")]
    hosts = sorted(health.hosts, key=lambda host: host.state == "connected")
    columns = _fitting(_host_columns(hosts), _DROPPED_OF_HOSTS, width)
    lines = _rows(columns, [host.state for host in hosts])
    for lost in health.lost_hosts:
        style = STATE_STYLES.get(lost.state, "")
        text = f"{escape(lost.name)} {escape(lost.state)} {span(lost.age_s)} ago: "
        lines.insert(1, Text.assemble((text, style), escape(lost.reason)))
    return _cut(lines, num_lines, "hosts")


def _host_columns(hosts: Sequence[KnownHost]) -> list[_TableColumn]:
    ready = [f"{each.workers_ready} of {each.workers}" for each in hosts]
    trips = [_milliseconds(each.round_trip_s) for each in hosts]
    clocks = [_milliseconds(each.clock_offset_s) for each in hosts]
    return [
        _TableColumn("host", [escape(each.name) for each in hosts]),
        _TableColumn("state", [escape(each.state) for each in hosts]),
        _TableColumn("workers", ready, is_right=True),
        _TableColumn("round trip", trips, is_right=True),
        _TableColumn("beat", [f"{each.last_beat_age_s:.1f} s" for each in hosts], is_right=True),
        _TableColumn("clock", clocks, is_right=True),
        _TableColumn("version", [escape(each.version) for each in hosts]),
        _TableColumn("address", [escape(each.address) for each in hosts]),
        _TableColumn("devices", [escape(", ".join(each.devices)) for each in hosts]),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds * 1000)


def _fitting(
    columns: list[_TableColumn], dropped_first: Sequence[str], width: int
) -> list[_TableColumn]:
    for title in dropped_first:
        if _width(columns) > width:
            columns = [column for column in columns if column.title != title]
    return columns


def _rows(columns: list[_TableColumn], states: Sequence[str]) -> list[Text]:
    lines = [Text("".join(column.cell(column.title) + _GAP for column in columns), style="dim")]
    for number, state in enumerate(states):
        line = Text()
        for column in columns:
            style = STATE_STYLES.get(state, "") if column.title == "state" else ""
            line.append(column.cell(column.cells[number]), style=style)
            line.append(_GAP)
        lines.append(line)
    return lines


def _cut(lines: list[Text], num_lines: int, what: str) -> list[Text]:
    if len(lines) > num_lines:
        num_hidden = len(lines) - num_lines + 1
        lines[num_lines - 1 :] = [Text(f"... and {num_hidden} more {what}", style="dim")]
    return lines


def _columns(workers: list[WorkerState], batches_per_s: Mapping[str, float]) -> list[_TableColumn]:
    memory = [in_words(each.rss_bytes) if each.rss_bytes is not None else "-" for each in workers]
    batches = [
        rate(batches_per_s[each.name]) if each.name in batches_per_s else "-" for each in workers
    ]
    hosts = [escape(each.host) for each in workers]
    return [
        _TableColumn("worker", [escape(each.name.partition("/")[2]) for each in workers]),
        _TableColumn("state", [escape(each.state) for each in workers]),
        *([_TableColumn("host", hosts)] if any(hosts) else []),
        _TableColumn("device", [escape(each.device) for each in workers]),
        _TableColumn("memory", memory, is_right=True),
        _TableColumn("batches", batches, is_right=True),
        _TableColumn("speed", [escape(each.speed or "-") for each in workers]),
        _TableColumn("restarts", [f"{each.restarts:,}" for each in workers], is_right=True),
    ]


def _width(columns: list[_TableColumn]) -> int:
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
