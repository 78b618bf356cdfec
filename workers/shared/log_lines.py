"""Carries log records and printed text from a worker to the front end, which logs them."""

import io
import logging
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, TextIO

from inferpool.models.texts import described, printable, traceback_of
from inferpool.workers.shared.messages import ID_FIELDS, LogLine

_MAX_LINE_CHARS = 8192
"""Longest printed line; a longer one is logged as several."""
_MAX_PRINT_CHARS = 65_536
"""Longest text of one print; the rest is left out."""
_MAX_TEXT_CHARS = 20_000
"""Longest message of a record, since a model may log anything."""


class LineHandler(logging.Handler):
    """Logging handler that sends records to another process."""

    def __init__(self, send: Callable[[LogLine], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, with its traceback as text."""
        try:
            error = record.exc_info[1] if record.exc_info else None
            trace = traceback_of(error) if error is not None else ""
            ids = {name: str(vars(record)[name]) for name in ID_FIELDS if name in vars(record)}
            self._send(LogLine(record.levelno, record.name, _text_of(record), ids, trace))
        except (OSError, ValueError):
            if to_stderr := logging.lastResort:
                to_stderr.handle(record)


class PrintedLines(io.TextIOBase):
    """Replacement of stdout or stderr that sends printed text line by line, like log records."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, original: TextIO, level: int, send: Callable[[LogLine], None]) -> None:
        """Store the arguments; text goes to `original` if `send` raises OSError or ValueError."""
        self._original = original
        self._level = level
        self._send = send
        self._logger = original.name.strip("<>")
        self._rest = ""
        self._is_sent = True
        self._writing = threading.Lock()

    def __getattr__(self, name: str) -> object:
        """Return other attributes of the stream, such as `reconfigure` and `name`."""
        return getattr(self._original, name)

    def stop_sending(self) -> None:
        """Write to the original stream from now on: a forked process must not send."""
        self._is_sent = False
        self._rest = ""  # the parent will send it
        self._writing = threading.Lock()  # a thread of the parent may hold it

    @property
    def buffer(self) -> BinaryIO:
        """Buffer of the original stream; the log does not see bytes written to it."""
        return self._original.buffer

    def fileno(self) -> int:
        """Return the descriptor of the original stream, for child processes."""
        return self._original.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Send the complete lines; keep the rest until it ends."""
        if not self._is_sent:
            return self._original.write(text)
        num_chars = len(text)
        if num_chars > _MAX_PRINT_CHARS:
            more = f"({num_chars - _MAX_PRINT_CHARS:,} more characters were printed)"
            text = f"{text[:_MAX_PRINT_CHARS]}\n{more}\n"
        with self._writing:
            *lines, rest = (self._rest + text).split("\n")
            # A progress bar overwrites itself: only its last state counts.
            self._rest = rest.rpartition("\r")[2] if rest.count("\r") > 1 else rest
            while len(self._rest) > _MAX_LINE_CHARS:
                lines.append(self._rest[:_MAX_LINE_CHARS])
                self._rest = self._rest[_MAX_LINE_CHARS:]
        for line in lines:
            if shown := line.rstrip().rpartition("\r")[2].rstrip():
                self._send_line(shown)
        return num_chars

    def flush(self) -> None:
        """Flush the original stream."""
        self._original.flush()

    def _send_line(self, line: str) -> None:
        for start in range(0, len(line), _MAX_LINE_CHARS):
            part = printable(line[start : start + _MAX_LINE_CHARS])
            try:
                self._send(LogLine(self._level, self._logger, part))
            except (OSError, ValueError):
                self._original.write(f"{part}\n")


def log_line(line: LogLine, extra: Mapping[str, object]) -> None:
    """Log a record of another process, together with its traceback.

    Args:
        line: The record.
        extra: Fields that name the process.
    """
    source = logging.getLogger(line.logger)
    if not source.isEnabledFor(line.level):
        return
    ids = {name: line.ids[name] for name in ID_FIELDS if name in line.ids}
    fields = {**extra, **ids}
    record = source.makeRecord(
        line.logger, line.level, "", 0, "%s", (line.text,), None, extra=fields
    )
    record.exc_text = line.traceback or None
    source.handle(record)


def _text_of(record: logging.LogRecord) -> str:
    """Return the message of a record, shortened; if it cannot be formatted, say where and why."""
    try:
        if not record.args and isinstance(record.msg, str):
            return printable(record.msg[:_MAX_TEXT_CHARS])  # without a copy of a long text
        return printable(record.getMessage()[:_MAX_TEXT_CHARS])
    except Exception as error:
        place = f"{record.pathname}:{record.lineno}"
        return f"a log message at {place} cannot be formatted: {described(error)}"
