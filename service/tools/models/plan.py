"""The flags of `inferpool models`. The parser of the command imports this, so it imports little."""

from argparse import ArgumentParser, _ActionsContainer

from inferpool.service.client.cli.flags import add_models_parsers
from inferpool.service.settings.fields import FieldText, fields_of

_REQUESTS = "inferpool.service.parts.swap.requests"
_SWAP = "SwapOptions"


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags and the actions of `models`."""
    parsers = add_models_parsers(parser)
    for what in ("add", "swap"):
        parsers[what].add_argument(
            "run_folder",
            metavar="RUN",
            nargs="?",
            help="the folder of a finished training run, which is the source; another version must "
            "label at least as many of its held-out images right as the one of now",
        )
    judged = parsers["swap"].add_argument_group("how it is judged")
    for field in fields_of(_REQUESTS, _SWAP):
        if field.name != "ephemeral":  # models are also added and removed so
            _add_flag(field, judged)


def _add_flag(field: FieldText, parser: _ActionsContainer) -> None:
    if field.default is False:
        parser.add_argument(field.flag, action="store_true", default=None, help=field.help)
        return
    is_number = isinstance(field.default, int | float)
    parser.add_argument(
        field.flag,
        type=type(field.default) if is_number else str,
        choices=field.choices,
        metavar=None if field.choices else "X" if is_number else "PATH",
        help=field.help,
    )
