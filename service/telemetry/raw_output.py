"""Turns what is written to stdout and stderr past the log into log lines, where the log is JSON.

It covers this process and all that it starts: a model's `print`, a message of a library in C, the
traceback of an interpreter that ends. Runs in the main process, in a thread of its own.
"""

import contextlib
import faulthandler
import logging
import os
import select
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

from inferpool.workers.host.error_guard import ErrorGuard

_LEVELS = {1: logging.INFO, 2: logging.WARNING}
_LOGGERS = {1: logging.getLogger("stdout"), 2: logging.getLogger("stderr")}
_MAX_LINE_BYTES = 8192
"""Longer lines are divided."""


class RawOutput:
    """Holds descriptors 1 and 2 until it is closed. Processes started meanwhile inherit ours."""

    def __init__(self, originals: Mapping[int, int], readers: Mapping[int, int]) -> None:
        self._originals = originals
        self._readers = readers
        self._rests = dict.fromkeys(readers, b"")
        self._is_closed = False
        self._wake, self._waker = os.pipe()
        # A daemon, like the thread that writes the log.
        self._thread = threading.Thread(target=self._run, name="raw output", daemon=True)

    @classmethod
    def take(cls) -> "RawOutput":
        """Take stdout and stderr. Until `start`, what is written waits in pipes of 64 KiB each.

        Raises:
            OSError: There are no free descriptors.
        """
        _flush()
        originals, readers = {}, {}
        for fd in _LEVELS:
            originals[fd] = os.dup(fd)
            readers[fd], writer = os.pipe()
            os.set_blocking(readers[fd], False)
            os.dup2(writer, fd)
            os.close(writer)
        return cls(originals, readers)

    @property
    def stderr(self) -> TextIO:
        """The original stderr, for the log itself."""
        return os.fdopen(self._originals[2], "w", encoding="utf-8", closefd=False)

    def start(self) -> None:
        """Begin to log what is written. The log must be configured by now.

        The traceback of a crash of this process goes to the original stderr, since nobody would be
        left to log it.
        """
        faulthandler.enable(self._originals[2])
        self._thread.start()

    def close(self) -> None:
        """Give both descriptors back, and log the rest. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        _flush()
        for fd, original in self._originals.items():
            os.dup2(original, fd)
        os.close(self._waker)
        if self._thread.is_alive():
            faulthandler.disable()
            self._thread.join()
        else:
            self._pass_on()
        for fd in (*self._originals.values(), *self._readers.values(), self._wake):
            os.close(fd)

    def _pass_on(self) -> None:
        """Write what was taken to where it was meant to go, if there never was a log."""
        for fd, reader in self._readers.items():
            with contextlib.suppress(OSError):
                while data := os.read(reader, 65536):
                    os.write(fd, data)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self._readers.values(), self._wake):
            poll.register(fd, select.POLLIN)
        is_open = True
        error_guard = ErrorGuard("the reader of stdout and stderr")
        while is_open:
            ready = {fd for fd, _ in poll.poll()}
            is_open = self._wake not in ready
            for fd in self._readers:
                with error_guard:  # or a full pipe would block whoever prints
                    self._read(fd)
        for fd, rest in self._rests.items():
            self._log(fd, rest)

    def _read(self, fd: int) -> None:
        """Log the complete lines that are there."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._readers[fd], 65536):
                *lines, rest = (self._rests[fd] + data).split(b"\n")
                while len(rest) > _MAX_LINE_BYTES:
                    lines.append(rest[:_MAX_LINE_BYTES])
                    rest = rest[_MAX_LINE_BYTES:]
                self._rests[fd] = rest
                for line in lines:
                    self._log(fd, line)

    def _log(self, fd: int, line: bytes) -> None:
        if text := line.decode("utf-8", "backslashreplace").rstrip():
            _LOGGERS[fd].log(_LEVELS[fd], "%s", text)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
