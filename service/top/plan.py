"""What is to be shown: the flags of `inferpool top`, checked.

Imported whenever the command's line is read, so it imports little.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from service.keys import first_key

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "INFERPOOL_METRICS_KEYS"


class PlanError(ValueError):
    """The flags make no sense; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which service, and how it is shown."""

    url: str
    """Without a slash at its end."""
    key: str
    """Sent along; empty for none."""
    ca_file: Path | None
    """Certificates to trust instead of the system's."""
    is_insecure: bool
    """Trust any certificate."""
    is_once: bool
    """Show one moment, and leave."""
    is_json: bool
    """Show one moment as JSON, and leave."""
    is_colored: bool


def add_flags(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}"
    )
    access = parser.add_argument_group("access")
    access.add_argument(
        "--key-file",
        type=Path,
        metavar="PATH",
        help="send the first key in it, where the service has keys for metrics (default: the first "
        f"of {KEY_VARIABLE})",
    )
    access.add_argument(
        "--ca-file", type=Path, metavar="PATH", help="trust the certificates in this PEM file"
    )
    access.add_argument("--insecure", action="store_true", help="trust any certificate")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--once",
        action="store_true",
        help="print one moment as plain text; so does an output that is no terminal",
    )
    shown.add_argument("--json", action="store_true", help="print one moment as JSON")
    shown.add_argument(
        "--no-color", action="store_true", help="use no colours; so does the variable NO_COLOR"
    )


def plan_of(args: Namespace, environ: Mapping[str, str]) -> Plan:
    """What the flags and the environment say.

    Raises:
        PlanError: They make no sense.
    """
    return Plan(
        url=_url_of(args.url),
        key=_key_of(args.key_file, environ),
        ca_file=args.ca_file,
        is_insecure=args.insecure,
        is_once=args.once,
        is_json=args.json,
        is_colored=not args.no_color,
    )


def _url_of(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        is_sound = False
    if not is_sound or parts.query or parts.fragment:
        raise PlanError(f"{text!r} is no address of a service, as {DEFAULT_URL} is one")
    return url.rstrip("/")


def _key_of(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        where, text = KEY_VARIABLE, environ.get(KEY_VARIABLE, "")
    else:
        where = str(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"--key-file: {path}: {error}") from error
    try:
        return first_key(text)
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error
