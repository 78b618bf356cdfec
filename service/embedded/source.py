"""Finds a source by which worker processes can import a class.

A class of a module is imported from there, and a class of the running script from the script's
file. A typed-in class, for example from a cell of a notebook, is written to a file with the
imports, functions, classes and constants that it uses.
"""

import ast
import builtins
import linecache
import os
import re
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType

from inferpool.models.errors import SourceError

_MAIN = "__main__"
_CURE = "put it into a file, such as my_model.py, and import it from there"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSource:
    """The place where a class is found."""

    source: str
    """The source, as the settings name it."""
    folder: str = ""
    """The folder of its module, if the module cannot be found otherwise."""
    text: str = ""
    """The text of its module, if that has no file yet."""


def source_of(model: type) -> FoundSource:
    """Return a source by which another process can import a class.

    Raises:
        SourceError: No other process can; the message says why, and what to do.
    """
    name = model.__qualname__
    module = sys.modules.get(model.__module__)
    if "<locals>" in name:
        raise SourceError(
            f"{name} is defined inside of a function, where worker processes cannot import it: "
            "define it at the top level of a module"
        )
    if module is None or _attribute(module, name) is not model:
        raise SourceError(
            f"{name} is not what {model.__module__} has under that name, so worker processes "
            f"cannot import it: {_CURE}"
        )
    if model.__module__ != _MAIN:
        return FoundSource(source=f"{model.__module__}:{name}")
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name != _MAIN:  # python -m package.module
        return FoundSource(source=f"{spec.name}:{name}")
    file = getattr(module, "__file__", None)
    if file is None or not os.path.isfile(file):
        module_name = "typed_" + re.sub(r"\W", "_", name).lower()
        return FoundSource(source=f"{module_name}:{name}", text=text_of(model))
    script = Path(file).resolve()
    if script.suffix != ".py" or "." in script.stem:
        why = "it does not end in .py" if script.suffix != ".py" else "its name has a dot in it"
        raise SourceError(f"{script.name} cannot be imported for {name}, as {why}: {_CURE}")
    return FoundSource(source=f"{script.stem}:{name}", folder=str(script.parent))


def text_of(model: type) -> str:
    """Return the source of a typed-in class, as a module with everything that it uses.

    Raises:
        SourceError: The class uses something whose source is unknown.
    """
    pieces = _Pieces(vars(sys.modules[model.__module__]))
    pieces.add(model.__name__, model, ())
    return "\n\n\n".join(pieces.texts) + "\n"


class _Pieces:
    """The statements of a module, each after the statements that it needs."""

    def __init__(self, names: dict[str, object]) -> None:
        self.texts: list[str] = []
        self._names = names
        self._seen: set[str] = set()

    def add(self, name: str, value: object, users: Sequence[str]) -> None:
        """Add the definition of a name, after those that it uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        if isinstance(value, type | FunctionType) and value.__module__ == _MAIN:
            text = _text_of(value)
            if text is None:
                raise SourceError(
                    f"the source of {value.__qualname__} is not known, as of all that is typed "
                    f"into `python -c` or stdin: {_CURE}"
                )
            for used in sorted(_free_names(text)):
                if used in self._names:
                    self.add(used, self._names[used], (*users, name))
            self.texts.append(text)
            if value.__name__ != name:
                self.texts.append(f"{name} = {value.__name__}")
        elif (statement := _statement(name, value)) is not None:
            self.texts.append(statement)
        else:
            raise SourceError(
                f"{users[0]} uses {name}, a {type(value).__name__} that was made here and that "
                f"worker processes do not have: make it in the class, or else {_CURE}"
            )


def _statement(name: str, value: object) -> str | None:
    """Return a statement that gives a name its value in another process; None if there is none."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, own_name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(own_name, str) and module != _MAIN:
        found = sys.modules.get(module)
        if own_name.isidentifier() and found and _attribute(found, own_name) is value:
            return f"from {module} import {own_name} as {name}"
    try:
        is_literal = ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        is_literal = False
    return f"{name} = {value!r}" if is_literal is True else None


def _text_of(value: type | FunctionType) -> str | None:
    """Return the source of a class or a function of the main module, or None."""
    functions = [value] if isinstance(value, FunctionType) else list(_functions_of(value))
    for function in functions:
        code = function.__code__
        lines = linecache.getlines(code.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            last = node.end_lineno or node.lineno
            if node.name == value.__name__ and first <= code.co_firstlineno <= last:
                return "".join(lines[first - 1 : last]).rstrip()
    return None


def _functions_of(value: type) -> Iterator[FunctionType]:
    for member in vars(value).values():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(function, FunctionType):
            yield function


def _free_names(text: str) -> set[str]:
    """Return the names that code uses but does not define."""
    found = set()
    waiting = [symtable.symtable(text, "<typed>", "exec")]
    while waiting:
        table = waiting.pop()
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (is_top or symbol.is_global()):
                found.add(symbol.get_name())
        waiting += table.get_children()
    return found - set(vars(builtins))


def _attribute(module: ModuleType, name: str) -> object:
    try:
        found: object = attrgetter(name)(module)
    except AttributeError:
        return None
    return found
