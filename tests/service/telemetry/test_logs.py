import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import TextIO

import pytest

from inferpool.service.client.texts import escape
from inferpool.service.telemetry.logs import (
    MAX_QUEUED,
    HumanFormatter,
    JsonFormatter,
    Logs,
    LogThrottle,
    configure,
)

ROOT = Path(__file__).parents[3]
NASTY = "a\nb\r\x00\x1b[31m\x85\u2028\u202e\udcff\t"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def configured(format, level: str, stream: TextIO, close_timeout_s: float = 100) -> Logs:
    return configure(format, level, stream, close_timeout_s=close_timeout_s)


def logged(log, format="json", stream: io.StringIO | None = None, level="debug") -> list[str]:
    """The lines that a function's logging writes."""
    stream = stream or io.StringIO()
    logs = configured(format, level, stream)
    try:
        log(logging.getLogger("service.test"))
    finally:
        logs.close()
    return stream.getvalue().split("\n")[:-1]


def test_a_json_line_has_time_level_logger_message_and_extra_fields():
    extra = {"request_id": "r", "n": 3}
    (line,) = logged(lambda log: log.info("%d of %d", 1, 2, extra=extra))
    record = json.loads(line)
    assert list(record) == ["time", "level", "logger", "message", *extra]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert record == {"level": "info", "logger": "service.test", "message": "1 of 2", **extra}
    made = logging.makeLogRecord({"created": 1.9996, "msg": "x"})
    assert json.loads(JsonFormatter().format(made))["time"] == "1970-01-01T00:00:01.999Z"


def test_nothing_in_a_record_can_make_a_second_line():
    def log(log):
        log.info(NASTY, extra={"request_id": NASTY, "path": NASTY})

    (line,) = logged(log)
    record = json.loads(line)
    assert record["message"] == record["request_id"] == record["path"] == NASTY
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u202e]", line)
    (line,) = logged(log, "human")
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u202e]", line)
    assert r"a\nb\r\x00\x1b[31m\x85\u2028\u202e\udcff\t" in line
    assert escape("größe 東京 🙂") == "größe 東京 🙂"


def test_the_text_of_an_exception_cannot_pass_for_a_record():
    def log(log):
        try:
            raise ValueError("x\n12:00:00.000 INFO    root: forged\x1b[2J")
        except ValueError:
            log.exception("failed")

    (line,) = logged(log)
    record = json.loads(line)
    assert record["exception"].startswith("Traceback")
    assert "forged" in record["exception"]
    first, *rest = logged(log, "human")
    assert first.endswith("service.test: failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert not any("\x1b" in line for line in rest)


def test_values_that_json_does_not_know_are_written_as_text():
    circle: dict[str, object] = {}
    circle["self"] = circle
    values = [Path("/x"), float("nan"), {(1, 2): 3}, circle, b"bytes", {1, 2}]

    def log(log):
        for value in values:
            log.info("x", extra={"value": value})

    lines = logged(log)
    assert len(lines) == len(values)
    for line in lines:
        assert isinstance(json.loads(line, parse_constant=pytest.fail)["value"], str)


def test_extra_fields_do_not_replace_the_fixed_ones():
    (line,) = logged(lambda log: log.info("x", extra={"level": 9, "time": 0, "exception": "e"}))
    record = json.loads(line)
    assert record["level"] == "info"
    assert (record["level_"], record["time_"], record["exception_"]) == (9, 0, "e")


def test_a_message_that_does_not_fit_its_arguments_is_still_written():
    stream = io.StringIO()
    logs = configured("json", "info", stream)
    for handler in logging.getLogger().handlers[-1:]:  # ours; pytest's would raise
        handler.handle(logging.makeLogRecord({"msg": "%d left", "args": ("x",)}))
    logs.close()
    message = json.loads(stream.getvalue())["message"]
    assert message == "%d left (which does not fit its arguments: ('x',))"


def test_a_record_is_written_as_it_was_when_it_was_logged():
    def log(log):
        value = ["before"]
        log.info("%s", value)
        value[0] = "after"

    assert json.loads(logged(log)[0])["message"] == "['before']"


def test_a_terminal_gets_colours_and_other_streams_json():
    (line,) = logged(lambda log: log.warning("hot"), "auto", FakeTerminal())
    assert "\x1b[33mWARNING\x1b[0m" in line
    (line,) = logged(lambda log: log.warning("hot"), "auto")
    assert json.loads(line)["level"] == "warning"
    (line,) = logged(lambda log: log.warning("hot"), "human")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} WARNING service\.test: hot", line)
    record = logging.makeLogRecord({"msg": "x", "name": "n", "a": 1, "b": "two words", "c": ""})
    line = HumanFormatter(is_colored=False).format(record)
    assert line.endswith('n: x a=1 b="two words" c=""')


