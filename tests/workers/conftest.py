"""Fixtures for tests with real workers: an arena, an engine, and payloads for them."""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator

import pytest

from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemRef
from tests.workers.contract import PATIENT


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    start_forkserver()
    arena = Arena(4 << 20)
    yield arena
    arena.close()


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Fail a test that ends while processes run that it has started."""
    before = set(multiprocessing.active_children())  # of a test that has failed
    yield
    deadline = time.monotonic() + 60  # they are killed, and may take a moment to exit
    while not set(multiprocessing.active_children()) <= before:
        assert time.monotonic() < deadline, multiprocessing.active_children()
        time.sleep(0.01)


@pytest.fixture
def engine(arena: Arena, no_process_left: None) -> LocalEngine:
    return LocalEngine(arena, PATIENT)


@pytest.fixture
def put(arena: Arena) -> Callable[..., ItemRef]:
    def put(
        value: object,
        *,
        timeout_s: float = 600,
        parameters: bytes = b"",
        request_id: str = "",
    ) -> ItemRef:
        """Store a payload, and return the instance that a worker is given."""
        body = json.dumps(value).encode()
        offset = arena.put([body], len(body))
        assert offset is not None
        deadline = time.monotonic() + timeout_s
        return ItemRef(
            "json", offset, len(body), deadline, parameters=parameters, request_id=request_id
        )

    return put
