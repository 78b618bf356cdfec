"""Speed presets, chosen by real workers of a real service."""

import json
import os
import random
import shutil
import signal
import time

import httpx
import pytest

from tests.e2e.photos import jpeg
from tests.e2e.running import running
from tests.models.speed.test_verdicts import DAMAGES, flip_a_bit

SMALL = "tests.small_classifier:SmallClassifier"


def workers(url):
    (model,) = httpx.get(f"{url}/health").json()["models"]
    return model["workers"]


def verdict_in(path):
    """The JSON of a sealed file."""
    return json.JSONDecoder().raw_decode(path.read_text())[0]


@pytest.mark.slow
def test_two_replicas_share_one_verdict_and_say_which(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": str(tmp_path), "INFERPOOL_SPEED_SEARCH": "false"}
    with running(SMALL, "--replicas", "2", "--speed", "auto", env=env) as service:
        (logged,) = [m for line in service.log if " speed: " in (m := str(line["message"]))]
        paths = [path for path in tmp_path.glob("*.json") if "-decode" not in path.name]
        (verdict,) = map(verdict_in, paths)
        assert f"speed: {verdict['preset']}" in logged
        assert {worker["speed"] for worker in workers(service.url)} == {verdict["preset"]}
        (path,) = tmp_path.glob("*-decode.json")
        decode = verdict_in(path)["decode"]
        assert {worker["decode"] for worker in workers(service.url)} == {decode}


def test_a_preset_by_name_serves_in_every_incarnation(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": "none", "XDG_CACHE_HOME": str(tmp_path)}
    arguments = (SMALL, "--replicas", "1", "--speed", "folded")
    with running(*arguments, env=env) as service, httpx.Client(base_url=service.url) as client:
        headers = {"Content-Type": "image/jpeg"}
        answer = client.post("/predict", content=jpeg("chelsea"), headers=headers)
        assert answer.status_code == 200, (answer.text, service.log)
        before = answer.json()
        (pid,) = service.worker_pids() or pytest.fail(str(service.log))
        os.kill(pid, signal.SIGKILL)
        service.wait_for_log("ended")
        service.wait_for_log("ready in")
        (worker,) = workers(service.url)
        assert (worker["speed"], worker["incarnation"]) == ("folded", 1)
        assert client.post("/predict", content=jpeg("chelsea"), headers=headers).json() == before
    assert not list(tmp_path.iterdir())


def test_without_a_folder_one_worker_measures_once_in_a_run_and_that_is_told(tmp_path):
    (tmp_path / "file").touch()
    env = {"INFERPOOL_CACHE_DIR": str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path)}
    env |= {"INFERPOOL_SPEED_SEARCH": "false"}
    arguments = (SMALL, "--replicas", "2", "--speed", "auto", "--log-level", "debug")
    with running(*arguments, env=env) as service:
        os.kill(service.worker_pids()[0], signal.SIGKILL)
        service.wait_for_log("ended")
        service.wait_for_log("ready in")
        messages = [str(line["message"]) for line in service.log]
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    assert sum(str(tmp_path / "file" / "cache") in message for message in messages) == 1
    assert sum("measuring speed presets 1/" in message for message in messages) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_whatever_has_become_of_the_cache_it_starts_and_answers_as_before(tmp_path):
    cache, temp = tmp_path / "cache", tmp_path / "temp"
    temp.mkdir()
    env = {"INFERPOOL_CACHE_DIR": str(cache), "TMPDIR": str(temp)}
    env |= {"INFERPOOL_SPEED_SEARCH": "false"}
    chance = random.Random(os.getpid())
    answers, done = [], []
    for _ in range(3):
        with running(SMALL, "--replicas", "1", "--speed", "auto", env=env) as service:
            headers = {"Content-Type": "image/jpeg"}
            url = f"{service.url}/predict?top_k=1"
            answer = httpx.post(url, content=jpeg("chelsea"), headers=headers, timeout=30)
            assert answer.status_code == 200, (done, answer.text, service.log)
            answers.append(answer.json()["predictions"][0][0]["label"])
            service.signal(signal.SIGTERM)
            assert service.wait() == 0
        for path in cache.iterdir():
            if path.is_file():
                damage = chance.choice(DAMAGES if path.stat().st_size else DAMAGES[3:])
                done.append((path.name, damage.__name__))
                damage(path)
    assert len(set(answers)) == 1, done
    assert not [path.name for path in temp.iterdir() if path.name.startswith("aotinductor")]


@pytest.mark.compile
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_compiled_preset_is_found_while_serving_and_taken_with_no_request_lost(tmp_path):
    env = {"INFERPOOL_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    arguments = ("tests.fusible_classifier:FusibleClassifier", "--speed", "auto")

    def state(client: httpx.Client) -> str:
        (model,) = client.get("/health").json()["models"]
        return str(model["speed_search"]["state"])

    body, headers = jpeg("chelsea"), {"Content-Type": "image/jpeg"}
    with (
        running(*arguments, "--replicas", "1", env=env) as service,
        httpx.Client(base_url=service.url) as client,
    ):
        until = time.monotonic() + 800
        labels = set()
        while state(client) not in ("done", "failed") and time.monotonic() < until:
            answer = client.post("/predict?top_k=1", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            labels.add(answer.json()["predictions"][0][0]["label"])
            time.sleep(0.02)  # the search has what time is left over
        (worker,) = workers(service.url)
        assert worker["speed"].startswith("compiled"), service.log
        assert worker["incarnation"] == 1
        assert len(labels) == 1
        metrics = client.get("/metrics").text
        assert f'worker_speed_gain{{model="fusibleclassifier",preset="{worker["speed"]}"' in metrics
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    with running(*arguments, "--replicas", "1", env=env) as service:
        (again,) = workers(service.url)
        assert (again["speed"], again["incarnation"]) == (worker["speed"], 0)
        os.kill(service.worker_pids()[0], signal.SIGKILL)
        service.wait_for_log("ended")
        service.wait_for_log("ready in")
    assert not list(tmp_path.glob("**/aotinductor*"))
    for path in tmp_path.glob("*.pt2"):
        flip_a_bit(path)
    env["INFERPOOL_SPEED_SEARCH"] = "false"
    with running(*arguments, "--replicas", "1", env=env) as service:
        (other,) = workers(service.url)
        assert not other["speed"].startswith("compiled")
        answer = httpx.post(f"{service.url}/predict?top_k=1", content=body, headers=headers)
        assert answer.json()["predictions"][0][0]["label"] in labels
