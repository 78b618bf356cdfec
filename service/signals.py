"""Handles signals before the server can stop in order, and after it has. Imports almost nothing.

A process with number 1 in its container gets no signal for which it has no handler.
"""

import os
import select
import signal
from types import FrameType

SHELL_OFFSET = 128
"""The number that shells add to a signal's number for the exit status."""


class EarlyStop:
    """The signal handler of a process that is still starting: it ends in order."""

    def __init__(self) -> None:
        self.signum = 0
        """The signal that came, if any. Somebody may have swallowed the exception."""

    def __call__(self, signum: int, _: FrameType | None) -> None:
        """End the process in order.

        Raises:
            SystemExit: Always.
        """
        self.signum = signum
        _drop_unread()
        raise SystemExit(SHELL_OFFSET + signum)


RETRY_SIGNAL = signal.SIGUSR2
"""It has the models tried again that were given up."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a service: SIGHUP too, unless it was ignored before."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signals.append(signal.SIGHUP)
    return signals


def end_early() -> None:
    """End this process in order on SIGTERM and SIGHUP from now on, as SIGINT does anyway.

    `RETRY_SIGNAL`, whose default would end it at once, does nothing.
    """
    stop = EarlyStop()
    for signum in stop_signals():
        if signum is not signal.SIGINT:
            signal.signal(signum, stop)
    signal.signal(RETRY_SIGNAL, _ignore)  # SIG_IGN would be inherited by all children


def _ignore(signum: int, _: FrameType | None) -> None:
    """Do nothing: nothing can have been given up yet."""


def _drop_unread() -> None:
    """Send stderr nowhere if it is full: the end of this process may write, and would block.

    A write in C, such as those of `python -X importtime`, blocks all of Python, handlers too.
    """
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if not poll.poll(0):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def early_signal() -> int:
    """Return the signal that came since `end_early` although the process goes on; else 0."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler.signum if isinstance(handler, EarlyStop) else 0
