"""All processes of a service that was started here, so that none of them is left."""

import contextlib
import subprocess

import psutil


class Family:
    """A front end and all processes under it."""

    def __init__(self, front_end: subprocess.Popen[bytes]) -> None:
        """Look at nothing yet."""
        self._front_end = front_end
        self._known: set[psutil.Process] = set()

    def alive(self) -> list[psutil.Process]:
        """Those that are alive, of all that were seen now or when this was asked before."""
        if self._front_end.poll() is None:  # else its number may be another's by now
            with contextlib.suppress(psutil.NoSuchProcess):
                front_end = psutil.Process(self._front_end.pid)
                self._known |= {front_end, *front_end.children(recursive=True)}
        self._known = {process for process in self._known if is_alive(process)}
        return sorted(self._known, key=lambda process: process.pid)

    def kill(self) -> None:
        """End those that are alive."""
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; its number may be another's by now.

    One that has ended is there until its parent looks, and an orphan's, the host's first process,
    may take its time.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
