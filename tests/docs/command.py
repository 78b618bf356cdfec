"""Stands for the command `inferpool` in the examples: `serve` returns as soon as it serves.

A reader starts it in a terminal of its own, and ends it by Ctrl-C before the next one.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

FOLDER = "DOCS_STAGE"
COMMAND = "DOCS_INFERPOOL"
_CHEAPEST = {
    "serve": (("--speed", "exact"), ("--replicas", "1")),
    "batch": (("--readers", "0"), ("--replicas", "1")),
}
"""Flags that save seconds of an example that does not have them, by verb."""
_READY_S = 150.0
_LEAVE_S = 60.0


def main() -> None:
    real, arguments = os.environ[COMMAND], sys.argv[1:]
    verb = arguments[0] if arguments and "--help" not in arguments else ""
    for flag, cheapest in _CHEAPEST.get(verb, ()):
        if flag not in arguments:
            arguments += [flag, cheapest]
    if verb != "serve":
        os.execv(real, [real, *arguments])
    folder = Path(os.environ[FOLDER])
    stop(folder)
    log = folder / "service.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [real, *arguments], stdout=file, stderr=file, start_new_session=True
        )
    (folder / "service.pid").write_text(str(process.pid))
    until = time.monotonic() + _READY_S
    while '"url": "http' not in log.read_text():  # it serves now, and says where
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"`inferpool {' '.join(arguments)}` does not serve:\n{log.read_text()}")
        time.sleep(0.02)


def stop(folder: Path) -> None:
    """End the service that was started last, as Ctrl-C does, and wait until it is gone."""
    file = folder / "service.pid"
    if not file.exists():
        return
    pid = int(file.read_text())
    file.unlink()
    if _is_alive(pid):
        os.kill(pid, signal.SIGINT)
    until = time.monotonic() + _LEAVE_S
    while _is_alive(pid):
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
