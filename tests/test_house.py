"""The layout of the code: imports, sizes of files and folders, class names, docstrings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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


def source_of(node: ast.ImportFrom, module: str) -> str:
    """Return the full name of the module that a statement `from ... import` of a module names."""
    if not node.level:
        return str(node.module)
    above = node.level - (f"{module}.__init__" in FILES)
    package = module.rsplit(".", above)[0] if above else module
    return f"{package}.{node.module}" if node.module else package


def imported_by(module: str) -> Iterator[str]:
    """Return our modules that a module imports anywhere, also in a function or for a type."""
    for node in ast.walk(trees_of_modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = source_of(node, module)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield submodule if submodule in trees_of_modules() else source


def test_no_module_imports_one_that_imports_it():
    graph = {
        each: {*imported_by(each)} & trees_of_modules().keys() - {each}
        for each in trees_of_modules()
    }
    assert sum(map(len, graph.values())) > len(trees_of_modules()), (
        "the imports are not those of our modules"
    )
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


CORE = {
    "inferpool.service.api.exchange",
    "inferpool.service.api.wire.protocol",
    "inferpool.service.queue.pool",
    "inferpool.workers.inside.process",
    "inferpool.workers.host.local",
    "inferpool.models.base",
}
"""Modules that one request goes through; all that they import is the core."""


def loaded_by(module: str) -> Iterator[str]:
    """Return our modules that a module imports when it runs, with the packages around them."""
    todo: list[ast.AST] = [trees_of_modules()[module]]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{source_of(node, module)}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            around = {".".join(parts[:num]) for num in range(1, len(parts) + 1)}
            yield from around & trees_of_modules().keys()
        todo += ast.iter_child_nodes(node)


def num_lines_reached(starts: set[str]) -> int:
    """Return the lines of some modules and of all that they import, directly or not."""
    seen, todo = set(starts), list(starts)
    while todo:
        found = {*loaded_by(todo.pop())} - seen
        seen |= found
        todo += found
    files = [FILES.get(name) or FILES[f"{name}.__init__"] for name in seen]
    return sum(len(path.read_text().splitlines()) for path in files)


def test_the_core_is_small_enough_to_read():
    assert num_lines_reached(CORE) <= 20_000
    assert num_lines_reached({"inferpool.models.base"}) <= 1_800


LARGE = {
    "load",
}
"""Names that are larger than they should be: the list may only get shorter."""


def size_faults(tree: ast.Module) -> Iterator[str]:
    """Return the names of functions, classes and constructors that are too large."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if _num_lines(node) > 350:
                yield node.name
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    arguments = each.args
                    num = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
                    if num - 1 > 8 or _num_lines(each) > 60:
                        yield f"{node.name}.__init__"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            _num_lines(node) > 60 and node.name != "__init__"
        ):
            yield node.name


def _num_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_classes_and_constructors_are_small():
    """A function has 60 lines at most, a class 350, and a constructor 8 arguments."""
    found = {name for tree in trees_of_modules().values() for name in size_faults(tree)}
    assert found == LARGE


SIDES = re.compile(r"_(side|process)$")
"""Ends of the names of modules that another process runs."""


def test_a_small_module_has_several_importers():
    """One below 60 lines whose only importer lies in the same room is a part of that one."""
    importers = defaultdict(set)
    for each in trees_of_modules():
        for name in imported_by(each):
            importers[name].add(each)
    found = {
        name
        for name, path in FILES.items()
        if len(path.read_text().splitlines()) < 60
        and not SIDES.search(name)
        and {each.rpartition(".")[0] for each in importers[name]} == {name.rpartition(".")[0]}
        and len(importers[name]) == 1
    }
    assert found == set()


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


NAMED = re.compile(r"`([\w.]+)`(?=[^|.()\[\]]* in \[[^\]]*\]\(([^)]+\.py)\))")
"""Symbols that a page names together with the file that has them: "`A` or `B` in [x.py](x.py)"."""


def names_in(path: Path) -> set[str]:
    """Return what a file defines, and what its classes do: `A`, `A.b`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = {getattr(node, "name", "")}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {ast.unparse(each) for each in targets}
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{getattr(each, 'name', '')}" for each in node.body}
        found |= names
    return found


def test_what_the_map_for_contributors_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = text.split("| you add |")[1].split("\n\n")[0].splitlines()[2:]
    assert [row for row in rows if not NAMED.search(row)] == [], "a row names no symbol of a file"
    named = NAMED.findall(text)
    assert [(name, path) for name, path in named if name not in names_in(ROOT / path)] == []


def test_each_room_is_on_the_map_for_contributors():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = (path for folder in FOLDERS for path in (ROOT / folder).glob("*/__init__.py"))
    places = [str(path.parent.relative_to(ROOT)) for path in rooms]
    assert len(places) > 20
    assert [place for place in places if f"]({place})" not in text] == []
