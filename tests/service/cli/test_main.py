import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from inferpool.service.cli.flags import _SETTINGS_FLAGS
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FLAGS
from inferpool.service.settings.settings import Settings
from tests.pty_screen import on_terminal

ROOT = Path(__file__).parents[3]
_FULL = "inferpool: the output cannot be written: No space left on device"


@pytest.fixture
def command(tmp_path):
    """Run the command in an empty directory, as a user would."""

    def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.run(
            [sys.executable, "-m", "inferpool", *args],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": str(ROOT), **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_config_shows_every_setting_with_its_origin(command, tmp_path):
    done = command("config", "--port", "9", INFERPOOL_HOST="::1")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert rows["port"] == ["9", "flag --port"]
    assert rows["host"] == ['"::1"', "environment INFERPOOL_HOST"]
    assert rows["models.efficientnet_lite0.credit"] == ["2", "default"]
    (tmp_path / "inferpool.toml").write_text('[models.a]\nsource = "echo"\noptions = {n = 1}\n')
    table = json.loads(command("config", "--json").stdout)
    assert table["models.a.options.n"] == {"value": 1, "origin": "file inferpool.toml"}
    table = tomllib.loads(command("config", "--format", "toml").stdout)
    assert table["models"]["a"]["options"] == {"n": 1}


def test_every_setting_is_described_with_default_variable_and_flag(command):
    listed = json.loads(command("config", "--describe", "--format", "json").stdout)
    found = {each["name"]: each for each in listed}
    names = {f"models.NAME.{name}" for name in ModelSettings.model_fields}
    assert set(found) == names | set(Settings.model_fields) - {"models"}
    assert all(each["meaning"] and each["type"] and each["default"] for each in listed)
    replicas = found["models.NAME.replicas"]
    assert replicas["variable"] == "INFERPOOL_MODELS__NAME__REPLICAS"
    assert (replicas["flag"], replicas["default"]) == ("--replicas", '"auto"')
    assert replicas["meaning"].startswith("The number of loaded copies. `auto`: one per GPU")
    assert {each["flag"] for each in listed} - {""} == set(FLAGS.values())


def test_settings_are_described_as_text_and_as_markdown(command):
    text = command("config", "--describe").stdout
    assert "\nport  (--port, INFERPOOL_PORT)\n" in text
    assert max(map(len, text.splitlines())) <= 105
    tables = command("config", "--describe", "--format", "markdown").stdout
    assert "| `port` | a whole number from 0 to 65535 | `8000` | `--port` |" in tables
    refused = command("config", "--describe", "--format", "toml")
    assert (refused.returncode, "--format toml is for" in refused.stderr) == (2, True)


def test_config_is_a_coloured_table_on_a_terminal(tmp_path):
    with on_terminal("config", columns=100, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}) as screen:
        assert screen.leave() == 0
    assert b"set by" in screen.written
    assert b"\x1b[" in screen.written
    assert b"models.efficientnet_lite0.replicas" in screen.written


def test_wrong_settings_are_one_line_each_and_exit_2(command, tmp_path):
    (tmp_path / "inferpool.toml").write_text("prot = 1\n")
    for verb in ("config", "serve"):
        done = command(verb, "--port", "http")
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == (
            "inferpool: inferpool.toml: prot: there is no such setting; did you mean port?\n"
            "inferpool: --port: 'http' is not a whole number from 0 to 65535\n"
        )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sevre"], "inferpool: there is no verb 'sevre'; did you mean serve?"),
        (
            ["serve", "--prot", "1"],
            "inferpool serve: there is no flag --prot; did you mean --port?",
        ),
        (
            ["serve", "--objective-p", "1"],
            "inferpool serve: there is no flag --objective-p; did you mean --objective-p99-ms?",
        ),
        (
            ["config", "--describe", "replicaz"],
            "inferpool config: --describe: there is no setting replicaz; did you mean replicas?",
        ),
        (["serve", "a", "b"], "inferpool serve: one MODEL at most; what is 'b'?"),
        (["top", "localhost"], "inferpool top: what is 'localhost'? A service is named by --url"),
        (["version", "torch"], "inferpool version: what is 'torch'?"),
        (["serve", "--port"], "inferpool serve: argument --port: expected one argument"),
        (["--port", "1", "serve"], "inferpool: "),
        (["--nope"], "inferpool: "),
    ],
)
def test_wrong_command_line_is_an_error_with_the_nearest_word(command, args, message):
    done = command(*args)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_help_has_examples_and_names_every_flag(command):
    done = command("--help")
    assert done.returncode == 0
    assert "inferpool serve torchvision:resnet50" in done.stdout
    done = command("serve", "--help")
    for flag in ("--host", "--port", "--replicas", "--devices", "--config", "--weights"):
        assert flag in done.stdout
    assert command().returncode == 2


