"""Stands for the commands `inferpool`, `python` and `pytest` in the examples.

`inferpool serve` returns as soon as it serves: a reader starts it in a terminal of its own, and
ends it by Ctrl-C before the next one. The commands of most pages are forked from a process that has
imported torch.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from tests.e2e import forked

FOLDER = "DOCS_STAGE"
REAL = "DOCS_REAL"
"""Variable that has the path of `inferpool` if command lines are to start interpreters."""
_CHEAPEST = {
    "serve": (("--speed", "exact"), ("--replicas", "1")),
    "batch": (("--speed", "exact"), ("--readers", "0"), ("--replicas", "1")),
}
"""Flags that save seconds of an example that does not have them, by verb."""
_READY_S = 150.0
_LEAVE_S = 60.0


def main() -> None:
    name, *arguments = sys.argv[1:]
    if name != "inferpool":
        _become([sys.executable, *(() if name == "python" else ("-m", name)), *arguments])
    verb = arguments[0] if arguments and "--help" not in arguments else ""
    for flag, cheapest in _CHEAPEST.get(verb, ()):
        if flag not in arguments:
            arguments += [flag, cheapest]
    command = [os.environ[REAL]] if REAL in os.environ else [*forked.COMMAND]
    if verb != "serve":
        _become([*command, *arguments])
    folder = Path(os.environ[FOLDER])
    stop(folder)
    log = folder / "service.log"
    with log.open("wb") as file:
        process = forked.popen(
            [*command, *arguments],
            cwd=os.getcwd(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    (folder / "service.pid").write_text(str(process.pid))
    until = time.monotonic() + _READY_S
    while '"url": "http' not in log.read_text():  # it serves now, and says where
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"`inferpool {' '.join(arguments)}` does not serve:\n{log.read_text()}")
        time.sleep(0.02)


def _become(command: list[str]) -> NoReturn:
    """Run a command, and end as it does."""
    if REAL in os.environ or not forked.may_ask():
        os.execv(command[0], command)
    status = forked.popen(command, cwd=os.getcwd(), ends_with_us=True).wait()
    sys.exit(status if status >= 0 else 128 - status)


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
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


if __name__ == "__main__":
    main()
