"""`start`: from the command to ready, and what the time is made of."""

import argparse
import http.client
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from tests.bench import rounds
from tests.bench.peers import conclude
from tests.bench.processes import OUT, ROOT, BenchError, Probe, Server, ask, inferpool
from tests.bench.report import Steps, console, save, spread, table

HELP = "from the command to ready, and what the time is made of"
_TIMEOUT_S = 180
_POLL_S = 0.01

PARTS: Mapping[str, str] = {
    "an empty interpreter": "pass",
    "the front end's imports": "import inferpool.service.app",
    "the forkserver's imports": "import inferpool.workers.inside.preload",
    "import torch alone": "import torch",
    "import torchvision alone": "import torchvision",
}
"""Code that is run in an interpreter of its own, which is timed as a whole."""
_IMPORTS = ("the front end's imports", "the forkserver's imports")
"""The parts that are taken apart by package."""
_IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="default: the service's own default model")
    parser.add_argument("--serve-args", default="", help="further arguments of inferpool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start. Times in seconds from the moment that the command was given."""

    listening_s: float
    """Until a connection was accepted."""
    ready_s: float
    """Until /health/ready said 200."""
    cpu_s: float
    """CPU time that all its processes took until then."""
    log: Sequence[tuple[float, str]]
    """The service's log lines, with the time of each."""


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    arguments = [*([args.model] if args.model else []), *shlex.split(args.serve_args)]
    contender = inferpool(args.inferpool, *arguments)
    results = rounds.Results()
    starts: list[Start] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    with Steps(plan.rounds * (1 + len(PARTS)) + len(_IMPORTS)) as steps:
        try:
            for round_ in range(plan.rounds):
                steps.begin(f"round {round_ + 1}: inferpool serve {' '.join(arguments)}")
                server = Server(contender, plan.port, OUT / "logs" / "start.log")
                starts.append(_start(server))
                steps.end()
                for name, code in PARTS.items():
                    steps.begin(f"round {round_ + 1}: {name}")
                    parts[name].append(_time_of(code))
                    steps.end()
            imports = {}
            for name in _IMPORTS:
                steps.begin(f"{name}, by package")
                imports[name] = _by_package(PARTS[name])
                steps.end()
        except KeyboardInterrupt:
            results.is_complete = False
        except BenchError as error:
            results.failures.append(str(error))
    if starts and results.is_complete and not results.failures:
        _print(starts, parts, imports)
        content = {
            "plan": asdict(plan),
            "starts": [asdict(each) for each in starts],
            "parts_s": parts,
            "imports_ms": imports,
        }
        save("start", args.out, content)
    return conclude(results)


def _start(server: Server) -> Start:
    began = time.time()
    listening_s = 0.0
    with server:
        while True:
            try:
                status, _ = ask(server.port, Probe(path="/health/ready"))
            except (OSError, http.client.HTTPException) as error:
                status = 0
                if not isinstance(error, ConnectionRefusedError):
                    listening_s = listening_s or time.time() - began
            else:
                listening_s = listening_s or time.time() - began
            if status == 200:
                break
            server.require_running()
            if time.time() - began > _TIMEOUT_S:
                raise BenchError(f"not ready in {_TIMEOUT_S} s; see {server.log}")
            time.sleep(_POLL_S)
        ready_s = time.time() - began
        usage = server.usage()
    return Start(
        listening_s=listening_s,
        ready_s=ready_s,
        cpu_s=usage.front_s + usage.rest_s,
        log=[
            (moment - began, message)
            for moment, message in _log_lines(server.log.read_text(errors="replace"))
            if moment - began <= ready_s + 0.05
        ],
    )


def _log_lines(text: str) -> list[tuple[float, str]]:
    """The moments and messages of JSON log lines; other lines are left out."""
    found = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            entry = json.loads(line)
            moment = datetime.fromisoformat(entry["time"].replace("Z", "+00:00")).timestamp()
        except (ValueError, KeyError):
            continue
        found.append((moment, str(entry.get("message", ""))))
    return found


def _time_of(code: str) -> float:
    began = time.perf_counter()
    _python(["-c", code])
    return time.perf_counter() - began


def _by_package(code: str) -> dict[str, float]:
    """Milliseconds that each top-level package took for its own modules, the slowest first."""
    total: dict[str, float] = {}
    for line in _python(["-X", "importtime", "-c", code]).splitlines():
        if match := _IMPORT_LINE.fullmatch(line.rstrip()):
            package = match[2].partition(".")[0]
            total[package] = total.get(package, 0.0) + int(match[1]) / 1000
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _python(arguments: Sequence[str]) -> str:
    """Run the interpreter in the repository; returns what it wrote to stderr."""
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if result.returncode:
        raise BenchError(f"python {' '.join(arguments)}: {result.stderr[-500:]}")
    return result.stderr


def _print(
    starts: Sequence[Start],
    parts: Mapping[str, Sequence[float]],
    imports: Mapping[str, Mapping[str, float]],
) -> None:
    rows = [
        ("listening", spread(each.listening_s for each in starts).text(2)),
        ("ready", spread(each.ready_s for each in starts).text(2)),
        ("CPU until ready", spread(each.cpu_s for each in starts).text(2)),
        *((name, spread(values).text(2)) for name, values in parts.items()),
    ]
    caption = (
        "The parts are interpreters of their own, beside the service; some run side by side in it."
    )
    table("From the command to ready", ("", "seconds, median (range)"), rows, caption)
    for name, packages in imports.items():
        top = list(packages.items())[:10]
        rest = sum(packages.values()) - sum(value for _, value in top)
        rows = [(package, f"{value:,.0f}") for package, value in [*top, ("all others", rest)]]
        title = f"{name.capitalize()}: {sum(packages.values()):,.0f} ms under -X importtime"
        table(
            title, ("package", "ms"), rows, "The modules of each package, without what they import."
        )
    typical = sorted(starts, key=lambda each: each.ready_s)[len(starts) // 2]
    rows = [(f"{moment:.2f}", message[:120]) for moment, message in typical.log]
    console.print(f"The log of a typical start, ready after {typical.ready_s:.2f} s:")
    for moment, message in rows:
        console.print(f"  {moment:>6} s  {message}", markup=False, highlight=False)
