"""Ends a rank on a signal: after its step if it can, and in any case in time."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 60.0
"""Time for a rank to save a checkpoint; then torchrun's agent kills it."""
_LEAST_S = 10.0
_STEPS = 5.0
"""A wait of this many times the longest step says that a rank waits for a dead one."""
_STUCK = 143
"""Exit status of a rank that could not end its step: 128 + SIGTERM."""


class StopWatch:
    """Delays a stop until the rank has ended its step and saved a checkpoint.

    Before `begin`, and after `pause`, there is nothing to save: then a signal ends the process at
    once, even one that waits for another rank in C++ and holds the GIL.
    """

    def __init__(self) -> None:
        self._is_told = threading.Event()
        self._is_over = threading.Event()
        self._beat_at: float | None = None
        self._longest_s = 0.0
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_DFL)

    def begin(self) -> None:
        """Handle signals from now on. The main thread calls it."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A thread learns of the signal, since the main one may be deep in a collective.
        threading.Thread(target=self._wait, args=(read,), name="stop-watch", daemon=True).start()
        signal.set_wakeup_fd(write)
        for signum in _SIGNALS:
            signal.signal(signum, lambda *_: self._is_told.set())

    @property
    def is_told(self) -> bool:
        """True once a signal has asked the rank to end."""
        return self._is_told.is_set()

    def beat(self) -> None:
        """Say that the rank is about to take a step."""
        now = time.monotonic()
        if self._beat_at is not None and not self.is_told:
            self._longest_s = max(self._longest_s, now - self._beat_at)
        self._beat_at = now

    def pause(self) -> None:
        """Say that the rank takes no more steps. The main thread calls it."""
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        if self.is_told:
            os._exit(_STUCK)

    def end(self) -> None:
        """Say that the rank ends by itself."""
        self._is_over.set()

    def _wait(self, pipe: int) -> None:
        os.read(pipe, 1)
        self._is_told.set()
        grace_s = min(GRACE_S - _LEAST_S, max(_LEAST_S, _STEPS * self._longest_s))
        if not self._is_over.wait(grace_s):
            os._exit(_STUCK)


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """Shield processes that the block starts from the signals: they end with this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
