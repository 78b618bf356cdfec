import contextlib
from collections.abc import Callable

import pytest

from inferpool.workers.arena import Arena
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from tests.workers.contract import EngineContract
from tests.workers.remote.cluster import OnHost, connected


class RemoteEngine:
    """An engine whose host joins at the first start, since that needs an event loop."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stack = contextlib.AsyncExitStack()
        self._engine: OnHost | None = None

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        if self._engine is None:
            hosts, _ = await self._stack.enter_async_context(connected(self._arena))
            self._engine = OnHost(hosts)
        return await self._engine.start(id, config, on_progress)


@pytest.fixture
def engine(arena: Arena, no_process_left: None) -> RemoteEngine:
    return RemoteEngine(arena)


class TestRemoteEngine(EngineContract):
    pass
