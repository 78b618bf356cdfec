"""Turns what is written to stdout and stderr past the log into log lines, where the log is JSON.

It covers this process and all that it starts: a model's `print`, a message of a library in C, the
traceback of an interpreter that ends. Runs in the main process, in a thread of its own, which reads
from the first moment on: a write to a full pipe would wait for ever.
"""

import contextlib
import errno
import faulthandler
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import TextIO

from inferpool.workers.host.error_guard import ErrorGuard

_LEVELS = {1: logging.INFO, 2: logging.WARNING}
_LOGGERS = {1: logging.getLogger("stdout"), 2: logging.getLogger("stderr")}
_MAX_LINE_BYTES = 8192
"""Longer lines are divided."""
_MAX_HELD_BYTES = 1 << 20
"""Output of each stream that is held until there is a log. The rest is dropped and counted."""
_PASS_ON_S = 2.0
"""Seconds that the reader of the original streams may take for what was never logged."""
_CLOSE_S = 2.0
"""Seconds for logging what came at last: a process that writes without end is cut off."""
_STEP_BYTES = select.PIPE_BUF
"""Bytes that a pipe takes without blocking if it can be written to at all (POSIX, `write`)."""
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
"""Room of a pipe, if the kernel grants it. A full one stops whoever writes, and a library in C that
writes with the GIL held stops the reader as well."""
_BEGIN = b"b"
_FOR_MAIN_THREAD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RawOutput:
    """Holds descriptors 1 and 2 until it is closed. Processes started meanwhile inherit ours."""

    def __init__(self, originals: Mapping[int, int], readers: Mapping[int, int]) -> None:
        self._originals = originals
        self._readers = readers
        self._rests = dict.fromkeys(readers, b"")
        """Output that is not logged yet: all from before the log, or the begin of a line."""
        self._num_dropped = dict.fromkeys(readers, 0)
        self._is_logging = False
        self._is_closed = False
        self._has_begun = threading.Event()
        self._wake, self._waker = os.pipe()
        # A daemon, like the thread that writes the log.
        self._thread = threading.Thread(target=self._run, name="raw output", daemon=True)
        # Signals go to the main thread, and interrupt its write to a full pipe.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_MAIN_THREAD)
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @classmethod
    def take(cls) -> "RawOutput":
        """Redirect stdout and stderr. They are read from now on, and logged from `start` on.

        Raises:
            OSError: There are no free descriptors, or too few threads.
        """
        _flush()
        originals, readers, writers = {}, {}, {}
        for fd in _LEVELS:
            originals[fd] = os.dup(fd)
            readers[fd], writers[fd] = os.pipe()
            os.set_blocking(readers[fd], False)
            with contextlib.suppress(AttributeError, OSError):  # or its user's limit
                fcntl.fcntl(writers[fd], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            taken = cls(originals, readers)  # with a reader, before a pipe can be full
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        for fd, writer in writers.items():
            os.dup2(writer, fd)
            os.close(writer)
        return taken

    @property
    def stderr(self) -> TextIO:
        """The original stderr, for the log itself."""
        return os.fdopen(self._originals[2], "w", encoding="utf-8", closefd=False)

    def start(self) -> None:
        """Begin to log what is written. The log must be configured by now.

        The traceback of a crash of this process goes to the original stderr: no thread is left to
        log it.
        """
        faulthandler.enable(self._originals[2])
        os.write(self._waker, _BEGIN)
        self._has_begun.wait()  # what comes later came after there was a log

    def close(self, pass_on_s: float = _PASS_ON_S) -> None:
        """Restore both descriptors, and log the rest. Closing again does nothing.

        Args:
            pass_on_s: Seconds that the reader of the original streams may take, without a log.
        """
        if self._is_closed:
            return
        self._is_closed = True
        _flush()
        for fd, original in self._originals.items():
            os.dup2(original, fd)
        os.close(self._waker)
        self._thread.join()
        if self._is_logging:
            faulthandler.disable()
        else:
            self._pass_on(time.monotonic() + pass_on_s)
        for fd in (*self._originals.values(), *self._readers.values(), self._wake):
            os.close(fd)

    def _pass_on(self, until: float) -> None:
        """Write the held output to the original streams, if there never was a log."""
        for fd, rest in self._rests.items():
            if num_dropped := self._num_dropped[fd]:
                rest += b"%s\n" % _loss(num_dropped).encode()
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            with contextlib.suppress(OSError):
                while rest and poll.poll(max(0.0, until - time.monotonic()) * 1000):
                    rest = rest[os.write(fd, rest[:_STEP_BYTES]) :]

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self._readers.values(), self._wake):
            poll.register(fd, select.POLLIN)
        is_open = True
        error_guard = ErrorGuard("the reader of stdout and stderr")
        while is_open:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake in ready:
                is_open = os.read(self._wake, 1) == _BEGIN
                self._drain(error_guard)
                if is_open:
                    self._begin(error_guard)
            for fd in self._readers:
                with error_guard:  # or a full pipe would block the code that prints
                    self._read(fd)
        if self._is_logging:
            for fd, rest in self._rests.items():
                self._log(fd, rest)

    def _begin(self, error_guard: ErrorGuard) -> None:
        """Log what was held, and log at once from now on."""
        self._is_logging = True
        self._has_begun.set()
        for fd in self._readers:
            with error_guard:
                self._log_lines(fd)
                if num_dropped := self._num_dropped[fd]:
                    _LOGGERS[fd].warning("%s", _loss(num_dropped))

    def _drain(self, error_guard: ErrorGuard) -> None:
        """Read what was written until now, at most a full pipe, since others go on writing."""
        until = time.monotonic() + _CLOSE_S
        for fd in self._readers:
            with error_guard:
                num_left = _PIPE_BYTES
                while num_left > 0 and time.monotonic() < until and (num := self._read(fd)):
                    num_left -= num

    def _read(self, fd: int) -> int:
        """Read what is there, and log complete lines, or hold them until there is a log.

        Returns:
            The number of bytes; 0 if there were none.
        """
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._readers[fd], _READ_BYTES)
        if self._is_logging:
            self._rests[fd] += data
            self._log_lines(fd)
        else:
            self._hold(fd, data)
        return len(data)

    def _hold(self, fd: int, data: bytes) -> None:
        """Store what fits; once something was dropped, drop all else, too."""
        if not self._num_dropped[fd]:
            room = _MAX_HELD_BYTES - len(self._rests[fd])
            is_cut = len(data) > room
            self._rests[fd] += data[:room] + b"\n" * is_cut
            data = data[room:]
        self._num_dropped[fd] += len(data)

    def _log_lines(self, fd: int) -> None:
        *lines, rest = self._rests[fd].split(b"\n")
        whole = len(rest) // _MAX_LINE_BYTES * _MAX_LINE_BYTES
        self._rests[fd] = rest[whole:]
        for line in (*lines, rest[:whole]):
            for begin in range(0, len(line), _MAX_LINE_BYTES):
                self._log(fd, line[begin : begin + _MAX_LINE_BYTES])

    def _log(self, fd: int, line: bytes) -> None:
        if text := line.decode("utf-8", "backslashreplace").rstrip():
            _LOGGERS[fd].log(_LEVELS[fd], "%s", text)


def _loss(num_bytes: int) -> str:
    return f"{num_bytes} bytes more were dropped: they came before there was a log"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
