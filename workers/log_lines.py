"""Log records between processes: sent as lines, and logged again by the process that writes."""

import logging
from collections.abc import Callable, Mapping

from workers.messages import ID_FIELDS, LogLine


class LineHandler(logging.Handler):
    """Sends the log records of a process to the one that writes them."""

    def __init__(self, send: Callable[[LogLine], None]) -> None:
        """Take what sends a line, and may raise OSError or ValueError."""
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record with its traceback as text."""
        try:
            text = printable(record.getMessage())
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            ids = {name: str(vars(record)[name]) for name in ID_FIELDS if name in vars(record)}
            self._send(LogLine(record.levelno, record.name, text, ids, printable(trace)))
        except (OSError, ValueError):
            self.handleError(record)


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


def printable(text: str) -> str:
    """A text that can be encoded, whatever a path or a model put into it."""
    return text.encode("utf-8", "backslashreplace").decode()
