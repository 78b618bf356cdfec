"""Swaps of real workers where memory is too short for two versions, and calls meanwhile."""

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

import psutil
import pytest

from inferpool.service.errors import ServiceError, VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.room import Room
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.state import StateFile
from inferpool.workers.host.device_memory import HOST, DeviceMemory
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemRef
from tests.ballast_model import BALLAST_BYTES
from tests.fakes import ref_to
from tests.service.catalog.test_catalog import Kept

pytestmark = pytest.mark.measures  # the memory of several processes cannot be read at one moment

_SLACK_BYTES = BALLAST_BYTES // 2


class Processes:
    """The processes that were started since this object was made, and their memory."""

    def __init__(self) -> None:
        self._before = {each.pid for each in psutil.Process().children(recursive=True)}

    def used_bytes(self) -> int:
        """Return the memory that each of them shares with no other process, added up.

        What they share is left out: it would count more as processes of other tests end.
        """
        total = 0
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                total += 0 if each.pid in self._before else each.memory_full_info().uss
        return total


class PeakWatch:
    """Notes the most memory that processes have taken at once. Runs a thread."""

    def __init__(self, processes: Processes) -> None:
        self.most_bytes = 0
        self._processes = processes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "PeakWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.03):
            self.most_bytes = max(self.most_bytes, self._processes.used_bytes())


class RealStage:
    """A model whose workers are processes, with a bound for their memory, and its clients."""

    def __init__(self, arena: Arena, replicas: int) -> None:
        source = "tests.ballast_model:BallastModel"
        model = ModelSettings(source=source, replicas=replicas, options={"mark": 1}, speed="exact")
        self.kept = Kept(arena, StateFile(None, {"m": model}), LocalEngine(arena))
        self.catalog = self.kept.catalog
        self.processes = Processes()  # before the loop runs, which starts workers
        self.bound_bytes = 1 << 50
        room = Room(
            lambda model, placement: {HOST: 1},
            lambda: {HOST: self.bound_bytes - self.processes.used_bytes()},
            DeviceMemory((), None).used_by,
        )
        self.changes = Changes(self.catalog, self.kept.metrics, None, room, grace_s=10)
        self.marks: Counter[tuple[int, int]] = Counter()
        """Answers by version and mark."""
        self.wrong: list[object] = []
        self.errors: list[ServiceError] = []
        self._numbers = itertools.count()

    async def full(self) -> None:
        """Wait until all workers of the version that serves are ready."""
        while not all(slot.handle for slot in self.catalog.serving["m"].slots):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def leave_room_for(self, num: float) -> None:
        """Set the bound: so many workers fit in beside those that there are."""
        (each, *_) = (slot.handle for slot in self.catalog.serving["m"].slots if slot.handle)
        used = await asyncio.to_thread(DeviceMemory((), None).used_by, each)
        assert used[HOST] > BALLAST_BYTES
        self.bound_bytes = await asyncio.to_thread(self.processes.used_bytes) + int(
            num * used[HOST]
        )

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Have clients ask in a closed loop during the block."""
        is_over = asyncio.Event()
        clients = [asyncio.create_task(self._ask(is_over)) for _ in range(4)]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*clients)

    async def swap(self, mark: int, **request: object) -> None:
        """Swap, and wait until all is done that belongs to it."""
        self.changes.begin_swap("m", {"options": {"mark": mark}, "policy": "force", **request})
        try:
            await self.changes.until_decided("m")
        finally:
            while self.changes.model_info("m").change:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def more_of(self, version: int) -> None:
        """Wait until a version has answered some more calls."""
        until = self.marks[version, version] + 10
        while self.marks[version, version] < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _ask(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            number = next(self._numbers)
            body = json.dumps({"n": number}).encode()
            serving = self.catalog.serving["m"]
            try:
                answer = await serving.submit(_ref_of(body), [body])
            except ServiceError as error:
                self.errors.append(error)
                await asyncio.sleep(0.05)
                continue
            assert isinstance(answer.value, bytes)
            value: Mapping[str, int] = json.loads(answer.value)
            self.marks[serving.version, value["mark"]] += 1
            if value["n"] != number:
                self.wrong.append((number, value))

    async def close(self) -> None:
        await self.changes.stop()
        await self.catalog.stop()
        await asyncio.gather(*(each.pool.stop(1) for each in self.catalog.loaded.values()))
        engine = self.kept.engine
        assert isinstance(engine, LocalEngine)
        await engine.close()


def _ref_of(body: bytes) -> ItemRef:
    ref = ref_to(body, 40)
    ref.kind = "json"
    return ref


@pytest.fixture(scope="module")
def wide_arena() -> Iterator[Arena]:
    start_forkserver()
    arena = Arena(4 << 20)
    yield arena
    arena.close()


@asynccontextmanager
async def bounded(arena: Arena, replicas: int, room: float) -> AsyncIterator[RealStage]:
    """Serve a model with room for so many workers more; check what its clients got."""
    it = RealStage(arena, replicas)
    try:
        await it.full()
        await it.leave_room_for(room)
        with PeakWatch(it.processes) as peak:
            async with it.asked():
                yield it
        assert peak.most_bytes <= it.bound_bytes + _SLACK_BYTES
        assert not it.wrong
        assert all(version == mark for version, mark in it.marks), it.marks
        assert it.kept.metrics.total("m").in_flight == 0
    finally:
        await it.close()


@pytest.mark.parametrize(
    "room",
    [pytest.param(1.3, marks=pytest.mark.slow, id="one more"), pytest.param(0.3, id="none more")],
)
async def test_the_bound_holds_and_no_call_is_lost_while_workers_follow_one_another(
    wide_arena, room
):
    async with bounded(wide_arena, 2, room) as it:
        await it.swap(2)
        assert all(slot.handle for slot in it.catalog.serving["m"].slots)
        await it.more_of(2)
    assert not it.errors


async def test_calls_wait_while_a_single_worker_makes_room_for_another_version(wide_arena):
    async with bounded(wide_arena, 1, 0.3) as it:
        with pytest.raises(VersionRefusedError, match="old_first"):
            await it.swap(2)
        await it.swap(2, old_first=True)
        await it.more_of(2)
    assert not it.errors
