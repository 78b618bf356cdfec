"""Starts any server, ours or a peer's, loads it by wrk, watches its processes and ends them all."""

import io
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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import httpx
import psutil

from inferpool.service.settings.loader import write_toml
from inferpool.service.tools.trial.connection import post_request
from inferpool.service.tools.trial.load import LoadPlan
from inferpool.service.tools.trial.processes import is_alive, pss_of
from tests.e2e.forked import python_path

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
_SCRIPT = Path(__file__).with_name("rotate.lua")
_ANSWER_S = 600.0
_NUM_CLIENTS = 32
"""Clients of a closed loop; more than fill two batches of each worker find nothing more."""

Popen = Callable[..., "subprocess.Popen[Any]"]
"""Starts a process as `subprocess.Popen` does. It need not be a child of this one, but below it."""


class BenchError(Exception):
    """The benchmark cannot go on; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """Request bodies that are sent in turn to one path."""

    files: Sequence[Path]
    content_type: str = "application/octet-stream"
    path: str = "/predict"

    def requests(self) -> list[bytes]:
        """Return them as whole HTTP requests."""
        return [post_request(self.path, each.read_bytes(), self.content_type)
                for each in self.files]  # fmt: skip


def plan_for(
    port: int, requests: Sequence[bytes] | Callable[[int], bytes], rate: float | None, **more: Any
) -> LoadPlan:
    """Plan load at a rate in an open loop, or in a closed loop that keeps a service full (None)."""
    most = {"connections": _NUM_CLIENTS if rate is None else 10_000}
    return LoadPlan(address=(HOST, port), requests=requests, rate=rate, **(most | more))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """Command line of a server: ours, a peer's, or a sketch of ours."""

    name: str
    argv: Sequence[str]
    """`{port}` stands for the port."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str = ""
    """Path that is asked until it answers 200, before the first request."""
    stop_signal: signal.Signals = signal.SIGTERM
    """Signal that makes it end its own processes and leave."""
    popen: Popen = subprocess.Popen
    """Starts it."""
    beside: Sequence[str] = ()
    """Another command that is started and ended with it."""


def inferpool(
    args: Any,
    *arguments: str,
    name: str = "inferpool",
    settings: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> ServerCommand:
    """Return the command line that starts our service as its users do, with JSON logs.

    `settings` go to a file, by their dotted names; those of a table must stand together.
    `args.popen` starts it.
    """
    argv = [*shlex.split(args.inferpool), "serve", *arguments]
    if settings:
        text = io.StringIO()
        write_toml([(tuple(key.split(".")), each, name) for key, each in settings.items()], text)
        file = OUT / "settings" / f"{zlib.crc32(text.getvalue().encode()):08x}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.getvalue())
        argv += ["--config", str(file)]
    argv += shlex.split(getattr(args, "serve_args", ""))
    argv += ["--host", HOST, "--port", "{port}", "--log-format", "json"]
    env = {"PYTHONPATH": python_path(), **(env or {})}  # for models of the benchmarks' own
    return ServerCommand(name=name, argv=argv, env=env, ready="/health/ready", popen=args.popen)


class BenchServer:
    """A running server. A context manager: leaving it ends every process of the server."""

    def __init__(self, command: ServerCommand, port: int, log: Path | None = None) -> None:
        self.command = command
        self.port = port
        self.log = log or OUT / "logs" / f"{command.name}.log"
        self.url = f"http://{HOST}:{port}"
        self.http = httpx.Client(
            base_url=self.url, timeout=_ANSWER_S, trust_env=False, verify=False
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._beside: subprocess.Popen[bytes] | None = None
        self._others: set[psutil.Process] = set()
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)

    def __enter__(self) -> "BenchServer":
        """Start it in a session of its own, with its own folder for temporary files.

        Raises:
            BenchError: The port is taken.
            OSError: The program cannot be run.
        """
        require_free(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        resource_tracker.ensure_running()  # a load generator starts it, which is not the server's
        self._others = self._below()
        try:
            with self.log.open("wb") as log:
                self._process = self._start(self.command.argv, log)
                if self.command.beside:
                    self._beside = self._start(self.command.beside, log)
        except BaseException:  # an interruption, too: the process may be there
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """Ask it to leave, then its remaining processes, then kill what is left."""
        self.http.close()
        ways = (
            (self.command.stop_signal, 8.0),
            (signal.SIGTERM, 3.0),
            *[(signal.SIGKILL, 3.0)] * 3,
        )
        for turn, (number, timeout_s) in enumerate(ways):  # one may start another meanwhile
            for process in self.processes()[: None if turn else 1]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            psutil.wait_procs(self.processes(), timeout_s)
        psutil.wait_procs(self._below(), 1.0)  # orphans that had ended are our zombies
        for process in filter(None, (self._process, self._beside)):
            with suppress(subprocess.TimeoutExpired):  # an interrupted poll keeps a lock
                process.wait(1)
        self._scratch.cleanup()

    def _start(self, argv: Sequence[str], log: BinaryIO) -> "subprocess.Popen[bytes]":
        return self.command.popen(
            [part.replace("{port}", str(self.port)) for part in argv],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": self._scratch.name, **self.command.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process that was started."""
        assert self._process is not None
        return self._process.pid

    def post(self, bodies: Bodies, number: int = 0) -> httpx.Response:
        """Send one of some bodies."""
        headers = {"Content-Type": bodies.content_type}
        body = bodies.files[number].read_bytes()
        return self.http.post(bodies.path, content=body, headers=headers)

    def wait_ready(self, *works: Bodies, timeout_s: float = 600.0) -> str:
        """Wait until all workers are ready and each work is answered; return the last answer."""
        until, answer = time.monotonic() + timeout_s, ""
        asks = [partial(self.post, each) for each in works]
        for ask in [partial(self.http.get, self.command.ready), *asks][not self.command.ready :]:
            for _ in self.turns(until):
                with suppress(httpx.TransportError):
                    answer = (response := ask()).text
                    if response.status_code == 200 and '"degraded"' not in answer:
                        break
            else:
                self.fail(f"not ready in time: {answer[:300]}")
        return answer

    def turns(self, until: float, pause_s: float = 0.05) -> Iterator[None]:
        """Give turns to look at it until a moment has come; its end is an error."""
        assert self._process is not None
        while time.monotonic() < until:
            if (code := self._process.poll()) is not None:
                self.fail(f"ended with {code}")
            yield
            time.sleep(pause_s)

    def fail(self, text: str) -> NoReturn:
        """Raise an error that names it, and has its last log lines."""
        tail = [f"({self.log})", *self.log.read_text(errors="replace").splitlines()[-12:]]
        raise BenchError("\n    ".join([f"{self.command.name}: {text}", *tail]))

    def model(self) -> Mapping[str, Any]:
        """Return what our service's /health says of its first model."""
        model: Mapping[str, Any] = self.http.get("/health").json()["models"][0]
        return model

    def metrics(self, *names: str) -> Sequence[float]:
        """Return the sum of all samples of our service whose names begin so, for each name."""
        lines = self.http.get("/metrics").text.splitlines()
        return [sum(float(line.split()[-1]) for line in lines
                    if line.startswith(f"inferpool_{name}")) for name in names]  # fmt: skip

    def processes(self) -> Sequence[psutil.Process]:
        """Return the server's processes that are alive, the one that was started first."""
        alive = [process for process in self._below() - self._others if is_alive(process)]
        return sorted(alive, key=lambda process: (process.create_time(), process.pid))

    def _below(self) -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - self._others


