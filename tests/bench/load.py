"""One cell of a benchmark: a server under closed-loop load by wrk, and what that cost."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.processes import BenchError, Probe, Server

_SCRIPT = Path(__file__).with_name("rotate.lua")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """What is asked: the request bodies, in turn, to one path."""

    files: Sequence[Path]
    content_type: str
    path: str = "/predict"

    def probe(self) -> Probe:
        """The first of these requests, as a single call."""
        body = self.files[0].read_bytes()
        return Probe(path=self.path, body=body, content_type=self.content_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one server did in one round at one number of connections. Times in ms are latencies."""

    contender: str
    workload: str
    connections: int
    round: int
    requests_per_s: float
    """Of requests that were answered well."""
    num_requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    errors: int
    """Answers that were no success, connections that broke, and timeouts."""
    cpu_s_per_1000: float
    """CPU seconds of all of the server's processes for a thousand requests."""
    front_cpu_s_per_1000: float
    """The part of it that the process that was started took: the one that listens, as a rule."""
    server_cores: float
    """Cores that the server kept busy."""
    generator_cores: float
    """Cores that wrk kept busy: near 1, and wrk is what was measured."""
    other_cores: float
    """Cores that neither took, the noise; see the README."""
    stolen_cores: float
    """Cores that the hypervisor withheld."""
    pss_mib: float
    """Memory of the server under this load."""


def require_wrk() -> None:
    """Check that the load generator is installed.

    Raises:
        BenchError: It is not; says how to get it.
    """
    if shutil.which("wrk") is None:
        raise BenchError(
            "wrk is not installed. Debian, Ubuntu: apt-get install wrk. macOS: brew install wrk. "
            "Else: https://github.com/wg/wrk"
        )


def measure(
    server: Server, workload: str, bodies: Bodies, connections: int, secs: int, round_: int
) -> Cell:
    """Load a ready server for some seconds.

    Raises:
        BenchError: wrk gave no result.
    """
    before = server.usage()
    summary = _run_wrk(server.url, bodies, connections, secs)
    after = server.usage()
    num_requests = int(summary["num_requests"])
    wall_s = summary["duration_s"]
    front_s = after.front_s - before.front_s
    server_s = front_s + after.rest_s - before.rest_s
    generator_s = after.children_s - before.children_s
    known_s = server_s + generator_s + after.own_s - before.own_s
    return Cell(
        contender=server.contender.name,
        workload=workload,
        connections=connections,
        round=round_,
        requests_per_s=(num_requests - summary["num_bad_status"]) / wall_s,
        num_requests=num_requests,
        p50_ms=summary["p50_ms"],
        p90_ms=summary["p90_ms"],
        p99_ms=summary["p99_ms"],
        max_ms=summary["max_ms"],
        errors=int(summary["num_bad_status"] + summary["num_broken"]),
        cpu_s_per_1000=server_s / max(1, num_requests) * 1000,
        front_cpu_s_per_1000=front_s / max(1, num_requests) * 1000,
        server_cores=server_s / wall_s,
        generator_cores=generator_s / wall_s,
        other_cores=max(0.0, after.machine_s - before.machine_s - known_s) / wall_s,
        stolen_cores=(after.stolen_s - before.stolen_s) / wall_s,
        pss_mib=server.pss_mib(),
    )


def warm(server: Server, bodies: Bodies, connections: int, secs: int) -> None:
    """Load a server without looking at the result."""
    if secs > 0:
        _run_wrk(server.url, bodies, connections, secs)


def _run_wrk(url: str, bodies: Bodies, connections: int, secs: int) -> dict[str, float]:
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{secs}s", "--timeout", "20s"]
    environment = {
        **os.environ,
        "BENCH_BODIES": "\n".join(str(file) for file in bodies.files),
        "BENCH_PATH": bodies.path,
        "BENCH_CONTENT_TYPE": bodies.content_type,
    }
    try:
        result = subprocess.run(
            [*argv, "-s", str(_SCRIPT), url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=secs + 40,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"wrk did not end: {url}") from error
    for line in result.stdout.splitlines():
        if line.startswith("SUMMARY "):
            summary: dict[str, float] = json.loads(line.removeprefix("SUMMARY "))
            return summary
    raise BenchError(f"wrk gave no result: {result.stdout[-300:]}{result.stderr[-300:]}")
