"""The command `python -m tests.clients`: real clients against the service, and beside Triton.

See README.md.
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import inferpool
from tests.clients.compare import difference, reason_of
from tests.clients.environments import ClientCall, Environments, calls_of
from tests.clients.perf import MODES, WORK, measure
from tests.clients.recording import record
from tests.clients.scripts.telling import KEY
from tests.clients.service import served
from tests.clients.texts import TEXT_CLIENTS, text_rows
from tests.clients.torchserve.side_by_side import record_torchserve, torchserve_rows
from tests.clients.triton_server import triton

OUT = Path(tempfile.gettempdir()) / "inferpool-clients"
"""Environments take 1 GB, and stay for the next time."""
CLIENTS = {
    "tritonclient.http": ("tritonclient_calls.py", "http"),
    "tritonclient.grpc": ("tritonclient_calls.py", "grpc"),
    "tritonclient.http.aio": ("tritonclient_aio_calls.py", "http"),
    "tritonclient.grpc.aio": ("tritonclient_aio_calls.py", "grpc"),
    "kserve v2": ("kserve_calls.py", "v2"),
    "kserve gRPC": ("kserve_calls.py", "grpc"),
    "kserve v1": ("kserve_calls.py", "v1"),
    "one process": ("one_process_calls.py", "tritonclient"),
    "one process, kserve": ("one_process_calls.py", "kserve"),
    "real models, HTTP": ("real_models_calls.py", "http"),
    "real models, gRPC": ("real_models_calls.py", "grpc"),
    "by hand": ("raw_calls.py", "http"),
}
"""Scripts and the argument that says how they call."""
_OURS_ALONE = (
    *("kserve v1", "real models, HTTP", "real models, gRPC"),
    *("one process", "one process, kserve"),
)
PHOTO = Path(inferpool.__path__[0]) / "models/vision/photos/chelsea.jpg"
_BAD = ("500", "INTERNAL", "UNKNOWN", "AssertionError", "JSONDecodeError", "TypeError")
Ports = tuple[int, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the clients, and print what differs; return 1 if anything does that must not."""
    args = make_parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    environments = Environments(args.out / "environments", args.python)
    if args.torchserve:
        return compare_torchserve(environments, args.out / "torchserve", args.record)
    with contextlib.ExitStack() as stack:
        theirs: Ports | None = None
        if args.triton:
            python = environments.triton(args.triton)
            theirs = stack.enter_context(triton(python, args.out))
        if args.record:
            assert theirs is not None, "--record needs --triton"
            record(environments, args.out, theirs)
            return 0
        wrong = 0
        if args.calls and not args.triton:
            names = [each for each in args.only or TEXT_CLIENTS if each in TEXT_CLIENTS]
            wrong = call_with_texts(environments, args.out / "texts", names)
        if args.only and not set(args.only) & set(CLIENTS):
            return int(wrong > 0)
        (args.out / "admin.key").write_text(KEY)
        settings = {"admin_keys_file": str(args.out / "admin.key")}
        ours = stack.enter_context(served(args.out, settings))
        if args.calls:
            names = [each for each in args.only or CLIENTS if each in CLIENTS]
            wrong += compare_calls(environments.clients(), names, ours, theirs, args.out)
        if args.perf:
            wrong += compare_load(environments, ours, theirs, args.rounds)
    return int(wrong > 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description="tests/clients/README.md says more."
    )
    parser.add_argument(
        "--triton", metavar="PYTHON", help="compare with Triton, run by this Python"
    )
    parser.add_argument(
        "--torchserve", action="store_true", help="compare with TorchServe alone; needs Java"
    )
    parser.add_argument("--python", default="3.11", help="Python of the clients")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of environments and logs")
    parser.add_argument(
        "--only", choices=[*CLIENTS, *TEXT_CLIENTS], action="append", help="these clients alone"
    )
    parser.add_argument("--no-calls", dest="calls", action="store_false")
    parser.add_argument("--perf", action="store_true", help="perf_analyzer in four modes too")
    parser.add_argument("--rounds", type=int, default=3, help="how often perf_analyzer measures")
    parser.add_argument("--record", action="store_true", help="write the recorded exchanges anew")
    return parser


