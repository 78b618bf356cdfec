"""The flags of `inferpool models`. The parser of the command imports this, so it imports little."""

from argparse import ArgumentParser, _ActionsContainer, _SubParsersAction
from collections.abc import Iterator

from inferpool.service.settings.address import add_access_flags, add_url_flag
from inferpool.service.settings.fields import FieldText, fields_of

KEY_VARIABLE = "INFERPOOL_ADMIN_KEYS"
_REQUESTS = "inferpool.service.parts.swap.requests"
_SWAP = "SwapOptions"


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of `models`, and what it can do."""
    adding = parser.add_subparsers(title="what to do", metavar="WHAT", dest="what", required=True)
    ephemeral, *judging = sorted(swap_flags(), key=lambda flag: flag.name != "ephemeral")
    _add(adding, "list", "list the models and their versions that serve")
    _add(adding, "versions", "list the versions of a model, and what became of each")
    added = _add(adding, "add", "load one more model")
    removed = _add(adding, "remove", "answer what a model has accepted, and serve it no longer")
    swapped = _add(
        adding, "swap", "load another version of a model, which takes over if it is good enough"
    )
    back = _add(adding, "rollback", "let the version that served before serve again")
    for each in (added, swapped):
        each.add_argument(
            "run_folder",
            metavar="RUN",
            nargs="?",
            help="the folder of a finished training run, which is the source; another version must "
            "label at least as many of its held-out images right as the one of now",
        )
        settings = each.add_argument_group("settings of the model")
        settings.add_argument("--source", metavar="SOURCE", help="where its network comes from")
        settings.add_argument("--weights", metavar="WHICH", help="a name, a file, or none")
        settings.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="any other setting of a model, such as replicas=2; may be repeated. Paths are "
            "those of the host and the folder that the service runs in",
        )
        _add_flag(ephemeral, settings)
    _add_flag(ephemeral, removed)
    judged = swapped.add_argument_group("how it is judged")
    for flag in judging:
        _add_flag(flag, judged)
    for each in (added, removed, swapped, back):
        each.epilog = (
            "Ctrl-C leaves it going on. Exit status: 0 once it is done, 1 if it failed or was "
            "refused, 2 for wrong arguments."
        )


def swap_flags() -> Iterator[FieldText]:
    """Yield the fields of `SwapOptions`, with their docstrings."""
    return fields_of(_REQUESTS, _SWAP)


def _add_flag(field: FieldText, parser: _ActionsContainer) -> None:
    """Add the flag of a field to a parser, or to a group of its flags."""
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


def _add(adding: "_SubParsersAction[ArgumentParser]", what: str, text: str) -> ArgumentParser:
    parser = adding.add_parser(
        what, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(parser=parser)
    if what != "list":
        parser.add_argument("name", metavar="NAME", help="the name of the model")
    parser.add_argument("--json", action="store_true", help="print what the service answers")
    add_url_flag(parser)
    add_access_flags(parser, "administration", KEY_VARIABLE)
    return parser
