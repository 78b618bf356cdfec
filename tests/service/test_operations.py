import asyncio
from types import SimpleNamespace

import pytest

from service.api.errors import NotFoundError
from service.errors import ConflictError, UnknownModelError
from service.operations import Operations
from workers.engine import WorkerId


class FakePool:
    def __init__(self, num_workers: int) -> None:
        self.slots = [
            SimpleNamespace(id=WorkerId(model="m", slot=number)) for number in range(num_workers)
        ]
        self.replaced: list[list[str]] = []
        self.may_end = asyncio.Event()

    async def replace(self, slots, grace_s: float) -> None:
        self.replaced.append([slot.id.worker for slot in slots])
        await self.may_end.wait()


def operations(pool: FakePool, *, is_stopping: bool = False) -> Operations:
    return Operations(
        {"m": pool},  # type: ignore[dict-item]
        grace_s=1,
        drain=lambda is_draining: is_draining or not is_stopping,
        settings_json=lambda: "{}",
    )


def test_one_restart_of_a_model_at_a_time():
    async def test() -> None:
        pool = FakePool(2)
        target = operations(pool)
        assert target.restart("m", None) == ["m/0", "m/1"]
        with pytest.raises(ConflictError, match="are being restarted"):
            target.restart("m", 1)
        await asyncio.sleep(0)
        pool.may_end.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert target.restart("m", 1) == ["m/1"]
        await asyncio.sleep(0)
        assert pool.replaced == [["m/0", "m/1"], ["m/1"]]
        await target.stop()

    asyncio.run(test())


def test_what_is_not_there_is_named():
    async def test() -> None:
        target = operations(FakePool(1))
        with pytest.raises(UnknownModelError, match="there are: m"):
            target.restart("x", None)
        with pytest.raises(NotFoundError, match="has 1 workers"):
            target.restart("m", 1)

    asyncio.run(test())


def test_a_shutdown_is_not_undone():
    async def test() -> None:
        target = operations(FakePool(1), is_stopping=True)
        target.set_draining(True)
        with pytest.raises(ConflictError, match="shutting down"):
            target.set_draining(False)

    asyncio.run(test())


def test_a_stop_ends_restarts_that_are_under_way():
    async def test() -> None:
        target = operations(FakePool(1))
        target.restart("m", None)
        await asyncio.sleep(0)
        await asyncio.wait_for(target.stop(), 20)

    asyncio.run(test())
