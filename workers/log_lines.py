"""Log records between processes: sent as lines, and logged again by the process that writes."""

import io
import logging
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, TextIO

from inferpool.models.texts import described, printable, traceback_of
from inferpool.workers.messages import ID_FIELDS, LogLine

_MAX_LINE_CHARS = 8192
"""A longer line is logged as several."""
_MAX_PRINT_CHARS = 65_536
"""Printed at once; the rest of a longer text is left out."""
_MAX_TEXT_CHARS = 20_000
"""The longest record: a model may log what it likes."""


class LineHandler(logging.Handler):
    """Sends the log records of a process to the one that writes them."""

    def __init__(self, send: Callable[[LogLine], None]) -> None:
        """Take what sends a line, and may raise OSError or ValueError."""
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record with its traceback as text."""
        try:
            error = record.exc_info[1] if record.exc_info else None
            trace = traceback_of(error) if error is not None else ""
            ids = {name: str(vars(record)[name]) for name in ID_FIELDS if name in vars(record)}
            self._send(LogLine(record.levelno, record.name, _text_of(record), ids, trace))
        except (OSError, ValueError):
            if to_stderr := logging.lastResort:
                to_stderr.handle(record)


class PrintedLines(io.TextIOBase):
    """Stands for stdout or stderr, and sends what is printed, line by line, as the log is sent."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, original: TextIO, level: int, send: Callable[[LogLine], None]) -> None:
        """Stand for a stream.

        Args:
            original: Gets what cannot be sent; has the descriptor, for processes of the model's.
            level: Of the lines.
            send: May raise OSError or ValueError.
        """
        self._original = original
        self._level = level
        self._send = send
        self._logger = original.name.strip("<>")
        self._rest = ""
        self._is_sent = True
        self._writing = threading.Lock()

    def __getattr__(self, name: str) -> object:
        """Whatever else a stream has, as `reconfigure` and `name`."""
        return getattr(self._original, name)

    def stop_sending(self) -> None:
        """Write straight to the stream. For a forked process, which must not send."""
        self._is_sent = False
        self._rest = ""  # the parent sends it
        self._writing = threading.Lock()  # a thread of the parent may have held it

    @property
    def buffer(self) -> BinaryIO:
        """For those who write bytes, which are not told from those of other workers."""
        return self._original.buffer

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._original.fileno()

    def writable(self) -> bool:
        """It is for nothing else."""
        return True

    def write(self, text: str) -> int:
        """Send the lines that are whole now; the rest waits for its end."""
        if not self._is_sent:
            return self._original.write(text)
        num_chars = len(text)
        if num_chars > _MAX_PRINT_CHARS:
            more = f"({num_chars - _MAX_PRINT_CHARS:,} more characters were printed)"
            text = f"{text[:_MAX_PRINT_CHARS]}\n{more}\n"
        with self._writing:
            *lines, rest = (self._rest + text).split("\n")
            # A bar of progress writes over itself: the last state is enough.
            self._rest = rest.rpartition("\r")[2] if rest.count("\r") > 1 else rest
            while len(self._rest) > _MAX_LINE_CHARS:
                lines.append(self._rest[:_MAX_LINE_CHARS])
                self._rest = self._rest[_MAX_LINE_CHARS:]
        for line in lines:
            if shown := line.rstrip().rpartition("\r")[2].rstrip():
                self._send_line(shown)
        return num_chars

    def flush(self) -> None:
        """Write out what the stream itself holds back."""
        self._original.flush()

    def _send_line(self, line: str) -> None:
        for start in range(0, len(line), _MAX_LINE_CHARS):
            part = printable(line[start : start + _MAX_LINE_CHARS])
            try:
                self._send(LogLine(self._level, self._logger, part))
            except (OSError, ValueError):
                self._original.write(f"{part}\n")


def log_line(line: LogLine, extra: Mapping[str, object]) -> None:
    """Log what another process logged, its traceback as one.

    Args:
        line: What it said.
        extra: Who said it.
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
    """The message of a record, cut; of one that cannot be formatted, why not, and where it is."""
    try:
        if not record.args and isinstance(record.msg, str):
            return printable(record.msg[:_MAX_TEXT_CHARS])  # no copy of a long one
        return printable(record.getMessage()[:_MAX_TEXT_CHARS])
    except Exception as error:
        place = f"{record.pathname}:{record.lineno}"
        return f"a log message at {place} cannot be formatted: {described(error)}"
