"""The command line, and the plan that it asks for: what to send, how fast, which thresholds."""

import argparse
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

from inferpool.service.client.cli.access import key_of
from inferpool.service.settings.names import FlagError
from inferpool.service.tools.trial.connection import TrialError, post_request
from inferpool.service.tools.trial.flags import count, positive
from inferpool.service.tools.trial.load import LoadPlan
from tests.load.bodies import bodies_of
from tests.load.judging import ErrorLimit, Thresholds, judge

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_KINDS = """\
closed  N connections, each sending its next request when it has its answer
open    requests arrive at a rate, at random moments, whatever becomes of the others
ramp    find the highest rate that keeps the thresholds (default: p99 50 ms, no errors)
soak    a steady rate for a long time; says whether latency and throughput drift
"""
_LENGTHS_S = {"closed": 30.0, "open": 30.0, "ramp": 10.0, "soak": 3600.0}
_ONLY_FOR = {
    "rate": ("open", "ramp", "soak"),
    "requests": ("closed", "open"),
    "max_rate": ("ramp",),
    "precision": ("ramp",),
    "max_drift": ("soak",),
}
"""Loops that have an option, where not all have it."""


def read_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with a message if it is wrong.

    `thresholds` is what it says of them, and the other options have the defaults of the loop.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    for name, kinds in _ONLY_FOR.items():
        if getattr(args, name) is not None and args.kind not in kinds:
            parser.error(f"--{name.replace('_', '-')} is for {' and '.join(kinds)}")
    if args.rate is None and args.kind in ("open", "soak"):
        parser.error("the following arguments are required: --rate")
    if args.kind == "ramp":
        args.rate = args.rate or 20.0
        if not any((args.p50_ms, args.p90_ms, args.p99_ms, args.p999_ms)):
            args.p99_ms = 50.0
        args.errors = args.errors or ErrorLimit()
    args.connections = args.connections or (16 if args.kind == "closed" else 512)
    args.duration = None if args.requests else args.duration or _LENGTHS_S[args.kind]
    args.processes = min(args.processes, args.connections, args.requests or args.connections)
    args.thresholds = Thresholds(
        **{each.name: getattr(args, each.name) for each in fields(Thresholds)}
    )
    return args


def plan_for(args: argparse.Namespace) -> LoadPlan:
    """Return what to send."""
    parts = urlsplit(args.url if "://" in args.url else f"http://{args.url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TrialError(f"{args.url}: say http://host:port or https://host")
    path = f"/predict/{quote(args.model, safe='')}" if args.model else "/predict"
    if parts.path.strip("/"):
        if args.model:
            raise TrialError(f"--model: {args.url} has a path already")
        path = parts.path
    is_encrypted = parts.scheme == "https"
    target = path + (f"?{parts.query}" if parts.query else "")
    headers = {**_headers(args), "Host": parts.netloc.rpartition("@")[2]}
    return LoadPlan(
        address=(parts.hostname, parts.port or (443 if is_encrypted else 80)),
        requests=[
            post_request(target, each.body, each.content_type, headers) for each in bodies_of(args)
        ],
        is_shuffled=True,
        connections=args.connections,
        rate=args.rate,
        duration_s=args.duration,
        num_requests=args.requests,
        warmup_s=args.warmup,
        timeout_s=args.timeout,
        tls=(str(args.ca) if args.ca else not args.insecure) if is_encrypted else None,
        seed=args.seed,
        judge=partial(judge, args.expect),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load",
        description=f"Loads a running service over HTTP and says what it took:\n\n{_KINDS}",
        epilog="tests/load/README.md says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=_LENGTHS_S)
    parser.add_argument("url", help="http://host:port, or a whole URL with its path")
    add = parser.add_argument_group("load").add_argument
    add("--connections", "-c", type=count, metavar="N", help="closed: 16, busy; else: 512 at most")
    add("--rate", "-r", type=positive, help="requests/s; of ramp: to begin with (20)")
    add("--max-rate", type=positive, help="of ramp (none)")
    add("--precision", type=positive, metavar="PERCENT", help="of the answer of ramp (5)")
    add("--duration", "-d", type=_seconds, help="30s; ramp: 10s a step; soak: 1h")
    add("--requests", "-n", type=count, metavar="N", help="instead of a time")
    add("--warmup", type=_seconds, default=2.0, help="the same load, not counted (2s)")
    add("--timeout", type=_seconds, default=30.0, help="of a request (30s)")
    add("--processes", type=count, default=1, metavar="N", help="generators; see the README (1)")
    add("--seed", type=int, default=0, help="of arrivals and order (0)")
    group = parser.add_argument_group("request")
    add = group.add_argument
    add("--model", metavar="NAME", help="default: the service's default model")
    what = group.add_mutually_exclusive_group().add_argument
    what("--body", type=Path, metavar="PATH", help="a file, or a folder of files")
    what("--image", type=_size, metavar="WxH", help="synthetic JPEGs (the default: 640x480)")
    what("--text", type=count, metavar="WORDS", help="texts; WORDS is their median length")
    what("--json", metavar="TEXT", help="a body, as '{\"instances\": [1]}'")
    add("--content-type", metavar="TYPE", help="of --body; default: by suffix")
    add("--instances", type=count, default=1, metavar="N", help="in each request (1)")
    add("--timeout-ms", type=count, metavar="N", help="sent as X-Timeout-Ms")
    add("--header", "-H", action="append", default=[], metavar="'NAME: VALUE'", help="repeatable")
    add("--key-file", type=Path, metavar="FILE", help="an API key, as Bearer")
    add("--insecure", action="store_true", help="do not check certificates")
    add("--ca", type=Path, metavar="FILE", help="who signs the certificate (PEM)")
    add("--expect", metavar="FIELD", help="that the JSON of a good answer has, as predictions")
    add("--no-check", action="store_true", help="go on though the first request fails")
    add = parser.add_argument_group("thresholds: else the exit status is 1").add_argument
    for name in ("p50", "p90", "p99", "p999"):
        add(f"--{name}-ms", type=positive, metavar="MS")
    add("--errors", type=_error_limit, metavar="N|P%", help="at most")
    add("--min-rate", type=positive, metavar="N", help="good answers per second")
    add("--max-drift", type=positive, metavar="PERCENT", help="of p99 in soak, by its quarters")
    add = parser.add_argument_group("results").add_argument
    add("--html", type=Path, metavar="FILE", help="a report with plots")
    add("--out", type=Path, metavar="FILE", help="all figures, as JSON")
    return parser


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {"User-Agent": "inferpool-load"}
    for text in args.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise TrialError(f"--header {text!r}: say 'NAME: VALUE'")
        headers[name.strip()] = value.strip()
    if args.timeout_ms:
        headers["X-Timeout-Ms"] = str(args.timeout_ms)
    try:
        key = key_of(args.key_file, {}, "")
    except FlagError as error:
        raise TrialError(str(error)) from error
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: say 30s, 10m, 2h or 1d")
    return float(match[1]) * _UNITS_S[match[2]]


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    return count(width), count(height)


def _error_limit(text: str) -> ErrorLimit:
    if text.endswith("%"):
        return ErrorLimit(share=float(text[:-1]) / 100)
    return ErrorLimit(num=int(text))
