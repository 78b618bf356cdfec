"""What the forkserver should import besides torch: known packages that the sources import.

A user's own modules are read, and never imported: their code may do anything, and may be changed
between two lives of a worker. An early import must change neither which code a worker runs nor what
that code sees. So a package is imported early only if it is an installed one, and nothing is if a
user's file may change the environment or the search for modules first.
"""

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

_KNOWN = frozenset(
    ("torchvision", "torchaudio", "timm", "transformers", "diffusers", "sentence_transformers")
)
"""Packages that take seconds to import and do nothing else meanwhile. The forkserver makes sure
that they have started no thread and opened no GPU."""
_MAX_FILES = 50
"""Of one source. Where there are more, nothing is known of the rest."""
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_STDLIB = Path(os.__file__).parent
_OURS = "inferpool"
_TELLING = {
    "os": frozenset(("environ", "environb", "putenv", "unsetenv", "*")),
    "sys": frozenset(("path", "modules", "meta_path", "path_hooks", "*")),
}
"""Names of these modules by which a file can change what a later import finds or sees."""
_TELLING_MODULES = frozenset(("dotenv", "site"))


def modules_to_preload(sources: Sequence[str], folder: Path) -> list[str]:
    """Find what the models of some sources will import, as "module" or "module:attribute".

    All workers come from one forkserver: one source that forbids early imports does so for all.

    Args:
        sources: As the settings name them.
        folder: Where modules are looked for before all other places.
    """
    places = [str(folder), *sys.path]
    found: dict[str, None] = {}
    for source in sources:
        name, colon, _ = source.partition(":")
        if name in _KNOWN:
            found[name] = None
        elif colon:
            imported = _imported_by(name, places)
            if imported is None:
                return []
            found.update(dict.fromkeys(imported))
    return [each for each in found if _is_installed(each.partition(":")[0], places)]


def _is_installed(module: str, places: Sequence[str]) -> bool:
    """Whether the first package of that name is an installed one, not a user's own."""
    file = _file_of(module.partition(".")[0], places)
    return file is not None and not _INSTALLED.isdisjoint(file.parts)


def _imported_by(name: str, places: Sequence[str]) -> list[str] | None:
    """What a module imports of the known packages, itself or by the user's other modules.

    None if one of the files may change what an import finds or sees, or if they are too many.
    """
    found: list[str] = []
    waiting = _with_parents(name)
    seen = set(waiting)
    num_files = 0
    while waiting:
        name = waiting.pop(0)
        file = _file_of(name, places)
        if file is None or not _INSTALLED.isdisjoint(file.parts) or _STDLIB in file.parents:
            continue
        num_files += 1
        nodes = _nodes_of(file)
        if num_files > _MAX_FILES or any(_is_telling(node) for node in nodes):
            return None
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        for module, attribute in _imports(nodes, package):
            if module.partition(".")[0] in _KNOWN:
                found.append(f"{module}:{attribute}" if attribute else module)
                continue
            for each in _with_parents(f"{module}.{attribute}" if attribute else module):
                if each not in seen and each.partition(".")[0] != _OURS:
                    seen.add(each)
                    waiting.append(each)
    return found


def _with_parents(name: str) -> list[str]:
    """A module and the packages that it is in, outermost first: all of them are run."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _file_of(name: str, places: Sequence[str]) -> Path | None:
    """The source file of a module. Nothing is imported, not even its package."""
    found = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        try:
            found = PathFinder.find_spec(".".join(parts[:end]), list(places))
        except (ImportError, ValueError, OSError):
            return None
        if found is None:
            return None
        places = found.submodule_search_locations or []
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    return Path(found.origin)


def _nodes_of(file: Path) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the worker tells


def _is_telling(node: ast.AST) -> bool:
    """Whether that part of a file may change the environment or the search for modules."""
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr=name):
            return name in _TELLING["sys"]
        case ast.Attribute(attr=name):
            return name in _TELLING["os"]
        case ast.Import(names=names):
            return any(
                each.name.partition(".")[0] in _TELLING_MODULES
                or (each.name in _TELLING and each.asname not in (None, each.name))
                for each in names
            )
        case ast.ImportFrom(module=str(module), names=names, level=0):
            is_any = module.partition(".")[0] in _TELLING_MODULES
            return is_any or any(each.name in _TELLING.get(module, ()) for each in names)
    return False


def _imports(nodes: Sequence[ast.AST], package: str) -> Iterator[tuple[str, str]]:
    """Each module that a file imports, and which attribute of it, or an empty one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield module, "" if alias.name == "*" else alias.name
