import io
import json
from pathlib import Path

from inferpool.service.tools.trial.report import write_page
from inferpool.service.tools.tune.plan import Goal
from inferpool.service.tools.tune.report import TradeOff, TuneReport, front, text_chart
from inferpool.service.tools.tune.search import SearchOutcome, Tried
from tests.service.tools.tune.fake_starter import sample_of


def report(*, is_confirmed: bool = True, is_interrupted: bool = False) -> TuneReport:
    better = Tried(
        changes={"replicas": 1}, connections=64, sample=sample_of(1300, 0.04), gain=1.3,
        verdict="better",
    )  # fmt: skip
    tried = [
        Tried(changes={}, connections=64, sample=sample_of(1000, 0.05)),
        better,
        Tried(changes={"credit": 3}, connections=64, verdict="fails", reason="no memory"),
    ]
    return TuneReport(
        model="net", source="torchvision:resnet18", preset="folded",
        goal=Goal(connections=64, p99_ms=45), seconds=60.0, date="2026-01-02",
        outcome=SearchOutcome(
            tried=tried, best=better, is_confirmed=is_confirmed, connections=64,
            untried=["credit"],
        ),
        is_interrupted=is_interrupted,
    )  # fmt: skip


def written(what: TuneReport) -> str:
    stream = io.StringIO()
    what.write(stream)
    return stream.getvalue()


def test_text_chart_stars_the_points_that_no_other_beats_in_both_and_draws_the_objective():
    figures = ((50, 1000), (20, 900), (60, 950), (80, 1500))
    points = [TradeOff(mark=str(n), p99_ms=ms, rate=rate) for n, (ms, rate) in enumerate(figures)]
    assert [each.mark for each in front(points)] == ["1", "0", "3"]
    lines = "\n".join(text_chart(points, 70))
    assert [f"*{mark}" in lines for mark in "0123"] == [True, True, False, True]
    assert " 2" in lines
    assert ":" in lines
    assert "*0" in "\n".join(text_chart(points[:1], None))


def test_report_says_what_to_use_and_what_could_not_be_tried():
    text = written(report())
    assert "Use replicas 1: 1.30 x the settings as they were." in text
    assert "The budget did not suffice for: credit" in text
    assert "fails: no memory" in text
    interrupted = written(report(is_confirmed=False, is_interrupted=True))
    assert "about 1.30 x the settings as they were, not confirmed" in interrupted
    assert "Interrupted" in interrupted


def test_page_and_json_have_it_all(tmp_path: Path):
    write_page(tmp_path / "x.html", "t", "", report().page("replicas = 1 # <tuned>"))
    html = (tmp_path / "x.html").read_text()
    assert 'class="plotly-graph-div"' in html
    assert "replicas = 1 # &lt;tuned&gt;" in html
    figures = json.loads(json.dumps(report().as_dict()))
    assert figures["recommended"] == {"replicas": 1}
    assert [each["verdict"] for each in figures["tried"]] == ["default", "better", "fails"]
