"""`inferpool doctor` as a user runs it, and the same findings at a start."""

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from inferpool.workers.host.devices import find_host
from tests.e2e import forked
from tests.e2e.running import ROOT, running
from tests.pty_screen import on_terminal

pytestmark = [pytest.mark.measures, pytest.mark.slow]

FAULTY = "tests.fault_model:FaultModel"


def doctor(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return forked.run([*forked.COMMAND, "doctor", *arguments], cwd=cwd, timeout=120)


def test_sound_model_is_measured():
    done = doctor(FAULTY, "--port", "0", "--measure", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["model faultmodel"]["level"] == "ok"
    assert "not known before it is loaded" in found["placement of faultmodel"]["message"]
    assert found["measured faultmodel"]["level"] == "ok"
    assert "ms for a batch of 8" in found["measured faultmodel"]["message"]


def test_several_models_share_the_cores_and_their_findings(tmp_path: Path):
    file = tmp_path / "inferpool.toml"
    names = [f"m{number}" for number in range(3)]
    file.write_text("".join(f'[models.{name}]\nsource = "{FAULTY}"\n' for name in names))
    done = doctor("--port", "0", "--json", "--config", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    for check in ("3 models", "devices of 3 models", "placement of 3 models"):
        assert found[check]["message"].startswith("m0, m1, m2: ")
    with running("--config", str(file)) as service:
        health = httpx.get(f"{service.url}/health").json()
        said = [line for line in service.log if "share" in str(line["message"])]
    num_cores = find_host(None).num_cores
    threads = [worker["threads"] for model in health["models"] for worker in model["workers"]]
    assert sum(threads) == max(3, num_cores)
    assert [str(line["message"]).partition(";")[0] for line in said] == [
        f"3 models share {num_cores} cores"
    ]


def test_terminal_shows_what_is_being_done():
    with on_terminal("doctor", FAULTY, "--port", "0") as screen:
        screen.wait_for("looking at this machine")
        screen.press("\x03")
        assert screen.leave() == 130
    assert b"Traceback" not in screen.written


def test_every_problem_is_named_with_advice(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "models").mkdir()  # a package of the user's with the name of one of ours
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('not ours')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "inferpool.toml").write_text(
            f"""
            port = {port}
            [models.a]
            source = "broken:Model"
            [models.b]
            source = "efficientnet_lite0"
            weights = "missing.safetensors"
            """
        )
        command = [str(Path(sys.executable).parent / "inferpool"), "doctor"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    assert f"error address cannot listen on 127.0.0.1:{port}" in text
    assert "error model a module 'broken' fails on import" in text
    assert "error weights of b missing.safetensors: there is no such file" in text
    assert "-> give the path of a whole, readable file" in text


def test_start_logs_warnings_of_the_quick_checks():
    with running(FAULTY, "--replicas", "6") as service:
        said = [line for line in service.log if str(line["message"]).startswith("cores: ")]
        assert [line["level"] for line in said] in ([], ["warning"])  # none on a large host
        assert bool(said) == (find_host(None).num_cores < 3)


def test_start_that_cannot_succeed_fails_at_once():
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with running("echo", ready=False, preexec_fn=limit) as service:
        assert service.wait() == 1
        assert "file size: 1 MiB (ulimit -f)" in str(service.log[-1]["message"])
