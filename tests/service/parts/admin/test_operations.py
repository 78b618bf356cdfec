import asyncio
from types import SimpleNamespace

import pytest

from inferpool.service.api.errors import NotFoundError
from inferpool.service.catalog.catalog import BusyModels
from inferpool.service.errors import (
    ConflictError,
    RestartFailedError,
    UnavailableError,
    UnknownModelError,
)
from inferpool.service.parts.admin.operations import Operations
from inferpool.service.parts.cluster.shown import ShownHosts
from inferpool.workers.host.engine import WorkerId


class HeldPool:
    def __init__(self, num_workers: int) -> None:
        self.slots = [
            SimpleNamespace(id=WorkerId(model="m", slot=number)) for number in range(num_workers)
        ]
        self.replaced: list[list[str]] = []
        self.may_end = asyncio.Event()
        self.failure = ""
        self.is_lost = False
        self.replacer = self

    async def replace(self, slots, grace_s: float, *, old_first: bool) -> None:
        self.replaced.append([slot.id.worker for slot in slots])
        await self.may_end.wait()
        if self.failure:
            raise RestartFailedError(self.failure)


def operations(pool: HeldPool, *, is_stopping: bool = False) -> Operations:
    return Operations(
        {"m": pool},  # type: ignore[dict-item]
        BusyModels(),
        grace_s=1,
        drain=lambda is_draining: is_draining or not is_stopping,
        settings_json=lambda: "{}",
        measure_host=ShownHosts().measure,
    )


async def test_one_restart_of_a_known_model_at_a_time():
    pool = HeldPool(2)
    target = operations(pool)
    assert target.restart("m", None, old_first=False) == ["m/0", "m/1"]
    for name, slot, error, message in (
        ("m", 1, ConflictError, "are being restarted"),
        ("x", None, UnknownModelError, "there are: m"),
        ("m", 2, NotFoundError, "has 2 workers"),
    ):
        with pytest.raises(error, match=message):
            target.restart(name, slot, old_first=False)
    await asyncio.sleep(0)
    pool.may_end.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert target.restart("m", 1, old_first=False) == ["m/1"]
    await asyncio.sleep(0)
    assert pool.replaced == [["m/0", "m/1"], ["m/1"]]
    await target.stop()


async def test_a_failed_restart_says_what_failed():
    pool = HeldPool(1)
    target = operations(pool)
    pool.failure = "m/0 was not replaced: SyntaxError"
    pool.may_end.set()
    target.restart("m", None, old_first=False)
    with pytest.raises(RestartFailedError, match="SyntaxError"):
        await target.until_restarted("m")


async def test_only_models_that_were_given_up_are_tried_again():
    pool = HeldPool(2)
    target = operations(pool)
    target.retry_lost()
    await asyncio.sleep(0)
    assert pool.replaced == []
    pool.is_lost = True
    target.retry_lost()
    target.retry_lost()  # it is being tried
    await asyncio.sleep(0)
    assert pool.replaced == [["m/0", "m/1"]]
    await target.stop()
    target.retry_lost()
    assert pool.replaced == [["m/0", "m/1"]]


@pytest.mark.usefixtures("virtual_time")
async def test_a_long_restart_is_answered_before_it_is_over():
    target = operations(HeldPool(1))
    target.restart("m", None, old_first=False)
    assert not await target.until_restarted("m")
    await target.stop()


async def test_a_stop_ends_restarts_and_a_drain_that_stays():
    target = operations(HeldPool(1), is_stopping=True)
    target.restart("m", None, old_first=False)
    waiting = asyncio.create_task(target.until_restarted("m"))
    await asyncio.sleep(0)
    await target.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        await waiting
    with pytest.raises(ConflictError, match="shutting down"):
        target.restart("m", None, old_first=False)
    target.set_draining(True)
    with pytest.raises(ConflictError, match="shutting down"):
        target.set_draining(False)
