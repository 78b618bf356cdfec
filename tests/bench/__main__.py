"""The command `python -m tests.bench`: measures the service and its peers. See README.md."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tests.bench import (
    entries,
    front,
    loss,
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
from tests.bench.processes import INFERPOOL, BenchError, require_free
from tests.bench.rounds import Plan

_BENCHMARKS = {
    "peers": peers,
    "sweep": sweep,
    "loss": loss,
    "model": model,
    "start": start,
    "overload": overload,
    "presets": presets,
    "front": front,
    "entries": entries,
    "soak": soak,
    "outputs": outputs,
    "trace": trace,
    "split": split,
}
_CONNECTIONS = {
    "peers": "1,16,64",
    "loss": "1,16,64",
    "model": "16,64",
    "sweep": "64",
    "split": "1,16",
}
_SECS = {"peers": 4, "loss": 4, "model": 8, "sweep": 5, "split": 6}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    args = _parser().parse_args(argv)
    plan = Plan(
        connections=args.connections,
        secs=args.secs,
        warm_s=args.warm,
        rounds=args.rounds,
        port=args.port,
    )
    try:
        require_free(args.port)
        status: int = args.run(args, plan)
    except BenchError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    verbs = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, module in _BENCHMARKS.items():
        verb = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
        )
        verb.set_defaults(run=module.run)
        verb.set_defaults(connections=(), secs=0, warm=0, rounds=1)
        if module is not soak:
            verb.add_argument("--rounds", type=_positive, default=5, help="default: %(default)s")
        if name in _CONNECTIONS:
            _add_load(verb, name)
        verb.add_argument("--port", type=int, default=8171, help="default: %(default)s")
        verb.add_argument("--inferpool", default=INFERPOOL, help="its command (%(default)s)")
        verb.add_argument("--out", type=Path, help="the JSON file; default: one in tests/bench/out")
        module.add_arguments(verb)
    return parser


def _add_load(verb: argparse.ArgumentParser, name: str) -> None:
    verb.add_argument(
        "--secs", type=_positive, default=_SECS[name], help="of each cell (%(default)s)"
    )
    verb.add_argument(
        "--warm", type=int, default=2, help="seconds of load before each turn (%(default)s)"
    )
    verb.add_argument(
        "--connections",
        type=_counts,
        default=_CONNECTIONS[name],
        help="comma-separated (%(default)s)",
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # As Ctrl-C does: the servers are ended on the way out, and what was measured is kept.
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    sys.exit(main())
