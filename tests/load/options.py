"""The command line: what to send, how fast, which thresholds, and which files to write."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from urllib.parse import quote, urlsplit

from inferpool.service.settings.address import key_of
from inferpool.service.settings.names import FlagError
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.flags import count, positive
from tests.load.bodies import BodySource
from tests.load.thresholds import ErrorLimit, Thresholds

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_KINDS = {
    "closed": "N connections, each sending its next request when it has its answer",
    "open": "requests arrive at a rate, at random moments, whatever becomes of the others",
    "ramp": "find the highest rate that keeps the thresholds (default: p99 50 ms, no errors)",
    "soak": "a steady rate for a long time; says whether latency and throughput drift",
}
_DURATION_DEFAULTS = {"closed": "30s", "open": "30s", "ramp": "10s", "soak": "1h"}
_OPEN_CONNECTIONS = 512
_RAMP_P99_MS = 50.0
_HIDDEN = {"authorization", "x-api-key", "cookie", "proxy-authorization"}
_NO_PLAN = {"kind", "thresholds", "max_rate", "precision", "html", "out", "is_checked"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run."""

    kind: str
    url: str
    """The whole URL, with its path."""
    source: BodySource
    headers: Mapping[str, str]
    connections: int
    rate: float | None
    duration_s: float | None
    num_requests: int | None
    warmup_s: float
    timeout_s: float
    verify: bool | str
    """True to check TLS certificates; or the file of the authority that signs them."""
    expect: str | None
    """A field that the JSON of a good answer has."""
    seed: int
    processes: int
    thresholds: Thresholds
    max_rate: float
    precision: float
    html: Path | None
    out: Path | None
    is_checked: bool
    """One request is sent first, and must be answered well."""

    def as_dict(self) -> dict[str, object]:
        """Return what was done, without secrets."""
        headers = {
            name: "hidden" if name.lower() in _HIDDEN else value
            for name, value in self.headers.items()
        }
        content = asdict(self) | {"headers": headers}
        return {name: value for name, value in content.items() if name not in _NO_PLAN}


