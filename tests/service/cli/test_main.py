import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from inferpool.service.cli.main import run
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FLAGS
from inferpool.service.settings.settings import Settings
from tests.e2e.running import ROOT, until
from tests.pty_screen import on_terminal

_FULL = "inferpool: the output cannot be written: No space left on device"


@dataclass
class Done:
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Callable[..., Done]:
    """Run the command in an empty directory, and without the settings of our environment."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("INFERPOOL_"):
            monkeypatch.delenv(name)

    def call(*args: str) -> Done:
        try:
            status = run(args)
        except SystemExit as left:
            status = int(left.code or 0)
        return Done(status, *capsys.readouterr())

    return call


def test_config_shows_every_setting_with_its_origin(command, tmp_path, monkeypatch):
    monkeypatch.setenv("INFERPOOL_HOST", "::1")
    done = command("config", "--port", "9")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert rows["port"] == ["9", "flag --port"]
    assert rows["host"] == ['"::1"', "environment INFERPOOL_HOST"]
    assert rows["models.efficientnet_lite0.credit"] == ["2", "default"]
    (tmp_path / "inferpool.toml").write_text('[models.a]\nsource = "echo"\noptions = {n = 1}\n')
    table = json.loads(command("config", "--json").stdout)
    assert table["models.a.options.n"] == {"value": 1, "origin": "file inferpool.toml"}
    (tmp_path / "config.properties").write_text("job_queue_sise=3\n")
    done = command("config", "--torchserve", "config.properties")
    assert "did you mean job_queue_size?" in done.stderr
    assert command("config", "--torchserve", "").returncode == 2
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
            ["serve", "--spread"],
            "inferpool serve: --spread is gone: leave it out; the devices of a replica are those "
            "of one host",
        ),
        (
            ["serve", "--max-queue-length", "1"],
            "inferpool serve: there is no flag --max-queue-length, but a setting: "
            "`max_queue_length = ...` at the top of inferpool.toml, or the variable "
            "INFERPOOL_MAX_QUEUE_LENGTH",
        ),
        (
            ["batch", "x", "--credit", "1"],
            "inferpool batch: there is no flag --credit, but a setting: `credit = ...` under "
            "[models.NAME] in inferpool.toml, or the variable INFERPOOL_MODELS__NAME__CREDIT",
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
        ([], "usage: inferpool"),
    ],
)
def test_wrong_command_line_is_an_error_with_the_nearest_word(command, args, message):
    done = command(*args)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_help_has_examples(command):
    done = command("--help")
    assert done.returncode == 0
    assert "inferpool serve torchvision:resnet50" in done.stdout


def test_version_names_torch(command):
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
        timeout=240,
    )
    assert (done.returncode, done.stderr.strip()) == (status, says)


@pytest.mark.parametrize(
    "line",
    [
        ["serve", "echo"],
        ["serve", "net:Net"],
        ["config"],
        ["doctor"],
        ["chaos", "echo"],
        ["tune", "echo"],
        ["train", "pictures"],
        ["batch", "*", "--model", "echo"],
    ],
    ids=" ".join,
)
def test_a_deleted_folder_gets_a_sentence(tmp_path, monkeypatch, capsys, line):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(line) == 2
    assert capsys.readouterr().err.endswith(
        "the current folder was deleted; change to another one\n"
    )


@pytest.mark.parametrize(
    ("verb", "late"),
    [
        ("config", "inferpool.service.settings.loader"),
        ("serve", "uvicorn"),
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
        until((tmp_path / "importing").exists)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=240)  # waits until no process holds its stderr
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
import asyncio, contextlib, io, json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from inferpool.service.cli.main import run

own_sleep = asyncio.sleep
asyncio.sleep = lambda _: own_sleep(0)  # between the attempts
told = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                status = run(line)
            except SystemExit as left:
                status = left.code
    told.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(told))
"""
_SERVER_PACKAGES = (
    *("torch", "torchvision", "numpy", "pydantic", "fastapi", "starlette", "uvicorn", "uvloop"),
    *("msgspec", "psutil", "PIL", "rich", "pynvml", "prometheus_client", "multipart", "plotly"),
)


def test_client_only_installation_has_its_verbs_and_names_missing_packages():
    nobody = "http://127.0.0.1:9"
    lines = (
        *(["version"], ["predict", "--help"], ["jobs", "--help"]),
        ["predict", "--text", "x", "--url", nobody, "--timeout-s", "600"],
        *([verb] for verb in ("serve", "config", "doctor", "tune", "chaos")),
    )
    code = CLIENT_ONLY % (_SERVER_PACKAGES,)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    version, predict_help, jobs_help, predict, *others = json.loads(done.stdout)
    assert (version[0], version[1].split()[0], version[2]) == (0, "inferpool", "")
    assert (predict_help[0], jobs_help[0]) == (0, 0)
    assert f"is a service running at {nobody}?" in predict[2]
    for status, _, said in others:
        assert status == 1
        assert " is not installed. Without it, only version, predict and jobs work" in said
