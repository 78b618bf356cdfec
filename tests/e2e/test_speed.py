"""Speed presets, chosen by real workers of a real service."""

import json
import os
import shutil
import signal
import time

import httpx
import pytest

from tests.e2e.running import Running, running
from tests.models.items import jpeg
from tests.models.speed.test_verdicts import flip_a_bit

SMALL = "tests.small_classifier:SmallClassifier"
PHOTO = {"content": jpeg("chelsea"), "headers": {"Content-Type": "image/jpeg"}}


def verdict_in(path):
    """Return the JSON of a sealed file."""
    return json.JSONDecoder().raw_decode(path.read_text())[0]


def label(service: Running, client: httpx.Client) -> str:
    answer = client.post(f"{service.url}/predict?top_k=1", **PHOTO)
    assert answer.status_code == 200, (answer.text, service.log)
    return str(answer.json()["predictions"][0][0]["label"])


def kill_only_worker(service: Running) -> None:
    """Kill it, and wait for the next one."""
    (pid,) = service.worker_pids()
    os.kill(pid, signal.SIGKILL)
    service.wait_for_log("ended")
    service.wait_for_log("ready in")


@pytest.mark.slow
def test_two_replicas_share_one_verdict_and_say_which(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": str(tmp_path), "INFERPOOL_SPEED_SEARCH": "false"}
    with running(SMALL, "--replicas", "2", "--speed", "auto", env=env) as service:
        (logged,) = [m for line in service.log if " speed: " in (m := str(line["message"]))]
        paths = [path for path in tmp_path.glob("*.json") if "-decode" not in path.name]
        (verdict,) = map(verdict_in, paths)
        assert f"speed: {verdict['preset']}" in logged
        assert {worker["speed"] for worker in service.workers()} == {verdict["preset"]}
        (path,) = tmp_path.glob("*-decode*.json")
        decode = verdict_in(path)["decode"]
        assert {worker["decode"] for worker in service.workers()} == {decode}


def test_a_preset_by_name_serves_in_every_incarnation(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": "none", "XDG_CACHE_HOME": str(tmp_path)}
    with running(SMALL, "--replicas", "1", "--speed", "folded", env=env) as service:
        before = service.post(**PHOTO)
        assert before.status_code == 200, (before.text, service.log)
        kill_only_worker(service)
        (worker,) = service.workers()
        assert (worker["speed"], worker["incarnation"]) == ("folded", 1)
        assert service.post(**PHOTO).json() == before.json()
    assert not list(tmp_path.iterdir())


@pytest.mark.compile  # it compiles nothing, but measures at idle priority
@pytest.mark.timeout(600)
def test_first_start_serves_exact_at_once_and_changes_over_with_no_request_lost(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    arguments = (SMALL, "--speed", "auto", "--replicas", "2")
    labels = set()

    def search(service: Running) -> str:
        return str(service.model()["speed_search"]["state"])

    with running(*arguments, env=env) as service, httpx.Client(timeout=60) as client:
        assert [(w["speed"], w["incarnation"]) for w in service.workers()] == [("exact", 0)] * 2
        assert search(service) in ("waiting", "searching")
        until = time.monotonic() + 500
        while search(service) not in ("off", "failed"):
            assert time.monotonic() < until
            labels.add(label(service, client))
            time.sleep(0.02)  # the search has what time is left over
        assert "no C++ compiler" in service.model()["speed_search"]["text"]
        found = [(w["speed"], w["decode"]) for w in service.workers()]
        assert len(set(found)) == 1
        assert found[0] != ("exact", "exact"), service.log  # decoding fast always pays
        assert [w["incarnation"] for w in service.workers()] == [1, 1]
        assert len(labels) == 1
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    with running(*arguments, env=env) as service:
        assert [(w["speed"], w["decode"]) for w in service.workers()] == found
        assert [w["incarnation"] for w in service.workers()] == [0, 0]
    assert not list(tmp_path.glob("*.begun"))


@pytest.mark.compile
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_compiled_preset_is_found_while_serving_and_taken_with_no_request_lost(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    fusible = "tests.small_classifier:FusibleClassifier"
    arguments = (fusible, "--speed", "auto", "--replicas", "1")
    labels = set()
    with running(*arguments, env=env) as service, httpx.Client(timeout=60) as client:
        until = time.monotonic() + 800
        while service.model()["speed_search"]["state"] not in ("done", "failed"):
            assert time.monotonic() < until
            labels.add(label(service, client))
            time.sleep(0.02)  # the search has what time is left over
        (worker,) = service.workers()
        assert worker["speed"].startswith("compiled"), service.log
        assert worker["incarnation"] >= 1
        assert len(labels) == 1
        gain = f'worker_speed_gain{{model="fusibleclassifier",preset="{worker["speed"]}"'
        assert gain in service.metrics()
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    with running(*arguments, env=env) as service:
        (again,) = service.workers()
        assert (again["speed"], again["incarnation"]) == (worker["speed"], 0)
        kill_only_worker(service)
    assert not list(tmp_path.glob("**/aotinductor*"))
    for path in tmp_path.glob("*.pt2"):
        flip_a_bit(path)
    env["INFERPOOL_SPEED_SEARCH"] = "false"
    with running(*arguments, env=env) as service:
        (other,) = service.workers()
        assert not other["speed"].startswith("compiled")
        assert label(service, service.http) in labels
