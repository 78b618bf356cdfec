"""`inferpool.serve` as scripts, notebooks and tests use it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from inferpool.models.base import Features, Model
from inferpool.models.spec import Placement, TensorSpec
from inferpool.service.client import Client
from inferpool.service.client.errors import UnauthorizedError
from inferpool.service.embedded.serve import RunningService, serve
from inferpool.service.errors import StartError
from inferpool.service.settings.names import SettingsError
from tests.e2e import forked
from tests.e2e.running import ROOT, left_over, until
from tests.ports import free_port
from tests.small_classifier import SmallClassifier

_KEY = "0123456789abcdef"
_MODEL = """
import sys, time
from inferpool.models.base import Model
from inferpool.models.spec import TensorSpec
from inferpool.service.embedded.serve import serve

class Doubler(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]
    outputs = [TensorSpec(name="y", dtype="float32", shape=(-1, 3))]
    def forward(self, batch):
        return {"y": batch["x"] * 2}
"""
_SERVE = """
with serve(Doubler, replicas=2, speed="exact") as service:
    print(service.url, flush=True)
    print(service.client.predict([1, 2, 3]).value, flush=True)
    IN_BLOCK
"""
_NOTEBOOK = """
import asyncio, linecache, threading

CELL = CELL_TEXT
name = "/tmp/ipykernel_1/1.py"
linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
exec(compile(CELL, name, "exec"))

async def run_cell():
    service = serve(Doubler, speed="exact")
    print(service.client.predict([1, 2, 3]).value)
    service.close()

