"""`start`: the time from the command to ready, and its parts."""

import http.client
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import (
    OUT,
    ROOT,
    BenchError,
    BenchServer,
    Probe,
    ServerCommand,
    ask,
    inferpool,
)

HELP = "from the command to ready, and the parts of that time"
OPTIONS = {
    "rounds": 5,
    "serve-args": "",
    "model": ("", "default: the service's own default model"),
}
_TIMEOUT_S = 180
_POLL_S = 0.01
_READY = Probe(path="/health/ready")
_PARTS: Mapping[str, str] = {
    "an empty interpreter": "pass",
    "the front end's imports": "import inferpool.service.app",
    "the forkserver's imports": "import inferpool.workers.inside.preload",
    "import torch alone": "import torch",
    "import torchvision alone": "import torchvision",
}
"""Code that is run in an interpreter of its own, which is timed as a whole."""
_IMPORTS = ("the front end's imports", "the forkserver's imports")
"""Parts that are split by package."""
_IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def run(bench: Benchmark) -> None:
    """Start the service and each part in each round; then split the imports by package."""
    args = bench.args
    model = [args.model] if args.model else []
    command = inferpool(args.inferpool, *model, *shlex.split(args.serve_args), name="start")
    bench.take_turns({
        "inferpool serve": partial(_start, command, args.port),
        **{name: partial(_time_part, name, code) for name, code in _PARTS.items()},
    })  # fmt: skip
    bench.content["imports_ms"] = {name: _by_package(_PARTS[name]) for name in _IMPORTS}


def report(bench: Benchmark) -> None:
    """Print all times, the slowest packages, and the log of a typical start."""
    caption = "The parts are interpreters of their own; some run side by side in the service."
    columns = [Column("seconds", "seconds, median (range)", 2, "range")]
    bench.add_cells("From the command to ready", "", columns, caption)
    imports: Mapping[str, Mapping[str, float]] = bench.content.get("imports_ms", {})
    for name, packages in imports.items():
        top = list(packages.items())[:10]
        rest = sum(packages.values()) - sum(value for _, value in top)
        rows = [(package, f"{value:,.0f}") for package, value in [*top, ("all others", rest)]]
        title = f"{name.capitalize()}: {sum(packages.values()):,.0f} ms under -X importtime"
        caption = "The modules of each package, without what they import."
        bench.add_table(title, ("package", "ms"), rows, caption)
    bench.add_note(f"The log of the last start is in {OUT / 'logs' / 'start.log'}")


def _start(command: ServerCommand, port: int, round_: int) -> Iterator[Cell]:
    began = time.monotonic()
    listening_s = 0.0
    with BenchServer(command, port) as server:
        status = 0
        while status != 200:
            try:
                status, _ = ask(port, _READY)
                is_listening = True
            except (OSError, http.client.HTTPException) as error:
                is_listening = not isinstance(error, ConnectionRefusedError)
            passed_s = time.monotonic() - began
            if is_listening:
                listening_s = listening_s or passed_s
            server.require_running()
            if passed_s > _TIMEOUT_S:
                raise BenchError(f"not ready in {_TIMEOUT_S} s; see {server.log}")
            time.sleep(0 if status == 200 else _POLL_S)
        cpu_s = server.cpu().server
    for name, seconds in (
        ("listening", listening_s), ("ready", passed_s), ("CPU until ready", cpu_s)
    ):  # fmt: skip
        yield Cell(workload="start", contender=name, round=round_, figures={"seconds": seconds})


def _time_part(name: str, code: str, round_: int) -> Iterator[Cell]:
    began = time.perf_counter()
    _python(["-c", code])
    figures = {"seconds": time.perf_counter() - began}
    yield Cell(workload="part", contender=name, round=round_, figures=figures)


def _by_package(code: str) -> dict[str, float]:
    """Return the milliseconds of each top-level package's own modules, the slowest first."""
    total: dict[str, float] = {}
    for line in _python(["-X", "importtime", "-c", code]).splitlines():
        if match := _IMPORT_LINE.fullmatch(line.rstrip()):
            package = match[2].partition(".")[0]
            total[package] = total.get(package, 0.0) + int(match[1]) / 1000
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _python(arguments: Sequence[str]) -> str:
    """Run the interpreter in the repository; return its stderr."""
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if result.returncode:
        raise BenchError(f"python {' '.join(arguments)}: {result.stderr[-500:]}")
    return result.stderr
