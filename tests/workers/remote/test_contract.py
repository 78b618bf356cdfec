from collections.abc import Callable

import pytest

from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from tests.workers.contract import EngineContract
from tests.workers.remote.cluster import JoinedHosts, OnHost


class RemoteEngine:
    """An engine that starts all workers on one host."""

    def __init__(self, arena: Arena) -> None:
        self._hosts = JoinedHosts(arena, "h")

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        return await OnHost(await self._hosts.get()).start(id, config, on_progress)


@pytest.fixture
def engine(arena: Arena, no_process_left: None) -> RemoteEngine:
    return RemoteEngine(arena)


class TestRemoteEngine(EngineContract):
    pass
