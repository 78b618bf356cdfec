"""What an operator asks for by mistake is refused before anything is planned for it."""

import asyncio
from collections.abc import Callable

import pytest

from inferpool.service.errors import InvalidInputError, VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.requests import read_model
from inferpool.service.parts.swap.room import Room
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.shared.arena import Arena
from tests.counted_steps import StepCounter
from tests.service.catalog.test_catalog import Kept, answering
from tests.service.pools import until

MIB = 1 << 20
SPLIT = {"source": "tests.small_classifier:SmallClassifier", "placement": "tensor"}


class Asked:
    """A service with so much memory, and room for so many processes."""

    def __init__(self, arena: Arena, *, free_mib: int, processes: int | None = None) -> None:
        self.kept = kept = Kept(arena)
        self.room = room = Room(
            lambda model, placement: {HOST: 100 * MIB * placement.num_ranks},
            lambda: {HOST: free_mib * MIB},
            lambda worker: {HOST: 0},
            lambda: processes,
        )
        self.num_planned = 0
        self.changes = Changes(kept.catalog, kept.metrics, None, room, grace_s=5)
        self._plan, kept.catalog.plan = kept.catalog.plan, self._counted  # type: ignore[method-assign]

    def _counted(self, name, model):
        self.num_planned += 1
        return self._plan(name, model)

    async def add(self, **settings: object) -> None:
        self.changes.begin_add({"name": "n", "source": "echo", **settings})
        await self.changes.until_decided("n")
        assert self.kept.catalog.serving["n"].is_ready


@pytest.fixture
def ask(arena: Arena) -> Callable[..., Asked]:
    return lambda **limits: Asked(arena, **limits)


@pytest.mark.parametrize("replicas", [10**9, 10**30, 1025, 0, -1, True, 1.5, "many"])
async def test_a_slip_in_replicas_is_refused_with_the_bound(ask, replicas):
    asked = ask(free_mib=1000)
    with StepCounter(20_000), pytest.raises(InvalidInputError, match="number from 1 to 1024"):
        await asked.add(replicas=replicas)
    assert not asked.num_planned


async def test_memory_is_checked_before_any_plan(ask):
    asked = ask(free_mib=1000)
    with pytest.raises(
        VersionRefusedError,
        match="its 1024 workers need about 102,400 MiB, and 1,000 MiB are free",
    ) as it:
        await asked.add(replicas=1024)
    assert it.value.figures == {"needed_bytes": 102_400 * MIB, "free_bytes": 1000 * MIB}
    with pytest.raises(VersionRefusedError, match="about 12,800 MiB"):
        await asked.add(**SPLIT, replicas=2, devices_per_replica=64)
    assert not asked.num_planned


async def test_processes_are_checked_before_any_plan(ask):
    asked = ask(free_mib=10_000_000, processes=100)
    for settings, num in (
        ({"replicas": 1000}, 3000),
        ({"replicas": 2, "decoders": 64}, 134),
        ({"replicas": 1, "threads_per_replica": 1000}, 1002),
        ({"replicas": 1, "prepare_threads": 256}, 258),
        ({**SPLIT, "devices_per_replica": 64}, 129),
    ):
        text = f"needs about {num} processes and threads, and 100 are allowed"
        with pytest.raises(VersionRefusedError, match=text):
            await asked.add(**settings)
    assert not asked.num_planned


async def test_a_swap_counts_the_processes_of_the_version_that_leaves(ask):
    asked = ask(free_mib=10_000_000, processes=100)
    answering(asked.kept)
    changes = asked.changes
    for replicas, refused in ((3, False), (4, False), (52, True)):
        changes.begin_swap("m", {"replicas": replicas, "policy": "force", "rollback_s": 0})
        if refused:
            with pytest.raises(VersionRefusedError, match="156 processes and threads, and 112 are"):
                await changes.until_decided("m")
        else:
            await changes.until_decided("m")
            await until(lambda: not changes.model_info("m").change)
    assert asked.num_planned == 2


GREATEST = [
    {"replicas": 1024},
    {"replicas": 63, "decoders": 64},
    {**SPLIT, "replicas": 4, "devices_per_replica": 1024},
    {**SPLIT, "replicas": 1024, "devices_per_replica": 4},
    {"threads_per_replica": 1024, "prepare_threads": 256, "credit": 64},
    {"options": {"labels": ["cat"] * 99_000}},
    {"max_batch_size": 65_536, "options": {str(number): [0] * 30 for number in range(256)}},
]


@pytest.mark.parametrize("settings", GREATEST, ids=lambda settings: " ".join(settings))
async def test_the_greatest_numbers_are_planned_in_few_steps(ask, settings):
    asked = ask(free_mib=10_000_000)
    model = read_model({"source": "echo", **settings})
    with StepCounter() as steps:
        plan = await asked.room.plan(asked.kept.catalog, "n", model)
        asked.kept.catalog.load("n", model, plan.configs, paused=True)
    assert steps.longest > 100


@pytest.mark.slow
@pytest.mark.parametrize("settings", GREATEST, ids=lambda settings: " ".join(settings))
async def test_the_greatest_numbers_hold_up_the_event_loop_for_few_steps(ask, settings):
    asked = ask(free_mib=10_000_000)
    answering(asked.kept)
    with StepCounter():
        async with asyncio.timeout(300):
            await asked.add(**settings)
