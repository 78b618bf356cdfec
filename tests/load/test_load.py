"""The command as users run it, against a small server whose behaviour is known."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.load.__main__ import main
from tests.load.small_server import small_server

pytestmark = pytest.mark.measures

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server():
    with small_server() as small:
        yield small


def _run(tmp_path, *words):
    """The exit status, and all figures."""
    out = tmp_path / "out.json"
    status = main([*words, "--warmup", "0.2s", "--out", str(out)])
    return status, json.loads(out.read_text()) if out.exists() else {}


def test_a_closed_loop_is_sent_as_asked_counted_and_reported(server, tmp_path, capsys):
    page, key = tmp_path / "page.html", tmp_path / "key"
    key.write_text("secret-secret-secret\n")
    status, found = _run(
        tmp_path, "closed", server.url, "-c", "3", "-n", "60", "--processes", "2",
        "--model", "mine", "--image", "40x30", "-H", "X-Priority: 1", "--timeout-ms", "900",
        "--key-file", str(key),
        "--html", str(page), "--p99-ms", "20000", "--errors", "0", "--expect", "predictions",
    )  # fmt: skip
    assert status == 0
    assert found["good"] == found["requests"] == found["statuses"]["200"] == 60
    assert found["server_timing_ms"] == {"queue": 1.5, "inference": 2.5}
    assert found["latency_ms"]["p50"] <= found["latency_ms"]["p99"] <= found["latency_ms"]["max"]
    assert found["received_bytes"] == 60 * 18
    assert sum(found["series"]["good"]) == 60
    shown = capsys.readouterr()
    assert "p99.9" in shown.out
    assert "All thresholds were kept" in shown.out
    assert page.read_text().count('class="plotly-graph-div"') == 3
    for headers in server.headers:
        assert headers["content-type"] == "image/jpeg"
        assert headers["x-priority"] == "1"
        assert headers["x-timeout-ms"] == "900"
        assert headers["authorization"] == "Bearer secret-secret-secret"
    assert server.bodies[0].startswith(b"\xff\xd8")
    assert "secret" not in json.dumps(found)


@pytest.mark.alone
@pytest.mark.slow
def test_an_open_loop_arrives_at_its_rate_at_random_moments(server, tmp_path):
    status, found = _run(tmp_path, "open", server.url, "--rate", "100", "-d", "2s", "--json", "{}")
    assert status == 0
    # 200 expected; five standard deviations of a Poisson process.
    assert 130 <= found["requests"] <= 270
    assert found["good"] == found["requests"]


@pytest.mark.alone
@pytest.mark.slow
def test_an_open_loop_does_not_omit_what_a_stall_delays(server, tmp_path):
    words = [f"{server.url}/stall", "-d", "2s", "--json", "{}"]
    _, found = _run(tmp_path, "open", *words, "--rate", "100")
    # 80 of the 200 requests become due while the server stands still for 0.8 s.
    assert found["latency_ms"]["p90"] > 300
    assert found["latency_ms"]["max"] > 700


def test_refusals_are_counted_by_code_with_their_retry_after(server, tmp_path):
    words = ["closed", f"{server.url}/busy", "-n", "40", "--json", "{}", "--no-check"]
    status, found = _run(tmp_path, *words, "--errors", "0")
    assert status == 1
    num = found["errors"]["429 overloaded"]
    assert num == found["statuses"]["429"] == found["retry_after"]["answers"] > 10
    assert found["retry_after"]["sum_s"] == 3 * num
    assert found["refusal_ms"]["max"] > 0
    assert found["missed"] == [f"{num} errors are more than 0"]


def test_requests_without_an_answer_time_out(server, tmp_path):
    words = ["open", f"{server.url}/silent", "--rate", "20", "-d", "1s", "--json", "{}"]
    status, found = _run(tmp_path, *words, "--timeout", "0.3s", "--no-check", "--p99-ms", "1")
    assert status == 1
    assert found["errors"] == {"timeout": found["requests"]}
    assert "no request was answered well" in found["missed"]


@pytest.mark.alone
@pytest.mark.slow
def test_ramp_finds_the_capacity(server, tmp_path, capsys):
    status, found = _run(
        tmp_path, "ramp", f"{server.url}/lane", "--rate", "40", "-d", "1s", "--json", "{}",
        "--p99-ms", "900", "--precision", "200", "--max-rate", "160", "--min-rate", "1000",
    )  # fmt: skip
    # 50 requests/s are possible; how near to it the queue stays short is a matter of chance.
    assert 10 <= found["capacity_per_s"] <= 60
    assert [step["holds"] for step in found["steps"]].count(False) >= 1
    assert status == 1
    assert "Capacity" in capsys.readouterr().out


@pytest.mark.alone
@pytest.mark.slow
def test_soak_says_that_a_server_becomes_slower(server, tmp_path):
    words = ["soak", f"{server.url}/ageing", "--rate", "50", "-d", "5s", "--json", "{}"]
    for _ in range(3):  # what others do meanwhile may hide it
        server.began = time.monotonic()
        status, found = _run(tmp_path, *words, "--max-drift", "20")
        drift = found["drift"]["p50_ms"]
        is_shown = drift["per_hour"] > drift["error_per_hour"]
        if is_shown and status == 1:
            break
    assert is_shown
    assert status == 1
    assert "p99 grew" in found["missed"][0]


def test_a_mistake_is_reported_before_any_load(server, tmp_path, capsys):
    assert main(["closed", f"{server.url}/missing", "--json", "{}"]) == 2
    assert "404: no such model" in capsys.readouterr().err
    assert server.num_requests == 1
    assert main(["closed", "http://127.0.0.1:9", "--json", "{}"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_ctrl_c_still_reports(server, tmp_path):
    out = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.load", "closed", server.url, "-d", "10m", "--json", "{}",
         "--warmup", "0", "--out", str(out)],
        cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while server.num_requests < 200:
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "Traceback" not in errors
    found = json.loads(out.read_text())
    assert found["good"] > 0
    assert found["errors"] == {}
    assert not found["is_complete"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_certificates_are_checked_against_the_authority_that_is_given(tmp_path, capsys):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key,
         "-out", cert, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with small_server(cert=cert, key=key) as server:
        words = ["closed", server.url, "-n", "3", "-c", "1", "--json", "{}"]
        assert main(words) == 2
        assert "certificate" in capsys.readouterr().err.lower()
        assert _run(tmp_path, *words, "--ca", str(cert))[0] == 0
        status, found = _run(tmp_path, *words, "--insecure")
        assert (status, found["good"]) == (0, 3)


def test_the_scripts_import_neither_torch_nor_the_server():
    ours = [f"service.{each}" for each in ("app", "api", "queue")] + ["workers.host", "models.base"]
    banned = {"torch", "fastapi", "uvicorn", *(f"inferpool.{each}" for each in ours)}
    code = f"import sys, tests.load.__main__; print(sorted({banned} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
