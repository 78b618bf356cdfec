"""The command `python -m tests.bench`: measures the service and its peers. See README.md."""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType

from tests.bench.frame import Benchmark
from tests.bench.server import INFERPOOL, BenchError, require_free

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHARED = {
    "rounds": "how often each takes its turn",
    "secs": "seconds of each cell",
    "warm": "seconds of load before each turn",
    "connections": "comma-separated",
    "serve-args": 'further arguments of inferpool, as "--replicas 1"',
}
"""Options that several benchmarks take, with their help."""
_NAMES = (
    *("peers", "sweep", "model", "presets", "front", "entries"),
    *("outputs", "trace", "start", "overload", "split", "soak"),
    *("decoders", "shares", "swap", "batch", "jobs", "hosts"),
)
_BENCHMARKS = {name: import_module(f"tests.bench.{name}") for name in _NAMES}
"""Modules with HELP, OPTIONS and `run`, and with `report` where there are cells to show. OPTIONS
has the default of each shared option that it takes, and the default and help of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; return the exit status."""
    args = make_parser().parse_args(argv)
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


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    verbs = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, module in _BENCHMARKS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=module.__doc__)
        verb.add_argument("--port", type=int, default=8171, help="default: %(default)s")
        verb.add_argument("--inferpool", default=INFERPOOL, help="its command (%(default)s)")
        verb.add_argument("--out", type=Path, help="the JSON file; default: one in tests/bench/out")
        for option, value in module.OPTIONS.items():
            default, text = (value, _SHARED[option]) if option in _SHARED else value
            _add_option(verb, option, default, text)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, default: object, text: str) -> None:
    flag = f"--{name}"
    if default is False:
        parser.add_argument(flag, action="store_true", help=text)
    elif isinstance(default, list):
        parser.add_argument(flag, action="append", default=default, help=f"{text}; repeatable")
    else:
        kind = _numbers if isinstance(default, tuple) else type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (%(default)s)")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(int(part) if part.isdigit() else float(part) for part in text.split(","))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:  # a second one would leave servers behind
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    for each in _SIGNALS:
        signal.signal(each, _interrupt)
    sys.exit(main())
