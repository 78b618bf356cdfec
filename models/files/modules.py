"""Finds the files of modules by their names, without importing anything. No torch."""

import difflib
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_INSTALLED = frozenset(("site-packages", "dist-packages"))
_STANDARD = Path(sysconfig.get_path("stdlib"))


def places_from(folder: str) -> list[str]:
    """Return where a worker in a folder looks for modules: there first, as `python -m` does."""
    return list(sys.path) if folder in sys.path else [folder, *sys.path]


def named_right(path: str) -> str:
    """Return the name of a module that was given by its path."""
    return ".".join(part for part in path.removesuffix(".py").split("/") if part not in ("", "."))


def spec_of(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """Find a module or package in some folders; not even its parents are imported."""
    found = None
    for part in name.split("."):
        try:
            # A finder uses only the last part of a name. With the whole one, it would look for the
            # parents of a folder without __init__.py among the imported modules.
            found = PathFinder.find_spec(part, list(places))
        except (ImportError, ValueError, OSError):
            return None
        if found is None:
            return None
        places = list(found.submodule_search_locations or [])
    return found


def file_of(name: str, places: Sequence[str]) -> Path | None:
    """Return the source file of a module; None if it has none, or cannot be found."""
    found = spec_of(name, places)
    is_source = found is not None and found.origin is not None and found.origin.endswith(".py")
    return Path(found.origin) if found and found.origin and is_source else None


def with_parents(name: str) -> list[str]:
    """Return a module and the packages that it is in, outermost first: all of them are run."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def is_installed(file: Path) -> bool:
    """Return whether a file is that of an installed package, not a user's own."""
    return not _INSTALLED.isdisjoint(file.parts)


def is_standard(file: Path) -> bool:
    """Return whether a file is of Python's own library."""
    return not is_installed(file) and file.is_relative_to(_STANDARD)


def is_ours(file: Path | str) -> bool:
    """Return whether a file is one of this package."""
    return Path(file).is_relative_to(Path(__file__).absolute().parents[2])


def may_change(origin: str | None) -> bool:
    """Return whether a file is a user's own, and so may change while a service runs."""
    file = Path(origin or "").absolute()
    return not (is_installed(file) or is_standard(file) or is_ours(file))


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
        if not is_code and (may_change(file) or (file == installed and not is_ours(file))):
            return f"{file}:{each.lineno}"
    return ""


def nearest_modules(name: str, folder: Path) -> str:
    """Return a hint that names the modules in a folder that are called almost so; or nothing."""
    try:
        names = [path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()]
    except OSError:  # such as a folder that may be entered but not listed
        return ""
    near = difflib.get_close_matches(name, names)
    return f", which has {', '.join(near)}" if near else ""
