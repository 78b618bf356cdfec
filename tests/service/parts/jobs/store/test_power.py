"""What is acknowledged survives a power cut: it was made to last before."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.parts.jobs.store.steps import STEPS

ACTOR = [sys.executable, "-m", "tests.service.parts.jobs.store.steps"]
CALLS = "openat,mkdir,write,pwrite64,ftruncate,rename,unlink,unlinkat,fsync,fdatasync"
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (\d+)(?:<(.*)>)?$")
_PATH = re.compile(r'"([^"]*)"')
_DESCRIPTOR = re.compile(r"^(\d+)<([^>]*)>")


@contextlib.contextmanager
def acting(folder: Path, *before: str, fault: str = "") -> Iterator["subprocess.Popen[str]"]:
    command = [*before, *ACTOR, str(folder), *([fault] if fault else [])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
    assert process.returncode == 0


def steps(process: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield each step once it is done, and let the process go on after it."""
    assert process.stdin is not None
    assert process.stdout is not None
    for step in STEPS:
        assert process.stdout.readline() == f"did {step}\n"
        yield step
        process.stdin.write("\n")
        process.stdin.flush()


class WrittenFiles:
    """What a process has written to the files of a store, and a power cut would undo."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._known: set[str] = set()
        self.unsafe: set[str] = set()
        """Files with content, and folders with names, that were not made to last."""

    def note(self, name: str, path: str) -> None:
        """Note a system call that has succeeded."""
        # What SQLite keeps in -shm is made anew at the next start (sqlite.org/walformat.html).
        if not path.startswith(self._root) or path.endswith("-shm"):
            return
        if name in ("openat", "mkdir") and path not in self._known:
            self._known.add(path)
            self.unsafe.add(os.path.dirname(path))  # a text, as strace has it
        elif name in ("write", "pwrite64", "ftruncate"):
            self.unsafe.add(path)
        elif name in ("fsync", "fdatasync"):
            self.unsafe.discard(path)
        elif name in ("unlink", "unlinkat"):
            assert not self.unsafe, f"{path} was removed before {self.unsafe} was safe"
            self._known.discard(path)
        else:
            assert name in ("openat", "mkdir"), name


def calls(log: Path) -> Iterator[tuple[str, str]]:
    """Yield name and path of the system calls of a log of strace."""
    for line in log.read_text().splitlines():
        assert "unfinished" not in line
        if (match := _LINE.match(line)) is None:
            continue
        name, arguments, _, opened = match.groups()
        if name == "openat":
            if "O_CREAT" in arguments:
                yield name, opened
        elif name in ("mkdir", "unlink", "rename"):
            yield name, _PATH.findall(arguments)[-1]
        elif name == "unlinkat":
            folder = re.findall(r"<([^>]*)>", arguments)[0]
            yield name, str(Path(folder, _PATH.findall(arguments)[0]))
        elif name == "write" and arguments.startswith("1<"):
            yield "did", _PATH.findall(arguments)[0]
        elif found := _DESCRIPTOR.match(arguments):
            yield name, found[2]


def unsafe_when_told(tmp_path: Path, fault: str = "") -> set[str]:
    """Return what a power cut would have undone of what was acknowledged."""
    folder, log = tmp_path / "some" / "jobs", tmp_path / "log"
    strace = ("strace", "-f", "-y", "-o", str(log), "-e", f"trace={CALLS}")
    with acting(folder, *strace, fault=fault) as process:
        assert list(steps(process)) == list(STEPS)
    written, unsafe, num_told = WrittenFiles(tmp_path), set(), 0
    for name, path in calls(log):
        if name == "did":
            num_told += 1
            unsafe |= written.unsafe
        else:
            written.note(name, path)
    assert num_told == len(STEPS)
    return unsafe


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@needs_strace
def test_everything_is_on_the_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    assert unsafe_when_told(tmp_path) == set()


@needs_strace
@pytest.mark.parametrize("fault", ["files", "folders"])
def test_a_forgotten_fsync_would_be_noticed(tmp_path: Path, fault: str) -> None:
    try:
        assert unsafe_when_told(tmp_path, fault)
    except AssertionError as error:
        assert "was removed before" in str(error)  # noqa: PT017  # it may be noticed so early
