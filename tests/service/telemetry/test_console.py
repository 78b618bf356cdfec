import io
import json
import re

import pytest

from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.logs import configure
from tests.service.telemetry.test_logs import FakeTerminal

DEVICES = ["cuda:0 (NVIDIA [H100], 80 GiB)", "16 CPU cores"]
PLAN = [("resnet/0", "cuda:0"), ("efficientnet_lite0/0", "cpu")]


TRY = "curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict"


def shown(stream: io.StringIO, format="auto", is_colored=True) -> str:
    """Return the output of the whole life of a service."""
    logs = configure(format, "info", stream, is_colored=is_colored)
    console = Console(logs, stream, is_colored=is_colored)
    console.started({"settings": "inferpool.toml"}, DEVICES, PLAN)
    console.progress("resnet/0", "loading weights")
    console.progress("resnet/0", "loading weights")
    console.ready("resnet/0", 0.42)
    console.failed("efficientnet_lite0/0", "no such file [bold]\n\x1b[2J")
    console.failed("resnet/0", "no such file [bold]\n\x1b[2J")
    console.serving("http://127.0.0.1:8000", ["resnet", "efficientnet_lite0"], [("try", TRY)])
    console.serving("http://127.0.0.1:8000", ["text"], [("ask", "POST")], ["a", "b"])
    console.joined("a", ("try", "curl a"), ["b"])
    console.joined("b", ("try", "curl b"), [])
    console.stopping("SIGTERM")
    console.stopped()
    logs.close()
    return stream.getvalue()


def test_workers_that_come_later_are_shown_with_their_placement_until_they_leave(caplog):
    console = Console(None)
    caplog.set_level("INFO")
    console.planned([("m/2/0", "cuda:1")])
    console.ready("m/2/0", 1.0)
    assert "m/2/0 on cuda:1: ready in 1.0 s" in caplog.text
    console.left(["m/2/0"])
    assert (console._placements, console._known) == ({}, set())


def test_pages_that_are_closed_are_not_shown(caplog):
    caplog.set_level("INFO")
    Console(None).serving("http://0.0.0.0:80", ["a"], is_closed=True)
    assert "health: http://0.0.0.0:80/health/ready" in caplog.text
    assert not {"docs", "page", "metrics"} & {*re.findall(r"\w+", caplog.text)}


def test_a_terminal_gets_lines_for_people():
    text = shown(FakeTerminal(), is_colored=False)
    text = re.sub(r"\x1b\[\d*m", "", text)
    for line in (
        "  devices   cuda:0 (NVIDIA [H100], 80 GiB)",
        "  workers   resnet/0 on cuda:0",
        "  resnet/0              cuda:0  ready in 0.4 s",
        r"  efficientnet_lite0/0  cpu     failed: no such file [bold]\n\x1b[2J",
        "  resnet/0              cuda:0  failed, as efficientnet_lite0/0 did",
        "Serving resnet, efficientnet_lite0 at http://127.0.0.1:8000",
        "  page     http://127.0.0.1:8000/",
        "  docs     http://127.0.0.1:8000/docs",
        "  health   http://127.0.0.1:8000/health",
        "  metrics  http://127.0.0.1:8000/metrics",
        "Serving text at http://127.0.0.1:8000",
        "  not yet  a, b",
        "  ask      POST",
        "Serving a too (not yet: b)",
        "  try  curl a",
        "Serving b too",
        "Stopping (SIGTERM): finishing what was accepted",
    ):
        assert line in text.splitlines()
    assert text.count("loading weights") == 1


def test_the_command_to_try_is_on_one_line_however_narrow_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown(FakeTerminal())).splitlines()
    (line,) = (line for line in lines if "photo.jpg" in line)
    assert line.endswith("http://127.0.0.1:8000/predict")


@pytest.mark.parametrize("stream", [io.StringIO(), FakeTerminal()])
def test_other_streams_get_the_same_facts_as_log_records(stream):
    records = [json.loads(line) for line in shown(stream, "json").splitlines()]
    messages = [record["message"] for record in records]
    for message in (
        "starting (settings: inferpool.toml)",
        "devices: cuda:0 (NVIDIA [H100], 80 GiB); 16 CPU cores",
        "worker resnet/0 on cuda:0",
        "resnet/0 on cuda:0: loading weights",
        "resnet/0 on cuda:0: ready in 0.4 s",
        "efficientnet_lite0/0 on cpu: failed: no such file [bold]\n\x1b[2J",
        "serving resnet, efficientnet_lite0 at http://127.0.0.1:8000",
        "serving text at http://127.0.0.1:8000",
        "not ready yet: a, b",
        "serving a too (not yet: b)",
        "try: curl a",
        "serving b too",
        "stopping: SIGTERM",
        "stopped",
    ):
        assert message in messages
    assert {record["level"] for record in records if "failed" in record["message"]} == {"error"}


def test_a_restart_does_not_show_its_stages_again():
    for stream in (io.StringIO(), FakeTerminal()):
        logs = configure("auto", "info", stream, is_colored=False)
        console = Console(logs, stream, is_colored=False)
        for _ in range(2):
            for stage in ("loading weights", "warming up"):
                console.progress("resnet/0", stage)
            console.ready("resnet/0", 0.4)
        logs.close()
        text = stream.getvalue()
        assert (text.count("loading weights"), text.count("warming up")) == (1, 1)
        assert text.count("ready in") == 2


def test_a_failure_is_shown_again_after_another_try():
    stream = io.StringIO()
    logs = configure("json", "info", stream)
    console = Console(logs, stream)
    console.failed("resnet/0", "no memory")
    console.failed("resnet/1", "no memory")
    console.progress("resnet/0", "loading")  # somebody has asked for it
    console.failed("resnet/1", "no memory")
    logs.close()
    said = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert [text for text in said if "failed" in text] == [
        "resnet/0: failed: no memory",
        "resnet/1: failed, as resnet/0 did",
        "resnet/1: failed: no memory",
    ]