thread = threading.Thread(target=asyncio.run, args=[run_cell()])
thread.start()
thread.join()
"""


class Echoing(Model):
    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 2)),)

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"]}


class WithoutWeights(Echoing):
    def load(self, placement: Placement) -> None:
        raise FileNotFoundError("weights.bin")


@pytest.fixture(scope="module", autouse=True)
def _forked_services() -> Iterator[None]:
    with forked.services_forked():
        yield


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    models = {"small": {"source": SmallClassifier, "replicas": 2}, "echoing": Echoing}
    with serve(models, speed="exact", replicas=1, predict_keys=[_KEY], page=False) as service:
        yield service


def start(*command: str, cwd: Path = ROOT, forks: bool = True) -> "subprocess.Popen[str]":
    """Start Python in a session of its own, with variables that `serve` is to ignore."""
    ignored = {"INFERPOOL_PORT": "1", "HTTP_PROXY": "http://[::]"}
    popen = forked.popen if forks else subprocess.Popen
    return popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": forked.python_path(), **ignored},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_script(tmp_path: Path, text: str, *, forks: bool = True) -> "subprocess.Popen[str]":
    (tmp_path / "my_script.py").write_text(text)
    return start(str(tmp_path / "my_script.py"), cwd=tmp_path, forks=forks)


def first_line(process: "subprocess.Popen[str]") -> str:
    """Return the first line, and read no further: `communicate` misses what a buffer has read."""
    assert process.stdout is not None
    line = b""
    while (byte := os.read(process.stdout.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    assert line, process.communicate(timeout=240)
    return line.decode()


def children_of(process: "subprocess.Popen[str] | None" = None) -> list[psutil.Process]:
    return psutil.Process(process and process.pid).children(recursive=True)


def is_listening(url: str) -> bool:
    with socket.socket() as probe:
        parsed = httpx.URL(url)
        return probe.connect_ex((parsed.host, parsed.port or 0)) == 0


def test_several_models_are_served_by_name_with_any_settings(service: RunningService):
    client = service.client
    num_workers = {model.name: len(model.workers) for model in client.models()}
    assert num_workers == {"small": 2, "echoing": 1}
    assert client.predict([1, 2], model="echoing").value == [1.0, 2.0]
    page = httpx.get(f"{service.url}/", headers={"accept": "text/html"})  # page=False
    assert page.status_code == 404
    with Client(service.url, proxy="") as other, pytest.raises(UnauthorizedError):
        other.predict([1, 2])


@pytest.mark.slow
def test_another_thread_can_serve_a_second_service(service: RunningService):
    answers = []

    def run() -> None:
        with serve("echo") as other:
            answers.append(other.client.predict([1]).value)
            answers.append(other.url != service.url)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(100)
    assert answers == [[1], True]
    assert service.client.predict([1, 2], model="echoing").value == [1.0, 2.0]


@pytest.mark.slow
def test_model_that_cannot_be_loaded_raises_its_own_error(caplog: pytest.LogCaptureFixture):
    with pytest.raises(StartError, match=r"FileNotFoundError: weights\.bin"):
        serve(WithoutWeights, speed="exact", max_restarts=0)
    assert "weights.bin" in caplog.text


def test_service_that_is_not_ready_in_time_is_given_up_and_leaves_nothing():
    before = set(children_of())
    with pytest.raises(StartError, match=r"not ready within 0 s \(ready_timeout_s\)"):
        serve("echo", ready_timeout_s=0)
    assert left_over(list(set(children_of()) - before)) == []


def test_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127.0.0.1:{port}.*in use"):
            serve("echo", port=port)


@pytest.mark.parametrize(
    ("models", "settings", "error", "message"),
    [
        ("echo", {"prot": 1}, SettingsError, r"^prot: there is no such setting; did you mean port"),
        ("echo", {"replicas": 0}, SettingsError, r"replicas: 0 is not .*whole number from 1"),
        (
            {"e": {"source": "echo", "replicsa": 1}}, {},
            SettingsError, r"models\.e\.replicsa: .* did you mean replicas",
        ),
        (
            {"e": {"source": "echo", "options": {"k": None}}}, {},
            SettingsError, r"^models\.e\.options\.k: None cannot be passed",
        ),
        ({}, {}, TypeError, "models is empty"),
        (Echoing(), {}, TypeError, "a Echoing cannot be served: give its class"),
    ],
)  # fmt: skip
def test_wrong_setting_is_an_error_at_once(models, settings, error, message: str):
    with pytest.raises(error, match=message):
        serve(models, **settings)


@pytest.mark.slow
def test_script_without_a_guard_serves_its_own_class(tmp_path: Path):
    end = "end = Undefined"  # an exception in the block
    process = start_script(tmp_path, _MODEL + _SERVE.replace("IN_BLOCK", end), forks=False)
    url = first_line(process)
    family = children_of(process)
    assert family
    out, err = process.communicate(timeout=240)
    assert out == "[2.0, 4.0, 6.0]\n", err
    assert "NameError: name 'Undefined'" in err
    assert process.returncode == 1
    assert left_over(family) == []
    assert not is_listening(url)


@pytest.mark.slow
def test_thread_of_a_script_starts_one_service_and_no_more(tmp_path: Path):
    serve = "def main():\n    time.sleep(0.3)  # in a worker, until the import has ended\n"
    serve += _SERVE.replace("IN_BLOCK", "time.sleep(1)").replace("\n", "\n    ")
    serve += "\nthread = threading.Thread(target=main)\nthread.start()\n"
    begin = "import logging, threading\nlogging.basicConfig(level='INFO')"
    end = "if __name__ == '__main__': thread.join()"
    process = start_script(tmp_path, f"{begin}\n{_MODEL}\n{serve}{end}")
    _, err = process.communicate(timeout=100)
    assert 'put what starts it under `if __name__ == "__main__":`' in err
    assert process.returncode == 0


@pytest.mark.slow
def test_service_ends_with_a_script_that_is_killed(tmp_path: Path):
    text = _MODEL + _SERVE.replace("IN_BLOCK", "time.sleep(60)")
    process = start_script(tmp_path, text, forks=False)  # the kernel knows who started whom
    url = first_line(process)
    family = children_of(process)
    process.kill()
    process.communicate()
    assert left_over(family) == []
    assert not is_listening(url)


@pytest.mark.slow
def test_ctrl_c_ends_a_script_and_its_service(tmp_path: Path):
    text = _MODEL + "print('starts', flush=True)\nserve(Doubler)\n"
    process = start_script(tmp_path, text, forks=False)  # which process is whose child counts
    first_line(process)
    until(lambda: len(children_of(process)) > 1)  # while it starts
    family = children_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert left_over(family) == []


@pytest.mark.slow
def test_class_of_a_notebook_is_served_from_a_running_loop():
    process = start("-c", _NOTEBOOK.replace("CELL_TEXT", repr(_MODEL)))
    out, err = process.communicate(timeout=100)
    assert out == "[2.0, 4.0, 6.0]\n", err
