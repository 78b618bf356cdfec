"""The processes of a service that was started here: their lives, memory and logs."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from inferpool.service.settings.names import PREFIX
from inferpool.service.tools.trial.bound import bound_command

POLL_S = 0.05
LINGER_S = 2.0
"""How long other processes may outlive the one that started them."""
_TELEMETRY = "OTEL_"
_PLATFORMS = ("AIP_", "SAGEMAKER_", "K_SERVICE", "DYNO", "CONTAINER_IMAGE")
"""Variables that open a service to all, and close its health; see `settings/platforms.py`."""
_NUM_TAIL_LINES = 15
_TOLD_TO_PEOPLE = "inferpool.service.telemetry.console"
"""The logger that reports the end of each worker."""
_REFUSAL = "inferpool: "
"""Prefix of the message of a service that refuses its settings before it has a log."""


class Family:
    """A front end and all processes under it."""

    def __init__(self, front_end: subprocess.Popen[bytes]) -> None:
        self._front_end = front_end
        self._known: set[psutil.Process] = set()

    def alive(self) -> list[psutil.Process]:
        """Return the living ones of all that were seen now or at an earlier call."""
        if self._front_end.poll() is None:  # else its number may be another's by now
            with contextlib.suppress(psutil.NoSuchProcess):
                front_end = psutil.Process(self._front_end.pid)
                self._known |= {front_end, *front_end.children(recursive=True)}
        self._known = {process for process in self._known if is_alive(process)}
        return sorted(self._known, key=lambda process: process.pid)

    def kill(self) -> None:
        """Kill the living ones."""
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class TrialProcess:
    """A command `inferpool ARGUMENTS` and all processes under it. It may be started again."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """Store the arguments, and the file for what it writes."""
        self._arguments = arguments
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._family: Family | None = None

    @property
    def pid(self) -> int:
        """Process id of the command."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """The command has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the command, also again after its end."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bound_command(self._arguments),
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family = Family(self._process)

    def family(self) -> list[psutil.Process]:
        """Return its living processes, of all that were seen now or at an earlier call."""
        return [] if self._family is None else self._family.alive()

    def destroy(self) -> None:
        """Kill all of its processes."""
        if self._process is not None and self._family is not None:
            self._family.kill()
            self._process.wait()

    def log_tail(self) -> str:
        """Return the last lines of its log, to append to a message."""
        return self._said().tail()

    def _said(self) -> "LogReader":
        said = LogReader()
        with contextlib.suppress(OSError):
            for line in self._log.read_bytes().splitlines():
                said.take(line)
        return said


async def num_left_over(family: Callable[[], Sequence[psutil.Process]], linger_s: float) -> int:
    """Return how many processes are still there a moment later."""
    until = time.monotonic() + linger_s
    while (alive := family()) and time.monotonic() < until:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(POLL_S)
    return len(alive)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without settings: the file has those that matter."""
    left_out = (PREFIX, _TELEMETRY, *_PLATFORMS)
    kept = {name: value for name, value in environ.items() if not name.startswith(left_out)}
    root = Path(__file__).absolute().parents[4]  # where `inferpool` lies
    if root.name != "site-packages":  # a clone that is run where it lies
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has not ended, even if its number is another's by now.

    An ended process exists until its parent waits for it. That may take a while if the parent is
    the first process of the host.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pss:
    """Bytes of memory of a process, in which shared pages count by share."""

    total: int
    files: int
    """Pages of files, such as libraries: they count less while other programs map them, too."""

    @property
    def own(self) -> int:
        """Memory of no file: only processes of the service share it."""
        return self.total - self.files


def pss_of(pid: int) -> Pss:
    """Return the memory of a process; none if it has ended. Linux only."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        lines = []
    found = {
        name: int(size.split()[0]) * 1024
        for name, _, size in (line.partition(":") for line in lines)
    }
    return Pss(total=found.get("Pss", 0), files=found.get("Pss_File", 0))


class LogRecord(msgspec.Struct):
    """A line of a service's log in JSON."""

    level: str
    logger: str
    message: str
    exception: str = ""
    url: str = ""
    """The service's address, in the line that says that it serves."""


class LogReader:
    """Stores the end of a service's log, and why the service gave up."""

    def __init__(self) -> None:
        self._first_failure = ""
        self._end = ""
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)

    def take(self, line: bytes) -> LogRecord:
        """Store a line; a line that is no record was not written by the log, and is a warning."""
        text = line.decode(errors="replace").rstrip("\n")
        self._tail.append(text)
        try:
            record = msgspec.json.decode(line, type=LogRecord)
        except msgspec.MsgspecError:
            if text.startswith(_REFUSAL):
                self._end = "; ".join(filter(None, [self._end, text.removeprefix(_REFUSAL)]))
            return LogRecord("warning", "stderr", text)
        if record.level == "critical":
            self._end = record.message
        elif record.level == "error" and record.logger == _TOLD_TO_PEOPLE:
            self._first_failure = self._first_failure or record.message
        return record

    def last_words(self) -> str:
        """Return why it gave up, if it logged that: why the first worker failed, and the end."""
        return "; ".join(filter(None, [self._first_failure, self._end])) if self._end else ""

    def tail(self) -> str:
        """Return the last lines, to append to a message; empty if there are none."""
        lines = ["the end of its log:", *self._tail] if self._tail else []
        return "".join(f"\n    {line}" for line in lines)
