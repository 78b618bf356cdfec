"""What signals do before the server can stop in order, and after it has. Imports next to nothing.

A process that is number 1 of its container gets no signal at all that it has no handler for.
"""

import signal
from types import FrameType

SHELL_OFFSET = 128
"""What shells add to a signal's number for the exit status of what it ended."""


class EarlyStop:
    """The handler of a process that is only starting: it ends, and leaves nothing behind."""

    def __init__(self) -> None:
        self.signum = 0
        """The signal that came, if any did; somebody may have swallowed the exception."""

    def __call__(self, signum: int, _: FrameType | None) -> None:
        """End the process in order.

        Raises:
            SystemExit: Always.
        """
        self.signum = signum
        raise SystemExit(SHELL_OFFSET + signum)


def stop_signals() -> list[signal.Signals]:
    """Those that stop a service; a hangup does, unless whoever started it wants it to stay."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signals.append(signal.SIGHUP)
    return signals


def end_early() -> None:
    """Let SIGTERM and SIGHUP end this process in order from now on, as SIGINT does anyway."""
    stop = EarlyStop()
    for signum in stop_signals():
        if signum is not signal.SIGINT:
            signal.signal(signum, stop)


def early_signal() -> int:
    """The signal that has come since `end_early`, though the process goes on; else 0."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler.signum if isinstance(handler, EarlyStop) else 0
