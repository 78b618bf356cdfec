"""perf_analyzer in four modes, against one server."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODES = {
    "HTTP, sync": ("-i", "http", "--sync"),
    "HTTP, async": ("-i", "http", "--async"),
    "gRPC, async": ("-i", "grpc", "--async"),
    "gRPC, a stream": ("-i", "grpc", "--async", "--streaming"),
}
WORK = {
    "scores": ("-m", "scores"),
    "150 KiB": ("-m", "any_size", "--shape", "x:38400"),
    "texts": ("-m", "lengths", "--string-length", "1024"),
}
"""Inputs: 16 bytes, 150 KiB and a text of 1 KiB."""
_RUN_S = 120.0
_RATE = re.compile(r"Throughput: ([\d.]+) infer/sec")
_MEDIAN = re.compile(r"p50 latency: (\d+) usec")


@dataclass(frozen=True)
class LoadFigures:
    """Figures that perf_analyzer has measured."""

    per_s: float
    """Calls answered in a second."""
    p50_ms: float


def measure(
    program: Path, variables: Mapping[str, str], mode: str, work: str, ports: tuple[int, int]
) -> LoadFigures | str:
    """Load a server for some seconds, with four requests at once.

    Returns:
        The figures; or the end of what perf_analyzer wrote, if it has failed.
    """
    port = ports[0] if "http" in MODES[mode] else ports[1]
    # The rounds show the spread: a measurement is three seconds, however much it varies.
    settings = ("--concurrency-range", "4", "-p", "1000", "-s", "1000", "-r", "3")
    command = [str(program), "-u", f"127.0.0.1:{port}", *WORK[work], *MODES[mode], *settings]
    done = subprocess.run(
        command, env=dict(variables), capture_output=True, text=True, timeout=_RUN_S, check=False
    )
    rate, median = _RATE.search(done.stdout), _MEDIAN.search(done.stdout)
    if done.returncode or not rate or not median:
        return (done.stdout + done.stderr)[-400:]
    return LoadFigures(per_s=float(rate[1]), p50_ms=int(median[1]) / 1000)
