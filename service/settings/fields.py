"""Reads the fields of a class from its source, and makes flags with their help texts.

To import a class of settings takes as long as the rest of a start, so `--help` doesn't.
"""

import ast
from argparse import ArgumentParser, _ActionsContainer
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

_READERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "N"),
    "float": (float, "X"),
    "str": (str, "TEXT"),
    "Path": (Path, "PATH"),
}
"""Readers of values, and words for values in the help, by the annotations of fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldText:
    """A field of a class, as its source tells of it."""

    name: str
    default: object
    is_required: bool = False
    kind: str
    """Its annotation."""
    metavar: str = ""
    """Word for its value in the help, from an annotation such as `Annotated[int, "MS"]`."""
    choices: Sequence[str] | None
    """The only values that it takes, if they are texts."""
    text: str
    """Its docstring on one line."""

    @property
    def flag(self) -> str:
        """The name of its flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """The help of its flag, with its default if that says something."""
        return self._with_default(self.text)

    @property
    def brief(self) -> str:
        """The first sentence of that help, with the default."""
        return self._with_default(f"{self.text.removesuffix('.').partition('. ')[0]}.")

    def _with_default(self, text: str) -> str:
        text = text.replace("%", "%%")
        silent = isinstance(self.default, bool) or self.default in (None, "", {}, ())
        return text if silent or "default:" in text else f"{text} (default: {self.default})"


@cache
def setting_texts() -> Mapping[str, FieldText]:
    """Return the settings of the service and those of a model, by name."""
    package = "inferpool.service.settings"
    fields = (
        *fields_of(f"{package}.settings", "Settings"),
        *fields_of(f"{package}.model", "ModelSettings"),
    )
    return {field.name: field for field in fields}


def add_flags_of(
    parser: ArgumentParser,
    fields: Iterable[FieldText],
    groups: Mapping[str, str],
    readers: Mapping[str, tuple[Callable[[str], object], str]] | None = None,
) -> None:
    """Add a flag for each field.

    Args:
        parser: The parser of a verb.
        fields: The fields of the class that says what the verb's flags are.
        groups: Titles of groups, by the fields that they begin with.
        readers: More annotations of fields, and what reads their values.
    """
    group: _ActionsContainer = parser
    for field in fields:
        if field.name in groups:
            group = parser.add_argument_group(groups[field.name])
        add_flag(field, group, {**_READERS, **(readers or {})})


def add_flag(
    field: FieldText,
    group: _ActionsContainer,
    readers: Mapping[str, tuple[Callable[[str], object], str]] = _READERS,
) -> None:
    """Add the flag of a field to a parser, or to a group of its flags."""
    if field.default is False:
        group.add_argument(field.flag, action="store_true", help=field.help)
        return
    read, metavar = readers[field.kind.removesuffix(" | None")] if not field.choices else (str, "")
    group.add_argument(
        field.flag,
        type=read,
        default=field.default,
        required=field.is_required,
        choices=field.choices,
        metavar=None if field.choices else field.metavar or metavar,
        help=field.help,
    )


def fields_of(module: str, name: str) -> Iterator[FieldText]:
    """Yield the fields of a class that have a docstring.

    Args:
        module: Full name of its module, which is not imported.
        name: Name of the class.
    """
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    aliases: dict[str, ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Subscript() as value):
                aliases[alias] = value
            case ast.ClassDef(name=found, body=body) if found == name:
                yield from _fields_in(body, aliases)


def _fields_in(body: Sequence[ast.stmt], aliases: Mapping[str, ast.expr]) -> Iterator[FieldText]:
    for field, after in pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                metavar = ""
                match kind:
                    case ast.Subscript(
                        value=ast.Name(id="Annotated"),
                        slice=ast.Tuple(elts=[inner, ast.Constant(value=str(metavar))]),
                    ):
                        kind = inner
                yield FieldText(
                    name=name,
                    default=None if value is None else _default_of(value),
                    is_required=value is None,
                    kind=ast.unparse(kind),
                    metavar=metavar,
                    choices=_choices_of(aliases.get(ast.unparse(kind), kind)),
                    text=" ".join(text.split()),
                )


def _choices_of(kind: ast.expr) -> Sequence[str] | None:
    match kind:
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            found: Sequence[str] = ast.literal_eval(values)
            return found
    return None


def _default_of(value: ast.expr) -> object:
    """Return the default that an expression gives: a constant, or a call of pydantic's `Field`."""
    match value:
        case ast.Call(args=[first, *_]):
            return _default_of(first)
        case ast.Call():
            return {}  # with a factory, which only tables need
    try:
        return ast.literal_eval(value)
    except ValueError:  # a computed one
        return {}
