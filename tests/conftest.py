"""Settings for all tests: coroutines, timeouts, second runs, and which tests run side by side."""

import asyncio
import atexit
import contextlib
import functools
import gc
import inspect
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings
from uvloop import new_event_loop
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from inferpool.workers.shared.threads import spin_briefly
from tests.process_state import ProcessState
from tests.simulated_accelerator.forwarding import Forwarding, has_device
from tests.turns import turn
from tests.virtual_time import run_in_virtual_time

_PATIENCE_S = 120.0
"""Default timeout of httpx in tests: its own, 5 s, is too short for a busy machine."""
_COROUTINE_LIMIT_S = 300.0
_SIMULATED = "simulated"
_DEAREST = ("tests/e2e/", "tests/test_docs.py", "tests/workers/", "tests/models/")
"""The folders of the tests that cost the most, in the order in which they run."""
_RERUN = "rerun"
"""Outcome of a first run that failed; it does not make the test session fail."""
_RUN = pytest.StashKey[int]()
"""Number of the run of a test: the first, or the second."""
_HAS_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process, and so all processes that tests start.

    They hear the signals that `nohup` or a shell's `&` has a process ignore. They keep bytecode,
    even if the environment forbids it: tests start some hundred interpreters, and each would
    compile torch anew, for two seconds. Threads of torch spin briefly, as a worker's do: tests have
    more of them than there are cores. Services keep their jobs in a folder that goes at the end.
    Examples of properties may take long, since the machine may stand still.
    """
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")
    state = tempfile.TemporaryDirectory(prefix="inferpool-state-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    spin_briefly()
    if not has_device():
        config.pluginmanager.register(Forwarding(), "forwarding")
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = _PATIENCE_S
    cache = getattr(config, "cache", None)  # none with `-p no:cacheprovider`
    if sys.dont_write_bytecode and cache is not None:
        sys.pycache_prefix = str(cache.mkdir("bytecode"))  # keeps the environment clean
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, for five minutes at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if "virtual_time" in pyfuncitem.fixturenames:
        run_in_virtual_time(test, _COROUTINE_LIMIT_S)
    else:
        factory = new_event_loop if "uvloop" in pyfuncitem.fixturenames else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test, _COROUTINE_LIMIT_S))
    return True


@pytest.fixture(autouse=True)
def unchanged_process() -> Generator[None]:
    """Fail a test that leaves the process in another state, in which others would run."""
    before = ProcessState()
    yield
    changes = list(before.changes())
    assert not changes, "\n".join(["the test has not taken back:", *changes])


@pytest.fixture(autouse=True)
def _restored_environment(unchanged_process: None) -> Generator[None]:
    """Take back what a test has changed in the environment, in which commands run.

    The same for the places of modules, to which the import of a class adds the working directory.
    """
    before, places = dict(os.environ), sys.path[:]
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    sys.path[:] = places


@pytest.fixture
def virtual_time() -> None:
    """Make the clock of a test's event loop jump to the next thing that is due."""


@pytest.fixture
def uvloop() -> None:
    """Run a test in uvloop's event loop, as the service runs."""


class _ByFileOrPage(LoadFileScheduling):
    """Gives one process all tests of a file; the examples of the docs go page by page.

    One process has all files with tests of the simulated accelerator: each process that has such
    tests starts another one for them.
    """

    def _split_scope(self, nodeid: str) -> str:
        page, found, _ = nodeid.partition(".md:")
        if found:
            return page
        file = super()._split_scope(nodeid)
        return _SIMULATED if _has_simulated(self.config.rootpath / file) else file


@functools.cache
def _has_simulated(file: Path) -> bool:
    """Return whether tests of a file may be marked `simulated`, as it or its folder's fixtures say.

    The process that spreads the tests collects none, and has only their names.
    """
    texts = (
        each.read_text("utf-8") for each in (file, file.with_name("conftest.py")) if each.exists()
    )
    return any(f"mark.{_SIMULATED}" in text for text in texts)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Spread the pages of the docs over the processes, since each starts services of its own."""
    return _ByFileOrPage(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that run alone as tests that measure, too, and put the dearest folders first.

    The last files to be run are small then, so that no process waits long for another.
    """
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker("measures")
        if item.get_closest_marker(_SIMULATED):
            assert _has_simulated(item.path), f"{item.path} does not say mark.{_SIMULATED}"
    items.sort(key=functools.partial(_place_in_order, config.rootpath))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what has been imported: each trial of a preset collects, too."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries complain of what is not freed in the end


def _place_in_order(root: Path, item: pytest.Item) -> int:
    if _has_simulated(item.path):
        return 0  # they are one piece of work, the longest of all
    path = item.path.relative_to(root).as_posix()
    places = (place for place, begin in enumerate(_DEAREST, 1) if path.startswith(begin))
    return next(places, len(_DEAREST) + 1)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waiting does not count for a test's timeout
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Take turns with tests in other processes, and run a failed test that measures once more."""
    item.stash[_RUN] = run = item.stash.get(_RUN, 0) + 1
    item.stash[_HAS_FAILED] = False
    is_alone = run > 1 or item.get_closest_marker("alone") is not None
    with _turn(item, is_alone=is_alone):
        result = yield
    if item.stash[_HAS_FAILED]:
        _collect_what_it_left()
        if _runs_again(item):
            return item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that it has the last word on the outcome
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a failure, and make the captured output fit to be sent between processes."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    if report.failed:
        item.stash[_HAS_FAILED] = True
        if _runs_again(item):
            vars(report)["outcome"] = _RERUN
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End the fixtures that a failed test shares with others, which it may have broken."""
    try:
        yield
    finally:
        if item.stash[_HAS_FAILED]:
            item.session._setupstate.teardown_exact(None)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show a first run that failed as an R."""
    return (_RERUN, "R", "RERUN") if vars(report)["outcome"] == _RERUN else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the first runs that failed; the second ones are reported like any other."""
    for report in terminalreporter.stats.get(_RERUN, []):
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_line(f"{title}:\n{text}")


def _runs_again(item: pytest.Item) -> bool:
    """Return whether a test that fails gets another run."""
    return item.stash[_RUN] == 1 and item.get_closest_marker("measures") is not None


def _collect_what_it_left() -> None:
    """Collect what a failed test left open, so that no later test is blamed for it.

    The interpreter keeps the last error for debuggers, and with it all that its frames hold.
    """
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()


def _turn(item: pytest.Item, *, is_alone: bool) -> contextlib.AbstractContextManager[None]:
    """Return the turn of a test; without pytest's cache there is nobody to take turns with."""
    cache = getattr(item.config, "cache", None)
    if cache is None:
        return contextlib.nullcontext()
    return turn(cache.mkdir("turns"), item.nodeid, alone=is_alone)
