"""Models that answer with content, as clients of a real service get it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferpool import (
    Client,
    InferpoolError,
    InvalidInputError,
    NotAcceptableError,
    Prediction,
)
from tests.content_model import PIXEL
from tests.e2e.running import ROOT, Running, running


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    models = {
        name: {"source": f"tests.content_model:{source}", "replicas": 1}
        for name, source in [
            ("drawing", "Drawing"),
            ("undeclared", "UndeclaredDrawing"),
            ("both", "DrawingOrNumber"),
        ]
    }
    with running(settings={"models": models, "front_ends": 2}) as service:
        yield service


def test_clients_get_the_form_that_they_ask_for(service: Running, tmp_path: Path) -> None:
    with Client(service.url) as client:
        drawn = client.predict(4, model="drawing")
        assert (drawn.content, drawn.content.media_type) == (PIXEL * 4, "image/png")
        assert drawn.save(tmp_path / "a.png").read_bytes() == PIXEL * 4
        shown = client.predict(4, model="drawing", accept="application/json")
        assert shown.content == PIXEL * 4
        assert shown.value["media_type"] == "image/png"
        assert client.predict(4, model="both").value == 4
        assert client.predict(4, model="both", accept="image/png").content == PIXEL * 4
        with pytest.raises(NotAcceptableError, match="none of image/png"):
            client.predict(4, model="undeclared", accept="image/webp")  # learned at its example
        with pytest.raises(InvalidInputError, match="3 cannot be drawn"):
            client.predict(3, model="drawing")


def test_large_contents_come_whole(service: Running) -> None:
    with Client(service.url) as client:
        num = 2_000_000 // len(PIXEL)
        assert client.predict(num, model="drawing").content == PIXEL * num


def test_a_page_of_a_model_is_sandboxed_and_no_type_is_guessed(service: Running) -> None:
    url = f"{service.url}/predict/drawing"
    answer = service.http.post(url, json={"instances": [1]})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == "sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" not in service.http.post(url, json={"instances": [0]}).headers
    failed = service.http.post(url, json={"instances": [0, 2]}).json()["predictions"]
    assert failed[0]["media_type"] == "image/png"
    assert "'Set-Cookie'" in failed[1]["error"]["message"]
    assert (
        service.http.post(f"{service.url}/predict/none", json={}).headers["x-content-type-options"]
        == "nosniff"
    )


def test_the_command_saves_a_content(service: Running, tmp_path: Path) -> None:
    (tmp_path / "4.json").write_text("4")
    command = [sys.executable, "-m", "inferpool", "predict", str(tmp_path / "4.json")]
    command += ["--url", service.url, "--model", "drawing", "-o", str(tmp_path / "out.png")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert (tmp_path / "out.png").read_bytes() == PIXEL * 4
    assert "image/png" in ran.stdout


def test_a_run_writes_files_beside_its_lines(service: Running, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("4\n0\n")
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "inferpool", "batch", str(tmp_path / "in.jsonl")]
    command += ["--url", service.url, "--model", "drawing", "--output", str(out)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert '"file": "out.jsonl.files/0.png"' in out.read_text()
    assert (tmp_path / "out.jsonl.files" / "0.png").read_bytes() == PIXEL * 4
    assert (tmp_path / "out.jsonl.files" / "1.png").read_bytes() == PIXEL


def test_a_job_keeps_contents_and_its_result_is_files_beside_lines(
    service: Running, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with Client(service.url) as client:
        job = client.submit([4, 2], model="drawing")
        drawn, failed = job.predictions(return_errors=True)
        assert isinstance(drawn, Prediction)
        assert drawn.content == PIXEL * 4
        assert isinstance(failed, InferpoolError)
        command = [sys.executable, "-m", "inferpool", "jobs", "result", job.id]
        command += ["--url", service.url, "--output", str(out)]
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    first, second = out.read_text().splitlines()
    assert '"file": "out.jsonl.files/0.png"' in first
    assert "model_error" in second
    assert (tmp_path / "out.jsonl.files" / "0.png").read_bytes() == PIXEL * 4
