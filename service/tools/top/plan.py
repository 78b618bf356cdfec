"""The flags of `inferpool top`. The parser of the command imports this, so it imports little."""

from argparse import ArgumentParser

from inferpool.service.client.cli.flags import add_access_flags, add_url_flag

KEY_VARIABLE = "INFERPOOL_METRICS_KEYS"


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of `top`."""
    add_url_flag(parser)
    add_access_flags(parser, "metrics", KEY_VARIABLE)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--once",
        action="store_true",
        help="print the current state as plain text; the default if the output is no terminal",
    )
    shown.add_argument("--json", action="store_true", help="print the current state as JSON")
    shown.add_argument(
        "--no-color", action="store_true", help="use no colours; so does the variable NO_COLOR"
    )
