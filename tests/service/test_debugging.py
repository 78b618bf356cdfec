"""`inferpool serve --debug` on a terminal, as the author of a model uses it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from inferpool.service.debugging import WatchedFiles, settings_for
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from tests.e2e.running import ROOT
from tests.pty_screen import on_terminal

NETS = """
import torch
from inferpool.models.base import Model
from inferpool.models.spec import TensorSpec


class Net(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1,))]

    def load(self, placement):
        print(f"loading it {torch.rand(1).item():.9f}")

    def forward(self, batch):
        doubled = batch["x"] * FACTOR
        if (doubled == 6).any():
            breakpoint()
        if (doubled == 8).any():
            raise ValueError("eight")
        return {"y": doubled}
"""
PROMPT = r"\(Pdb\) "


@pytest.fixture
def client() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.slow
def test_author_debugs_and_edits_a_model(tmp_path: Path, client: ThreadPoolExecutor):
    nets = tmp_path / "nets.py"
    nets.write_text(NETS.replace("FACTOR", "2"))
    url = ""

    def ask(value: float) -> "Future[httpx.Response]":
        body = {"instances": [value]}
        return client.submit(httpx.post, f"{url}/predict", json=body, timeout=60)

    arguments = ("serve", "nets:Net", "--debug", "--reload", "--port", "0")
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with on_terminal(*arguments, cwd=tmp_path, env=env) as terminal:
        drawn = {terminal.wait_for_next(r"loading it (0\.\d+)")[1]}
        url = terminal.wait_for_next(r"Serving net at (http\S+)")[1]
        assert ask(1.0).result(60).json() == {"predictions": [2.0]}

        # A breakpoint has the terminal, and the call waits for it.
        answer = ask(3.0)
        terminal.wait_for_next(PROMPT)
        terminal.press("p doubled.tolist()\r")
        terminal.wait_for_next(r"\[6\.0\]")
        terminal.press("c\r")
        assert answer.result(60).json() == {"predictions": [6.0]}

        # The answer shows an exception with its traceback, and a debugger that was quit.
        detail = ask(4.0).result(60).json()["detail"]
        assert 'raise ValueError("eight")' in detail
        assert f'File "{nets}", line' in detail
        answer = ask(3.0)
        terminal.wait_for_next(PROMPT)
        terminal.press("q\r")
        assert "BdbQuit" in answer.result(60).json()["detail"]

        # A changed file restarts the service. A mistake in the file does not end it.
        nets.write_text("def")
        terminal.wait_for_next(r"nets.py changed")
        terminal.wait_for_next(r"SyntaxError.*\(.*nets.py:1\)")
        terminal.wait_for_next("waiting for a file to change")
        nets.write_text(NETS.replace("FACTOR", "3"))
        drawn.add(terminal.wait_for_next(r"loading it (0\.\d+)")[1])
        assert len(drawn) == 2
        url = terminal.wait_for_next(r"Serving net at (http\S+)")[1]
        assert ask(1.0).result(60).json() == {"predictions": [3.0]}

        # So does one in the settings.
        settings = tmp_path / "inferpool.toml"
        settings.write_text("port = ")
        terminal.wait_for_next("waiting for a file to change")
        settings.write_text("")
        url = terminal.wait_for_next(r"Serving net at (http\S+)")[1]

        # Ctrl-C at the prompt ends it, and leaves the terminal as it was.
        answer = ask(2.0)
        terminal.wait_for_next(PROMPT)
        terminal.press("\x03")
        assert terminal.leave() == 0
        assert terminal.attributes() == terminal.before
        assert answer.exception(60) or answer.result().status_code == 503


def test_settings_for_several_processes_are_overridden():
    model = ModelSettings(source="echo", replicas=4, speed="auto")
    settings = Settings(models={"echo": model}, default_model="echo", front_ends=4)
    changed = settings_for(settings)
    assert (changed.front_ends, changed.models["echo"].replicas) == (1, 1)
    assert changed.models["echo"].speed == "exact"
    assert changed.default_timeout_s == 3600
    assert settings.models["echo"].replicas == 4


def test_files_of_the_project_are_watched(tmp_path: Path):
    (tmp_path / "a.py").write_text("a")
    (tmp_path / ".venv").mkdir()
    files = WatchedFiles(tmp_path)
    assert not files.has_changed()
    (tmp_path / ".venv" / "c.py").write_text("c")
    assert not files.has_changed()
    (tmp_path / "b.py").write_text("b")
    assert files.has_changed()
    assert files.changed == str(tmp_path / "b.py")
    files = WatchedFiles(tmp_path)
    (tmp_path / "a.py").unlink()
    assert files.has_changed()
