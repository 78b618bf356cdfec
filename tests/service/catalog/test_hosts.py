"""Versions whose workers come and go with hosts of a cluster, over fake workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from inferpool.service.catalog.catalog import Catalog
from inferpool.service.errors import InvalidInputError, UnavailableError, VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.room import Room
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.telemetry.metrics import Metrics
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.fakes import FakeEngine, ref_to
from tests.service.catalog.test_catalog import ECHO
from tests.service.pools import SilentAnnouncer, until

DEVICES = Host(cpus=(0, 1), num_cores=2)


class Hosted:
    """A catalog of a cluster, whose hosts run fake workers."""

    def __init__(self, arena: Arena, model: ModelSettings = ECHO) -> None:
        self.engine = FakeEngine()
        self.metrics = Metrics(["m"], {})
        self.catalog = Catalog(
            Settings(models={"m": model}, default_model="m"),
            None,
            self.metrics,
            SilentAnnouncer(),
            cache_dir=None,
            on_change=lambda: None,
            until_known=self._until_known,
            state=StateFile(None, {"m": model}),
        )
        self.catalog.start(self.engine, arena)
        room = Room.of_other_hosts()
        self.changes = Changes(self.catalog, self.metrics, None, room, grace_s=5)

    def lose(self, host: str) -> None:
        """Lose a host as an engine tells it: its workers first."""
        gone = {
            str(slot.id)
            for version in self.catalog.loaded.values()
            for slot in version.pool.slots
            if slot.config.host == host
        }
        for worker in self.engine.started:
            if str(worker.id) in gone and not worker.is_gone:
                worker.lose_host()
        self.catalog.remove_host(host, "silence")

    def workers(self) -> list[str]:
        """Return the workers that are ready, and the host of each."""
        pools = [version.pool for version in self.catalog.versions("m")]
        slots = [slot for pool in pools for slot in pool.slots if slot.handle]
        return [f"{slot.config.host} {slot.id.number}" for slot in slots]

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Send calls one after another, each of which must be answered."""
        is_over = asyncio.Event()

        async def ask() -> None:
            while not is_over.is_set():
                await self.catalog.serving["m"].submit(ref_to(b"x", 20), [b"x"])

        async def work() -> None:
            while True:
                for worker in self.engine.started:
                    while worker.batches:
                        worker.answer()
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(ask()), asyncio.create_task(work())]
        try:
            yield
        finally:
            is_over.set()
            await tasks[0]
            tasks[1].cancel()
            await asyncio.gather(tasks[1], return_exceptions=True)

    async def _until_known(self) -> None:
        return


@pytest.fixture
def cluster(arena: Arena) -> Callable[[], Hosted]:
    return lambda: Hosted(arena)


async def test_each_host_that_joins_gets_workers_of_every_version(cluster: Callable[[], Hosted]):
    hosted = cluster()
    catalog = hosted.catalog
    assert catalog.planned == []
    with pytest.raises(UnavailableError, match="no host is connected"):
        hosted.changes.begin_swap("m", {})
    with pytest.raises(UnavailableError, match="no host is connected"):
        hosted.changes.begin_add({"name": "n", "source": "echo"})
    catalog.add_host("a", DEVICES)
    await until(lambda: catalog.serving["m"].is_ready)
    second = catalog.load("m", ECHO)
    assert [slot.config.host for slot in second.pool.slots] == ["a"]
    catalog.add_host("b", DEVICES)
    await until(lambda: len(hosted.workers()) == 4)
    assert hosted.workers() == ["a 0", "b 1", "a 2/0", "b 2/1"]
    hosted.lose("a")
    assert hosted.workers() == ["b 1", "b 2/1"]
    hosted.lose("b")
    assert not catalog.serving["m"].is_lost
    catalog.add_host("a", DEVICES)
    await until(lambda: len(hosted.workers()) == 2)


