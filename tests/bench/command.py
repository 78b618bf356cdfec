"""The command line: which benchmarks there are, and their options."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench import (
    archives,
    batches,
    bodies,
    entries,
    hosts,
    loaded,
    loops,
    overload,
    peers,
    protocols,
    service,
    soak,
    split,
    steps,
    streams,
    texts,
    trace,
)
from tests.bench.frame import FAILURES, Benchmark
from tests.bench.server import INFERPOOL, Popen, require_free

_SHARED = {
    "rounds": "how often each takes its turn",
    "secs": "seconds of each cell",
    "warm": "seconds of load before each turn",
    "connections": "comma-separated",
    "serve_args": 'further arguments of inferpool, as "--replicas 1"',
}
"""Options that several benchmarks take, with their help."""
BENCHMARKS = {
    "peers": peers.peers,
    "sweep": peers.sweep,
    "presets": loops.presets,
    "front": steps.front,
    "entries": entries.entries,
    "loaded": loaded.loaded,
    "outputs": steps.outputs,
    "batches": batches.batches,
    "trace": trace.trace,
    "start": service.start,
    "overload": overload.overload,
    "split": split.split,
    "decoders": loops.decoders,
    "shares": service.shares,
    "jobs": service.jobs,
    "hosts": hosts.hosts,
    "streams": streams.streams,
    "bodies": bodies.bodies,
    "protocols": protocols.protocols,
    "texts": texts.texts,
    "archives": archives.archives,
    "soak": soak.soak,
}


def main(argv: Sequence[str] | None = None, popen: Popen = subprocess.Popen) -> int:
    """Run one benchmark, whose services are started by `popen`; return the exit status."""
    args = make_parser(popen).parse_args(argv)
    bench = Benchmark(args.benchmark, args)
    try:
        require_free(args.port)
        BENCHMARKS[args.benchmark].run(bench)
    except FAILURES as error:
        if not (bench.cells or bench.parts):
            sys.stderr.write(f"{error}\n")
            return 2
        bench.failures.append(str(error))
    except KeyboardInterrupt:
        bench.is_complete = False
    return bench.publish()


def make_parser(popen: Popen = subprocess.Popen) -> argparse.ArgumentParser:
    """Return the parser of the command line; what it finds has `popen`, too."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="tests/bench/README.md says more."
    )
    verbs = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, command in BENCHMARKS.items():
        verb = verbs.add_parser(name, help=command.help, description=command.help)
        verb.set_defaults(popen=popen)
        verb.add_argument("--port", type=int, default=8171, help="default: %(default)s")
        verb.add_argument("--inferpool", default=INFERPOOL, help="its command (%(default)s)")
        verb.add_argument("--out", type=Path, help="the JSON file; default: one in tests/bench/out")
        for option, value in command.options.items():
            default, text = (value, _SHARED[option]) if option in _SHARED else value
            _add_option(verb, f"--{option.replace('_', '-')}", default, text)
    return parser


def _add_option(parser: argparse.ArgumentParser, flag: str, default: object, text: str) -> None:
    if default is False:
        parser.add_argument(flag, action="store_true", help=text)
    elif isinstance(default, list):
        parser.add_argument(flag, action="append", default=default, help=f"{text}; repeatable")
    else:
        kind = _numbers if isinstance(default, tuple) else type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (%(default)s)")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(int(part) if part.isdigit() else float(part) for part in text.split(","))
