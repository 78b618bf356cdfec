"""The verb `inferpool jobs`, against a real service."""

import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferpool.service.cli.main import run
from inferpool.service.client import Client
from tests.e2e.running import FAULTY, Running, running, until
from tests.models.items import jpeg
from tests.pty_screen import on_terminal

QUICK = [{"n": each} for each in range(64)]
"""A part of a job: its results are there before the next part has begun."""
HELD = {"n": 64, "do": "wait"}
"""An instance that is computed while the gate is open."""


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    """Return a file that holds instances up while it exists."""
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture(scope="module")
def service(gate: Path) -> Iterator[Running]:
    options = {"gate": str(gate)}
    model = {"source": FAULTY, "replicas": 1, "max_batch_size": 1, "options": options}
    models = {"echo": {"source": "echo", "replicas": 1}, "held": model}
    with running(settings={"default_model": "echo", "models": models}) as service:
        yield service


@pytest.fixture
def jobs(service, capsys):
    """Run a command of `jobs`; return its exit status, stdout and stderr."""

    def ask(what: str, *arguments: object) -> tuple[int, str, str]:
        status = run(["jobs", what, *map(str, arguments), "--url", service.url])
        return status, *capsys.readouterr()

    return ask


@pytest.fixture
def held(service, gate) -> Iterator[str]:
    """Make a job of 65 instances, of which the last one is not computed before the gate opens."""
    gate.touch()
    with Client(service.url) as client:
        job = client.submit([*QUICK, HELD], model="held")
        until(lambda: job.refresh().num_done == len(QUICK))
        yield job.id
        gate.unlink(missing_ok=True)
        job.cancel()
        client.predict(QUICK[0], model="held")  # so the worker has seen that the gate is open


