"""The command `python -m tests.bench`: measures the service and its peers. See README.md."""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tests.bench import (
    entries,
    front,
    model,
    outputs,
    overload,
    peers,
    presets,
    soak,
    split,
    start,
    sweep,
    trace,
)
from tests.bench.frame import Benchmark
from tests.bench.server import INFERPOOL, BenchError, require_free

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BENCHMARKS: Mapping[str, ModuleType] = {
    "peers": peers,
    "sweep": sweep,
    "model": model,
    "presets": presets,
    "front": front,
    "entries": entries,
    "outputs": outputs,
    "trace": trace,
    "start": start,
    "overload": overload,
    "split": split,
    "soak": soak,
}
"""Modules with HELP, the DEFAULTS of the shared options that they take, and `run`; `report` where
there are cells to show, and `add_arguments` where there are options of their own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; return the exit status."""
    args = _parser().parse_args(argv)
    bench = Benchmark(args.benchmark, args)
    module = _BENCHMARKS[args.benchmark]
    try:
        require_free(args.port)
        module.run(bench)
    except BenchError as error:
        if not (bench.cells or bench.parts):
            sys.stderr.write(f"{error}\n")
            return 2
        bench.failures.append(str(error))
    except KeyboardInterrupt:
        bench.is_complete = False
    if bench.cells:
        module.report(bench)
    if bench.parts:
        bench.publish()
    return bench.conclude()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    verbs = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, module in _BENCHMARKS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=module.__doc__)
        verb.add_argument("--port", type=int, default=8171, help="default: %(default)s")
        verb.add_argument("--inferpool", default=INFERPOOL, help="its command (%(default)s)")
        verb.add_argument("--out", type=Path, help="the JSON file; default: one in tests/bench/out")
        for option, default in module.DEFAULTS.items():
            kind, text = _SHARED[option]
            verb.add_argument(f"--{option}", type=kind, default=default, help=text)
        if hasattr(module, "add_arguments"):
            module.add_arguments(verb)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


_SHARED: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "rounds": (_positive, "default: %(default)s"),
    "secs": (_positive, "seconds of each cell (%(default)s)"),
    "warm": (int, "seconds of load before each turn (%(default)s)"),
    "connections": (_counts, "comma-separated (%(default)s)"),
    "serve-args": (shlex.split, 'further arguments of inferpool, as "--replicas 1" (%(default)s)'),
}
"""Options that several benchmarks take: type and help."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:  # a second one would leave servers behind
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    for each in _SIGNALS:
        signal.signal(each, _interrupt)
    sys.exit(main())
