"""The verb `inferpool predict`."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inferpool.service.cli.main import run
from inferpool.service.client.cli.access import key_of
from inferpool.service.client.usage import FlagError
from tests.models.items import jpeg


def test_predictions_are_printed_in_order(service, tmp_path: Path, capsys):
    for name in ("chelsea", "coffee"):
        (tmp_path / name).write_bytes(jpeg(name))
    files = [str(tmp_path / name) for name in ("chelsea", "coffee", "missing")]
    address = service.url.removeprefix("http://")
    assert run(["predict", *files, "--url", address, "--model", "classes"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == files[:2]
    assert all("label " in line for line in lines)
    assert "missing" in err
    assert "Traceback" not in err


def test_json_has_predictions_timing_and_errors(service, capsys):
    arguments = ["predict", "--text", "one", "--text", "two", "--url", service.url, "--json"]
    assert run([*arguments, "--model", "echo"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["input"], first["predictions"]) == ("one", ["one"])
    assert second["predictions"] == ["two"]
    assert first["timing"]["total_s"] > 0
    assert run([*arguments, "--model", "fault", "--parameter", "fail=1"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[0])
    assert document["error"]["code"] == "invalid_input"
    assert document["error"]["status"] == 422


def test_a_version_is_asked_for_and_json_tells_which_one_answered(service, capsys):
    arguments = ["predict", "--text", "one", "--url", service.url, "--json", "--model", "echo"]
    assert run([*arguments, "--model-version", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert run([*arguments, "--model-version", "9"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "unknown_model"
    assert "no version '9' loaded; there are: 1" in error["message"]


def test_standard_input_is_an_input(service, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"12345678 and more")))
    assert run(["predict", "-", "--url", service.url, "--model", "echo"]) == 0
    assert capsys.readouterr().out == '-: {"num_bytes": 17, "head": "3132333435363738"}\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a file"),
        (["x", "--url", "ftp://x"], "is not the address"),
        (["x", "--url", "http://h\x01"], "is not the address"),
        (["x", "--url", "http://two hosts"], "is not the address"),
        (["x", "--url", "http://me:secret@h:x"], "port is not a number"),
        (["x", "--url", "secret@h:x"], "port is not a number"),
        (["x", "--url", "sec/ret@h?x"], "has a query"),
        (["x", "--url", "sec'ret@h:x"], "is not the address"),
        (["x", "--url", "http://me:secret@\N{SNOWMAN}.example"], "host name is not valid"),
        (["x", "--url", "http://me:secret@xn--a"], "host name is not valid"),
        (["x", "--url", "http://me:sec/ret@h"], "%2F"),
        (["http://127.0.0.1:9", "x"], "--url http://127.0.0.1:9"),
        (["ftp://me:secret@h/x.jpg"], "'ftp://h/x.jpg' is not a file; download it first"),
        (["x", "--parameter", "k"], "not NAME=VALUE"),
        (["x", "--timeout-s", "0"], "more than 0"),
        (["x", "--key-file", "nowhere"], "nowhere"),
        (["x", "--ca-file", "nowhere"], "nowhere"),
    ],
)
def test_wrong_flags_are_named_and_exit_2(arguments, message, capsys):
    assert run(["predict", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "ret" not in said
    assert said.count("\n") == 1


def test_missing_service_is_an_error_with_advice(capsys):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with_password = url.replace("//", "//me:secret@")
    ask = ["predict", "--text", "x", "--text", "y", "--url", with_password, "--timeout-s", "5"]
    assert run(ask) == 1
    waiting, *failures, cure = capsys.readouterr().err.splitlines()
    assert f"no answer from {url}" in waiting
    assert waiting.endswith("; trying again, up to 7 times within 5 s")
    assert [each.partition(": no answer")[0] for each in failures] == [
        "inferpool predict: x",
        "inferpool predict: y",
    ]
    assert f"is a service running at {url}? `inferpool serve` starts one" in cure


def test_ctrl_c_does_not_wait_for_an_answer():
    command = [sys.executable, "-m", "inferpool", "predict", "--text", "x", "--timeout-s", "60"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        asking = subprocess.Popen([*command, "--url", address])
        connection, _ = silent.accept()
        with connection:
            asking.send_signal(signal.SIGINT)
            assert asking.wait(120) == 130


def test_names_of_any_alphabet_are_printed_whatever_the_locale(service, tmp_path: Path):
    (tmp_path / "é.txt").write_text("hi")
    command = [sys.executable, "-m", "inferpool", "predict", str(tmp_path / "é.txt")]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*command, "--url", service.url, "--model", "echo"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith('\\xe9.txt: "hi"\n')


def test_a_key_may_come_from_a_pipe_but_is_not_awaited_forever(tmp_path: Path):
    pipe = tmp_path / "key"
    os.mkfifo(pipe)
    with pytest.raises(FlagError, match=r"nobody wrote all of it within 0\.2 s"):
        key_of(pipe, {}, "", wait_s=0.2)
    descriptor = os.open(pipe, os.O_RDWR)  # a writer that never ends
    os.write(descriptor, b"0123456789abcdef")
    with pytest.raises(FlagError, match="nobody wrote all of it"):
        key_of(pipe, {}, "", wait_s=0.2)
    os.close(descriptor)
    with subprocess.Popen(["sh", "-c", f"echo 0123456789abcdef > {pipe}"]):
        assert key_of(pipe, {}, "") == "0123456789abcdef"
    with pytest.raises(FlagError, match="it is a folder, not a file"):
        key_of(tmp_path, {}, "")


def test_parts_of_a_stream_are_printed_one_by_one(service, tmp_path: Path, capsys):
    files = []
    for name, deed in (("good", "ok"), ("bad", "raise")):
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps({"n": 4, "parts": 3, "do": deed, "at": 2}))
    ask = ["predict", "--url", service.url, "--model", "counts"]
    assert run([*ask, files[0]]) == 0
    assert capsys.readouterr().out == "".join(f"{files[0]}: {part}\n" for part in (4, 5, 6))
    assert run([*ask, files[1]]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{files[1]}: 4\n{files[1]}: 5\n"
    assert "model_error" in printed.err
    assert run([*ask, files[0], files[0]]) == 0
    assert capsys.readouterr().out == f"{files[0]}: [4, 5, 6]\n" * 2
    assert run([*ask, files[1], files[1]]) == 1
    assert capsys.readouterr().out == ""
