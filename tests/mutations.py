"""The command `python -m tests.mutations`: break lines of the core, and see whether a test fails.

It draws lines at random, so that nobody chooses them to please, changes each in a scratch copy of
the tree, and runs the tests that belong to its file. The exit code is 1 if a mutation lived, or if
tests are broken: they fail without a mutation too, or end in a way that proves nothing.
"""

import argparse
import ast
import contextlib
import difflib
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from rich.console import Console

_ROOT = Path(__file__).parents[1]
_WORKERS = ("tests/workers/host", "tests/workers/*.py", "tests/workers/inside")
_SERVICE = ("tests/service/test_*.py", "tests/service/catalog", "tests/service/parts/fronts")
_TESTS = {
    "service/api": ("tests/service/api", "tests/service/client", "tests/e2e/test_predict.py"),
    "service/queue": ("tests/service/queue", _SERVICE[0], "tests/e2e/test_batching.py"),
    "service/*.py": (*_SERVICE, "tests/e2e/test_predict.py", "tests/e2e/test_stopping.py"),
    "workers/host": (*_WORKERS, "tests/e2e/test_worker_faults.py"),
    "workers/inside": (*reversed(_WORKERS), "tests/e2e/test_faults.py"),
    "workers/*.py": ("tests/workers/*.py", *_WORKERS, "tests/e2e/test_faults.py"),
    "models/*.py": ("tests/models/*.py", "tests/models/sources", "tests/workers/inside"),
}
"""The rooms of the core, and where the tests of each are: its own first, then its neighbours'."""
_NOT_CORE = re.compile(
    r"service/(debugging|example|live|operations|report|speed)|models/(agreement|example|survey)"
)
_PAIRS = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)
_MORE_PAIRS = (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub)
_OTHER = {a: b for pair in (*_PAIRS, *_MORE_PAIRS) for a, b in (pair, reversed(pair))}
_LOG = re.compile(r"(\w+\.)*_?log(ger)?\.\w+\(|warnings\.warn\(")
_LEFT_OUT = ("annotation", "returns", "decorator_list")
_MARKS = "not gpu and not compile"
"""Slow tests run too: the table names files that have no others."""
_NO_TESTS = 5
"""Exit code of pytest where the marks leave out all tests."""
_CAUGHT = ("FAILED ", "ERROR ", "no end ")
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests.*", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """Another text for a part of a file; offsets in bytes."""

    file: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, root: Path) -> str:
        """Write the mutation into a tree and return the diff."""
        before = (_ROOT / self.file).read_bytes()
        after = before[: self.start] + self.text.encode() + before[self.end :]
        (root / self.file).write_bytes(after)
        lines = (text.decode().splitlines() for text in (before, after))
        return "\n".join(list(difflib.unified_diff(*lines, n=0, lineterm=""))[3:])


def main(argv: Sequence[str] | None = None) -> int:
    """Draw lines, try a mutation of each, and return 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of those to try again")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried side by side")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for the tests of one")
    args = parser.parse_args(argv)
    drawn = enumerate(_draw(random.Random(args.seed), args.count), 1)
    chosen = [each for each in drawn if args.only is None or each[0] in args.only]
    rooms = dict.fromkeys(_room_of(mutation.file) for _, mutation in chosen)
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            trees.put(_copy(Path(folder, str(job))))
        faults = pool.map(lambda room: _baseline(room, trees, args.limit_s), rooms)
        broken = dict(zip(rooms, faults, strict=True))
        tries = [
            pool.submit(_try, number, mutation, broken, trees, args.limit_s)
            for number, mutation in chosen
        ]
        return int(not all(each.result() for each in tries))


def _draw(rng: random.Random, count: int) -> Iterator[Mutation]:
    """Draw lines, each as likely as another, and one mutation of each."""
    lines: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
    for file in sorted({path for room in _TESTS for path in _expand(room)}):
        for mutation in () if _NOT_CORE.match(file) else _mutations(file):
            lines[file, mutation.line].append(mutation)
    for line in rng.sample(sorted(lines), count):
        yield rng.choice(lines[line])