def compare_calls(
    python: Path, clients: Sequence[str], ours: Ports, theirs: Ports | None, out: Path
) -> int:
    """Make each client's calls to both servers; return how many answers are wrong."""
    rows: list[tuple[str, str, str, str]] = []
    for client in clients:
        script, kind = CLIENTS[client]
        place = int(kind == "grpc")
        needs = {"PREDICT": f"http://127.0.0.1:{ours[0]}", "PHOTO": str(PHOTO)}
        address, interpreter = f"127.0.0.1:{ours[place]}", python
        if script == "one_process_calls.py":  # it serves too, and imports the client's packages
            interpreter = Path(sys.executable)
            (packages,) = python.parent.parent.glob("lib/python*/site-packages")
            address = str(packages)
        found = calls_of(interpreter, script, kind, address, **needs)
        told: Sequence[ClientCall | None] = [None] * len(found)
        if theirs is not None and client not in _OURS_ALONE:
            told = calls_of(python, script, kind, f"127.0.0.1:{theirs[place]}")
        rows += [(client, *row) for row in rows_of(found, told)]
    (out / "calls.json").write_text(json.dumps(rows, indent=1))
    return say_rows(rows)


def call_with_texts(environments: Environments, folder: Path, clients: Sequence[str]) -> int:
    """Make the calls of clients that are about texts; return how many answers are wrong."""
    if not clients:
        return 0
    folder.mkdir(exist_ok=True)
    rows = [*text_rows(environments, folder, clients)]
    (folder / "calls.json").write_text(json.dumps(rows, indent=1))
    return say_rows(rows)


def compare_torchserve(environments: Environments, folder: Path, is_recorded: bool) -> int:
    """Make all calls to TorchServe and to the service; return 1 if an answer is wrong."""
    if shutil.which("java") is None:
        say(
            "TorchServe needs Java 11 or later, and there is no java on the PATH: install it, "
            "such as by apt-get install openjdk-17-jre-headless"
        )
        return 1
    folder.mkdir(exist_ok=True)
    if is_recorded:
        record_torchserve(environments, folder)
        return 0
    rows = [*torchserve_rows(environments, folder)]
    (folder / "calls.json").write_text(json.dumps(rows, indent=1))
    return int(say_rows(rows) > 0)


def say_rows(rows: Sequence[tuple[str, str, str, str]]) -> int:
    """Print what is not as it should be, and a line for each client; return the faults."""
    for client, call, result, text in rows:
        if result not in ("same", "answered", "right"):
            say(f"{client:22} {call:44} {result:10} {' '.join(text.split())}")
    for client in dict.fromkeys(name for name, *_ in rows):
        results = [result for name, _, result, _ in rows if name == client]
        counts = (f"{results.count(each)} {each}" for each in dict.fromkeys(results))
        say(f"{client:22} {len(results):3} calls: {', '.join(counts)}")
    return sum(result in ("different", "failed") for _, _, result, _ in rows)


def rows_of(
    ours: Sequence[ClientCall], theirs: Sequence[ClientCall | None]
) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each call, its result, and how it differs or what the error says."""
    for found, told in zip(ours, theirs, strict=True):
        if told is None:
            is_bad = found.status in _BAD and "fails" not in found.call
            yield found.call, "failed" if is_bad else "answered", found.text
            continue
        assert found.call == told.call
        text = difference(found.call, told.values, found.values)
        if not text:
            yield found.call, "same", ""
        elif reason := reason_of(found.call, found.values):
            yield found.call, "documented", f"{text} ({reason})"
        else:
            yield found.call, "different", f"{text} {found.text}"


def compare_load(environments: Environments, ours: Ports, theirs: Ports | None, rounds: int) -> int:
    """Load both servers in turn by perf_analyzer; return how many runs have failed."""
    program, variables = environments.perf_analyzer()
    servers = {"inferpool": ours} | ({"Triton": theirs} if theirs else {})
    num_failed = 0
    for mode in MODES:
        for work in WORK:
            rates: dict[str, list[str]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, ports in servers.items():
                    found = measure(program, variables, mode, work, ports)
                    if isinstance(found, str):
                        num_failed += 1
                        rates[name].append("failed")
                        say(found)
                    else:
                        rates[name].append(f"{found.per_s:.0f}/s {found.p50_ms:.1f} ms")
            for name, each in rates.items():
                say(f"{mode:16} {work:8} {name:10} {'  '.join(each)}")
    return num_failed


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # the servers end with the command
    sys.exit(main())