def start(service: Running, *arguments: str) -> "subprocess.Popen[str]":
    """Start a command of `jobs` as a user does."""
    command = [sys.executable, "-m", "inferpool", "jobs", *arguments, "--url", service.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_job_is_submitted_waited_for_read_and_deleted(jobs, tmp_path: Path):
    file = tmp_path / "in.jsonl"
    file.write_text('"a"\n"b"\n')
    status, out, _ = jobs("submit", file, "--id", f"j-{tmp_path.name}"[:64], "--priority", 2)
    id = out.strip()
    assert (status, id) == (0, f"j-{tmp_path.name}"[:64])
    assert jobs("wait", id) == (0, f"{id}: succeeded, 2 of 2 done\n", "")
    status, out, _ = jobs("result", id)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [(each["index"], each["prediction"]) for each in lines] == [(0, "a"), (1, "b")]
    assert jobs("result", id, "--first", 1)[1] == out.splitlines(keepends=True)[1]
    output = tmp_path / "out.jsonl"
    assert jobs("result", id, "--output", output)[:2] == (0, "")
    assert output.read_text() == out
    shown = dict(line.split(maxsplit=1) for line in jobs("show", id)[1].splitlines())
    assert shown["state"] == "succeeded"
    assert shown["instances"] == "2 of 2 done, 0 failed"
    assert shown["priority"] == "2"
    assert "ended" in shown
    document = json.loads(jobs("show", id, "--json")[1])
    assert (document["id"], document["num_done"]) == (id, 2)
    assert jobs("cancel", id)[1] == f"{id}: had succeeded already\n"
    assert jobs("delete", id) == (0, f"{id}: deleted\n", "")
    for what in ("show", "result", "wait", "cancel", "delete"):
        status, out, err = jobs(what, id)
        assert (status, out) == (1, "")
        assert f"there is no job '{id}'" in err
        assert err.count("\n") == 1


def test_files_are_an_instance_each_and_lines_of_stdin_too(jobs, tmp_path: Path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(jpeg("chelsea"))
    (tmp_path / "b.txt").write_text("hello")
    status, out, err = jobs("submit", tmp_path / "a.jpg", tmp_path / "b.txt", "--wait")
    (id,) = out.splitlines()
    assert (status, err) == (0, f"{id}: succeeded, 2 of 2 done\n")
    first, second = [json.loads(line)["prediction"] for line in jobs("result", id)[1].splitlines()]
    assert (first["num_bytes"], second) == (len(jpeg("chelsea")), "hello")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"a"\nno json\n')))
    status, out, err = jobs("submit", "-", "--wait")
    assert (status, err.partition(": ")[2]) == (4, "succeeded, 2 of 2 done, 1 failed\n")
    status, out, _ = jobs("result", out.splitlines()[0])
    assert status == 4
    assert json.loads(out.splitlines()[1])["error"]["code"] == "bad_request"
    status, _, err = jobs("submit", tmp_path / "b.txt", "--model", "held", "--wait")
    assert status == 1
    assert "failed, 1 of 1 done, 1 failed" in err


def test_the_result_of_a_job_is_all_that_stdout_has(jobs, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('"a"\n"b"\n')
    status, out, err = jobs("submit", tmp_path / "in.jsonl", "--result")
    assert [json.loads(line)["prediction"] for line in out.splitlines()] == ["a", "b"]
    id, waited = err.splitlines()
    assert (status, waited) == (0, f"{id}: succeeded, 2 of 2 done")


def test_jobs_are_listed_newest_first(jobs, tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello")
    ids = [jobs("submit", tmp_path / "a.txt", "--wait")[1].split()[0] for _ in range(3)]
    status, out, err = jobs("list", "--limit", 2, "--state", "succeeded", "--state", "failed")
    header, *rows = out.splitlines()
    assert status == 0
    assert header.split() == ["ID", "STATE", "MODEL", "DONE", "FAILED", "CREATED"]
    assert [row.split()[:3] for row in rows] == [[id, "succeeded", "echo"] for id in ids[:0:-1]]
    assert "--limit N" in err
    lines = jobs("list", "--limit", 3, "--json")[1].splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids[::-1]


def test_follow_prints_predictions_while_the_job_runs(service, jobs, gate, held):
    status, out, err = jobs("result", held)
    assert (status, out) == (1, "")
    assert "is running, with 64 of 65 done; --follow" in err
    following = start(service, "result", held, "--follow")
    assert following.stdout is not None
    for number in range(len(QUICK)):
        assert json.loads(following.stdout.readline())["prediction"]["twice"] == 2 * number
    gate.unlink()
    out, err = following.communicate(timeout=60)
    assert (json.loads(out)["prediction"]["twice"], err) == (128, "")
    assert following.returncode == 0


def test_a_cancelled_job_keeps_its_results(jobs, held):
    assert jobs("cancel", held) == (0, f"{held}: cancelled, 64 of 65 done\n", "")
    status, out, _ = jobs("result", held)
    *rest, last = [json.loads(line) for line in out.splitlines()]
    assert (status, last["error"]["code"]) == (1, "cancelled")
    assert [each["prediction"]["twice"] for each in rest] == [2 * n for n in range(64)]
    assert jobs("wait", held)[0] == 1


def test_the_time_to_wait_is_limited_and_the_job_goes_on(jobs, held, gate):
    status, out, err = jobs("wait", held, "--timeout-s", 0.2)
    assert (status, out) == (3, "")
    assert f"job {held} is running still, with 64 of 65 done; it goes on" in err
    gate.unlink()
    assert jobs("wait", held)[0] == 0


def test_a_terminal_shows_a_bar_and_ctrl_c_leaves_the_job_going_on(service, jobs, held, gate):
    arguments = ("jobs", "wait", held, "--url", service.url)
    with on_terminal(*arguments, columns=120) as screen:
        screen.wait_for("64/65")
        screen.press("\x03")
        assert screen.leave() == 130
    assert "the jobs go on" in screen.text
    with on_terminal(*arguments, columns=120) as screen:
        screen.wait_for("64/65")
        gate.unlink()
        assert screen.leave() == 0
    assert f"{held}: succeeded, 65 of 65 done" in screen.text
    assert jobs("wait", held)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "a.jsonl", "b.jpg"], "a.jsonl is a whole job: submit it alone"),
        (["submit", "a.jpg", "-"], "- is a whole job: submit it alone"),
        (["submit", "."], ". is a folder; name its files, such as ./*"),
        (["submit", "http://127.0.0.1:9"], "a service is named by --url"),
        (["submit", "x.jpg", "--parameter", "k"], "not NAME=VALUE"),
        (["list", "--limit", "0"], "--limit: must be at least 1"),
        (["result", "j", "--first", "-1"], "--first: must be at least 0"),
        (["wait", "j", "--timeout-s", "0"], "--timeout-s: must be more than 0"),
        (["show", "j", "--ca-file", "nowhere"], "--ca-file: nowhere"),
        (["show", "j", "--url", "ftp://x"], "is not the address"),
    ],
)
def test_wrong_flags_are_named_and_exit_2(arguments, message, capsys):
    assert run(["jobs", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_files_and_models_that_are_not_there_are_named(jobs, tmp_path: Path):
    missing = tmp_path / "missing.jsonl"
    status, out, err = jobs("submit", missing)
    assert (status, out) == (1, "")
    assert str(missing) in err
    status, _, err = jobs("submit", "a" * 300)
    assert (status, "File name too long" in err, "Traceback" in err) == (1, True, False)
    (tmp_path / "a.txt").write_text("hello")
    status, _, err = jobs("submit", tmp_path / "a.txt", "--model", "nobody")
    assert status == 1
    assert "no model 'nobody'" in err
    status, _, err = jobs("result", "j", "--output", tmp_path)
    assert (status, err.count("\n")) == (1, 1)


def test_missing_service_is_an_error_with_advice(capsys, monkeypatch):
    monkeypatch.setattr("inferpool.service.client.sync_client.time.sleep", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    assert run(["jobs", "wait", "j", "--url", url]) == 1
    waiting, failure, cure = capsys.readouterr().err.splitlines()
    assert waiting.endswith("; trying again")
    assert f"no answer from {url}" in failure
    assert f"is a service running at {url}? `inferpool serve` starts one" in cure
