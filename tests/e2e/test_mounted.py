"""`inferpool.asgi_app` inside the applications of users, served by uvicorn."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from inferpool.service.embedded.mounted import asgi_app
from inferpool.service.errors import StartError
from tests.e2e import forked
from tests.e2e.running import left_over, status_of, until
from tests.ports import free_port

_APP = """
import os
import fastapi, torch
from inferpool.models.base import Model
from inferpool.models.spec import TensorSpec
from inferpool.service.embedded.mounted import asgi_app

class Doubler(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]
    def load(self, placement):
        if "BROKEN" in os.environ:
            raise FileNotFoundError("weights.bin")
    def forward(self, batch):
        return {"y": batch["x"] * 2}

models = asgi_app(Doubler, speed="exact", max_restarts=0)
app = fastapi.FastAPI(lifespan=models.lifespan)
lazy = fastapi.FastAPI()

@app.middleware("http")
async def check(request, call_next):
    if request.headers.get("x-own-auth") == "wrong":
        return fastapi.responses.PlainTextResponse("go away", 401)
    return await call_next(request)

@app.get("/own")
def own():
    return "own"

app.mount("/models", models)
lazy.mount("/models", models)
"""
_CALLER = """
import subprocess, sys, threading, time
from fastapi.testclient import TestClient
import user_app

def ask(number):
    with TestClient(user_app.app) as client:
        print(client.post("/models/predict", json={"instances": [[number, 0, 0]]}).json())

if __name__ == "__main__":
    ask(1)
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    thread = threading.Thread(target=ask, args=[2])
    thread.start()
    thread.join()
    time.sleep(2.5)  # looks for orphans come every second
    print("code", child.wait())
    client = TestClient(user_app.lazy)
    print(client.post("/models/predict", json={"instances": [[3, 0, 0]]}).json())
    try:
        client.get("/models/health")
    except RuntimeError as error:
        print(error)
"""
_BODY = {"instances": [[1, 2, 3]]}
_ANSWER = {"predictions": [[2.0, 4.0, 6.0]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user_app.py").write_text(_APP)
    return tmp_path


@contextlib.contextmanager
def serving(
    folder: Path, name: str, *, num_forkservers: int = 1, **env: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    port = free_port()
    process = forked.popen(
        [sys.executable, "-m", "uvicorn", f"user_app:{name}", "--port", str(port)],
        cwd=folder, env={**os.environ, **env}, num_forkservers=num_forkservers,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def family_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_ends_in_order(process: "subprocess.Popen[str]") -> None:
    """Tell a server to stop; it must leave neither a process nor a traceback."""
    family = family_of(process)
    process.terminate()
    _, log = process.communicate(timeout=240)
    assert "Application shutdown complete" in log
    assert "Traceback" not in log
    assert left_over(family) == []


@pytest.mark.slow
def test_models_are_served_behind_routes_and_middleware_of_the_user(folder: Path):
    with serving(folder, "app") as (process, url):
        until(lambda: status_of(url))
        assert httpx.get(f"{url}/own").json() == "own"
        predict = f"{url}/models/predict"
        answer = httpx.post(predict, json=_BODY)  # ready: its lifespan waits for that
        assert answer.json() == _ANSWER
        assert httpx.post(predict, json=_BODY, headers={"x-own-auth": "wrong"}).status_code == 401
        refused = httpx.post(predict, json={"instances": [[1]]})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input")
        workers = httpx.get(f"{url}/models/health").json()["models"][0]["workers"]
        os.kill(next(each["pid"] for each in workers if each["state"] == "ready"), signal.SIGKILL)
        until(lambda: httpx.post(predict, json=_BODY).json() == _ANSWER)
        assert_ends_in_order(process)


@pytest.mark.slow
def test_first_call_starts_the_models_if_nothing_else_has(folder: Path):
    with serving(folder, "lazy") as (process, url):
        until(lambda: status_of(url))
        assert httpx.post(f"{url}/models/predict", json=_BODY, timeout=100).json() == _ANSWER
        assert_ends_in_order(process)


def test_call_after_a_start_that_failed_starts_the_models_again(monkeypatch: pytest.MonkeyPatch):
    tries = []

    def refuse(*_: object) -> None:
        tries.append(1)
        raise OSError("no room")

    monkeypatch.setattr("inferpool.service.embedded.mounted.find_host", refuse)

    async def ask() -> None:
        app = asgi_app("echo")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            for _ in range(2):
                with pytest.raises(StartError, match="no room"):
                    await client.get("http://models/health")

    asyncio.run(ask())
    assert len(tries) == 2


@pytest.mark.slow
def test_models_end_with_a_server_that_is_killed(folder: Path):
    # As the whole application. Its forkserver is an interpreter that the server has started.
    with serving(folder, "models", num_forkservers=0) as (process, url):
        until(lambda: status_of(url))
        assert httpx.post(f"{url}/predict", json=_BODY).json() == _ANSWER
        family = family_of(process)
        process.kill()
        assert left_over(family) == []


@pytest.mark.slow
def test_server_does_not_start_where_no_model_can_be_loaded(folder: Path):
    with serving(folder, "app", BROKEN="1") as (process, _):
        _, log = process.communicate(timeout=100)
    assert process.returncode == 3
    assert "StartError: no model could be loaded: doubler: " in log
    assert "FileNotFoundError: weights.bin" in log


@pytest.mark.slow
def test_test_clients_in_any_thread_start_and_stop_the_models(folder: Path):
    (folder / "caller.py").write_text(_CALLER)
    command = [sys.executable, "caller.py"]
    done = forked.run(command, cwd=folder, num_forkservers=3, timeout=150)
    first, second, code, third, refusal = done.stdout.splitlines()
    assert first == str({"predictions": [[2.0, 0.0, 0.0]]})
    assert second == str({"predictions": [[4.0, 0.0, 0.0]]})
    assert code == "code 7"  # of a child that was waited for later
    assert third == str({"predictions": [[6.0, 0.0, 0.0]]})
    assert "with TestClient(app) as client" in refusal
    assert done.returncode == 0, done.stderr
