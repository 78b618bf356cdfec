"""Starts a server under test, loads it, watches all its processes and ends them. Linux only."""

import contextlib
import ctypes
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from inferpool.service.tools.trial.processes import is_alive, pss_of

ROOT = Path(__file__).resolve().parents[2]
"""The repository. Every child starts here, so that `-m tests.bench...` is found."""
OUT = Path(__file__).resolve().parent / "out"
HOST = "127.0.0.1"
INFERPOOL = str(Path(sys.executable).parent / "inferpool")
"""The command of the environment that runs the benchmark."""

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""Makes glibc keep freed memory, as in the service's workers, and not return it after a batch."""

_GRACE_S = 8.0
_SCRIPT = Path(__file__).with_name("rotate.lua")
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
"""From linux/prctl.h."""


class BenchError(Exception):
    """The benchmark cannot go on; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One HTTP call that shows whether a server is there and does its work."""

    path: str
    body: bytes | None = None
    """A probe with a body is a POST."""
    content_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """Request bodies that are sent in turn to one path."""

    files: Sequence[Path]
    content_type: str = "application/octet-stream"
    path: str = "/predict"

    def probe(self) -> Probe:
        """Return the first of these requests as a single call."""
        body = self.files[0].read_bytes()
        return Probe(path=self.path, body=body, content_type=self.content_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """Command line of a server: ours, a peer's, or a sketch of ours."""

    name: str
    argv: Sequence[str]
    """`{port}` stands for the port."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Probe | None = None
    """Call that is repeated until it answers 200, before the first measured request."""
    path: str = ""
    """Path of the measured requests, for a server that cannot choose it."""
    stop_signal: signal.Signals = signal.SIGTERM
    """Signal that makes it end its own processes and leave."""


def inferpool(
    command: str, *arguments: str, name: str = "inferpool", env: Mapping[str, str] | None = None
) -> ServerCommand:
    """Return the command line that starts our service as its users do, with JSON logs."""
    flags = ["--host", HOST, "--port", "{port}", "--log-format", "json"]
    argv = [*shlex.split(command), "serve", *arguments, *flags]
    return ServerCommand(name=name, argv=argv, env=env or {}, ready=Probe(path="/health/ready"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSeconds:
    """CPU seconds since some moment in the past: only differences mean anything."""

    front: float
    """CPU time of the process that was started: the one that listens, as a rule."""
    server: float
    """CPU time of all processes of the server."""
    known: float
    """CPU time of the server, the benchmark, and the load generators that have ended."""
    machine: float
    """CPU time of the whole machine, with what the hypervisor withheld."""

    def cores(self, since: "CpuSeconds", wall_s: float) -> dict[str, float]:
        """Return the cores that were busy since an earlier reading, by whom."""
        server, known = self.server - since.server, self.known - since.known
        return {
            "server_cores": server / wall_s,
            "generator_cores": (known - server) / wall_s,
            "noise": max(0.0, self.machine - since.machine - known) / wall_s,
        }


class BenchServer:
    """A running server. A context manager: leaving it ends every process of the server.

    Meanwhile this process adopts orphans (PR_SET_CHILD_SUBREAPER), so that each process of the
    server stays below it, whatever becomes of its parent.
    """

    def __init__(self, command: ServerCommand, port: int, log: Path | None = None) -> None:
        self.command = command
        self.port = port
        self.log = log or OUT / "logs" / f"{command.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._others: set[psutil.Process] = set()
        self._adopted_before = False
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)

    def __enter__(self) -> "BenchServer":
        """Start it in a session of its own, with its own folder for temporary files.

        Raises:
            BenchError: The port is taken, or the program cannot be run.
        """
        require_free(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        argv = [part.replace("{port}", str(self.port)) for part in self.command.argv]
        resource_tracker.ensure_running()  # a load generator starts it, which is not the server's
        self._others = set(psutil.Process().children(recursive=True))
        self._adopted_before = _adopt_orphans(True)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    argv,
                    cwd=ROOT,
                    env={**os.environ, "TMPDIR": self._scratch.name, **self.command.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException as error:  # an interruption, too: the process may be there
            self.__exit__()
            if isinstance(error, OSError):
                message = f"{self.command.name}: cannot run {argv[0]}: {error.strerror}"
                raise BenchError(message) from error
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """Ask it to leave, then its remaining processes, then kill what is left."""
        shared = {path for process in self.processes() for path in _shared_memory(process)}
        self._end(self.processes()[:1], self.command.stop_signal, _GRACE_S)
        self._end(self.processes(), signal.SIGTERM, 3.0)
        for _ in range(3):  # in case one starts another meanwhile
            self._end(self.processes(), signal.SIGKILL, 3.0)
        # Orphans that had ended are our zombies.
        psutil.wait_procs(set(psutil.Process().children()) - self._others, 1.0)
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):  # an interrupted poll keeps a lock
                self._process.wait(1)
        _adopt_orphans(self._adopted_before)
        self._scratch.cleanup()
        for path in shared:  # mosec leaves its semaphores behind now and then
            path.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, probe: Probe, timeout_s: float = 180.0) -> bytes:
        """Wait until the server is ready and answers a call with 200; return that answer.

        Raises:
            BenchError: It ended, or did not answer in time.
        """
        until = time.monotonic() + timeout_s
        if self.command.ready:
            self._await_success(self.command.ready, until)
        return self._await_success(probe, until)

    def _await_success(self, probe: Probe, until: float) -> bytes:
        last = "no answer"
        while time.monotonic() < until:
            self.require_running()
            try:
                status, body = ask(self.port, probe)
            except (OSError, http.client.HTTPException) as error:
                last = repr(error)
            else:
                if status == 200:
                    return body
                last = f"{status} {body[:300]!r}"
            time.sleep(0.05)
        where = f"{self.command.name} {probe.path}"
        raise BenchError(f"{where}: not ready in time: {last}{self._tail()}")

    def require_running(self) -> None:
        """Check that the process that was started is alive.

        Raises:
            BenchError: It has ended. The message has its exit code and its last log lines.
        """
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise BenchError(f"{self.command.name} ended with {code}{self._tail()}")

    def processes(self) -> Sequence[psutil.Process]:
        """Return the server's processes that are alive, the one that was started first."""
        found = set(psutil.Process().children(recursive=True)) - self._others
        alive = [process for process in found if is_alive(process)]
        return sorted(alive, key=lambda process: (process.create_time(), process.pid))

    def cpu(self) -> CpuSeconds:
        """Return the CPU time taken so far, by whom."""
        each_s = {process.pid: _cpu_s(process) for process in self.processes()}
        own = os.times()
        ours = own.user + own.system + own.children_user + own.children_system
        server = sum(each_s.values())
        return CpuSeconds(
            front=each_s.get(self.pid, 0.0),
            server=server,
            known=server + ours,
            machine=machine_cpu_s(),
        )

    def pss_mib(self) -> float:
        """Return its memory in MiB. Each process that maps a shared page counts a share of it."""
        return sum(pss_of(process.pid).total for process in self.processes()) / 2**20

    def _end(
        self, processes: Sequence[psutil.Process], number: signal.Signals, timeout_s: float
    ) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs({*processes, *self.processes()}, timeout_s)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return "".join(f"\n    {line}" for line in [f"({self.log})", *lines])


def require_wrk() -> None:
    """Check that the load generator is installed.

    Raises:
        BenchError: It is not. The message says how to get it.
    """
    if shutil.which("wrk") is None:
        raise BenchError(
            "wrk is not installed. Debian, Ubuntu: apt-get install wrk. macOS: brew install wrk. "
            "Else: https://github.com/wg/wrk"
        )


def load_closed(
    server: BenchServer, bodies: Bodies, connections: int, secs: int
) -> dict[str, float]:
    """Load a ready server for some seconds.

    Returns:
        Answers and their latencies, CPU and memory: the README explains each.

    Raises:
        BenchError: wrk gave no result.
    """
    before = server.cpu()
    summary = run_wrk(server, bodies, connections, secs)
    after = server.cpu()
    wall_s, num_requests = summary["duration_s"], max(1.0, summary["num_requests"])
    return {
        "requests_per_s": (summary["num_requests"] - summary["num_bad_status"]) / wall_s,
        "errors": summary["num_bad_status"] + summary["num_broken"],
        **{name: summary[name] for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")},
        "cpu_s_per_1000": (after.server - before.server) / num_requests * 1000,
        "front_cpu_s_per_1000": (after.front - before.front) / num_requests * 1000,
        "pss_mib": server.pss_mib(),
        **after.cores(before, wall_s),
    }


def run_wrk(server: BenchServer, bodies: Bodies, connections: int, secs: int) -> dict[str, float]:
    """Run wrk and return its summary.

    Raises:
        BenchError: wrk gave no result.
    """
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{secs}s", "--timeout", "20s", "-s", str(_SCRIPT)]
    environment = {
        **os.environ,
        "BENCH_BODIES": "\n".join(str(file) for file in bodies.files),
        "BENCH_PATH": bodies.path,
        "BENCH_CONTENT_TYPE": bodies.content_type,
    }
    url = f"http://{HOST}:{server.port}"
    try:
        result = subprocess.run(
            [*argv, url], env=environment, capture_output=True, text=True, timeout=secs + 40
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"wrk did not end: {url}") from error
    for line in result.stdout.splitlines():
        if line.startswith("SUMMARY "):
            summary: dict[str, float] = json.loads(line.removeprefix("SUMMARY "))
            return summary
    raise BenchError(f"wrk gave no result: {result.stdout[-300:]}{result.stderr[-300:]}")


def ask(port: int, probe: Probe, timeout_s: float = 20.0) -> tuple[int, bytes]:
    """Make one HTTP call on a connection of its own; return status and body."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        method = "GET" if probe.body is None else "POST"
        headers = {} if probe.body is None else {"Content-Type": probe.content_type}
        connection.request(method, probe.path, probe.body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def machine_cpu_s() -> float:
    """Return the CPU seconds that the machine has spent, or the hypervisor has withheld."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return float(busy + times.steal)


def require_free(port: int) -> None:
    """Refuse to measure somebody else's server.

    Raises:
        BenchError: Something listens on the port.
    """
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        message = f"port {port} is taken ({error.strerror}); choose another one with --port"
        raise BenchError(message) from error


def _adopt_orphans(wanted: bool) -> bool:
    """Become the parent of processes below this one whose own parent ends (prctl(2)), or not.

    Returns:
        True if this process did so before.
    """
    before = ctypes.c_int()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
    return bool(before.value)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _shared_memory(process: psutil.Process) -> Iterator[Path]:
    """Yield the files in /dev/shm that a process has mapped."""
    with contextlib.suppress(psutil.Error):
        for mapping in process.memory_maps():
            if mapping.path.startswith("/dev/shm/") and not mapping.path.endswith("(deleted)"):
                yield Path(mapping.path)
