"""Log records between processes: sent as lines, and logged again by the process that writes."""

import logging
from collections.abc import Callable, Mapping

from workers.messages import LogLine


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
            request_id = getattr(record, "request_id", "")
            self._send(LogLine(record.levelno, record.name, text, request_id, printable(trace)))
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
    fields = {**extra, "request_id": line.request_id} if line.request_id else dict(extra)
    record = source.makeRecord(
        line.logger, line.level, "", 0, "%s", (line.text,), None, extra=fields
    )
    record.exc_text = line.trace or None
    source.handle(record)


def printable(text: str) -> str:
    """A text that can be encoded, whatever a path or a model put into it."""
    return text.encode("utf-8", "backslashreplace").decode()
