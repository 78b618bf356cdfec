"""Memory for versions that load at once, and those that do not fit."""

import asyncio
from collections.abc import Callable

import pytest

from inferpool.service.errors import VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.room import Room
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.service.catalog.test_catalog import ECHO, Kept
from tests.service.pools import until

MIB = 1 << 20


class Memory:
    """So much is free; each worker needs 100 MiB."""

    def __init__(self, free_mib: int, kept: Kept) -> None:
        self.kept, self.catalog = kept, kept.catalog
        self.free_bytes = free_mib * MIB
        self.room = Room(
            lambda model, placement: {HOST: 100 * MIB},
            lambda: {HOST: self.free_bytes},
            lambda worker: {HOST: 0},
        )
        self.inside: list[int] = []

    async def load(self, num_workers: int, until_loaded: asyncio.Event) -> None:
        model = ECHO.model_copy(update={"replicas": num_workers})
        async with self.room.taken(self.catalog, "n", model):
            self.inside.append(num_workers)
            await until_loaded.wait()
        self.inside.remove(num_workers)


@pytest.fixture
def remember(arena: Arena) -> Callable[[int], Memory]:
    return lambda free_mib: Memory(free_mib, Kept(arena))


async def test_versions_that_fit_in_load_at_once_and_others_wait_for_them(remember):
    memory = remember(350)
    loaded = asyncio.Event()
    loads = [asyncio.create_task(memory.load(2, loaded)) for _ in range(2)]
    loads.append(asyncio.create_task(memory.load(1, loaded)))
    await until(lambda: len(memory.inside) == 2)
    assert memory.inside == [2, 1], "the second two do not fit in beside the first"
    loaded.set()
    await asyncio.gather(*loads)
    assert memory.inside == []


async def test_no_more_than_a_few_load_at_once(remember):
    memory = remember(10_000)
    loaded = asyncio.Event()
    loads = [asyncio.create_task(memory.load(1, loaded)) for _ in range(9)]
    await until(lambda: len(memory.inside) == 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(memory.inside) == 4
    loaded.set()
    await asyncio.gather(*loads)


async def test_a_wait_for_room_that_is_cancelled_takes_none(remember):
    memory = remember(150)
    loaded = asyncio.Event()
    first, second = (asyncio.create_task(memory.load(1, loaded)) for _ in range(2))
    await until(lambda: memory.inside)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    loaded.set()
    await first
    await memory.load(1, loaded)


async def test_a_version_that_does_not_fit_is_refused_with_figures_before_it_starts(remember):
    memory = remember(150)
    kept = memory.kept
    changes = Changes(kept.catalog, kept.metrics, None, memory.room, grace_s=5)
    await until(lambda: kept.catalog.serving["m"].is_ready)
    num_started = len(kept.engine.started)
    changes.begin_swap("m", {"replicas": 2})
    with pytest.raises(
        VersionRefusedError, match=r"2 workers need about 200 MiB, and 150 MiB"
    ) as it:
        await changes.until_decided("m")
    assert it.value.figures == {"needed_bytes": 200 * MIB, "free_bytes": 150 * MIB}
    changes.begin_add({"name": "n", "source": "echo", "replicas": 2})
    with pytest.raises(VersionRefusedError, match="lower replicas"):
        await changes.until_decided("n")
    await until(lambda: not any(model.change for model in changes.shown.list_models()))
    assert len(kept.engine.started) == num_started
    assert list(kept.catalog.serving) == ["m"]
    memory.free_bytes = 200 * MIB
    changes.begin_swap("m", {"replicas": 2, "policy": "force", "rollback_s": 0})
    await changes.until_decided("m")
    assert kept.catalog.serving["m"].version == 2


@pytest.mark.parametrize(
    ("free_mib", "becomes"), [(250, "kept"), (50, "gone"), (10, "kept")], ids=str
)
async def test_a_kept_version_leaves_first_if_another_fits_in_only_without_it(
    arena, free_mib, becomes
):
    kept = Kept(arena)
    await until(lambda: kept.catalog.serving["m"].is_ready)
    until_full = [free_mib * MIB]

    def free() -> dict[str, int]:
        others = len(kept.catalog.versions("m")) - 2
        return {HOST: until_full[0] - 80 * MIB * others}

    used = {HOST: 80 * MIB}
    room = Room(lambda model, placement: {HOST: 100 * MIB}, free, lambda worker: used)
    until_full[0] = 1000 * MIB
    changes = Changes(kept.catalog, kept.metrics, None, room, grace_s=5)
    changes.begin_swap("m", {"policy": "force", "rollback_s": 600})
    await changes.until_decided("m")
    first = kept.catalog.versions("m")[0]
    until_full[0] = free_mib * MIB
    kept.engine.failures = [WorkerStartError("no file", permanent=True)]
    changes.begin_swap("m", {"policy": "force"})
    with pytest.raises(VersionRefusedError):
        await changes.until_decided("m")
    await kept.catalog.until_left("m")
    (state,) = (v.state for v in changes.model_info("m").versions if v.number == first.number)
    assert state == becomes
    is_loaded = first in kept.catalog.versions("m")
    assert is_loaded == (becomes == "kept")


async def test_memory_of_a_gpu_counts_as_that_of_the_host_does(arena):
    kept = Kept(arena)
    await until(lambda: kept.catalog.serving["m"].is_ready)
    free = {HOST: 1000 * MIB, "GPU-a": 100 * MIB, "GPU-b": 0}
    used = {HOST: 10 * MIB, "GPU-a": 150 * MIB, "GPU-b": 0}
    room = Room(
        lambda model, placement: {HOST: 100 * MIB, "GPU-a": 50 * MIB, "GPU-unknown": 1},
        lambda: free,
        lambda worker: used,
    )
    changes = Changes(kept.catalog, kept.metrics, None, room, grace_s=5)
    changes.begin_swap("m", {"replicas": 2, "policy": "force"})
    with pytest.raises(VersionRefusedError, match="300 MiB of GPU GPU-a, and 250 MiB are") as it:
        await changes.until_decided("m")
    assert it.value.figures == {"needed_bytes": 300 * MIB, "free_bytes": 250 * MIB}
    await until(lambda: not changes.model_info("m").change)
    free["GPU-a"] = 150 * MIB
    changes.begin_swap("m", {"policy": "force"})
    await changes.until_decided("m")
    assert kept.catalog.serving["m"].version == 2
