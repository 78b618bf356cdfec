"""Reports of trials: parts that a terminal, an HTML page and a JSON file show alike."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table as RichTable

_COLOURS = ("#1f6feb", "#d9730d", "#1a7f5a", "#8250df", "#cf222e", "#6e7781", "#bf3989", "#0a7ea4")
"""Colours of the series of a chart, which differ on white and on black."""
_FAINT = "#808890"
_GRID = "rgba(128,136,144,0.3)"
_STYLES = {"bad": "red", "good": "green"}
_WIDE = 180
"""Columns where there is no terminal."""
_CSS = """
:root{color-scheme:light dark;--paper:#fff;--ink:#24292f;--faint:#57606a;--line:#d8dee4}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--faint:#9198a1;--line:#30363d}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.faint{color:var(--faint)}.bad{color:#cf222e;font-weight:600}
.good{color:#1a7f37;font-weight:600}pre{overflow-x:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}
summary{cursor:pointer;margin:2rem 0 .5rem}summary h2{display:inline}
td.text,th.text{text-align:left}th{color:var(--faint);font-weight:500}
"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Rows of text under a heading."""

    title: str
    columns: Sequence[str]
    """Heads of the columns; all empty for none."""
    rows: Sequence[Sequence[str]]
    caption: str = ""
    texts: Sequence[int] = (0,)
    """Numbers of the columns that hold words, aligned to the left."""
    is_folded: bool = False
    """True if a page hides the rows until a reader opens them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A paragraph."""

    text: str
    tone: str = ""
    """"good", "bad", "faint" or "code"; empty for none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plotly figure, which only a page shows; see `line_chart`."""

    data: Sequence[Mapping[str, object]]
    layout: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """Raw HTML, which only a page shows: the caller escapes what it quotes."""

    html: str
    css: str = ""


Part = ReportTable | Note | Chart | Markup


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[Point]],
    *,
    mode: str = "lines",
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[tuple[float, str]] = (),
    limit: tuple[float, str] | None = None,
) -> Chart:
    """Return a chart of points, by the name of their line.

    `mode` is plotly's: "lines", "markers" or "lines+markers". `x_ticks` are the values of x to
    mark, with their names; `limit` is a value of y to draw, with its name.
    """
    data = [
        {"type": "scatter", "mode": mode, "name": name,
         "x": [x for x, _ in points], "y": [y for _, y in points]}
        for name, points in lines.items()
    ]  # fmt: skip
    x_axis: dict[str, object] = {"type": "log"} if log_x else {"rangemode": "tozero"}
    if x_ticks:
        x_axis |= {"tickvals": [x for x, _ in x_ticks], "ticktext": [text for _, text in x_ticks]}
    y_axis = {"type": "log"} if log_y else {"rangemode": "tozero"}
    look = {"gridcolor": _GRID, "zerolinecolor": _GRID}
    layout: dict[str, object] = {
        "title": {"text": escape(title)},
        "xaxis": {"title": {"text": escape(x_label)}, **look, **x_axis},
        "yaxis": {"title": {"text": escape(y_label)}, **look, **y_axis},
        "colorway": list(_COLOURS),
        "font": {"color": _FAINT},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": 360,
        "margin": {"l": 60, "r": 20, "t": 50, "b": 50},
    }
    if limit:
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit[0], "y1": limit[0],
             "line": {"color": _FAINT, "dash": "dash", "width": 1},
             "label": {"text": limit[1], "textposition": "end"}}
        ]  # fmt: skip
    return Chart(data=data, layout=layout)


def console_for(stream: TextIO) -> Console:
    """Return a console for reports; it is wide where there is no terminal."""
    return Console(
        file=stream, highlight=False, width=None if stream.isatty() else _WIDE, soft_wrap=False
    )


def show(parts: Iterable[Part], console: Console) -> None:
    """Print tables and notes."""
    for part in parts:
        if isinstance(part, ReportTable):
            console.print(_rich_table(part))
        elif isinstance(part, Note):
            style = _STYLES.get(part.tone)
            console.print(part.text, style=style, markup=False, soft_wrap=True)


def _rich_table(table: ReportTable) -> RichTable:
    shown = RichTable(
        title=escape_markup(table.title), title_justify="left",
        caption=escape_markup(table.caption) or None, caption_justify="left",
        show_header=any(table.columns),
    )  # fmt: skip
    for number, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if number in table.texts else "right")
    for row in table.rows:
        shown.add_row(*map(escape_markup, row))
    return shown


def write_page(path: Path, title: str, subtitle: str, parts: Iterable[Part]) -> None:
    """Write a report as one HTML file that needs no network."""
    shown = list(parts)
    body = "\n".join(_html(part) for part in shown)
    script = ""
    if any(isinstance(part, Chart) for part in shown):
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it has none

        script = f"<script>{get_plotlyjs()}</script>"
    css = "".join({part.css: None for part in shown if isinstance(part, Markup)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}{css}</style>{script}</head><body>"
        f'<h1>{escape(title)}</h1><p class="faint">{escape(subtitle)}</p>\n{body}\n'
        "</body></html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # names of files may be no UTF-8
    )


def _html(part: Part) -> str:
    match part:
        case Chart():
            from plotly.io import to_html  # type: ignore[import-untyped]  # it has none

            figure = {"data": part.data, "layout": part.layout}
            options = {"displaylogo": False, "responsive": True}
            return str(
                to_html(
                    figure, config=options, include_plotlyjs=False, full_html=False, validate=False
                )
            )
        case Markup():
            return part.html
        case Note():
            tag = "pre" if part.tone == "code" else "p"
            return f'<{tag} class="{part.tone}">{escape(part.text)}</{tag}>'
        case ReportTable():
            rows = "".join(_html_row(row, part.texts, "td") for row in part.rows)
            caption = f'<p class="faint">{escape(part.caption)}</p>' if part.caption else ""
            heads = _html_row(part.columns, part.texts, "th") if any(part.columns) else ""
            title = f"<h2>{escape(part.title)}</h2>" if part.title else ""
            table = f'<div class="scroll"><table>{heads}{rows}</table></div>{caption}'
            if part.is_folded:
                return f"<details><summary>{title}</summary>{table}</details>"
            return title + table


def _html_row(cells: Sequence[str], texts: Sequence[int], tag: str) -> str:
    shown = (
        f"<{tag}{' class=text' if number in texts else ''}>{escape(cell)}</{tag}>"
        for number, cell in enumerate(cells)
    )
    return f"<tr>{''.join(shown)}</tr>"


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write figures, with the time, machine and command of their measurement."""
    document = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "machine": machine(),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def machine() -> Mapping[str, object]:
    """Return a description of this machine."""
    return {
        "cpu": _cpu_name(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "kernel": f"Linux {platform.release()}",
        "python": f"Python {platform.python_version()}",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
