"""Control groups and mounts for tests, which are skipped where they cannot be made."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup")
_REMOVE_S = 30.0
"""Seconds that processes may take to end after they were killed."""


class ControlGroup:
    """A control group of version 1, inside the group of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, name: str, value: int | str) -> None:
        (self.folder / name).write_text(str(value))

    def get(self, name: str) -> str:
        return (self.folder / name).read_text()

    def enter(self) -> None:
        """Move this process into it; for `preexec_fn`."""
        self.set("cgroup.procs", os.getpid())

    def remove(self) -> None:
        """Kill the processes left in it, as after a test that failed, and remove it."""
        until = time.monotonic() + _REMOVE_S
        while True:
            for pid in self.get("cgroup.procs").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError:  # an ended process is in it until its parent has waited for it
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
            else:
                return


@contextlib.contextmanager
def control_group(controller: str) -> Iterator[ControlGroup]:
    """Make a group, and remove it in the end with whatever runs in it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = [line.split(":", 2)[2] for line in lines if f":{controller}:" in line]
    if not paths:
        pytest.skip(f"the controller {controller} is not mounted as version 1")
    parent = MOUNT / controller / paths[0].lstrip("/")
    try:
        group = ControlGroup(Path(tempfile.mkdtemp(prefix="inferpool-test-", dir=parent)))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group
    finally:
        group.remove()


def with_mounts(*mounts: str) -> Sequence[str]:
    """Return the start of a command that runs with mounts of its own.

    Args:
        mounts: Arguments for calls of `mount`, one string for each call.
    """
    hidden = [Path(each.split()[-1]) for each in mounts]
    for needed in (Path(sys.executable), Path(__file__).resolve()):
        if any(folder in needed.parents for folder in hidden):
            pytest.skip(f"{needed} would be hidden")
    script = " && ".join([*(f"mount {each}" for each in mounts), 'exec "$@"'])
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no mounts can be made")
    return command
