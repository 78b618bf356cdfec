"""Prepares `serve` and `agent` before their event loops start, in the main thread."""

import contextlib
import errno
import faulthandler
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Literal

from inferpool.service.signals import RETRY_SIGNAL
from inferpool.service.telemetry.logs import is_json
from inferpool.service.telemetry.raw_output import RawOutput
from inferpool.workers.host.local import start_forkserver

CANNOT_START = 1
"""Exit status if this machine has no room for the processes."""


class NoRoomError(Exception):
    """Workers cannot be started; the message says why, and what to do."""


@contextlib.contextmanager
def prepared(
    log_format: Literal["auto", "human", "json"], modules: Sequence[str] | None
) -> Iterator[RawOutput | None]:
    """Capture stdout and stderr for the log, if that is JSON, and start the forkserver.

    Args:
        log_format: The form of log lines.
        modules: More modules for the forkserver to import; None: none is started.

    Yields:
        Captured stdout and stderr; the end of the block restores them.

    Raises:
        NoRoomError: There are too few processes or descriptors.
    """
    with contextlib.ExitStack() as stack:
        raw = None
        try:
            if is_json(log_format, sys.stderr):
                # Before anything starts that could write there.
                raw = RawOutput.take()
                stack.callback(raw.close)
            faulthandler.register(signal.SIGQUIT, 2, chain=False)  # the process goes on afterwards
            # These processes are spared a signal to all, which would kill the tracker.
            signal.pthread_sigmask(signal.SIG_BLOCK, {RETRY_SIGNAL})
            # First, since its start unblocks SIGINT.
            resource_tracker.ensure_running()
            # Child processes inherit the block, so Ctrl-C does not reach them; we end them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if modules is not None:
                # It imports torch while we import the rest.
                start_forkserver(modules)
        except OSError as error:
            text = f"workers cannot be started: {error}{_cure(error)}"
            raise NoRoomError(text) from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, RETRY_SIGNAL})
        yield raw


def _cure(error: OSError) -> str:
    """Return advice on an error of starting a process."""
    cures = {
        errno.EAGAIN: "; raise the limit of processes (ulimit -u, or the container's pids limit)",
        errno.EMFILE: "; raise the limit of descriptors (ulimit -n)",
    }
    return cures.get(error.errno or 0, "")
