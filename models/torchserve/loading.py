"""Finds and initialises the handler of an archive, as TorchServe does. Worker processes only.

Rules are those of `ts/model_loader.py`: a function `handle` of the module, or the one class in it.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing import parent_process
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from inferpool.models.accelerator.failures import raised
from inferpool.models.errors import SourceError
from inferpool.models.sources.classes import distrust_bytecode
from inferpool.models.sources.registry import last_line
from inferpool.models.torchserve.context import HandlerContext
from inferpool.models.torchserve.envelopes import Handle
from inferpool.models.torchserve.handlers import HANDLERS
from inferpool.models.torchserve.modules import hint_of, supply_modules

_DEFAULT = "handle"


def loaded_handler(folder: Path, handler: str, context: HandlerContext) -> Handle:
    """Import the handler of an archive and initialise it; return its entry point.

    Args:
        folder: The archive's files.
        handler: The handler as the manifest names it: a built-in one, `FILE.py`, or
            `FILE.py:FUNCTION`.
        context: The context that it gets.

    Raises:
        SourceError: There is no such handler, or its import fails.
        Exception: Its own code raises.
    """
    supply_modules()
    _enter(folder)
    name, _, entry = handler.partition(":")
    name = name.rpartition("/")[2].removesuffix(".py")
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    if name in HANDLERS and not path.is_file():
        made = resolve_name(HANDLERS[name])()
    else:
        module = _module_of(path, name, handler)
        found = getattr(module, entry or _DEFAULT, None)
        if callable(found) and not isinstance(found, type):
            found(None, context)  # as TorchServe initialises functions
            function: Handle = found
            return function
        made = _class_of(module, found, handler)()
    for method in ("initialize", "handle"):
        if not callable(getattr(made, method, None)):
            raise SourceError(
                f"{handler}: {type(made).__name__} has no {method}: a handler has "
                "initialize(context) and handle(data, context)"
            )
    entry_point: Handle = made.handle
    made.initialize(context)
    return entry_point


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """Import a class by its name with dots, as `ts.handler_utils.utils` does.

    Raises:
        ImportError: There is no such class.
    """
    module_name, _, name = class_name.rpartition(".")
    full = ".".join(filter(None, (module_prefix, module_name)))
    if not name or not full:
        raise ImportError(f"{class_name!r} names no class of a module")
    found = getattr(importlib.import_module(full), name, None)
    if not isinstance(found, type):
        raise ImportError(f"the module {full} has no class {name!r}")
    return found


def names_any(folder: Path, words: Sequence[bytes]) -> bool:
    """Return whether a Python file of an archive has one of some words in it."""
    return any(
        any(word in content for word in words)
        for content in (each.read_bytes() for each in folder.rglob("*.py") if each.is_file())
    )


def _enter(folder: Path) -> None:
    """Have this process import from the archive, and in a worker also work in its folder.

    TorchServe starts its workers there (`WorkerLifeCycle.java`), and handlers open files by names
    alone.
    """
    root = str(folder)
    if parent_process() is not None:  # a worker, which has one model
        distrust_bytecode()
        os.chdir(root)
    else:
        _forget_others(root)
    if root not in sys.path:
        sys.path.insert(0, root)
    importlib.invalidate_caches()


def _forget_others(root: str) -> None:
    """Forget modules of archives in other folders, which may have the same names."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file.startswith(f"{root}{os.sep}"):
            continue
        parents = [*Path(file).parents][:2]
        if any((each / "MAR-INF").is_dir() for each in parents):
            del sys.modules[name]
    sys.path[:] = [each for each in sys.path if not os.path.isdir(os.path.join(each, "MAR-INF"))]


def _module_of(path: Path, name: str, handler: str) -> ModuleType:
    """Import a handler's module: of the archive, or an installed one."""
    if not path.is_file() and find_spec(name.partition(".")[0]) is None:
        raise SourceError(
            f"there is no handler {handler!r}: it is a file in the archive, or one of "
            f"{', '.join(HANDLERS)}"
        )
    try:
        module = importlib.import_module(name)
    except raised() as error:
        raise SourceError(_fault(error, path.parent, handler)) from error
    if path.is_file() and not _is_from(module, path):
        raise SourceError(
            f"the handler {handler!r} has the name of a module that Python has loaded already "
            f"({getattr(module, '__file__', 'built-in')}): rename the file"
        )
    return module


def _is_from(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and os.path.realpath(file) == os.path.realpath(path)


def _fault(error: BaseException, folder: Path, handler: str) -> str:
    """Return what is wrong with a handler that cannot be imported, and what to do."""
    text = f"the handler {handler!r} fails on import: {last_line(error)}"
    if hint := hint_of(error):
        return f"{text}; {hint}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return text
    listed = [each.name for each in sorted(folder.glob("*requirements*.txt"))]
    how = f"pip install -r {folder / listed[0]}" if listed else f"pip install {error.name}"
    return f"{text}; packages of an archive are not installed by themselves: {how}"


def _class_of(module: ModuleType, found: object, handler: str) -> Callable[[], Any]:
    """Return the class of a handler: the only one of its module.

    Raises:
        SourceError: There is none, or there are several.
    """
    if isinstance(found, type):
        return found
    classes: Sequence[type] = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__
    ]
    if len(classes) == 1:
        return classes[0]
    listed = ", ".join(each.__name__ for each in classes) or "none"
    raise SourceError(
        f"the handler {handler!r} must have a function handle(data, context) or one class; its "
        f"classes are {listed}"
    )