async def test_a_model_that_does_not_fit_on_a_host_is_left_out_there(
    cluster: Callable[[], Hosted], caplog: pytest.LogCaptureFixture
):
    hosted = cluster()
    catalog = hosted.catalog
    catalog.add_host("cpus", DEVICES)
    with pytest.raises(DeviceError):
        catalog.load("n", ECHO.model_copy(update={"devices": "cuda"}))
    model = ECHO.model_copy(update={"replicas": 2, "threads_per_replica": 1, "devices": "cpu"})
    catalog.load("m", model)
    with pytest.raises(DeviceError, match="leave out share"):
        catalog.load("n", ECHO.model_copy(update={"share": 2.0}))
    assert "n cannot be served on host cpus: " in caplog.text


async def test_a_swap_goes_on_while_hosts_leave_and_join(cluster: Callable[[], Hosted]):
    hosted = cluster()
    for host in "abc":
        hosted.catalog.add_host(host, DEVICES)
    await until(lambda: len(hosted.workers()) == 3)
    async with hosted.asked():
        hosted.changes.begin_swap("m", {"policy": "force", "rollback_s": 0})
        await until(lambda: any(worker.id.version == 2 for worker in hosted.engine.started))
        hosted.lose("b")
        hosted.catalog.add_host("d", DEVICES)
        await hosted.changes.until_decided("m")
        await until(lambda: hosted.workers() == ["a 2/0", "c 2/2", "d 2/3"])


async def test_a_version_gets_the_hosts_that_are_there_when_it_is_loaded(
    cluster: Callable[[], Hosted],
):
    hosted = cluster()
    catalog = hosted.catalog
    for host in "ab":
        catalog.add_host(host, DEVICES)
    plan = catalog.plan("n", ECHO)
    hosted.lose("a")
    catalog.add_host("c", DEVICES)
    version = catalog.load("n", ECHO, plan)
    assert [slot.config.host for slot in version.pool.slots] == ["b", "c"]


async def test_a_version_whose_hosts_are_all_lost_is_refused(cluster: Callable[[], Hosted]):
    hosted = cluster()
    hosted.catalog.add_host("a", DEVICES)
    await until(lambda: hosted.catalog.serving["m"].is_ready)
    hosted.changes.begin_swap("m", {"policy": "force"})
    await until(lambda: len(hosted.catalog.versions("m")) == 2)
    hosted.lose("a")
    with pytest.raises(VersionRefusedError, match=r"all hosts .* were lost"):
        await hosted.changes.until_decided("m")


async def test_the_former_version_leaves_first_only_if_it_is_asked_to(
    cluster: Callable[[], Hosted],
):
    hosted = cluster()
    hosted.catalog.add_host("a", DEVICES)
    hosted.catalog.add_host("b", DEVICES)
    await until(lambda: len(hosted.workers()) == 2)
    start, beside = hosted.engine.start, list[bool]()

    async def watch_start(id, config, on_progress):
        beside.append(any(not each.is_gone for each in hosted.engine.started))
        if fails and id.slot == 1:
            raise WorkerStartError("out of memory", permanent=False)
        return await start(id, config, on_progress)

    hosted.engine.start = watch_start  # type: ignore[method-assign]
    for old_first in (False, True):
        for fails in (True, False):
            beside.clear()
            request = {"policy": "force", "old_first": old_first, "rollback_s": 0}
            hosted.changes.begin_swap("m", request)
            if fails:
                with pytest.raises(VersionRefusedError, match="out of memory"):
                    await hosted.changes.until_decided("m")
            else:
                await hosted.changes.until_decided("m")
            assert beside[0] is not old_first
            fails = False  # else what it goes back to
            await until(lambda: not hosted.changes.model_info("m").change)
            await until(lambda: len(hosted.workers()) == 2)


async def test_a_missing_device_on_all_hosts_is_an_invalid_request(cluster: Callable[[], Hosted]):
    hosted = cluster()
    hosted.catalog.add_host("a", replace(DEVICES, num_cores=1))
    hosted.changes.begin_add({"name": "n", "source": "echo", "devices": "cuda"})
    with pytest.raises(InvalidInputError):
        await hosted.changes.until_decided("n")
