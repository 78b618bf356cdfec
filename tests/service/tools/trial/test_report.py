import io
import json
import re

from inferpool.service.tools.trial.report import (
    Note,
    Part,
    ReportTable,
    console_for,
    line_chart,
    show,
    write_json,
    write_page,
)

_WORDS: list[Part] = [
    ReportTable(title="T", columns=("a", "b"), rows=[("<x> [b]", "1")], caption="c"),
    Note(text="x = 1 # <a> [good]", tone="code"),
]
_CHARTS: list[Part] = [
    line_chart(
        "A </script> plot", "x", "y", {"a & b": [(0, 1), (1, 100)], "c": [(1, 5)]},
        log_x=True, log_y=True, x_ticks=[(1, "one")], limit=(50, "limit"),
    ),
    line_chart("Another", "x", "y", {"a": [(1, 2)]}, mode="markers"),
]  # fmt: skip


def test_a_terminal_shows_tables_and_notes_as_they_are():
    stream = io.StringIO()
    show([*_WORDS, *_CHARTS], console_for(stream))
    assert "<x> [b]" in stream.getvalue()
    assert "x = 1 # <a> [good]" in stream.getvalue()


def test_a_page_is_one_file_that_asks_nothing_of_the_network(tmp_path):
    write_page(tmp_path / "x.html", "Title & more", "sub", [*_WORDS, *_CHARTS])
    text = (tmp_path / "x.html").read_text()
    assert not re.search(r"<script[^>]*\bsrc=|<link|<img|@import", text)
    assert text.count("Plotly.newPlot(") >= 2
    assert "A </script>" not in text
    assert "&lt;x&gt; [b]" in text
    assert "x = 1 # &lt;a&gt; [good]</pre>" in text
    write_page(tmp_path / "y.html", "Without charts", "", _WORDS)
    assert (tmp_path / "y.html").stat().st_size < 10_000


def test_json_says_where_and_when_the_figures_came_about(tmp_path):
    write_json(tmp_path / "new" / "x.json", {"rate": 1.5})
    found = json.loads((tmp_path / "new" / "x.json").read_text())
    assert found["rate"] == 1.5
    assert {"time", "command", "machine"} <= found.keys()
