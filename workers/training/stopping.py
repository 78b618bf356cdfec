"""Ends a rank when it is told to: after its step if it can, and in any case in time."""

import os
import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 60.0
"""Time that a rank has to save a checkpoint. torchrun's agent then kills it."""
_LONGER_S = 5.0
_STUCK = 143
"""Exit status of a rank that could not end its step: 128 + SIGTERM."""


class StopWatch:
    """Waits for a signal in a thread, since a rank may be deep in a collective when it comes.

    Signals of the readers are those of this process: it blocks them before it starts any.
    """

    def __init__(self) -> None:
        self._is_told = threading.Event()
        self._is_over = threading.Event()

    def start(self) -> None:
        """Block the signals in all threads to come, and wait for one."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=self._wait, name="stop-watch", daemon=True).start()

    @property
    def is_told(self) -> bool:
        """True once the rank was told to end."""
        return self._is_told.is_set()

    def end(self) -> None:
        """Say that the rank ends by itself."""
        self._is_over.set()

    def _wait(self) -> None:
        signal.sigwait(_SIGNALS)
        self._is_told.set()
        if not self._is_over.wait(GRACE_S - _LONGER_S):
            os._exit(_STUCK)
