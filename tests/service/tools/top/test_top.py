"""`inferpool top` against a feed that does as it is told, on a pipe and on a terminal."""

import json
import signal

import pytest

from inferpool.service.cli.main import run
from tests.pty_screen import on_terminal
from tests.service.tools.top.states import NOW, Stage, answers, state, tells

KEY = "a-key-for-metrics-0123456789"


def refused(status: int, detail: str) -> bytes:
    return json.dumps({"status": status, "detail": detail}).encode()


def test_a_pipe_gets_one_moment_as_text(capsys):
    with Stage(tells(state(reason="a\u2028b"), stays_s=5)).listening() as url:
        assert run(["top", "--url", url.removeprefix("http://")]) == 0
    out = capsys.readouterr().out
    assert "throughput 1,234/s" in out
    assert "\x1b" not in out


def test_json_is_one_event_without_its_past(capsys):
    past = [{"time": NOW - 1, "models": {}}]
    with Stage(tells(state(history=past))).listening() as url:
        assert run(["top", "--url", url, "--json"]) == 0
    event = json.loads(capsys.readouterr().out)
    assert event["models"]["resnet"]["queue_depth"] == 7
    assert "history" not in event


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (answers(401, refused(401, "this key is not known here")), "--key-file PATH"),
        (answers(403, refused(403, "this key is for something else")), "for something else"),
        (answers(404), "is no inferpool"),
        (answers(200, b"<html>", "text/html"), "is no inferpool"),
        (answers(503, refused(503, "64 clients listen already")), "64 clients listen already"),
        (tells(b'{"time": "noon"}'), "is not what this version understands"),
        (tells(), "shuts down"),
    ],
    ids=["no key", "wrong key", "no route", "a page", "too many", "other events", "no events"],
)
def test_what_is_wrong_is_said_with_what_to_do(script, says, capsys):
    with Stage(script).listening() as url:
        assert run(["top", "--url", url]) == 1
    assert says in capsys.readouterr().err


def test_nobody_there_is_said_with_what_to_do(capsys):
    with Stage(answers(404)).listening() as url:
        pass  # it does not listen any more
    assert run(["top", "--url", url.replace("//", "//me:secret@")]) == 1
    said = capsys.readouterr().err
    assert "inferpool serve" in said
    assert "secret" not in said


def test_https_of_a_service_that_speaks_http_is_said(capsys):
    with Stage(answers(404)).listening() as url:
        assert run(["top", "--url", url.replace("http://", "https://")]) == 1
    assert "is it http?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--url", "ftp://x"], ["--url", "http://"], ["--url", "x:port"], ["--key-file", "/no"]],
)
def test_arguments_that_make_no_sense_are_refused(arguments, capsys):
    assert run(["top", *arguments]) == 2
    assert capsys.readouterr().err.startswith("inferpool top: ")


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(f"# of the team\n{KEY}\nanother-key-0123456789\n")
    stage = Stage(tells(state()))
    with stage.listening() as url:
        assert run(["top", "--url", url, "--key-file", str(tmp_path / "keys")]) == 0
        monkeypatch.setenv("INFERPOOL_METRICS_KEYS", KEY)
        assert run(["top", "--url", url]) == 0
    sent = [
        headers["authorization" if "authorization" in headers else "Authorization"]
        for headers in stage.headers
    ]
    assert sent == [f"Bearer {KEY}"] * 2


def test_a_terminal_is_drawn_on_resized_and_given_back():
    first = state(others=("bert",))
    stage = Stage(
        tells(first), tells(state(others=("bert",), queue_depth=99, at=NOW + 9), stays_s=60)
    )
    with stage.listening() as url, on_terminal("top", "--url", url) as screen:
        assert screen.wait_for("99 of 1,024 waiting"), "it has connected again"
        assert b"Feed lost, connecting again" in screen.written
        screen.press("2")
        screen.wait_for("bert ready")
        screen.press("\x1b[C?")
        screen.wait_for("the model before")
        screen.press("?p")
        assert "resnet ready" in screen.wait_for("paused at")
        screen.resize(40, 12)
        assert max(map(len, screen.wait_for("99 of 1,024, 9 in flight").splitlines())) <= 40
        screen.press("q")
        assert screen.leave() == 0
        assert b"\x1b[?1049l" in screen.written, "the screen from before is back"
        assert screen.attributes() == screen.before


def test_a_service_that_wants_a_key_after_its_restart_ends_the_show_with_the_reason():
    stage = Stage(tells(state()), answers(401))
    with stage.listening() as url, on_terminal("top", "--url", url) as screen:
        assert screen.leave() == 1
        assert b"wants a key for metrics" in screen.written.rpartition(b"\x1b[?1049l")[2]


def test_ctrl_c_leaves_with_its_status():
    with (
        Stage(tells(state(), stays_s=60)).listening() as url,
        on_terminal("top", "--url", url) as screen,
    ):
        screen.wait_for("throughput")
        screen.press("\x03")
        assert screen.leave() == 128 + signal.SIGINT
