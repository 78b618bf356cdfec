"""Finds classes of users by `package.module:Class`, and calls them. Worker processes only."""

import contextlib
import importlib
import importlib.machinery as machinery
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import cache_from_source
from multiprocessing import parent_process
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from inferpool.models.accelerator.failures import raised
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.files.modules import (
    is_installed,
    is_standard,
    named_right,
    nearest_modules,
)
from inferpool.models.sources import importing

_Built = TypeVar("_Built")


def find_class(module_name: str, class_name: str) -> type:
    """Import a class of the user's, as `python -m` would find its module.

    Raises:
        SourceError: There is no such module or class, or its import fails.
    """
    source = f"{module_name}:{class_name}"
    found = _attribute(_import(module_name, class_name), class_name)
    if not isinstance(found, type):
        raise SourceError(
            f"{source} is no class: it must be a subclass of inferpool.Model or torch.nn.Module"
        )
    return found


def construct(factory: Callable[..., _Built], options: Mapping[str, object], source: str) -> _Built:
    """Call a class with options.

    Raises:
        SourceError: It does not take them, or it fails; the message has its line.
        ModelError: Raised by the class.
    """
    check_options(factory, options, source)
    try:
        return factory(**options)
    except ModelError:
        raise
    except raised() as error:  # a user's constructor may raise anything
        raise SourceError(f"{source} cannot be constructed: {_last_line(error)}") from error


def check_options(
    factory: Callable[..., object], options: Mapping[str, object], source: str
) -> None:
    """Check that a class takes some options.

    Raises:
        SourceError: It does not; the message says what it takes.
    """
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        taken = [
            p.name
            for p in inspect.signature(factory).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "weights"
        ]
        knows = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise SourceError(f"{source} does not take these options: {error}; {knows}") from None


def distrust_bytecode() -> None:
    """Have this process import the modules of users from bytecode only if that is surely newer."""
    if not any(isinstance(each, _FinderOfSource) for each in sys.meta_path):
        sys.meta_path.insert(0, _FinderOfSource())


def line_of(error: BaseException, module: str = "") -> str:
    """Return the last line of a user's own file that led to an error, as "file:line"; or "".

    Args:
        error: The error.
        module: The module of the user's class, which may be installed, and is not ours.
    """
    installed = getattr(sys.modules.get(module), "__file__", None)
    for each in reversed(traceback.extract_tb(error.__traceback__)):
        file = each.filename
        is_code = file.startswith("<")  # as of a generated function
        if not is_code and (_may_change(file) or (file == installed and not is_ours(file))):
            return f"{file}:{each.lineno}"
    return ""


def _import(name: str, wanted: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:  # as `python -m` does
        sys.path.insert(0, folder)
    if parent_process() is not None:  # a worker: another process may be the user's own
        distrust_bytecode()
    importlib.invalidate_caches()
    try:
        return importing.import_for_model(name, wanted)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SourceError(f"module {name!r} fails on import: {_last_line(error)}") from error
        if name.endswith(".py"):
            named = named_right(name)
            raise SourceError(f"a module is named without .py: {named}:CLASS") from error
        raise SourceError(
            f"there is no module {error.name!r}: it must be installed, or lie under {folder}"
            f"{nearest_modules(error.name, Path(folder))}"
        ) from error
    except raised() as error:  # a user's module may do anything
        raise SourceError(f"module {name!r} fails on import: {_last_line(error)}") from error


class _LoaderOfSource(machinery.SourceFileLoader):
    """Loads bytecode only if it was written after the last change of its source.

    Python asks whether the source has the size and the date, in seconds, of the one that was
    compiled. So a restarted worker could run the old code, while the service reported the new file:
    after a quick edit, or where all files have one date.
    """

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return what bytecode must agree with, once there is none that is older."""
        bytecode = cache_from_source(path)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(bytecode).st_mtime_ns <= os.stat(path).st_ctime_ns:
                os.unlink(bytecode)  # where this fails, the import system uses none
        return super().path_stats(path)


class _FinderOfSource:
    """Has the modules of users loaded by `_LoaderOfSource`; an entry of `sys.meta_path`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        """Find a module as the other finders do."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            if spec := finder.find_spec(name, path, target):
                if type(spec.loader) is machinery.SourceFileLoader and _may_change(spec.origin):
                    spec.loader = _LoaderOfSource(spec.loader.name, spec.loader.path)
                return spec
        return None


def _may_change(origin: str | None) -> bool:
    """Return whether a file is a user's own, and so may change while a service runs."""
    file = Path(origin or "").absolute()
    return not (is_installed(file) or is_standard(file) or is_ours(file))


def is_ours(file: Path | str) -> bool:
    """Return whether a file is one of this package."""
    return Path(file).is_relative_to(Path(__file__).absolute().parents[2])


def _attribute(module: ModuleType, name: str) -> object:
    try:
        found: object = attrgetter(name)(module)
    except AttributeError:
        classes = [n for n, value in vars(module).items() if isinstance(value, type)]
        own = [n for n in classes if getattr(module, n).__module__ == module.__name__]
        near = get_close_matches(name, classes) or own
        hint = f": it has {', '.join(near)}" if near else ", nor any class"
        raise SourceError(f"module {module.__name__!r} has no {name!r}{hint}") from None
    return found


def _last_line(error: BaseException) -> str:
    """Return the error's last line, and the line of the user's code that raised it."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{text} ({error.filename}:{error.lineno})"  # no frame runs what cannot be parsed
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importing.__file__)
    own = [f for f in frames if f.filename not in ours and "importlib" not in f.filename]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
