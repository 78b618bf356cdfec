import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from tests.workers.contract import StreamingContract, until
from tests.workers.remote.cluster import front, make_agent, running


class RemoteEngine:
    """Starts all workers on one host, which joins once an event loop runs and leaves with it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        if self._task is None:
            self._joined = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run())
        hosts = await self._joined
        return await hosts.start(id, replace(config, host="h"), on_progress)

    async def _run(self) -> None:
        async with front(self._arena) as (hosts, _), running(make_agent(hosts.address)):
            await until(lambda: hosts.hosts)
            self._joined.set_result(hosts)
            await asyncio.Event().wait()  # until this task is cancelled


@pytest.fixture
def engine(arena: Arena, no_process_left: None) -> RemoteEngine:
    return RemoteEngine(arena)


class TestRemoteEngine(StreamingContract):
    pass
