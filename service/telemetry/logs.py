"""Log lines, for people on a terminal or as JSON, written by a thread of the front end.

Logging only puts a record on a bounded queue. If nobody reads our output, log lines are lost (and
counted), but the event loop never waits.
"""

import asyncio
import atexit
import contextlib
import copy
import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from logging import Formatter, Handler, LogRecord
from typing import Literal, TextIO

from inferpool.service.client.texts import escape

MAX_QUEUED = 10_000
"""Lines that wait for a slow reader; about 10 MB at worst."""
_MAX_BATCH = 256
"""Lines joined into one write."""
_CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits if the reader is slow or gone."""
_UVICORN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_QUIET_LOGGERS = ("alembic",)
"""Loggers of libraries that log every step."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn's message again, with escape sequences
}
_ID_KEYS = ("request_id", "trace_id", "span_id")
_FIRST_JSON_KEYS = ("time", "level", "logger", "message", *_ID_KEYS, "exception")

_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""The characters that `escape` replaces and JSON does not escape itself."""

_COLORS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
"""Terminal attributes by level (ECMA-48, Select Graphic Rendition)."""

_THROTTLE_PERIOD_S = 1.0


class Logs:
    """Passes all log records of the process to the thread that writes them. See `configure`."""

    def __init__(
        self, formatter: Formatter, level: int, stream: TextIO, close_timeout_s: float
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self.is_human = isinstance(formatter, HumanFormatter)
        self._level = level
        self._writer = _Writer(formatter, stream)
        self._handler = _QueueHandler(self._writer)
        self._undo: list[Callable[[], None]] = []

    @property
    def num_dropped(self) -> int:
        """Lines lost because nobody read them in time."""
        return self._writer.num_dropped

    def write(self, text: str) -> None:
        """Write text as it is, in its turn among the log lines; never blocks."""
        self._writer.put(text)

    def start(self) -> None:
        """Install itself as the handler of the root logger and uvicorn's loggers."""
        root = logging.getLogger()
        level = root.level
        root.addHandler(self._handler)
        root.setLevel(self._level)
        self._undo += [lambda: root.removeHandler(self._handler), lambda: root.setLevel(level)]
        for name in _UVICORN_LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        for name in _QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.captureWarnings(True)
        self._undo.append(lambda: logging.captureWarnings(False))
        atexit.register(self.close)
        self._undo.append(lambda: atexit.unregister(self.close))
        self._writer.start()

    def close(self) -> None:
        """Write what waits, for `close_timeout_s` at most, and release the loggers."""
        while self._undo:
            self._undo.pop()()
        self._writer.stop(self._close_timeout_s)


def configure(
    format: Literal["auto", "human", "json"] = "auto",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    is_colored: bool | None = None,
    close_timeout_s: float = _CLOSE_TIMEOUT_S,
) -> Logs:
    """Send every log record of this process to a stream.

    Args:
        format: "auto" is "human" on a terminal and "json" elsewhere.
        level: The least severe level to write.
        stream: By default stderr. If it has a descriptor, that is written to directly.
        is_colored: Use colours; by default on a terminal.
        close_timeout_s: How long `close` waits if the reader is slow or gone.

    Returns:
        The object to close at the end. The exit of the interpreter closes it too.
    """
    stream = sys.stderr if stream is None else stream
    formatter: Formatter
    if is_json(format, stream):
        formatter = JsonFormatter()
    else:
        formatter = HumanFormatter(is_colored=stream.isatty() if is_colored is None else is_colored)
    number = logging.getLevelNamesMapping()[level.upper()]
    logs = Logs(formatter, number, stream, close_timeout_s)
    logs.start()
    return logs


def is_json(format: Literal["auto", "human", "json"], stream: TextIO) -> bool:
    """Return whether log lines to a stream are JSON."""
    return format == "json" or (format == "auto" and not stream.isatty())


class LogThrottle:
    """Allows a few log lines a second and counts the rest. Used by the event loop alone."""

    def __init__(self, write_rest: Callable[[int], None], *, most: int = 1) -> None:
        """Start with none written.

        Args:
            write_rest: Called at the end of a second with the number left out, if any.
            most: Lines that may be written in a second.
        """
        self._write_rest = write_rest
        self._most = most
        self._num = 0
        self._timer: asyncio.TimerHandle | None = None

    def may_write(self) -> bool:
        """Count a line, and return whether it may be written."""
        if self._timer is None:
            self._num = 0
            self._timer = asyncio.get_running_loop().call_later(_THROTTLE_PERIOD_S, self._end)
        self._num += 1
        return self._num <= self._most

    def _end(self) -> None:
        self._timer = None
        if self._num > self._most:
            self._write_rest(self._num - self._most)


class JsonFormatter(Formatter):
    """One JSON object per record: time (RFC 3339, UTC), level, logger, message, then the rest."""

    def format(self, record: LogRecord) -> str:
        """Return a record on one line."""
        fields: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = _extra(record)
        fields.update({name: extra.pop(name) for name in _ID_KEYS if name in extra})
        for name, value in extra.items():
            fields[f"{name}_" if name in _FIRST_JSON_KEYS else name] = value
        if text := _exception(record):
            fields["exception"] = text
        return _UNSAFE_IN_JSON.sub(_escaped_for_json, _json(fields))


