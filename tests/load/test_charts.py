import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.load.charts import Bars, Chart, Line, to_png, to_svg
from tests.load.page import Note, Table, write_page

_LINES = Chart(
    title="A <plot>",
    x_label="x",
    y_label="y",
    lines=[
        Line(name="a & b", points=[(0, 1), (1, 100), (2, 10)], marks=True),
        Line(name="c", points=[(0, 5), (2, 7)]),
    ],
    log_y=True,
    limit=(50, "limit"),
)
_BARS = Chart(
    title="Bars",
    x_label="x",
    y_label="y",
    bars=[Bars(name="a", values=[(3, 2, 4), None]), Bars(name="b", values=[(1, 1, 1), (5, 4, 6)])],
    groups=["one", "two"],
)


@pytest.mark.parametrize(
    "chart",
    [
        _LINES,
        _BARS,
        Chart(title="nothing", x_label="x", y_label="y", log_y=True),
        Chart(title="a point", x_label="", y_label="", lines=[Line(name="p", points=[(3, 0.0)])]),
        Chart(
            title="flat", x_label="", y_label="", log_x=True,
            lines=[Line(name="p", points=[(1, 2), (1000, 2)])],
        ),
    ],
    ids=lambda chart: chart.title,
)  # fmt: skip
def test_any_chart_is_drawn_inside_its_frame(chart, tmp_path):
    root = ElementTree.fromstring(to_svg(chart))
    for points in (each.get("points", "") for each in root.iter() if "points" in each.attrib):
        for x, y in (map(float, point.split(",")) for point in points.split()):
            assert 0 <= x <= 720
            assert 0 <= y <= 340
    to_png([chart], tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.size == (1440, 680)


def test_a_page_is_one_file_that_asks_nothing_of_the_network(tmp_path):
    table = Table(title="T", columns=("a", "b"), rows=[("<x>", "1")], caption="c")
    write_page(tmp_path / "x.html", "Title & more", "sub", [table, Note(text="n"), _LINES, _BARS])
    text = (tmp_path / "x.html").read_text()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text
    assert "&lt;x&gt;" in text
    assert text.count("<svg") == 2