def _mutations(file: str) -> Iterator[Mutation]:
    source = (_ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _walk(ast.parse(source)):
        for place, text in _changes(node):
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            yield Mutation(file=file, line=place.lineno, start=begin, end=end, text=text)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may be mutated: no types, messages to people, or checks of ours."""
    if isinstance(node, ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.Expr) and _LOG.match(ast.unparse(node)):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _LEFT_OUT:
                yield from _walk(child)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield a part to replace, and what replaces it."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for place, op in enumerate(ops):
                changed = [*ops[:place], _OTHER[type(op)](), *ops[place + 1 :]]
                yield node, f"({ast.unparse(ast.Compare(left, changed, comparators))})"
        case ast.BoolOp(op=op, values=values):
            yield node, f"({ast.unparse(ast.BoolOp(_OTHER[type(op)](), values))})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            yield node, f"({ast.unparse(ast.BinOp(left, _OTHER[type(op)](), right))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield from ((node, str(other)) for other in sorted({value + 1, value * 2} - {value}))
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
            yield node, "pass"
            yield node, ast.unparse(ast.AugAssign(target, _OTHER[type(op)](), value))
        case ast.Assign(targets=[ast.Attribute()]) | ast.AnnAssign(target=ast.Attribute()):
            yield node, "pass"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass"
        case ast.Break() | ast.Continue() | ast.Raise():
            yield node, "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from ((test, text) for text in ("True", "False") if ast.unparse(test) != text)


@cache
def _expand(pattern: str) -> tuple[str, ...]:
    """Return the Python files that a path of the table names."""
    folder = _ROOT / pattern
    found = folder.rglob("*.py") if folder.is_dir() else _ROOT.glob(pattern)
    return tuple(sorted(str(path.relative_to(_ROOT)) for path in found))


def _room_of(file: str) -> str:
    return next(room for room in _TESTS if file in _expand(room))


def _tests_in(room: str) -> list[str]:
    """Return the test files of a room and its neighbours."""
    found = dict.fromkeys(test for pattern in _TESTS[room] for test in _expand(pattern))
    return [test for test in found if Path(test).name.startswith("test_")]


def _tests_of(file: str) -> tuple[list[str], list[str]]:
    """Return the test files that mirror or import a file, and those of its room and neighbours."""
    own = Path("tests", file).with_name(f"test_{Path(file).name}")
    module = re.compile(rf"\b{re.escape('.'.join(Path(file).with_suffix('').parts))}\b")
    near, far = [], []
    for test in _tests_in(_room_of(file)):
        is_near = test == str(own) or module.search((_ROOT / test).read_text())
        (near if is_near else far).append(test)
    near.sort(key=lambda test: test != str(own))
    far.sort(key=lambda test: Path(test).parent != own.parent)
    return near, far


def _copy(target: Path) -> Path:
    """Copy the tree as git sees it."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(_ROOT / name, target / name, follow_symlinks=False)
    return target


def _baseline(room: str, trees: "queue.Queue[Path]", limit_s: float) -> str:
    """Return how the tests of a room fail without a mutation; "" if they pass."""
    tree = trees.get()
    try:
        verdict = _run(tree, _tests_in(room), 2 * limit_s)  # what `_try` does in two runs
    finally:
        trees.put(tree)
    return verdict and f"broken without a mutation: {verdict}"


def _try(
    number: int,
    mutation: Mutation,
    broken: Mapping[str, str],
    trees: "queue.Queue[Path]",
    limit_s: float,
) -> bool:
    """Run the tests with a mutation, print what came of it, and return whether it was caught."""
    tree = trees.get()
    diff = mutation.apply(tree)
    try:
        verdict = broken[_room_of(mutation.file)]
        for tests in filter(None, _tests_of(mutation.file)):
            verdict = verdict or _run(tree, tests, limit_s)
    finally:
        shutil.copy2(_ROOT / mutation.file, tree / mutation.file)
        trees.put(tree)
    text = f"{number}. {mutation.file}:{mutation.line}\n{diff}\n{verdict or 'LIVED'}\n"
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    return verdict.startswith(_CAUGHT)


def _run(tree: Path, tests: Sequence[str], limit_s: float) -> str:
    """Return "" if all tests passed, what caught the mutation, or in what way they are broken."""
    options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE", "-m", _MARKS)
    options += ("--continue-on-collection-errors",)  # a mutation that prevents an import is caught
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    environment["PYTHONPYCACHEPREFIX"] = str(tree / ".bytecode")  # torch is slow to compile
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # In a file, not a pipe, whose end would wait for all that the tests have left behind.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", "pytest", *options, *tests),
            cwd=tree,
            env=environment,
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"no end in {limit_s:.0f} s"
        output.seek(0)
        said = output.read()
    if code in (0, _NO_TESTS):
        return ""
    failed = _FAILED.search(said)
    return failed.group() if code == 1 and failed else f"broken: exit {code}: {said[-600:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that descend from it, also those that lead sessions of their own."""
    parent = psutil.Process(process.pid)
    for each in [*parent.children(recursive=True), parent]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
