"""The layout of the code: imports, sizes of files and folders, class names, docstrings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
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


@cache  # in the process that runs these tests, not in each that imports them
def trees_of_modules() -> dict[str, ast.Module]:
    """Return the trees of our modules by name."""
    return {name.removesuffix(".__init__"): ast.parse(FILES[name].read_bytes()) for name in FILES}


@cache
def trees_of_tests() -> dict[str, ast.Module]:
    """Return the trees of the files of tests by path."""
    paths = (ROOT / "tests").rglob("*.py")
    return {str(path.relative_to(ROOT)): ast.parse(path.read_bytes()) for path in paths}


@cache
def trees_of_helpers() -> dict[str, ast.Module]:
    """Return the trees of those files that hold no tests."""
    return {
        name: tree
        for name, tree in trees_of_tests().items()
        if not Path(name).name.startswith("test_")
    }


def imported_by(module: str) -> Iterator[str]:
    """Return our modules that a module imports anywhere, also in a function or for a type."""
    for node in ast.walk(trees_of_modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in trees_of_modules() else str(node.module)


def test_no_module_imports_one_that_imports_it():
    graph = {
        each: {*imported_by(each)} & trees_of_modules().keys() - {each}
        for each in trees_of_modules()
    }
    assert sum(map(len, graph.values())) > len(trees_of_modules()), (
        "the imports are not those of our modules"
    )
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_has_few_files_beside_its_folders(folder: str):
    assert len(list((ROOT / folder).glob("*.py"))) <= 12


def test_no_file_is_too_long_to_read():
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: num for name, num in lengths.items() if num > 450} == {}


def class_names(tree: ast.Module) -> set[str]:
    """Return the public classes of a module."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def test_a_class_name_means_one_thing():
    """The client alone may repeat names of the service: it mirrors them, and comes without it."""
    places = defaultdict(list)
    for module, tree in {**trees_of_modules(), **trees_of_helpers()}.items():
        if not module.startswith("inferpool.service.client."):
            for name in class_names(tree):
                places[name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_no_test_calls_a_class_of_its_own_like_one_of_the_product():
    ours = set().union(*map(class_names, trees_of_modules().values()))
    local = {
        name: tree for name, tree in trees_of_tests().items() if name not in trees_of_helpers()
    }
    repeated = {name: class_names(tree) & ours for name, tree in local.items()}
    assert {name: names for name, names in repeated.items() if names} == {}


def test_every_docstring_stands_alone():
    """One that begins so is a clause that leans on the line above it."""
    starts = {*("Of", "As", "Whose", "Whom", "That"), *("What", "Whether", "Where", "Which", "Who")}
    found = []
    for module, tree in {**trees_of_modules(), **trees_of_helpers()}.items():
        for node in ast.walk(tree):
            # A string as a statement is a docstring, also of an attribute.
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = str(node.value.value)
                if text.split(maxsplit=1)[:1] and text.split()[0].strip('`",.:;') in starts:
                    found.append(f"{module}:{node.lineno}: {text[:60]}")
    assert found == []


def test_only_the_device_seam_names_a_kind_of_accelerator():
    """Everything else asks `models.accelerator`, so that another kind needs no change elsewhere."""
    said = re.compile(
        r"""torch\.cuda\.\w+\(|\.is_cuda\b|\.cuda\(|[=(\[] *["']cuda["']|(prefix|with)\("cuda"""
        r"""|import pynvml"""
    )
    found = [
        f"{name}:{number}"
        for name, path in FILES.items()
        if not name.startswith("inferpool.models.accelerator.")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if said.search(line)
    ]
    assert not found


PATCHES = re.compile(r"\.setattr$|\bpatch(\.object)?$")
"""Functions that replace what their first two arguments name."""
ASSIGNED = re.compile(r"\.(_?[A-Z][A-Z_]*_S)\s*=[^=]")
"""An assignment to a constant of something else, also in code that a test has another run."""


def patched_names(name: str, tree: ast.Module) -> Iterator[str]:
    """Return what a test file replaces by `monkeypatch.setattr`, `patch.object` or the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and PATCHES.search(ast.unparse(node.func)):
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            yield from (str(text).rpartition(".")[2] for text in texts)
    yield from ASSIGNED.findall((ROOT / name).read_text())


def test_no_test_patches_a_time_of_the_product():
    """Budgets and periods are arguments: a patch would also change what others wait for."""
    found = {
        name: [*filter(re.compile("[A-Z]_S$").search, patched_names(name, tree))]
        for name, tree in trees_of_tests().items()
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_no_property_fails_for_a_slow_machine():
    """Hypothesis bounds the time of examples, but for those that `untimed` marks."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees_of_tests().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for marks in [" ".join(map(ast.unparse, node.decorator_list))]
        if "given(" in marks and not re.search(r"untimed\(|deadline=None", marks)
    ]
    assert found == []
