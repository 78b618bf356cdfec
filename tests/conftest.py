"""What holds for all tests: bytecode, patience, signals, who runs beside whom, what they write."""

import inspect
import os
import signal
import sys
from collections.abc import Generator

import httpx
import pytest

from tests.turns import turn

_PATIENCE_S = 30.0
"""For an answer, where a test does not say how much: httpx has 5 s, and a busy machine may need
more."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the bytecode of what is imported, also where the environment says not to.

    The tests start some hundred interpreters, each of which would compile torch anew, for two
    seconds. The processes that they start also hear the signals that `nohup` or a shell's `&` would
    have them ignore.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = _PATIENCE_S
    if sys.dont_write_bytecode and (cache := _cache_of(config)) is not None:
        sys.pycache_prefix = str(cache.mkdir("bytecode"))  # the environment's own stays clean
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waiting is no part of the time that a test may take
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Take turns with the tests that other processes run."""
    cache = _cache_of(item.config)
    if cache is None:
        return (yield)
    is_alone = item.get_closest_marker("alone") is not None
    with turn(cache.mkdir("turns"), item.nodeid, alone=is_alone):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have what tests wrote in a form that can be sent from process to process."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def _cache_of(config: pytest.Config) -> pytest.Cache | None:
    """What pytest keeps from run to run; nothing where its plugin is left out."""
    return getattr(config, "cache", None)
