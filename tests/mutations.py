"""The command `python -m tests.mutations`: break lines of the core, and see whether a test fails.

It draws lines at random, so that nobody chooses them to please, changes each in a scratch copy of
the tree, and runs the tests that belong to its file. The exit code is 1 if a mutation lived.
"""

import argparse
import ast
import difflib
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console

_ROOT = Path(__file__).parents[1]
_WORKERS = ("tests/workers/host", "tests/workers/*.py", "tests/workers/inside")
_SERVICE = ("tests/service/test_*.py", "tests/service/catalog", "tests/service/fronts")
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
    """Draw lines, try a mutation of each, and return 1 if one lived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of those to try again")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried side by side")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for the tests of one")
    args = parser.parse_args(argv)
    drawn = enumerate(_draw(random.Random(args.seed), args.count), 1)
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            trees.put(_copy(Path(folder, str(job))))
        tries = [
            pool.submit(_try, number, mutation, trees, args.limit_s)
            for number, mutation in drawn
            if args.only is None or number in args.only
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


def _tests_of(file: str) -> tuple[list[str], list[str]]:
    """Return the test files that mirror or import a file, and those of its room and neighbours."""
    room = next(each for each in _TESTS if file in _expand(each))
    own = Path("tests", file).with_name(f"test_{Path(file).name}")
    module = re.compile(rf"\b{re.escape('.'.join(Path(file).with_suffix('').parts))}\b")
    near, far = [], []
    for test in dict.fromkeys(test for pattern in _TESTS[room] for test in _expand(pattern)):
        if Path(test).name.startswith("test_"):
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


def _try(number: int, mutation: Mutation, trees: "queue.Queue[Path]", limit_s: float) -> bool:
    """Run the tests with a mutation, print what came of it, and return whether one failed."""
    tree = trees.get()
    diff = mutation.apply(tree)
    try:
        near, far = _tests_of(mutation.file)
        caught = (near and _run(tree, near, limit_s)) or _run(tree, far, limit_s)
    finally:
        shutil.copy2(_ROOT / mutation.file, tree / mutation.file)
        trees.put(tree)
    text = f"{number}. {mutation.file}:{mutation.line}\n{diff}\n{caught or 'LIVED'}\n"
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    return bool(caught)


def _run(tree: Path, tests: Sequence[str], limit_s: float) -> str:
    """Return how the first test failed; a hang is a failure; "" if all passed."""
    options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE")
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    environment["PYTHONPYCACHEPREFIX"] = str(tree / ".bytecode")  # torch is slow to compile
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(
        (sys.executable, "-m", "pytest", *options, *tests),
        cwd=tree,
        env=environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end in {limit_s:.0f} s"
    failed = _FAILED.search(output)
    ended = f"exit {process.returncode}: {output[-600:]}" if process.returncode else ""
    return failed.group() if failed else ended


if __name__ == "__main__":
    sys.exit(main())
