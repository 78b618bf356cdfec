"""What is to be shown: the flags of `inferpool top`, checked.

Imported whenever the command's line is read, so it imports little.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inferpool.service.settings.address import add_access_flags, add_url_flag, key_of, url_of
from inferpool.service.settings.urls import without_password

KEY_VARIABLE = "INFERPOOL_METRICS_KEYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopPlan:
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

    @property
    def place(self) -> str:
        """The address as it may be shown."""
        return without_password(self.url)


def add_flags(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    add_url_flag(parser)
    add_access_flags(parser, "metrics", KEY_VARIABLE)
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


def plan_of(args: Namespace, environ: Mapping[str, str]) -> TopPlan:
    """What the flags and the environment say.

    Raises:
        FlagError: They make no sense.
    """
    return TopPlan(
        url=url_of(args.url),
        key=key_of(args.key_file, environ, KEY_VARIABLE),
        ca_file=args.ca_file,
        is_insecure=args.insecure,
        is_once=args.once,
        is_json=args.json,
        is_colored=not args.no_color,
    )
