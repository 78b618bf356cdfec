"""Flags of the verb `train`. Its `--help` imports this, so it imports little."""

from argparse import ArgumentParser, BooleanOptionalAction, _ActionsContainer

from inferpool.service.settings.fields import FieldText, fields_of

_SETTINGS = "inferpool.service.train.settings"
_CLASS = "TrainSettings"
_GROUPS = {
    "val": "images",
    "model": "network",
    "epochs": "training",
    "augment": "changes of the images",
    "precision": "computing",
    "devices": "devices and processes",
    "nodes": "several hosts",
    "max_restarts": "the run",
}
"""Title of the group that begins with a field."""
_METAVARS = {
    "N": ("Length", "Copies", "Tries", "int"),
    "X": ("float", "Ratio"),
    "HOW": ("Literal", "Augmentation", "Precision"),
}
"""Names of values in the help, by words in the annotation of their field."""


def add_flags(parser: ArgumentParser) -> None:
    """Add DATA, a flag for each field of `TrainSettings`, and those that are no settings.

    All values are texts, which `settings.load_settings` checks; None if they are not given.
    """
    data, *fields = fields_of(_SETTINGS, _CLASS)
    parser.add_argument("data", nargs="?", metavar="DATA", help=data.help)
    parser.add_argument("--config", metavar="PATH", help="a TOML or YAML file of these settings")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --output from its last checkpoint, with its settings",
    )
    how.add_argument(
        "--overwrite", action="store_true", help="delete the run in --output, and begin anew"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress and no report")
    group: _ActionsContainer = parser
    for field in fields:
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        _add_flag(field, group)


def _add_flag(field: FieldText, group: _ActionsContainer) -> None:
    kind = field.kind
    if "bool" in kind:
        group.add_argument(field.flag, action=BooleanOptionalAction, default=None, help=field.help)
    elif kind == "Table":
        group.add_argument(
            field.flag,
            action="append",
            metavar="KEY=VALUE",
            help=f"{field.help} The value is TOML or else a text; may be repeated.",
        )
    else:
        metavar = next(
            (
                metavar
                for metavar, words in _METAVARS.items()
                if any(each in kind for each in words)
            ),
            field.name.upper(),
        )
        group.add_argument(field.flag, metavar=metavar, help=_short(field))


def _short(field: FieldText) -> str:
    """Return the help of a field; its text explains a default `auto`."""
    return field.text.replace("%", "%%") if "auto: " in field.text else field.help
