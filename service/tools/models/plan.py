"""The flags of `inferpool models`. The parser of the command imports this, so it imports little."""

import ast
from argparse import ArgumentParser, _ActionsContainer, _SubParsersAction
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from inferpool.service.settings.address import add_access_flags, add_url_flag

KEY_VARIABLE = "INFERPOOL_ADMIN_KEYS"
_REQUESTS = "inferpool.service.catalog.requests"
_SWAP = "SwapOptions"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFlag:
    """A field of `SwapOptions`, as its source tells of it."""

    name: str
    default: object
    choices: Sequence[str] | None
    text: str

    def add_to(self, parser: _ActionsContainer) -> None:
        """Add its flag to a parser, or to a group of its flags."""
        flag, text = f"--{self.name.replace('_', '-')}", self.text.replace("%", "%%")
        if self.default is False:
            parser.add_argument(flag, action="store_true", default=None, help=text)
            return
        if self.default is not None:
            text = f"{text} (default: {self.default})"
        is_number = isinstance(self.default, int | float)
        metavar = None if self.choices else "X" if is_number else "PATH"
        parser.add_argument(
            flag,
            type=type(self.default) if is_number else str,
            choices=self.choices,
            metavar=metavar,
            help=text,
        )


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
        ephemeral.add_to(settings)
    ephemeral.add_to(removed)
    judged = swapped.add_argument_group("how it is judged")
    for flag in judging:
        flag.add_to(judged)
    for each in (added, removed, swapped, back):
        each.epilog = (
            "Ctrl-C leaves it going on. Exit status: 0 once it is done, 1 if it failed or was "
            "refused, 2 for wrong arguments."
        )


def swap_flags() -> Iterator[SwapFlag]:
    """Yield the fields of `SwapOptions`, with their docstrings.

    They are read from the source: its import takes as long as the rest of a start.
    """
    spec = find_spec(_REQUESTS)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    choices: dict[str, Sequence[str]] = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Subscript(value=ast.Name(id="Literal"), slice=values),
            ):
                choices[name] = ast.literal_eval(values)
            case ast.ClassDef(name=name, body=body) if name == _SWAP:
                yield from _flags_in(body, choices)


def _flags_in(body: Sequence[ast.stmt], choices: dict[str, Sequence[str]]) -> Iterator[SwapFlag]:
    for field, after in pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield SwapFlag(
                    name=name,
                    default=ast.literal_eval(value),
                    choices=choices.get(ast.unparse(kind)),
                    text=" ".join(text.split()),
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
