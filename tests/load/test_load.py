"""The command as users run it, against a small server whose behaviour is known."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.certificates import make_certificate
from tests.load.__main__ import main
from tests.load.small_server import small_server

pytestmark = [pytest.mark.measures, pytest.mark.slow]

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server():
    with small_server() as small:
        yield small


def _run(tmp_path, *words):
    """The exit status, and all figures."""
    out = tmp_path / "out.json"
    status = main([*words, "--json", "{}", "--warmup", "0.2s", "--out", str(out)])
    return status, json.loads(out.read_text())


def test_a_closed_loop_is_sent_as_asked_counted_and_reported(server, tmp_path, capsys):
    page, key = tmp_path / "page.html", tmp_path / "key"
    key.write_text("# mine\n\nsecret-secret-secret\n")
    status, found = _run(
        tmp_path, "closed", server.url, "-c", "3", "-n", "60", "--processes", "2",
        "-H", "X-Secret: secret", "--timeout-ms", "900", "--key-file", str(key),
        "--html", str(page), "--p99-ms", "20000", "--errors", "0", "--expect", "predictions",
    )  # fmt: skip
    assert status == 0
    assert found["good"] == found["requests"] == found["statuses"]["200"] == 60
    assert found["server_timing_ms"] == {"queue": 1.5, "inference": 2.5}
    assert found["latency_ms"]["p50"] <= found["latency_ms"]["p99"] <= found["latency_ms"]["max"]
    assert found["received_bytes"] == 60 * 18
    assert sum(found["series"]["good"]) == 60
    assert "secret" not in json.dumps(found)
    assert "All thresholds were kept" in capsys.readouterr().out
    assert page.read_text().count('class="plotly-graph-div"') == 3
    sent = {"content-type": "application/json", "x-secret": "secret", "x-timeout-ms": "900",
            "authorization": "Bearer secret-secret-secret"}  # fmt: skip
    assert all(sent.items() <= headers.items() for headers in server.headers)


@pytest.mark.alone
def test_an_open_loop_does_not_omit_what_a_stall_delays(server, tmp_path):
    words = ("open", f"{server.url}/stall", "-d", "2s", "--rate", "100")
    status, found = _run(tmp_path, *words)
    assert status == 0
    # 200 expected; five standard deviations of a Poisson process.
    assert 130 <= found["requests"] == found["good"] <= 270
    # 80 of them become due while the server stands still for 0.8 s.
    assert found["latency_ms"]["p90"] > 300
    assert found["latency_ms"]["max"] > 700


def test_refusals_are_counted_by_code_with_their_retry_after(server, tmp_path):
    words = ["closed", f"{server.url}/busy", "-n", "40", "--no-check", "--errors", "0"]
    status, found = _run(tmp_path, *words)
    assert status == 1
    num = found["errors"]["429 overloaded"]
    assert num == found["statuses"]["429"] == found["retry_after"]["answers"] > 10
    assert found["retry_after"]["sum_s"] == 3 * num
    assert found["refusal_ms"]["max"] > 0
    assert found["missed"] == [f"{num} errors are more than 0"]


def test_requests_without_an_answer_time_out(server, tmp_path):
    words = ["open", f"{server.url}/silent", "--rate", "20", "-d", "1s", "--timeout", "0.3s"]
    status, found = _run(tmp_path, *words, "--no-check", "--p99-ms", "1")
    assert status == 1
    assert found["errors"] == {"timeout": found["requests"]}
    assert "no request was answered well" in found["missed"]


@pytest.mark.alone
def test_ramp_finds_the_capacity(server, tmp_path):
    status, found = _run(
        tmp_path, "ramp", f"{server.url}/lane", "--rate", "40", "-d", "1s", "--p99-ms", "900",
        "--precision", "200", "--max-rate", "160", "--min-rate", "1000",
    )  # fmt: skip
    # 50 requests/s are possible; how near to it the queue stays short is a matter of chance.
    assert 10 <= found["capacity_per_s"] <= 60
    assert not all(step["holds"] for step in found["steps"])
    assert status == 1


@pytest.mark.alone
def test_soak_says_that_a_server_becomes_slower(server, tmp_path):
    server.began = time.monotonic()
    words = ["soak", f"{server.url}/ageing", "--rate", "50", "-d", "5s", "--max-drift", "20"]
    status, found = _run(tmp_path, *words)
    assert found["drift"]["p50_ms"]["per_hour"] > found["drift"]["p50_ms"]["error_per_hour"]
    assert status == 1
    assert "p99 grew" in found["missed"][0]


def test_a_mistake_is_reported_before_any_load(server, capsys):
    assert main(["closed", f"{server.url}/missing", "--json", "{}"]) == 2
    assert "404: no such model" in capsys.readouterr().err
    assert server.num_requests == 1
    assert main(["closed", "http://127.0.0.1:9", "--json", "{}"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_ctrl_c_still_reports(server, tmp_path):
    out = tmp_path / "out.json"
    words = ["closed", server.url, "-d", "10m", "--json", "{}", "--warmup", "0", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.load", *words], cwd=_ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while server.num_requests < 200:
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "Traceback" not in errors
    found = json.loads(out.read_text())
    assert found["good"] > 0
    assert found["errors"] == {}
    assert not found["is_complete"]


def test_certificates_are_checked_against_the_authority_that_is_given(tmp_path, capsys):
    cert, key = make_certificate(tmp_path)
    with small_server(cert=cert, key=key) as server:
        words = ["closed", server.url, "-n", "3", "-c", "1"]
        assert main([*words, "--json", "{}"]) == 2
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