def test_the_level_and_the_handlers_are_restored():
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    assert logged(lambda log: log.info("quiet"), level="error") == []
    assert (root.level, root.handlers) == before


def test_uvicorn_and_warnings_go_the_same_way():
    def log(_):
        logger = logging.getLogger("uvicorn.error")
        logger.setLevel(logging.NOTSET)  # a server in this process has set another, perhaps
        logger.addHandler(logging.NullHandler())
        logger.info("started", extra={"color_message": "\x1b[1mstarted"})
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", DeprecationWarning, stacklevel=1)

    first, second = (json.loads(line) for line in logged(log))
    assert first["logger"] == "uvicorn.error"
    assert "color_message" not in first
    assert re.search("DeprecationWarning:\\s+old", second["message"])  # plotly changes the form


def test_text_written_directly_keeps_its_place_among_the_records():
    stream = io.StringIO()
    logs = configured("human", "info", stream)
    for number in range(300):
        logging.getLogger("t").info("record %d", number)
        logs.write(f"text {number}\n")
    logs.close()
    lines = stream.getvalue().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"{kind} {number}" for number in range(300) for kind in ("record", "text")
    ]


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    yield reader, stream
    stream.close()
    os.close(reader)


def test_a_reader_that_stops_costs_lines_and_no_time(pipe):
    """A write that waited for the reader would never return."""
    reader, stream = pipe
    logs = configured("json", "info", stream)
    logger = logging.getLogger("flood")
    for number in range(MAX_QUEUED + 5000):
        logger.info("line %d", number)
    assert logs.num_dropped > 0

    received = bytearray()

    def read_all() -> None:
        while chunk := os.read(reader, 65536):
            received.extend(chunk)

    thread = threading.Thread(target=read_all)
    thread.start()
    logs.close()
    stream.close()
    thread.join(60)
    assert not thread.is_alive()
    messages = [json.loads(line)["message"] for line in received.splitlines()]
    losses = [message for message in messages if "log lines were dropped" in message]
    assert sum(int(loss.split()[0]) for loss in losses) == logs.num_dropped
    assert len(messages) - len(losses) + logs.num_dropped == MAX_QUEUED + 5000


def test_a_reader_that_has_gone_does_no_harm():
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    logs = configured("json", "info", stream)
    os.close(reader)
    logging.getLogger("t").info("into the void")
    logs.close()
    assert logs.num_dropped == 1
    stream.close()


def test_a_pipe_that_somebody_made_non_blocking_gets_every_line(pipe):
    reader, stream = pipe
    os.set_blocking(stream.fileno(), False)
    logs = configured("json", "info", stream)
    for number in range(3000):
        logging.getLogger("t").info("line %d", number)
    received = bytearray()
    while received.count(b"\n") < 3000:
        received.extend(os.read(reader, 65536))
    logs.close()
    assert [json.loads(line)["message"] for line in received.splitlines()] == [
        f"line {number}" for number in range(3000)
    ]


def test_the_exit_of_the_process_writes_what_waits():
    code = (
        "import logging; from inferpool.service.telemetry.logs import configure\n"
        "configure('json', close_timeout_s=100)\n"
        "for n in range(1000): logging.getLogger('t').info('line %d', n)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1000


def test_a_process_whose_output_nobody_reads_can_still_exit():
    code = (
        "import logging, sys; from inferpool.service.telemetry.logs import configure;\n"
        "logs = configure('json', 'info', sys.stdout)\n"
        "for n in range(20000): logging.getLogger('t').info('line %d', n)\n"
        "sys.exit(7)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.wait(timeout=240) == 7
    with process:
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.usefixtures("virtual_time")
async def test_few_lines_are_written_in_a_second_and_the_rest_is_counted():
    counted = asyncio.Queue[int]()
    lines = LogThrottle(counted.put_nowait, most=2)
    assert [lines.may_write() for _ in range(5)] == [True, True, False, False, False]
    assert await counted.get() == 3
    assert lines.may_write()  # the next second has begun
    await asyncio.sleep(3)
    assert counted.empty()  # nothing was left out of it