def read_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; ends the process with a message if it is wrong."""
    args = _parser().parse_args(argv)
    connections = args.connections or (16 if args.kind == "closed" else _OPEN_CONNECTIONS)
    num_requests = getattr(args, "requests", None)
    return Options(
        kind=args.kind,
        url=_whole_url(args.url, args.model),
        source=_source(args),
        headers=_headers(args),
        connections=connections,
        rate=getattr(args, "rate", None),
        duration_s=None if num_requests else args.duration,
        num_requests=num_requests,
        warmup_s=args.warmup,
        timeout_s=args.timeout,
        verify=False if args.insecure else str(args.ca) if args.ca else True,
        expect=args.expect,
        seed=args.seed,
        processes=min(args.processes, connections, num_requests or connections),
        thresholds=_thresholds(args),
        max_rate=getattr(args, "max_rate", inf),
        precision=getattr(args, "precision", 5.0) / 100,
        html=args.html,
        out=args.out,
        is_checked=not args.no_check,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=_DESCRIPTION)
    verbs = parser.add_subparsers(dest="kind", metavar="closed|open|ramp|soak", required=True)
    for kind, text in _KINDS.items():
        verb = verbs.add_parser(kind, help=text, description=text)
        verb.add_argument("url", help="http://host:port, or a whole URL with its path")
        _add_load(verb, kind)
        _add_request(verb)
        _add_results(verb, kind)
    return parser


_DESCRIPTION = "Loads a running service over HTTP and says what it took. See tests/load/README.md."


def _add_load(verb: argparse.ArgumentParser, kind: str) -> None:
    group = verb.add_argument_group("load")
    many = "busy connections (16)" if kind == "closed" else f"at most ({_OPEN_CONNECTIONS})"
    group.add_argument("--connections", "-c", type=count, metavar="N", help=many)
    if kind == "ramp":
        group.add_argument("--rate", type=positive, default=20.0, help="to begin with (20)")
        group.add_argument("--max-rate", type=positive, default=inf, help="(none)")
        group.add_argument(
            "--precision", type=positive, default=5.0, metavar="PERCENT", help="of the answer (5)"
        )
    elif kind != "closed":
        group.add_argument("--rate", "-r", type=positive, required=True, help="requests/s")
    default = _DURATION_DEFAULTS[kind]
    what = "of each step" if kind == "ramp" else "of measuring"
    group.add_argument(
        "--duration", "-d", type=_seconds, default=_seconds(default), help=f"{what} ({default})"
    )
    if kind in ("closed", "open"):
        group.add_argument("--requests", "-n", type=count, metavar="N", help="instead of a time")
    group.add_argument(
        "--warmup", type=_seconds, default=2.0, help="the same load, not counted (2s)"
    )
    group.add_argument("--timeout", type=_seconds, default=30.0, help="of a request (30s)")
    group.add_argument(
        "--processes", type=count, default=1, metavar="N", help="generators; see the README (1)"
    )
    group.add_argument("--seed", type=int, default=0, help="of arrivals and order (0)")


def _add_request(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("request")
    group.add_argument("--model", metavar="NAME", help="default: the service's default model")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--body", type=Path, metavar="PATH", help="a file, or a folder of files")
    what.add_argument(
        "--image", type=_size, metavar="WxH", help="synthetic JPEGs (the default: 640x480)"
    )
    what.add_argument(
        "--text",
        type=count,
        metavar="WORDS",
        help="synthetic texts, of so many words in the median",
    )
    what.add_argument("--json", metavar="TEXT", help="a body, as '{\"instances\": [1]}'")
    group.add_argument("--content-type", metavar="TYPE", help="of --body; default: by suffix")
    group.add_argument(
        "--instances", type=count, default=1, metavar="N", help="in each request (1)"
    )
    group.add_argument("--timeout-ms", type=count, metavar="N", help="sent as X-Timeout-Ms")
    group.add_argument(
        "--header", "-H", action="append", default=[], metavar="'NAME: VALUE'", help="repeatable"
    )
    group.add_argument("--key-file", type=Path, metavar="FILE", help="an API key, as Bearer")
    tls = group.add_mutually_exclusive_group()
    tls.add_argument("--insecure", action="store_true", help="do not check certificates")
    tls.add_argument("--ca", type=Path, metavar="FILE", help="who signs the certificate (PEM)")
    group.add_argument(
        "--expect", metavar="FIELD", help="that the JSON of a good answer has, as predictions"
    )
    group.add_argument(
        "--no-check", action="store_true", help="go on though the first request fails"
    )


def _add_results(verb: argparse.ArgumentParser, kind: str) -> None:
    what = "what a rate must keep" if kind == "ramp" else "exit status 1 where they are not kept"
    group = verb.add_argument_group(f"thresholds: {what}")
    for name in ("p50", "p90", "p99", "p999"):
        group.add_argument(f"--{name}-ms", type=positive, metavar="MS")
    group.add_argument("--errors", type=_error_limit, metavar="N|P%", help="at most")
    group.add_argument("--min-rate", type=positive, metavar="N", help="good answers per second")
    if kind == "soak":
        group.add_argument(
            "--max-drift", type=positive, metavar="PERCENT",
            help="growth of p99 from the first to the last quarter",
        )  # fmt: skip
    group = verb.add_argument_group("results")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report with plots")
    group.add_argument("--out", type=Path, metavar="FILE", help="all figures, as JSON")


def _thresholds(args: argparse.Namespace) -> Thresholds:
    given = Thresholds(**{each.name: getattr(args, each.name, None) for each in fields(Thresholds)})
    if args.kind != "ramp":
        return given
    p99_ms = given.p99_ms if any(given.percentiles()) else _RAMP_P99_MS
    return replace(given, p99_ms=p99_ms, errors=given.errors or ErrorLimit())


def _whole_url(text: str, model: str | None) -> str:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TrialError(f"{text}: say http://host:port or https://host")
    if parts.path.strip("/"):
        if model:
            raise TrialError(f"--model: {text} has a path already")
        return parts.geturl()
    path = f"/predict/{quote(model, safe='')}" if model else "/predict"
    return parts._replace(path=path).geturl()


def _source(args: argparse.Namespace) -> BodySource:
    is_default = args.body is None and args.json is None and args.text is None
    return BodySource(
        path=args.body,
        content_type=args.content_type,
        image=args.image or ((640, 480) if is_default else None),
        json_text=args.json,
        text_words=args.text,
        instances=args.instances,
        seed=args.seed,
    )


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
