"""Measures a server in a closed loop by wrk: each connection waits for its answer."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.bench.server import HOST, BenchError, BenchServer, Bodies

_SCRIPT = Path(__file__).with_name("rotate.lua")


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
