"""Runs the tests that are coroutines, and gives them an arena."""

import asyncio
import inspect
from collections.abc import Iterator

import pytest
from uvloop import new_event_loop

from inferpool.workers.arena import Arena
from tests.virtual_time import run_in_virtual_time

_LIMIT_S = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine in an event loop of its own, for half a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if "virtual_time" in pyfuncitem.fixturenames:
        run_in_virtual_time(test, _LIMIT_S)
    else:
        factory = new_event_loop if "uvloop" in pyfuncitem.fixturenames else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test, _LIMIT_S))
    return True


@pytest.fixture
def virtual_time() -> None:
    """Make the clock of a test's event loop jump to the next thing that is due."""


@pytest.fixture
def uvloop() -> None:
    """Run a test in uvloop's event loop, as the service runs."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 16)
    yield arena
    arena.close()
