"""The report as a page that needs nothing else: the plot, the table, the recommendation."""

from collections.abc import Sequence
from html import escape

from inferpool.service.tools.tune.charts import svg_chart
from inferpool.service.tools.tune.report import TuneReport

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --text: #24292f; --faint: #6e7781;
  --grid: #d8dee4; --front: #1f6feb; --chosen: #1a7f5a; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --text: #e6edf3;
  --faint: #8b949e; --grid: #30363d; --front: #4493f8; --chosen: #3fb950; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; font-size: 12px; } svg text { fill: var(--faint); }
.grid { stroke: var(--grid); fill: none; } .limit { stroke: #cf222e; stroke-dasharray: 5 4; }
polyline.front { fill: none; stroke: var(--front); } circle { fill: var(--faint); }
g.front circle { fill: var(--front); } g.chosen circle { fill: var(--chosen); }
g text { fill: #fff !important; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--grid); text-align: right;
  font-variant-numeric: tabular-nums; }
td:nth-child(2), th:nth-child(2), td:last-child, th:last-child { text-align: left; }
"""


def page(report: TuneReport, settings: str) -> str:
    """The whole page.

    Args:
        report: What was found.
        settings: The text of the settings file.
    """
    head, *rows = report.table()
    limit = report.goal.p99_ms
    chart = svg_chart(report.points, limit) if report.points else ""
    conclusion = "".join(f"<p>{escape(line)}</p>" for line in report.conclusion())
    body = "".join(f"<tr>{_row(row, 'td')}</tr>" for row in rows)
    title = f"inferpool tune: {escape(report.model)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{title}</h1>{conclusion}{chart}"
        f'<div class="scroll"><table><thead><tr>{_row(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div><pre>{escape(settings)}</pre></html>\n"
    )


def _row(cells: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
