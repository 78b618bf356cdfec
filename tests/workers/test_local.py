import asyncio
import json
import multiprocessing
import time
from collections.abc import Coroutine

import pytest

from tests.workers.contract import EngineContract
from workers.arena import Arena
from workers.local import LocalEngine, start_forkserver
from workers.messages import ItemRef


@pytest.fixture(scope="module")
def arena():
    start_forkserver()
    arena = Arena(4 << 20)
    yield arena
    arena.close()


@pytest.fixture
def engine(arena: Arena):
    return LocalEngine(arena)


@pytest.fixture
def put(arena: Arena):
    def put(value: object, *, deadline: float | None = None, parameters: bytes = b"") -> ItemRef:
        body = json.dumps(value).encode()
        offset = arena.put([body], len(body))
        assert offset is not None
        late = time.monotonic() + 60 if deadline is None else deadline
        return ItemRef("json", offset, len(body), late, parameters=parameters)

    return put


@pytest.fixture
def run():
    def run(coroutine: Coroutine[None, None, None]) -> None:
        asyncio.run(asyncio.wait_for(coroutine, 60))
        assert not multiprocessing.active_children()

    return run


class TestLocalEngine(EngineContract):
    pass
