"""The servers under test: each a family of processes that is started, watched and ended as one.

Linux only: everything is read from /proc.
"""

import http.client
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
"""The repository: every child starts here, so that `-m tests.bench...` is found."""
OUT = Path(__file__).resolve().parent / "out"
HOST = "127.0.0.1"
INFERPOOL = str(Path(sys.executable).parent / "inferpool")
"""The command of the environment that runs the benchmark."""

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""glibc keeps freed memory, rather than return it after each batch, as in the service's workers."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """The benchmark cannot go on; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One HTTP call that tells whether a server is there, and whether it does its work."""

    path: str
    body: bytes | None = None
    """With a body it is a POST."""
    content_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server that can be started: ours, a peer, or a step of the ladder."""

    name: str
    argv: Sequence[str]
    """`{port}` stands for the port."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Probe | None = None
    """Asked until it answers 200; by default the request that is measured."""
    path: str = ""
    """Where it answers what is measured, if it has a path of its own for that."""
    stop_signal: signal.Signals = signal.SIGTERM
    """What makes it end its own processes and leave."""


def inferpool(
    command: str, *arguments: str, name: str = "inferpool", env: Mapping[str, str] | None = None
) -> Contender:
    """Our own service as its users start it, with JSON logs.

    Args:
        command: What runs `inferpool`, split as a shell would.
        arguments: What follows `serve`: the model and flags.
        name: What the tables call it.
        env: Further settings, by environment variable.
    """
    flags = ["--host", HOST, "--port", "{port}", "--log-format", "json"]
    argv = [*shlex.split(command), "serve", *arguments, *flags]
    return Contender(name=name, argv=argv, env=env or {}, ready=Probe(path="/health/ready"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds since some moment in the past: only differences mean anything."""

    front_s: float
    """Of the process that was started."""
    rest_s: float
    """Of all the processes that it started in turn."""
    machine_s: float
    """Of the whole machine, whoever took them."""
    stolen_s: float
    """Withheld by the hypervisor."""
    children_s: float
    """Of the benchmark's own children that have ended: the load generators."""
    own_s: float
    """Of the benchmark itself."""


class Server:
    """A contender while it runs. A context manager: leaving it ends every process of it."""

    def __init__(self, contender: Contender, port: int, log: Path) -> None:
        self.contender = contender
        self.port = port
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: set[int] = set()
        self._births: dict[int, int] = {}
        """By pid, when each process that was seen began: another one may get its number."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Server":
        try:
            self.start()
        except KeyboardInterrupt:  # it came while signals were held: the process is there
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it in a session of its own, with a folder of its own for temporary files.

        Raises:
            BenchError: The port is taken, or the program cannot be run.
        """
        require_free(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        argv = [part.replace("{port}", str(self.port)) for part in self.contender.argv]
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        environment = {**os.environ, "TMPDIR": self._scratch.name, **self.contender.env}
        with self.log.open("wb") as log, signals_held():
            try:
                self._process = subprocess.Popen(
                    argv,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._scratch.cleanup()
                message = f"{self.contender.name}: cannot run {argv[0]}: {error.strerror}"
                raise BenchError(message) from error
            self._sessions = {self.pid}
            self._births = {}

    def wait_ready(self, request: Probe, timeout_s: float) -> bytes:
        """Wait until the server is ready and answers the request with 200; return that answer.

        Raises:
            BenchError: It ended, or did not answer in time.
        """
        until = time.monotonic() + timeout_s
        for probe in (self.contender.ready, request):
            last = "no answer"
            while probe is not None:
                self.require_running()
                try:
                    status, body = ask(self.port, probe)
                except (OSError, http.client.HTTPException) as error:
                    last = repr(error)
                else:
                    if status == 200:
                        break
                    last = f"{status} {body[:300]!r}"
                if time.monotonic() > until:
                    where = f"{self.contender.name} {probe.path}"
                    raise BenchError(f"{where}: not ready in {timeout_s:g} s: {last}{self._tail()}")
                time.sleep(0.05)
        return body

    def require_running(self) -> None:
        """Check that the process that was started is alive.

        Raises:
            BenchError: It has ended; says how, and what it wrote.
        """
        if (code := self._poll()) is not None:
            raise BenchError(f"{self.contender.name} ended with {code}{self._tail()}")

    def stop(self, grace_s: float = 8.0) -> None:
        """Ask it to leave, then its remaining processes, then kill what is left."""
        if self._process is None:
            return
        assert self._scratch is not None
        with signals_held():
            shared = {path for pid in self.pids() for path in _shared_memory(pid)}
            if self._poll() is None:
                _signal(self.pid, self.contender.stop_signal)
                self._wait_gone(grace_s)
            for number in (signal.SIGTERM, signal.SIGKILL):
                for pid in self.pids():
                    _signal(pid, number)
                self._wait_gone(3.0)
            self._process.wait(5)
            self._process = None
            self._scratch.cleanup()
            for path in shared:  # mosec leaves its semaphores behind now and then
                path.unlink(missing_ok=True)

    def pids(self) -> Sequence[int]:
        """The processes of the server that are alive, the one that was started first."""
        alive = {pid: place for pid in _all_pids() if (place := _place_of(pid))}
        found: set[int] = set()
        num_before = -1
        while len(found) > num_before:
            num_before = len(found)
            found.update(
                pid
                for pid, place in alive.items()
                if place.session in self._sessions
                or place.parent in found
                or place.birth == self._births.get(pid)
            )
            # Some servers give their workers sessions, which they stay in when the parent is gone.
            self._sessions.update(alive[pid].session for pid in found)
        self._births.update((pid, alive[pid].birth) for pid in found)
        return sorted(found, key=lambda pid: (pid != self.pid, pid))

    def usage(self) -> Usage:
        """The CPU time taken so far, by whom."""
        busy_s, stolen_s = machine_s()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(
            front_s=_cpu_s(self.pid),
            rest_s=sum(_cpu_s(pid) for pid in self.pids() if pid != self.pid),
            machine_s=busy_s,
            stolen_s=stolen_s,
            children_s=children.ru_utime + children.ru_stime,
            own_s=own.ru_utime + own.ru_stime,
        )

    def pss_mib(self) -> float:
        """Memory: shared pages count by the share of each process that maps them."""
        return sum(_pss_kib(pid) for pid in self.pids()) / 1024

    def _poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def _wait_gone(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and (self._poll() is None or self.pids()):
            time.sleep(0.02)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return "".join(f"\n    {line}" for line in [f"({self.log})", *lines])


@contextmanager
def signals_held() -> Iterator[None]:
    """Let an interruption wait until the end of the block, so that it loses no process."""
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def ask(port: int, probe: Probe, timeout_s: float = 20.0) -> tuple[int, bytes]:
    """One HTTP call on a connection of its own: status and body."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        if probe.body is None:
            connection.request("GET", probe.path)
        else:
            headers = {"Content-Type": probe.content_type}
            connection.request("POST", probe.path, probe.body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def machine_s() -> tuple[float, float]:
    """CPU seconds that the whole machine has spent, and those withheld by the hypervisor."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(each) / _TICKS_PER_S for each in fields)
    return user + nice + system + irq + softirq, steal


def require_free(port: int) -> None:
    """Refuse to measure somebody else's server.

    Raises:
        BenchError: Something listens on the port.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            message = f"port {port} is taken ({error.strerror}); choose another one with --port"
            raise BenchError(message) from error


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _all_pids() -> Sequence[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> Sequence[str]:
    """The fields of /proc/PID/stat after the name (proc(5)).

    State, parent, group and session are the first; 11 and 12 are CPU ticks, 19 the start.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()


class _Place(NamedTuple):
    """Where a process belongs."""

    parent: int
    session: int
    birth: int
    """When it began, in ticks since the machine did."""


def _place_of(pid: int) -> _Place | None:
    """Where a process belongs, unless it is gone or a zombie."""
    fields = _stat(pid)
    if not fields or fields[0] == "Z":
        return None
    return _Place(parent=int(fields[1]), session=int(fields[3]), birth=int(fields[19]))


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def _shared_memory(pid: int) -> Iterator[Path]:
    """The files in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, is_there, name = line.partition(" /dev/shm/")
        if is_there and not name.endswith("(deleted)"):
            yield Path("/dev/shm", name)


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