class HumanFormatter(Formatter):
    """A line with local time, level, logger, message and extra fields; tracebacks are indented."""

    def __init__(self, *, is_colored: bool) -> None:
        super().__init__()
        self._is_colored = is_colored

    def format(self, record: LogRecord) -> str:
        """Return a record on one line, and its traceback on further ones."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(f" {name}={_plain(value)}" for name, value in _extra(record).items())
        level = self._paint(f"{record.levelname:<7}", _COLORS.get(record.levelname, "0"))
        head = f"{clock}.{_milliseconds(record.created):03d}"
        line = (
            f"{self._paint(head, '2')} {level} {self._paint(record.name, '36')}: "
            f"{escape(record.getMessage())}{self._paint(extra, '2') if extra else ''}"
        )
        if text := _exception(record):
            # Indented, so that no line of an exception's text can pass for a record.
            line += "".join(f"\n    {escape(each)}" for each in text.splitlines())
        return line

    def _paint(self, text: str, attributes: str) -> str:
        return f"\x1b[{attributes}m{text}\x1b[0m" if self._is_colored else text


class _QueueHandler(Handler):
    """Freezes a record in the thread that logs it, and passes it on."""

    def __init__(self, writer: "_Writer") -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: LogRecord) -> None:
        try:
            self._writer.put(_frozen(record))
        except Exception:
            self.handleError(record)


class _Writer:
    """Formats and writes in a thread. `put` may be called from any thread."""

    def __init__(self, formatter: Formatter, stream: TextIO) -> None:
        self.num_dropped = 0
        self._dropping = threading.Lock()
        self._formatter = formatter
        self._sink = _sink(stream)
        self._queue: queue.Queue[LogRecord | str | None] = queue.Queue(MAX_QUEUED)
        # A daemon, since a write to a reader that has stopped may never return.
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, entry: LogRecord | str) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._drop(1)

    def stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._give_up()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _give_up(self) -> None:
        """Mark the thread to end if its write ever returns."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
                self._drop(1)
        self._queue.put(None)

    def _run(self) -> None:
        num_reported = 0
        while True:
            entries = self._take()
            text = "".join(self._text(entry) for entry in entries if entry is not None)
            if (num_dropped := self.num_dropped) > num_reported:
                text += self._text(_loss(num_dropped - num_reported))
                num_reported = num_dropped
            try:
                self._sink.write(text.encode("utf-8", "backslashreplace"))
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                self._drop(sum(entry is not None for entry in entries))
            if None in entries:
                self._sink.close()
                return

    def _drop(self, num_lines: int) -> None:
        with self._dropping:
            self.num_dropped += num_lines

    def _take(self) -> Sequence[LogRecord | str | None]:
        """Return what waits, up to one write's worth, and at least one entry."""
        entries = [self._queue.get()]
        while len(entries) < _MAX_BATCH and entries[-1] is not None:
            try:
                entries.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return entries

    def _text(self, entry: LogRecord | str) -> str:
        if isinstance(entry, str):
            return entry
        try:
            return self._formatter.format(entry) + "\n"
        except Exception as error:  # a record must not end the thread that writes all others
            return f"a log record of {entry.name} cannot be formatted: {escape(repr(error))}\n"


class _Stream:
    """Writes bytes to a stream that has no file behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream.write(data.decode("utf-8"))
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open, since it is not ours."""


class _Descriptor:
    """Writes bytes to a copy of a stream's descriptor.

    A thread that is stuck inside `stream.write` holds the stream's lock, and the interpreter needs
    that lock in order to exit.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._descriptor = os.dup(stream.fileno())
        self._writable = select.poll()
        self._writable.register(self._descriptor, select.POLLOUT)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the terminal or pipe non-blocking
                self._writable.poll()

    def close(self) -> None:
        os.close(self._descriptor)


def _sink(stream: TextIO) -> _Stream | _Descriptor:
    try:
        return _Descriptor(stream)
    except (AttributeError, OSError):
        return _Stream(stream)


def _frozen(record: LogRecord) -> LogRecord:
    """Return a copy that does not depend on anything that may change before it is formatted."""
    frozen = copy.copy(record)
    try:
        frozen.msg = record.getMessage()
    except Exception:  # raised by the arguments' methods; the caller can do nothing about it
        frozen.msg = f"{record.msg} (which does not fit its arguments: {record.args!r})"
    frozen.args = None
    if record.exc_info and not record.exc_text:
        frozen.exc_text = Formatter().formatException(record.exc_info)
    frozen.exc_info = None
    return frozen


def _loss(num_lines: int) -> LogRecord:
    record = logging.makeLogRecord({"name": __name__, "levelname": "WARNING"})
    record.msg = f"{num_lines} log lines were dropped: nobody read them in time"
    return record


def _extra(record: LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _exception(record: LogRecord) -> str:
    parts = (record.exc_text, record.stack_info)
    return "\n".join(part for part in parts if part)


def _utc(created: float) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{seconds}.{_milliseconds(created):03d}Z"


def _milliseconds(created: float) -> int:
    return int(created % 1 * 1000)


def _json(fields: dict[str, object]) -> str:
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):  # odd keys, NaN, or a circular reference
        plain = {
            name: value if isinstance(value, str) else repr(value) for name, value in fields.items()
        }
        return json.dumps(plain, ensure_ascii=False)


def _plain(value: object) -> str:
    text = escape(str(value))
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s"=]', text) or not text else text


def _escaped_for_json(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
