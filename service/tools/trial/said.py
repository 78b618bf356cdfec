"""Reads what a service says in its log, line by line as JSON, and why it ended."""

from collections import deque

import msgspec

_NUM_TAIL_LINES = 15
_TOLD_TO_PEOPLE = "inferpool.service.telemetry.console"
"""The logger of what each worker comes to."""


class Record(msgspec.Struct):
    """A line of the log."""

    level: str
    logger: str
    message: str
    exception: str = ""
    url: str = ""
    """Where the service is, in the line that says that it serves."""


class Said:
    """Keeps the end of what a service has said, and why it gave up."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._first_failure = ""
        self._end = ""
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)

    def take(self, line: bytes) -> Record:
        """Read a line; one that is no record was written past the log, and is a warning."""
        text = line.decode(errors="replace").rstrip("\n")
        self._tail.append(text)
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError:
            return Record("warning", "stderr", text)
        if record.level == "critical":
            self._end = record.message
        elif record.level == "error" and record.logger == _TOLD_TO_PEOPLE:
            self._first_failure = self._first_failure or record.message
        return record

    def last_words(self) -> str:
        """Why it gave up, if it said so: what the first worker failed of, and what that led to."""
        return "; ".join(filter(None, [self._first_failure, self._end])) if self._end else ""

    def tail(self) -> str:
        """The last lines, to go behind a message; empty if there are none."""
        lines = ["the end of its log:", *self._tail] if self._tail else []
        return "".join(f"\n    {line}" for line in lines)
