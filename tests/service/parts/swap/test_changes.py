"""Changes, restarts and reports of one model at a time, over fake workers."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from inferpool.service.errors import ConflictError, UnavailableError
from inferpool.service.parts.admin.operations import Operations
from inferpool.service.parts.cluster.shown import ShownHosts
from inferpool.service.parts.speed import SpeedSearch
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.report import is_host_ready, model_health, report_of, status_of
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.speed.host_side import search
from tests.service.catalog.test_catalog import ROOM, Kept, answering
from tests.service.parts.test_speed import FIRST, FakeSearch
from tests.service.pools import until


class Changing:
    """A service's catalog, changes and restarts over fake workers, which answer."""

    def __init__(self, arena: Arena) -> None:
        self.kept = kept = Kept(arena)
        self.catalog = catalog = kept.catalog
        self.speed_search = SpeedSearch(search, grace_s=1)
        self.changes = Changes(catalog, kept.metrics, self.speed_search, ROOM, grace_s=5)
        self.operations = Operations(
            catalog.serving,
            catalog.busy,
            grace_s=1,
            drain=lambda is_draining: True,
            settings_json=lambda: "{}",
            measure_host=ShownHosts().measure,
        )

    async def ready(self) -> "Changing":
        await until(lambda: self.catalog.serving["m"].is_ready)
        return self

    async def swapped(self, **request: object) -> None:
        self.changes.begin_swap("m", {"policy": "force", **request})
        await self.changes.until_decided("m")

    def report(self):
        models = [
            model_health(name, pool, [version.pool for version in self.catalog.versions(name)])
            for name, pool in self.catalog.serving.items()
        ]
        is_ready = is_host_ready(self.catalog.serving.values())
        report = report_of(models, [], [], None, is_ready=is_ready, is_draining=False)
        report = self.changes.shown.add_to_health(self.speed_search.add_to_health(report))
        return replace(report, status=status_of(report))

    @property
    def steps(self) -> list[tuple[int | None, str]]:
        """The version and the state of each step, the oldest first."""
        return [(step.version, step.state) for step in reversed(self.changes.shown.history.steps)]


@pytest.fixture
def make(arena: Arena) -> Callable[[], Changing]:
    def changing() -> Changing:
        changing = Changing(arena)
        answering(changing.kept)
        return changing

    return changing


async def test_a_restart_and_a_change_of_one_model_exclude_each_other(make):
    changing = await make().ready()
    changing.operations.restart("m", None, old_first=False)
    with pytest.raises(ConflictError, match="workers of it are being restarted"):
        changing.changes.begin_swap("m", {})
    assert await changing.operations.until_restarted("m")
    await until(lambda: "m" not in changing.catalog.busy)
    changing.changes.begin_swap("m", {"policy": "force"})
    with pytest.raises(ConflictError, match=r"it is being changed \(swap\)"):
        changing.operations.restart("m", None, old_first=False)
    await changing.changes.until_decided("m")
    changing.operations.restart("m", None, old_first=False)
    assert await changing.operations.until_restarted("m")


async def test_a_model_is_restarted_while_its_former_version_leaves_or_is_kept(make):
    changing = await make().ready()
    changing.kept.are_fronts_slow = True
    await changing.swapped(rollback_s=0)
    assert changing.steps[-1] == (1, "leaving")
    assert changing.operations.restart("m", None, old_first=False) == ["m/2/0"]
    assert await changing.operations.until_restarted("m")
    changing.kept.told.set()
    await changing.catalog.until_left("m")
    await until(lambda: changing.steps[-1] == (1, "gone"))
    await changing.swapped(rollback_s=600)
    assert changing.steps[-1] == (2, "kept")
    assert changing.operations.restart("m", None, old_first=False) == ["m/3/0"]
    assert await changing.operations.until_restarted("m")


async def test_a_swap_waits_for_a_version_that_leaves_and_takes_its_memory(make):
    changing = await make().ready()
    changing.kept.are_fronts_slow = True
    await changing.swapped(rollback_s=0)
    changing.changes.begin_swap("m", {"policy": "force"})
    for _ in range(20):
        await asyncio.sleep(0)
    assert [version.number for version in changing.catalog.versions("m")] == [2]
    changing.kept.told.set()
    await changing.changes.until_decided("m")
    assert changing.catalog.serving["m"].version == 3


async def test_versions_have_the_numbers_of_a_folder_as_long_as_they_rise(make):
    changing = await make().ready()
    changes = changing.changes
    for wanted, gets in ((7, 7), (9, 9), (3, 10), (10, 11), (1 << 60, 12)):
        changes.begin_swap("m", {"policy": "force", "rollback_s": 0})
        assert changes.number_next("m", wanted) == gets
        await changes.until_decided("m")
        assert changing.catalog.serving["m"].version == gets
    changes.begin_add({"name": "n", "source": "echo"})
    assert changes.number_next("n", 5) == 5
    await changes.until_decided("n")
    assert changing.catalog.serving["n"].version == 5


