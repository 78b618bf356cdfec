"""Ends a rank when it is told to: after its step if it can, and in any case in time."""

import os
import signal
import threading
import time

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 60.0
"""Time that a rank has to save a checkpoint. torchrun's agent then kills it."""
_LEAST_S = 10.0
_STEPS = 5.0
"""Waits of so many times the longest step say that a rank waits for another one that is dead."""
_STUCK = 143
"""Exit status of a rank that could not end its step: 128 + SIGTERM."""


class StopWatch:
    """Waits for a signal in a thread, since a rank may be deep in a collective when it comes.

    Before the first step there is nothing to save, so the rank ends at once. Readers of images do
    not get the signals, since this process blocks them before it starts any.
    """

    def __init__(self) -> None:
        self._is_told = threading.Event()
        self._is_over = threading.Event()
        self._beat_at: float | None = None
        self._longest_s = 0.0

    def start(self) -> None:
        """Block the signals in all threads to come, and wait for one."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=self._wait, name="stop-watch", daemon=True).start()

    @property
    def is_told(self) -> bool:
        """True once the rank was told to end."""
        return self._is_told.is_set()

    def beat(self) -> None:
        """Say that the rank is about to take a step."""
        now = time.monotonic()
        if self._beat_at is not None and not self.is_told:
            self._longest_s = max(self._longest_s, now - self._beat_at)
        self._beat_at = now

    def pause(self) -> None:
        """Say that the rank takes no steps: then it ends at once when it is told to."""
        self._beat_at = None
        if self.is_told:
            os._exit(_STUCK)

    def end(self) -> None:
        """Say that the rank ends by itself."""
        self._is_over.set()

    def _wait(self) -> None:
        signal.sigwait(_SIGNALS)
        self._is_told.set()
        grace_s = min(GRACE_S - _LEAST_S, max(_LEAST_S, _STEPS * self._longest_s))
        if self._beat_at is None or not self._is_over.wait(grace_s):
            os._exit(_STUCK)
