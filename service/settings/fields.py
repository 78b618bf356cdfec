"""Reads the fields of a settings class from its source, for the help of its flags.

To import the class takes as long as the rest of a start, so `--help` doesn't.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldText:
    """A field of a settings class, as its source tells of it."""

    name: str
    default: object
    kind: str
    """Its annotation."""
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
        text = self.text.replace("%", "%%")
        if isinstance(self.default, bool) or self.default in (None, "", {}):
            return text
        return f"{text} (default: {self.default})"


def fields_of(module: str, name: str) -> Iterator[FieldText]:
    """Yield the fields of a class that have a default and a docstring.

    Args:
        module: Full name of its module, which is not imported.
        name: Name of the class.
    """
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    choices: dict[str, Sequence[str]] = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=alias)],
                value=ast.Subscript(value=ast.Name(id="Literal"), slice=values),
            ):
                choices[alias] = ast.literal_eval(values)
            case ast.ClassDef(name=found, body=body) if found == name:
                yield from _fields_in(body, choices)


def _fields_in(
    body: Sequence[ast.stmt], choices: Mapping[str, Sequence[str]]
) -> Iterator[FieldText]:
    for field, after in pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield FieldText(
                    name=name,
                    default=_default_of(value),
                    kind=ast.unparse(kind),
                    choices=choices.get(ast.unparse(kind)),
                    text=" ".join(text.split()),
                )


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
