"""Runs the tests marked `simulated` in a second pytest process, which has that accelerator.

torch reads its backends when it is imported, and from then on the simulated device is the process's
accelerator: `torch.accelerator`, pinned memory and random numbers would change for all other tests.
So each pytest process starts a child when it comes to the first such test, tells it which tests to
run, and reports the child's results as its own. A child that dies fails one test.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_accelerator.build import NoCompilerError, build, environment

MARK = "simulated"
_TEST_LIMIT_S = 600.0
"""Longest time for a test; pytest-timeout ends it far earlier."""
_END_LIMIT_S = 20.0


def has_device() -> bool:
    """Return True if this process has the simulated accelerator itself."""
    return any(point.name == "sim" for point in entry_points(group="torch.backends"))


class Forwarding:
    """Plugin of the pytest process that has no simulated accelerator."""

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._problem = ""
        self._files: dict[str, None] = {}
        """Files with such tests, in order. The child collects them all at its start."""

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        """Leave the timeouts of such tests to the child."""
        for item in items:
            if item.get_closest_marker(MARK):
                item.add_marker(pytest.mark.timeout(0), append=False)

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the files of the tests that were chosen."""
        self._files = {str(i.path): None for i in session.items if i.get_closest_marker(MARK)}

    @pytest.hookimpl
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Have the child run a test, if it is one for the simulated accelerator."""
        if not item.get_closest_marker(MARK):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # What earlier tests set up for their folders may not be for the next one.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()

    def _reports(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterable[pytest.TestReport]:
        try:
            child = self._start(item.config)
        except RuntimeError as error:  # of the compiler
            return [_report(item, "setup", "failed", str(error))]
        if child is None:
            return [_report(item, "setup", "skipped", (str(item.path), 0, self._problem))]
        try:
            return child.run(item, nextitem)
        except (EOFError, OSError, TimeoutError):
            self._child = None
            return [_report(item, "call", "failed", child.last_words())]

    def _start(self, config: pytest.Config) -> "_Child | None":
        if self._child is None and not self._problem:
            try:
                self._child = _Child(config, build(), self._files)
            except NoCompilerError as error:
                self._problem = str(error)
        return self._child


class _Child:
    """The second pytest process."""

    def __init__(self, config: pytest.Config, folder: Path, files: Iterable[str]) -> None:
        self._config = config
        self._scratch = tempfile.TemporaryDirectory(prefix="simulated-")
        self._output = Path(self._scratch.name, "output")
        self._pipe, theirs = Pipe()
        self._process = _start_child(config, folder, files, self._output, theirs)
        theirs.close()

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Run a test. Its fixtures end, too, unless the next one is in the same file, and ours."""
        following = None
        if nextitem is not None and nextitem.path == item.path:
            following = nextitem.nodeid if nextitem.get_closest_marker(MARK) else None
        self._pipe.send((item.nodeid, following))
        if not self._pipe.poll(_TEST_LIMIT_S):
            raise TimeoutError
        restore = self._config.hook.pytest_report_from_serializable
        reports: list[Mapping[str, Any]] = self._pipe.recv()
        return [restore(config=self._config, data=data) for data in reports]

    def end(self) -> None:
        """End the process; kill it if it does not end by itself."""
        self._pipe.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

    def last_words(self) -> str:
        """End the process, and return what it wrote as it failed."""
        self._process.kill()
        code = self._process.wait()
        text = self._output.read_text(errors="replace")[-20_000:]
        self.end()
        return f"the process with the simulated accelerator ended with {code}:\n{text}"


def _start_child(
    config: pytest.Config, folder: Path, files: Iterable[str], output: Path, pipe: Connection
) -> "subprocess.Popen[bytes]":
    arguments = [
        *("-c", str(config.inipath), "--rootdir", str(config.rootpath), "-m", ""),
        *("-p", "tests.simulated_accelerator.serving", "-p", "no:cacheprovider"),
        *files,
    ]
    variables = {
        **environment(folder),
        "SIM_SHARED": str(output.with_name("devices")),
        "SIM_TESTS_PIPE": str(pipe.fileno()),
    }
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=config.rootpath,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log if config.option.capture != "no" else None,
            stderr=log,
            pass_fds=[pipe.fileno()],
        )


def _report(item: pytest.Item, when: Any, outcome: Any, text: Any) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome=outcome,
        longrepr=text,
        when=when,
    )