def test_version_names_torch_without_importing_it(command):
    for args in (["version"], ["--version"]):
        done = command(*args)
        assert done.returncode == 0
        names = [line.split()[0] for line in done.stdout.splitlines()]
        assert names == ["inferpool", "Python", "torch", "torchvision"]


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("config | true", 1, ""),
        ("config > /dev/full", 1, _FULL),
        ("--help > /dev/full", 1, _FULL),
        ("config >&-", 0, ""),
    ],
)
def test_unwritable_output_gets_no_traceback(tmp_path, line, status, says):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m inferpool {line}"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.strip()) == (status, says)


@pytest.mark.parametrize(
    ("verb", "late"),
    [
        ("config", "inferpool.service.settings.loader"),
        ("serve", "uvicorn"),
        ("doctor", "inferpool.service.tools.doctor.diagnosis"),
    ],
)
def test_ctrl_c_during_the_imports_ends_the_command_silently(tmp_path, verb, late):
    # The import of one module announces itself, and then takes for ever.
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import pathlib, sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == {late!r}:
            pathlib.Path("importing").touch()
            time.sleep(600)
sys.meta_path.insert(0, Slow())
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "inferpool", verb, "echo"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "importing").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # waits until no process holds its stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("port", "port"),
        ("replicas", "models.NAME.replicas"),
        ("models.resnet.replicas", "models.NAME.replicas"),
        ("INFERPOOL_MAX_JSON_BYTES", "max_json_bytes"),
        ("INFERPOOL_MODELS__RESNET__CREDIT", "models.NAME.credit"),
    ],
)
def test_one_setting_is_described_by_any_of_its_names(command, key: str, named: str):
    done = command("config", "--describe", key, "--json")
    assert [each["name"] for each in json.loads(done.stdout)] == [named]


CLIENT_ONLY = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from inferpool.service.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
_SERVER_PACKAGES = (
    *("torch", "torchvision", "numpy", "pydantic", "fastapi", "starlette", "uvicorn", "uvloop"),
    *("msgspec", "psutil", "PIL", "rich", "pynvml", "prometheus_client", "multipart", "plotly"),
)


@pytest.mark.measures
def test_client_only_installation_has_its_verbs_and_names_missing_packages():
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        code = CLIENT_ONLY % (_SERVER_PACKAGES,)
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("inferpool ")
    assert run("predict", "--help").returncode == run("jobs", "--help").returncode == 0
    done = run("predict", "--text", "x", "--url", "http://127.0.0.1:9", "--timeout-s", "0.2")
    assert "is a service running at http://127.0.0.1:9?" in done.stderr
    for verb in ("serve", "config", "doctor", "tune", "chaos"):
        done = run(verb)
        assert done.returncode == 1
        assert " is not installed. Without it, only version, predict and jobs work" in done.stderr


def test_every_flag_of_a_setting_sets_it():
    shown = {name for flags in _SETTINGS_FLAGS.values() for name in flags}
    assert shown - {"config"} == {flag.removeprefix("--") for flag in FLAGS.values()}
