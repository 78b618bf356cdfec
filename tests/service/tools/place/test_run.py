import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from unittest.mock import Mock, call

import psutil
import pytest

from inferpool.service.tools.place import run
from inferpool.service.tools.place.load import FrontLoad, LoadError
from inferpool.service.tools.place.plan import PlacePlan
from inferpool.service.tools.place.scaling import Demand
from tests.ray_cluster import needs_ray

PLAN = PlacePlan(min_hosts=2, gpus_per_host=0)


@pytest.mark.parametrize(
    ("statuses", "expected", "pauses_s"),
    [([0], 0, []), ([run.HOPELESS], 1, []), ([None], 0, []), ([-6, 4, 0], 0, [1.0, 2.0])],
)
def test_another_process_speaks_to_ray_when_one_has_ended(
    statuses, expected, pauses_s, monkeypatch, caplog
):
    waited_s: list[float] = []
    monkeypatch.setattr(run, "_run_driver", lambda *_: statuses.pop(0))
    monkeypatch.setattr(run.connection, "wait", lambda _, pause_s: waited_s.append(pause_s))
    assert run.supervise(PLAN) == expected
    assert (statuses, waited_s) == ([], pauses_s)
    assert not pauses_s or "signal 6" in caplog.text


def decided(plan: PlacePlan, num_hosts: int) -> tuple[int | None, int]:
    return run._Decider(plan, num_hosts).decide(1000.0)


def test_without_a_front_end_every_host_gets_an_agent_and_the_least_is_asked_for():
    assert decided(PLAN, 7) == (None, 2)
    assert decided(replace(PLAN, max_hosts=5), 7) == (5, 2)
    assert decided(replace(PLAN, stop=True), 7) == (0, 0)


def test_load_decides_and_a_front_end_that_is_silent_changes_nothing(monkeypatch, caplog):
    pressed = Demand(
        num_hosts=3, offered_per_s=9, refused_per_s=3, busy=1.0, queue_share=1.0, p99_ratio=0.0
    )
    answers: list[Demand | LoadError] = [LoadError("nobody is there")] * 3 + [pressed] * 3
    monkeypatch.setattr(FrontLoad, "read", Mock(side_effect=answers))
    decider = run._Decider(replace(PLAN, front_end="http://f", max_hosts=9), 3)
    wanted = [decider.decide(1000.0 + second) for second in range(30)]
    assert FrontLoad.read.mock_calls == [call(1000.0 + second) for second in range(0, 30, 5)]
    assert wanted[:25] == [(3, 3)] * 25
    assert wanted[25] == (6, 6)
    assert caplog.text.count("as many hosts as before, since nobody is there") == 1


@needs_ray
@pytest.mark.ray
@pytest.mark.alone  # or it finds the cluster of another test, and never ends
def test_without_a_cluster_it_tries_again_until_a_signal_comes(tmp_path):
    if any(each.info["name"] == "gcs_server" for each in psutil.process_iter(["name"])):
        pytest.skip("a Ray cluster runs on this machine, and would be found")
    command = [sys.executable, "-m", "inferpool", "place", "--join", "f:7"]
    environ = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        messages = (json.loads(line)["message"] for line in process.stderr)
        said = list(takewhile(lambda text: text != "trying again in 1 s", messages))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert sum("no Ray cluster at auto" in text for text in said) == 1
