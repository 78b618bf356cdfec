"""A program that is served anew by forks, without torch and without a service."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.running import ROOT

PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
sys.path += [os.getcwd(), "packages"]
import imported_first
from inferpool.workers.beside.reloading import CHANGED, serve_anew

def serve():
    import of_the_user
    print("serving", os.getpid(), os.getppid(), of_the_user.VALUE, SOURCE.random(), flush=True)
    return of_the_user.act(CHANGED)

SOURCE = random.Random(1)
print("started", imported_first.VALUE, flush=True)
status = serve_anew(serve, [sys.prefix, sys.base_prefix], sys.argv[1:])
print("status", status, flush=True)
"""
"""Each line says what happened: "serving", process, its parent, and what it has imported."""


@contextmanager
def running(
    folder: Path, act: str, on_import: str = "", packages: Sequence[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """Run the program in a folder; `act` is the body of a function that ends what serves."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "imported_first.py").write_text("VALUE = 1")
    write_user(folder, 1, act, on_import)
    with subprocess.Popen(
        [sys.executable, "program.py", *packages],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def write_user(folder: Path, value: int, act: str, on_import: str = "") -> None:
    text = f"import os, signal, time\nVALUE = {value}\n{on_import}\ndef act(changed):\n    {act}\n"
    (folder / "of_the_user.py").write_text(text)


def line_of(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_what_serves_is_forked_anew_and_imports_the_users_files_again(tmp_path: Path):
    with running(tmp_path, "open('go').read(); return changed") as process:
        os.mkfifo(tmp_path / "go")
        assert line_of(process) == ["started", "1"]
        seen = []
        for value in (2, 3):
            seen.append(line_of(process))
            write_user(tmp_path, value, "open('go').read(); return changed")
            (tmp_path / "go").write_text("on")
        seen.append(line_of(process))
        assert [each[3] for each in seen] == ["1", "2", "3"]
        assert {int(each[2]) for each in seen} == {process.pid}
        assert len({each[1] for each in seen}) == 3
        assert len({each[4] for each in seen}) == 3  # random numbers

        # What the process that forks has imported is imported again by a new interpreter.
        (tmp_path / "imported_first.py").write_text("VALUE = 22")
        write_user(tmp_path, 4, "return 7")
        (tmp_path / "go").write_text("on")
        assert line_of(process) == ["started", "22"]
        assert line_of(process)[2:4] == [str(process.pid), "4"]
        assert line_of(process) == ["status", "7"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_of_other_processes_reach_what_serves(tmp_path: Path, number: signal.Signals):
    on_import = f"signal.signal({int(number)}, lambda *_: os._exit(9))"
    with running(tmp_path, "time.sleep(600)", on_import) as process:
        assert line_of(process) == ["started", "1"]
        assert line_of(process)[0] == "serving"
        process.send_signal(number)
        assert line_of(process) == ["status", "9"]


def test_what_serves_ends_with_the_process_that_was_started(tmp_path: Path):
    with running(tmp_path, "time.sleep(600)") as process:
        assert line_of(process) == ["started", "1"]
        assert line_of(process)[0] == "serving"
        process.kill()
        assert line_of(process) == []  # nobody has its stdout any more


@pytest.mark.parametrize(
    ("code", "num_imports"),
    [("", 1), ("import _thread; _thread.start_new_thread(time.sleep, (60,))", 4)],
    ids=["safe", "unsafe"],
)
def test_packages_are_imported_once_unless_no_process_may_be_forked_with_them(
    tmp_path: Path, code: str, num_imports: int
):
    (tmp_path / "packages").mkdir()
    add_to = "file = open('{}', 'a'); file.write('.'); file.close()"
    text = f"import time\n{code}\n{add_to.format('imports')}"
    (tmp_path / "packages" / "a_package.py").write_text(text)
    act = "return changed if os.path.getsize('lives') < 3 else 5"
    with running(
        tmp_path, act, f"import a_package; {add_to.format('lives')}", ["a_package"]
    ) as process:
        lines = [line_of(process) for _ in range(5)]
    assert lines[-1] == ["status", "5"]
    assert len((tmp_path / "imports").read_text()) == num_imports


def test_crash_of_what_serves_is_the_exit_status(tmp_path: Path):
    with running(tmp_path, "signal.raise_signal(signal.SIGSEGV)") as process:
        assert line_of(process) == ["started", "1"]
        line_of(process)
        assert line_of(process) == ["status", str(128 + signal.SIGSEGV)]
