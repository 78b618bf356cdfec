"""What the forkserver should import besides torch: known packages that the sources import.

A user's own modules are read, and never imported: their code may do anything, and may be changed
between two lives of a worker.
"""

import ast
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


def modules_to_preload(sources: Sequence[str], folder: Path) -> list[str]:
    """Find what the models of some sources will import, as "module" or "module:attribute".

    Args:
        sources: As the settings name them.
        folder: Where modules are looked for before all other places.
    """
    found: dict[str, None] = {}
    for source in sources:
        name, colon, _ = source.partition(":")
        if name in _KNOWN:
            found[name] = None
        elif colon:
            found.update(dict.fromkeys(_imported_by(name, folder)))
    return list(found)


def _imported_by(name: str, folder: Path) -> Iterator[str]:
    """What a module imports of the known packages, itself or by the user's other modules."""
    places = [str(folder), *sys.path]
    waiting, seen = [name], {name}
    while waiting and len(seen) <= _MAX_FILES:
        name = waiting.pop(0)
        file = _file_of(name, places)
        if file is None or "site-packages" in file.parts:
            continue
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        for module, attribute in _imports(file, package):
            if module.partition(".")[0] in _KNOWN:
                yield f"{module}:{attribute}" if attribute else module
                continue
            for each in (module, f"{module}.{attribute}"):
                if each not in seen and each.partition(".")[0] not in sys.stdlib_module_names:
                    seen.add(each)
                    waiting.append(each)


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


def _imports(file: Path, package: str) -> Iterator[tuple[str, str]]:
    """Each module that a file imports, and which attribute of it, or an empty one."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # the worker tells
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield module, "" if alias.name == "*" else alias.name
