"""The layout of the code: imports, sizes of files and folders, class names, docstrings."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("service", "workers", "models")
FILES = {
    ".".join(("inferpool", *path.relative_to(ROOT).with_suffix("").parts)): path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}
MODULES = {
    name.removesuffix(".__init__"): ast.parse(path.read_bytes()) for name, path in FILES.items()
}


def imported_by(module: str) -> Iterator[str]:
    """Return our modules that a module imports anywhere, also in a function or for a type."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else str(node.module)


def test_no_module_imports_one_that_imports_it():
    graph = {each: {*imported_by(each)} & MODULES.keys() - {each} for each in MODULES}
    assert sum(map(len, graph.values())) > len(MODULES), "the imports are not those of our modules"
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_has_few_files_beside_its_folders(folder: str):
    assert len(list((ROOT / folder).glob("*.py"))) <= 12


def test_no_file_is_too_long_to_read():
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: num for name, num in lengths.items() if num > 450} == {}


def test_a_class_name_means_one_thing():
    """But for the clients', which call things as the service does, and can be had without it."""
    places = defaultdict(list)
    for module, tree in MODULES.items():
        for node in () if module.startswith("inferpool.service.client.") else tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
