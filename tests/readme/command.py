"""Stands for the command `inferpool` in the examples: `serve` returns as soon as it serves.

A reader starts it in a terminal of its own, and ends it by Ctrl-C before the next one.
"""

import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

FOLDER = "README_STAGE"
COMMAND = "README_INFERPOOL"
_READY_S = 110.0
_LEAVE_S = 20.0
_ADDRESS = re.compile(r' at (https?://[^\s"]+)')


def main() -> None:
    real, arguments = os.environ[COMMAND], sys.argv[1:]
    if arguments[:1] != ["serve"] or "--help" in arguments:
        os.execv(real, [real, *arguments])
    folder = Path(os.environ[FOLDER])
    stop(folder)
    for flag, cheapest in (("--speed", "exact"), ("--replicas", "1")):  # to save seconds
        if flag not in arguments:
            arguments += [flag, cheapest]
    log = folder / "service.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [real, *arguments], stdout=file, stderr=file, start_new_session=True
        )
    (folder / "service.pid").write_text(str(process.pid))
    until = time.monotonic() + _READY_S
    while not _is_ready(log.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"`inferpool {' '.join(arguments)}` does not serve:\n{log.read_text()}")
        time.sleep(0.02)


def stop(folder: Path) -> None:
    """End the service that was started last, as Ctrl-C does, and await that it is gone."""
    file = folder / "service.pid"
    if not file.exists():
        return
    pid = int(file.read_text())
    file.unlink()
    until = time.monotonic() + _LEAVE_S
    signum: int = signal.SIGINT
    while _lives(pid):
        if signum:
            os.kill(pid, signum)
            signum = 0
        elif time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    """Whether a process is there and no zombie; nobody here is its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_ready(log: str) -> bool:
    found = _ADDRESS.search(re.sub(r"\x1b\[[0-9;]*m", "", log))
    if found is None:
        return False
    anyone = ssl.create_default_context()
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{found[1]}/health/ready", timeout=5, context=anyone):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
