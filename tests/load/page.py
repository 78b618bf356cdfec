"""Reports as one HTML file that asks nothing of the network: text, tables and plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.load.charts import STYLE, Chart, to_svg

_CSS = """
:root{color-scheme:light dark;--paper:#fff;--ink:#24292f;--faint:#57606a;--line:#d8dee4}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--faint:#9198a1;--line:#30363d}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.faint{color:var(--faint)}.bad{color:#cf222e;font-weight:600}
.good{color:#1a7f37;font-weight:600}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{color:var(--faint);font-weight:500}
svg{width:100%;height:auto;margin:1rem 0}code{font-size:.9em;overflow-wrap:anywhere}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a heading; the first column is to the left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A paragraph; `tone` is "good", "bad", "faint" or nothing."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """SVG as it is."""

    svg: str


Part = Table | Note | Chart | Picture


def write_page(path: Path, title: str, subtitle: str, parts: Sequence[Part]) -> None:
    """Write a report."""
    body = "\n".join(_html(part) for part in parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}{STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="faint">{escape(subtitle)}</p>\n{body}\n'
        "</body></html>\n",
        encoding="utf-8",
    )


def _html(part: Part) -> str:
    match part:
        case Chart():
            return to_svg(part)
        case Picture():
            return part.svg
        case Note():
            return f'<p class="{part.tone}">{escape(part.text)}</p>'
        case Table():
            heads = "".join(f"<th>{escape(each)}</th>" for each in part.columns)
            rows = "".join(
                f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
                for row in part.rows
            )
            caption = f'<p class="faint">{escape(part.caption)}</p>' if part.caption else ""
            return (
                f'<h2>{escape(part.title)}</h2><div class="scroll"><table><tr>{heads}</tr>'
                f"{rows}</table></div>{caption}"
            )