async def test_a_shutdown_answers_those_who_wait_for_a_change_also_for_one_not_begun(make):
    changing = await make().ready()
    changing.changes.begin_swap("m", {})
    waiting = asyncio.ensure_future(changing.changes.until_decided("m"))
    await asyncio.sleep(0)
    changing.changes.begin_add({"name": "n", "source": "echo"})
    not_begun = asyncio.ensure_future(changing.changes.until_decided("n"))
    changing.changes.end()
    for each in (waiting, not_begun):
        with pytest.raises(UnavailableError, match="shutting down"):
            await each
    await changing.changes.stop()
    assert "m" not in changing.catalog.busy
    assert changing.catalog.serving["m"].version == 1


async def test_a_version_whose_leaving_is_cancelled_leaves_all_the_same(make):
    changing = await make().ready()
    catalog, kept = changing.catalog, changing.kept
    first = catalog.version("m")
    catalog.serve(await kept.ready())
    kept.are_fronts_slow = True
    leaving = asyncio.create_task(catalog.unload(first, 1))
    await asyncio.sleep(0)
    leaving.cancel()
    kept.told.set()
    await catalog.until_left("m")
    assert [each.number for each in catalog.loaded.values()] == [2]
    assert all(not slot.handle for slot in first.pool.slots)


async def test_each_step_is_told_and_versions_beside_do_not_degrade_the_status(make, caplog):
    changing = await make().ready()
    await changing.swapped(rollback_s=600)
    report = changing.report()
    (model,) = report.models
    assert (report.status, model.version, model.change) == ("ready", 2, "")
    assert [(each.number, each.state) for each in model.versions] == [(2, "serving"), (1, "kept")]
    assert [each.name for each in model.workers] == ["m/2/0"]
    assert [each.name for each in model.other_workers] == ["m/0"]
    changing.changes.begin_rollback("m")
    await changing.changes.until_decided("m")
    await until(lambda: "m" not in changing.catalog.busy)
    told = [(2, "loading"), (2, "comparing"), (2, "serving"), (1, "kept")]
    assert changing.steps == [*told, (2, "rolled_back"), (1, "serving")]
    assert "m: version 2 is rolled back: it was asked for" in caplog.text
    changing.kept.engine.failures = [WorkerStartError("no file", permanent=True)]
    changing.changes.begin_swap("m", {"policy": "force"})
    with pytest.raises(Exception, match="no file"):
        await changing.changes.until_decided("m")
    assert changing.steps[-2:] == [(3, "loading"), (3, "refused")]
    assert changing.report().status == "ready"


async def test_without_models_a_service_is_unavailable_until_one_is_added(make):
    changing = await make().ready()
    changing.speed_search.add(changing.catalog.serving["m"])
    changing.changes.begin_remove("m")
    await changing.changes.until_decided("m")
    report = changing.report()
    assert (report.status, report.ready, report.models) == ("unavailable", False, [])
    assert changing.steps == [(None, "gone")]
    changing.changes.begin_add({"name": "m", "source": "echo"})
    (loading,) = changing.report().models
    assert (loading.ready, loading.version) == (False, None)
    await changing.changes.until_decided("m")
    assert changing.report().status == "ready"


async def test_a_rollback_goes_to_the_version_before_even_if_an_earlier_one_left_later(make):
    changing = await make().ready()
    await changing.swapped(rollback_s=600)
    changing.kept.are_fronts_slow = True  # so that the first version leaves late
    await changing.swapped(rollback_s=600)
    changing.kept.told.set()
    await changing.catalog.until_left("m")
    await asyncio.sleep(0)
    assert changing.steps[-1] == (1, "gone")
    changing.changes.begin_rollback("m")
    await changing.changes.until_decided("m")
    assert changing.catalog.serving["m"].version == 2


async def test_a_change_cancels_a_search_for_speed_and_need_not_wait_for_it(make):
    changing = await make().ready()
    search = FakeSearch(None)  # it takes an hour
    changing.speed_search = changing.changes._speed_search = SpeedSearch(search, grace_s=1)
    pool = changing.catalog.serving["m"]
    (slot,) = pool.slots
    slot.config = replace(slot.config, chosen=FIRST)
    changing.speed_search.add(pool)
    await until(lambda: search.keys)
    assert changing.speed_search.progress("m").state == "searching"
    await changing.swapped(rollback_s=0)
    assert search.was_cancelled
    assert changing.catalog.serving["m"].version == 2
    assert changing.speed_search.progress("m").state != "searching"


@pytest.mark.usefixtures("virtual_time")
async def test_a_version_is_kept_while_its_model_is_restarted(make):
    changing = await make().ready()
    await changing.swapped(rollback_s=5)
    await until(lambda: not changing.changes.model_info("m").change)
    changing.catalog.busy.begin("m", "workers of it are being restarted")
    await asyncio.sleep(10)
    assert [each.number for each in changing.catalog.versions("m")] == [1, 2]
    changing.catalog.busy.end("m")
    await asyncio.sleep(1)
    assert [each.number for each in changing.catalog.versions("m")] == [2]
