"""Finds classes of users by `package.module:Class`, and calls them. Worker processes only."""

import contextlib
import importlib
import importlib.machinery as machinery
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.util import cache_from_source
from multiprocessing import parent_process
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from inferpool.models.accelerator.failures import raised
from inferpool.models.base import Model
from inferpool.models.border import checked
from inferpool.models.errors import SourceError
from inferpool.models.files.modules import may_change, named_right, nearest_modules
from inferpool.models.sources import importing
from inferpool.models.sources.modules import ModuleModel
from inferpool.models.sources.registry import check_options, construct, last_line, with_specs

_WRAPPER_OPTIONS = ("inputs", "outputs", "finite_outputs", "repeatable", "alone_as_in_batch")
"""Options of `ModuleModel`; the others go to the user's network."""


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


def users_model(
    module_name: str, class_name: str, weights: str | None, options: Mapping[str, object]
) -> Model:
    """Build a model of a user's class: a `Model`, or an `nn.Module` to be served as one.

    Raises:
        SourceError: There is no such class, or it does not accept the weights or the options.
    """
    source = f"{module_name}:{class_name}"
    found = find_class(module_name, class_name)
    if not issubclass(found, Model | nn.Module):
        raise SourceError(f"{source} is no subclass of inferpool.Model or torch.nn.Module")
    checkpoint = None if weights == "DEFAULT" else weights
    if issubclass(found, nn.Module):
        specs = {k: v for k, v in options.items() if k in _WRAPPER_OPTIONS}
        rest = {k: v for k, v in options.items() if k not in specs}
        check_options(found, rest, source)
        return ModuleModel(
            lambda: construct(found, rest, source), weights=checkpoint, **with_specs(specs)
        )
    if checkpoint is None:
        return checked(construct(found, options, source))
    if "weights" not in inspect.signature(found).parameters:
        raise SourceError(
            f"{source} takes no weights: give its constructor a `weights` argument, or leave "
            "them out of the settings"
        )
    return checked(construct(found, {"weights": checkpoint, **options}, source))


def distrust_bytecode() -> None:
    """Have this process import the modules of users from bytecode only if that is surely newer."""
    if not any(isinstance(each, _FinderOfSource) for each in sys.meta_path):
        sys.meta_path.insert(0, _FinderOfSource())


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
            raise SourceError(f"module {name!r} fails on import: {last_line(error)}") from error
        if name.endswith(".py"):
            named = named_right(name)
            raise SourceError(f"a module is named without .py: {named}:CLASS") from error
        raise SourceError(
            f"there is no module {error.name!r}: it must be installed, or lie under {folder}"
            f"{nearest_modules(error.name, Path(folder))}"
        ) from error
    except raised() as error:  # a user's module may do anything
        raise SourceError(f"module {name!r} fails on import: {last_line(error)}") from error


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
                if type(spec.loader) is machinery.SourceFileLoader and may_change(spec.origin):
                    spec.loader = _LoaderOfSource(spec.loader.name, spec.loader.path)
                return spec
        return None


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