class CpuMeter:
    """Measures, from when it is made, who takes the cores: the server, the benchmark or others."""

    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._began = time.monotonic()
        self._before = self._read()

    def figures(self) -> dict[str, float]:
        """Return CPU seconds of the server and of its first process, and cores by who took them."""
        front_s, server_s, known_s, machine_s = (
            now - before for now, before in zip(self._read(), self._before, strict=True)
        )
        wall_s = time.monotonic() - self._began
        return {
            "front_s": front_s,
            "server_s": server_s,
            "server_cores": server_s / wall_s,
            "generator_cores": (known_s - server_s) / wall_s,
            "noise": max(0.0, machine_s - known_s) / wall_s,
        }

    def _read(self) -> tuple[float, float, float, float]:
        each_s: dict[int, float] = {}
        for process in self._server.processes():
            with suppress(psutil.NoSuchProcess):
                each_s[process.pid] = sum(process.cpu_times()[:2])
        server_s = sum(each_s.values())
        ours_s = sum(os.times()[:4])  # with the generators that have ended
        return each_s.get(self._server.pid, 0.0), server_s, server_s + ours_s, machine_cpu_s()


def load_closed(
    server: BenchServer, bodies: Bodies, connections: int, secs: int
) -> dict[str, float]:
    """Load a ready server for some seconds.

    Returns:
        Answers and their latencies, CPU and memory: the README explains each.
    """
    meter = CpuMeter(server)
    found = run_wrk(server, bodies, connections, secs)
    cpu, thousands = meter.figures(), max(1.0, found["num_requests"]) / 1000
    return {
        "requests_per_s": (found["num_requests"] - found["num_bad_status"]) / found["duration_s"],
        "errors": found["num_bad_status"] + found["num_broken"],
        **{name: found[name] for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")},
        "cpu_s_per_1000": cpu.pop("server_s") / thousands,
        "front_cpu_s_per_1000": cpu.pop("front_s") / thousands,
        "pss_mib": sum(pss_of(each.pid).total for each in server.processes()) / 2**20,
        **cpu,
    }


def run_wrk(server: BenchServer, bodies: Bodies, connections: int, secs: int) -> dict[str, float]:
    """Run wrk and return its summary.

    Raises:
        BenchError: It is not installed, or gave no result.
    """
    require_wrk()
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{secs}s", "--timeout", "20s", "-s", str(_SCRIPT)]
    environment = {
        **os.environ,
        "BENCH_BODIES": "\n".join(str(file) for file in bodies.files),
        "BENCH_PATH": bodies.path,
        "BENCH_CONTENT_TYPE": bodies.content_type,
    }
    try:
        result = subprocess.run(
            [*argv, server.url],
            env=environment, capture_output=True, text=True, timeout=secs + 60,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BenchError("wrk did not end") from error
    _, is_there, summary = result.stdout.partition("SUMMARY ")
    if not is_there:
        raise BenchError(f"wrk gave no result: {result.stdout[-300:]}{result.stderr[-300:]}")
    figures: dict[str, float] = json.loads(summary)
    return figures


def require_wrk() -> None:
    """Check that the load generator is installed.

    Raises:
        BenchError: It is not. The message says how to get it.
    """
    if shutil.which("wrk") is None:
        raise BenchError("wrk is not installed: apt-get install wrk, or https://github.com/wg/wrk")


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
