import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from inferpool.models.speed.names import SpeedReport
from inferpool.service.speed.search import SpeedSearch
from inferpool.workers.beside.searching import SearchFailedError
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.supervisor import WorkerSlot
from tests.fakes import FakeWorker
from tests.service.pools import CONFIG, until

QUICK = SpeedReport(preset="bf16", gain=2.0, is_final=False, key="key")
FOUND = SpeedReport(preset="compiled_bf16", gain=3.0, note="bf16 2.00 x; compiled_bf16 3.00 x")


class FakePool:
    """Its workers come up as they are told to."""

    name = "m"

    def __init__(self, num_workers: int = 2, comes_up: bool = True) -> None:
        self.slots = [
            WorkerSlot(config=CONFIG, id=WorkerId(model="m", slot=number))
            for number in range(num_workers)
        ]
        self.changed: list[tuple[str, str]] = []
        self._comes_up = comes_up
        self.replacer = self

    def raise_all(self, speed: SpeedReport = QUICK) -> None:
        for slot in self.slots:
            slot.handle, slot.state = FakeWorker(slot.id), "ready"
            slot.handle.ready = msgspec.structs.replace(slot.handle.ready, speed=speed)

    async def change_over(self, slot: WorkerSlot, preset: str, grace_s: float) -> bool:
        self.changed.append((slot.id.worker, preset))
        return self._comes_up


class FakeSearch:
    """Finds what it is told to find."""

    def __init__(self, found: SpeedReport | Exception | None = FOUND) -> None:
        self.found = found
        self.keys: list[str] = []
        self.was_cancelled = False

    async def __call__(
        self, config: WorkerConfig, key: str, on_progress: Callable[[str], None]
    ) -> SpeedReport:
        self.keys.append(key)
        on_progress("compiling")
        try:
            await asyncio.sleep(3600 if self.found is None else 0)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if isinstance(self.found, Exception):
            raise self.found
        assert self.found is not None
        return self.found


def run(pool: FakePool, search: FakeSearch, test: Callable[[SpeedSearch], Awaitable[None]]) -> None:
    async def go() -> None:
        searching = SpeedSearch({"m": pool}, search, grace_s=1)  # type: ignore[dict-item]
        searching.start()
        await test(searching)
        await searching.stop()

    asyncio.run(asyncio.wait_for(go(), 10))


@pytest.fixture(autouse=True)
def with_compiler(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.touch()
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("inferpool.service.speed.search._NEEDED_BYTES", 0)


def test_each_worker_is_changed_over_to_what_is_found_and_that_is_told(caplog):
    pool, search = FakePool(), FakeSearch()

    async def test(searching: SpeedSearch) -> None:
        assert searching.progress("m").state == "waiting"
        pool.raise_all()
        searching.on_change()
        await until(lambda: searching.progress("m").state == "done")
        assert "changed from bf16 to compiled_bf16, 3.00 x" in searching.progress("m").text

    with caplog.at_level(logging.INFO):
        run(pool, search, test)
    assert search.keys == ["key"]
    assert pool.changed == [("m/0", "compiled_bf16"), ("m/1", "compiled_bf16")]
    first, found, last = caplog.messages
    assert "searching for a faster preset than bf16" in first
    assert "compiled_bf16, 3.00 x exact" in found
    assert "changed from bf16" in last


def test_it_waits_until_all_workers_are_up():
    pool, search = FakePool(), FakeSearch()

    async def test(searching: SpeedSearch) -> None:
        pool.raise_all()
        pool.slots[1].handle = None
        for _ in range(3):
            searching.on_change()
            await asyncio.sleep(0)
        assert not search.keys
        pool.raise_all()
        searching.on_change()
        await until(lambda: search.keys)

    run(pool, search, test)


@pytest.mark.parametrize(
    ("found", "state", "text"),
    [
        (SpeedReport(preset="bf16", note="compiled 1.9 x"), "done", "bf16 stays (compiled 1.9 x)"),
        (SearchFailedError("ended by signal 9"), "failed", "ended by signal 9"),
        (RuntimeError("a bug"), "failed", "a mistake of the service"),
    ],
)
def test_workers_stay_where_nothing_better_is_found(caplog, found, state, text):
    pool = FakePool()

    async def test(searching: SpeedSearch) -> None:
        pool.raise_all()
        searching.on_change()
        await until(lambda: searching.progress("m").state == state)
        assert searching.progress("m").text == text

    run(pool, FakeSearch(found), test)
    assert not pool.changed
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == (state == "failed")


def test_the_rest_stay_where_the_first_does_not_come_up_with_it():
    pool = FakePool(comes_up=False)

    async def test(searching: SpeedSearch) -> None:
        pool.raise_all()
        searching.on_change()
        await until(lambda: searching.progress("m").state == "failed")

    run(pool, FakeSearch(), test)
    assert pool.changed == [("m/0", "compiled_bf16")]


def test_there_is_no_search_where_nothing_is_left_to_try_or_nothing_can_be_compiled(
    monkeypatch, caplog
):
    async def is_off(
        searching: SpeedSearch, pool: FakePool, speed: SpeedReport, state: str = "off"
    ) -> None:
        pool.raise_all(speed)
        searching.on_change()
        await until(lambda: searching.progress("m").state == state)

    final, search = FakePool(), FakeSearch()
    run(final, search, lambda searching: is_off(searching, final, SpeedReport()))
    known = msgspec.structs.replace(FOUND, key="key")
    run(final, search, lambda searching: is_off(searching, final, known, "done"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    quick = FakePool()
    with caplog.at_level(logging.INFO):
        run(quick, search, lambda searching: is_off(searching, quick, QUICK))
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr("inferpool.service.speed.search._NEEDED_BYTES", 1 << 60)
    with caplog.at_level(logging.INFO):
        run(quick, search, lambda searching: is_off(searching, quick, QUICK))
    assert not search.keys
    assert "there is no C++ compiler (no-such-compiler)" in caplog.messages[0]
    assert "GiB of memory" in caplog.messages[1]


def test_a_stop_ends_the_search():
    pool, search = FakePool(), FakeSearch(found=None)

    async def test(searching: SpeedSearch) -> None:
        pool.raise_all()
        searching.on_change()
        await until(lambda: searching.progress("m").text == "compiling")

    run(pool, search, test)
    assert search.was_cancelled
