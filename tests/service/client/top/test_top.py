"""`inferpool top` with a made-up feed, on a pipe and on a terminal."""

import json
import signal
from http.server import BaseHTTPRequestHandler

import pytest

from inferpool.service.cli.main import run
from tests.pty_screen import on_terminal
from tests.service.client.top.states import NOW, answers, event, feed, sends

KEY = "a-key-for-metrics-0123456789"


def refusal(detail: str) -> bytes:
    return json.dumps({"detail": detail}).encode()


def test_pipe_gets_the_current_state_as_text_or_as_one_event_without_its_past(capsys):
    state = event(history=[{"time": NOW - 1, "models": {}}], model={"reason": "a\u2028b"})
    with feed(sends(state, is_endless=True)) as url:
        assert run(["top", "--url", url.removeprefix("http://")]) == 0
        out = capsys.readouterr().out
        assert run(["top", "--url", url, "--json"]) == 0
    assert "throughput 1,234/s" in out
    assert "\x1b" not in out
    told = json.loads(capsys.readouterr().out)
    assert told["models"]["resnet"]["queue_depth"] == 7
    assert "history" not in told


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (answers(401, refusal("this key is not known here")), "--key-file PATH"),
        (answers(403, refusal("this key is for something else")), "for something else"),
        (answers(404), "is no inferpool"),
        (answers(200, b"<html>", "text/html"), "is no inferpool"),
        (answers(503, refusal("64 clients listen already")), "64 clients listen already"),
        (sends(b'{"time": "noon"}'), "this version cannot read the feed"),
        (sends(), "shuts down"),
    ],
    ids=["no key", "wrong key", "no route", "a page", "too many", "other events", "no events"],
)
def test_problem_of_the_feed_is_an_error_with_advice(script, says, capsys):
    with feed(script) as url:
        assert run(["top", "--url", url]) == 1
    assert says in capsys.readouterr().err


def test_missing_service_and_https_to_an_http_service_are_errors_with_advice(capsys):
    with feed(answers(404)) as url:
        assert run(["top", "--url", url.replace("http://", "https://")]) == 1
    assert "is it http?" in capsys.readouterr().err
    assert run(["top", "--url", url, "--ca-file", "nowhere"]) == 1
    assert "top: --ca-file: nowhere" in capsys.readouterr().err
    assert run(["top", "--url", url.replace("//", "//me:secret@")]) == 1  # it no longer listens
    said = capsys.readouterr().err
    assert "inferpool serve" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    "flags", ["--url ftp://x", "--url http://", "--url x:port", "--key-file /"]
)
def test_wrong_arguments_are_refused(flags, capsys):
    assert run(["top", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith("inferpool top: ")


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(f"# of the team\n{KEY}\nanother-key-0123456789\n")
    keys = []

    def script(call: BaseHTTPRequestHandler) -> None:
        keys.append(call.headers["authorization"])
        sends(event())(call)

    with feed(script) as url:
        assert run(["top", "--url", url, "--key-file", str(tmp_path / "keys")]) == 0
        monkeypatch.setenv("INFERPOOL_METRICS_KEYS", KEY)
        assert run(["top", "--url", url]) == 0
    assert keys == [f"Bearer {KEY}"] * 2


def test_terminal_is_drawn_on_resized_and_restored():
    names = ("resnet", "bert")
    second = event(names=names, queue_depth=99, at=NOW + 9)
    scripts = (sends(event(names=names)), sends(second, is_endless=True))
    with feed(*scripts) as url, on_terminal("top", "--url", url) as screen:
        assert screen.wait_for("99 of 1,024 waiting"), "it has connected again"
        assert b"Feed lost, connecting again" in screen.written
        screen.press("2")
        screen.wait_for("bert ready")
        screen.press("\x1b[C?")
        screen.wait_for("the previous model")
        screen.press("?p")
        assert "resnet ready" in screen.wait_for("paused at")
        screen.resize(40, 12)
        assert max(map(len, screen.wait_for("99 of 1,024, 9 in flight").splitlines())) <= 40
        screen.press("q")
        assert screen.leave() == 0
        assert b"\x1b[?1049l" in screen.written, "the screen from before is back"
        assert screen.attributes() == screen.before


def test_service_that_wants_a_key_after_its_restart_ends_top_with_the_reason():
    with feed(sends(event()), answers(401)) as url, on_terminal("top", "--url", url) as screen:
        assert screen.leave() == 1
        assert b"wants a key for metrics" in screen.written.rpartition(b"\x1b[?1049l")[2]


def test_ctrl_c_ends_top_with_its_status():
    script = sends(event(), is_endless=True)
    with feed(script) as url, on_terminal("top", "--url", url) as screen:
        screen.wait_for("throughput")
        screen.press("\x03")
        assert screen.leave() == 128 + signal.SIGINT
