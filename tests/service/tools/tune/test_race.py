"""Placements of a model against each other, on a machine that drifts."""

import asyncio
import io
from pathlib import Path

import pytest

from inferpool.service.checks.facts import gather
from inferpool.service.checks.findings import Finding
from inferpool.service.settings.loader import load
from inferpool.service.tools.doctor.placement import check_ways
from inferpool.service.tools.trial.screen import Screen
from inferpool.service.tools.tune.plan import Goal, TunePlan
from inferpool.service.tools.tune.race import PlacementRace, Speed, measured
from inferpool.workers.host.devices import Host
from tests.e2e import forked
from tests.service.tools.tune.fake_starter import FakeStarter

QUIET = Screen(io.StringIO())
RATES = {"replicate": 1000.0, "pipeline": 700.0, "tensor": 0.0}


@pytest.mark.parametrize(("is_side_by_side", "most_alive"), [(True, 2), (False, 1)])
def test_placements_take_turns_with_the_first_or_run_one_at_a_time(
    is_side_by_side: bool, most_alive: int
):
    starter = FakeStarter(
        lambda changes: RATES[str(changes["placement"])], drift=0.5 if is_side_by_side else 0
    )
    ways = {f"{name} x2": {"placement": name} for name in RATES}
    course = measured(starter, "m", ways, QUIET, num_clients=32, is_side_by_side=is_side_by_side)
    found = asyncio.run(course)
    assert found["replicate x2"].ratio is None
    assert found["pipeline x2"].ratio == pytest.approx(0.7, rel=0.05)
    assert found["tensor x2"] == Speed(problem="the service ended with exit code 3")
    assert (starter.most_alive, starter.alive) == (most_alive, [])


def raced(folder: Path, model: str, used_percent: float, **flags: str) -> Finding:
    """Return what is found on the placements of a model, which are measured for a moment."""
    loaded = load({"model": model, **flags}, {}, folder)
    facts = gather(loaded.settings, Host(cpus=(0, 1), num_cores=2))
    plan = TunePlan(goal=Goal(), secs=0.3, warm_s=0.1, warm_pipeline_s=0.1)
    race = PlacementRace(loaded, QUIET, plan)
    names = list(loaded.settings.models)
    (found,) = check_ways(facts, loaded.settings, names, race, lambda: used_percent)
    return found


def test_nothing_is_measured_on_a_machine_that_is_busy(tmp_path: Path):
    found = raced(tmp_path, "echo", 26.0)
    assert (found.level, found.advice) == ("note", "measure when they are done")


@pytest.mark.slow
@pytest.mark.measures
def test_placements_of_a_model_are_started_and_put_under_load(
    tmp_path: Path,
):
    source = "tests.small_classifier:SmallClassifier"
    with forked.services_forked():
        found = raced(tmp_path, source, 0.0, devices="cpu", speed="exact")
    assert found.level == "ok"
    assert "565 KiB of parameters" in found.message  # 448 + 130 + 144,010 numbers, a count
    assert "more for a batch of 8; it fits" in found.message
    head, *rows = found.rows
    assert head[3] == "inputs/s"
    cells = {row[0]: row[3:] for row in rows}
    assert float(cells["replicate x2"][0]) > 0
    rate, _, ratio = cells["pipeline x2"][0].partition(" ")
    assert float(rate) > 0
    assert float(ratio.strip("()")) > 0
    assert "KiB + " in cells["pipeline x2"][1]
    assert "no network for tensor parallelism" in cells["tensor x2"][1]
