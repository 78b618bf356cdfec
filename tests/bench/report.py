"""What all benchmarks print and keep: medians with their spread, paired ratios, progress, JSON."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.bench.processes import OUT, ROOT, BenchError

NOISY_CORES = 0.15
"""More than this taken by others during a cell, and its row is marked."""

console = Console(width=None if sys.stdout.isatty() else 180)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 0) -> str:
        """Median and range, as "1,204 (1,100-1,290)"."""
        if self.low == self.high:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    """The median and the range of at least one value."""
    known = list(values)
    return Spread(median=statistics.median(known), low=min(known), high=max(known))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """The ratio ours / theirs in each round that has both: drift of the machine cancels out."""
    ratios = [ours[key] / theirs[key] for key in ours if theirs.get(key)]
    return spread(ratios) if ratios else None


class Steps:
    """The progress of a benchmark: a bar on a terminal, else a line for each step (on stderr)."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=total)
        self._total = total
        self._num_done = 0

    def __enter__(self) -> "Steps":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, text: str) -> None:
        """Say what is being done now."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            step = f"[{self._num_done + 1}/{self._total}]"
            self._console.print(step, text, markup=False, highlight=False)

    def end(self) -> None:
        """Count it as done."""
        self._num_done += 1
        self._progress.advance(self._task)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> None:
    """Print a table, its first column to the left and the figures to the right."""
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def save(benchmark: str, path: Path | None, content: Mapping[str, object]) -> Path:
    """Write what was measured, with the machine and the command, as JSON."""
    target = path or OUT / f"{benchmark}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, "machine": machine(), **content}
    target.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"Written to {target}", highlight=False)
    return target


def machine() -> Mapping[str, object]:
    """Where and when it was measured, and by which command."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "tests.bench", *sys.argv[1:]],
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {
            name: _version(name)
            for name in ("torch", "torchvision", "uvicorn", "uvloop", "fastapi", "pillow")
        },
        "loop_ms": round(loop_ms(), 2),
        "load_average": os.getloadavg(),
    }


def loop_ms() -> float:
    """How long a fixed loop takes now (median of 5): tells a slow machine from a slow service."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        sum(number & 3 for number in range(200_000))
        taken.append((time.perf_counter() - start) * 1000)
    return statistics.median(taken)


def installed_version(python: str, distribution: str) -> str | None:
    """The version of a distribution as another interpreter sees it, or None.

    Raises:
        BenchError: There is no such interpreter.
    """
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise BenchError(f"{python} is no interpreter: {error.strerror}") from error
    return result.stdout.strip() if result.returncode == 0 else None


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
