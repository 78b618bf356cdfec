import asyncio
import logging
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from inferpool.models.speed_names import SpeedReport
from inferpool.service.parts.speed import SpeedCache, SpeedSearch
from inferpool.service.settings.loader import load
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.speed.host_side import SearchFailedError
from tests.fakes import FakeWorker
from tests.service.pools import CONFIG, until

FIRST = SpeedReport(is_final=False, is_provisional=True, key="key")
QUICK = SpeedReport(preset="bf16", gain=2.0, is_final=False, key="key")
FOUND = SpeedReport(
    preset="compiled_bf16", gain=3.0, note="bf16 2.00 x; compiled_bf16 3.00 x", key="key"
)


class RaisedPool:
    """A pool whose workers come up when the test says so."""

    def __init__(self, num_workers: int = 2, comes_up: bool = True, name: str = "m") -> None:
        self.name = name
        self.slots = [
            WorkerSlot(config=CONFIG, id=WorkerId(model=name, slot=number))
            for number in range(num_workers)
        ]
        self.changed: list[tuple[str, str]] = []
        self.comes_up_with: SpeedReport | None = None
        """What the next worker to change over serves with, in place of what was found."""
        self._comes_up = comes_up
        self.replacer = self

    def raise_all(self, speed: SpeedReport = QUICK) -> None:
        for slot in self.slots:
            slot.handle, slot.state = FakeWorker(slot.id), "ready"
            slot.handle.ready = replace(slot.handle.ready, speed=speed)

    async def change_over(self, slot: WorkerSlot, found: SpeedReport, grace_s: float) -> bool:
        self.changed.append((slot.id.worker, found.preset))
        if self._comes_up and slot.handle is not None:
            speed, self.comes_up_with = self.comes_up_with or found, None
            slot.handle.ready = replace(slot.handle.ready, speed=speed)
        return self._comes_up


class FakeSearch:
    """A search with a given result."""

    def __init__(self, *found: SpeedReport | Exception | None) -> None:
        self.found = list(found or [FOUND])
        self.keys: list[str] = []
        self.present: list[SpeedReport | None] = []
        """What the workers served with when each search began."""
        self.was_cancelled = False

    async def __call__(
        self, config: WorkerConfig, key: str, on_progress: Callable[[str], None]
    ) -> SpeedReport:
        self.keys.append(key)
        self.present.append(config.chosen)
        on_progress("compiling")
        found = self.found.pop(0)
        try:
            await asyncio.sleep(3600 if found is None else 0)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found


@asynccontextmanager
async def searching_for(
    pool: RaisedPool, search: FakeSearch, compiler_bytes: int = 0
) -> AsyncIterator[SpeedSearch]:
    searching = SpeedSearch(search, grace_s=1, compiler_bytes=compiler_bytes)
    searching.add(pool)  # type: ignore[arg-type]
    yield searching
    await searching.stop()


async def search_to(
    pool: RaisedPool,
    search: FakeSearch,
    state: str,
    speed: SpeedReport = QUICK,
    compiler_bytes: int = 0,
) -> str:
    """Search once all workers are up, until there is a state; return the text that goes with it."""
    async with searching_for(pool, search, compiler_bytes) as searching:
        pool.raise_all(speed)
        searching.on_change()
        await until(lambda: searching.progress("m").state == state)
        return searching.progress("m").text


@pytest.fixture(autouse=True)
def with_compiler(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.touch()
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))


async def test_each_worker_changes_over_to_the_preset_found(caplog):
    caplog.set_level(logging.INFO)
    pool, search = RaisedPool(), FakeSearch()
    text = await search_to(pool, search, "done")
    assert "changed from bf16 to compiled_bf16, 3.00 x" in text
    assert search.keys == ["key"]
    assert pool.changed == [("m/0", "compiled_bf16"), ("m/1", "compiled_bf16")]
    first, found, last = caplog.messages
    assert "searching for a faster preset than bf16" in first
    assert "compiled_bf16, 3.00 x exact" in found
    assert "changed from bf16" in last


async def test_workers_that_serve_exact_at_first_change_over_twice():
    pool, search = RaisedPool(), FakeSearch(QUICK, FOUND)
    async with searching_for(pool, search) as searching:
        pool.raise_all(FIRST)
        searching.on_change()
        await until(lambda: searching.progress("m").state == "done")
        assert searching.progress("m").text.startswith("changed from bf16 to compiled_bf16")
    assert [preset for _, preset in pool.changed] == ["bf16"] * 2 + ["compiled_bf16"] * 2
    assert search.present == [FIRST, QUICK]


async def test_what_is_faster_takes_over_also_if_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    pool, search = RaisedPool(), FakeSearch(QUICK)
    assert "no C++ compiler" in await search_to(pool, search, "off", FIRST)
    assert pool.changed == [("m/0", "bf16"), ("m/1", "bf16")]


async def test_another_way_to_decode_is_a_reason_to_change_over():
    pool = RaisedPool()
    decoding = replace(FIRST, decode="fast", is_provisional=False, is_final=True)
    text = await search_to(pool, FakeSearch(decoding), "done", FIRST)
    assert text.startswith("changed its decoding from exact to fast, ")
    assert len(pool.changed) == 2


async def test_exact_that_stays_is_known_to_be_judged():
    pool = RaisedPool()
    judged = SpeedReport(note="folded 0.9 x", key="key")
    assert await search_to(pool, FakeSearch(judged), "done", FIRST) == "exact stays (folded 0.9 x)"
    assert [slot.config.chosen for slot in pool.slots] == [judged, judged]  # for the next life
    assert not pool.changed


async def test_a_worker_that_has_missed_the_change_is_changed_over_too():
    pool, search = RaisedPool(), FakeSearch(QUICK, QUICK, FOUND)
    pool.comes_up_with = FIRST  # as one that crashed meanwhile and was told what it had
    await search_to(pool, search, "done", FIRST)
    assert search.present == [FIRST, FIRST, QUICK]
    assert pool.changed[2] == ("m/0", "bf16")
    assert len(pool.changed) == 5


async def test_it_waits_until_all_workers_are_up():
    pool, search = RaisedPool(), FakeSearch()
    async with searching_for(pool, search) as searching:
        assert searching.progress("m").state == "waiting"
        pool.raise_all()
        pool.slots[1].handle = None
        for _ in range(3):
            searching.on_change()
            await asyncio.sleep(0)
        assert not search.keys
        pool.raise_all()
        searching.on_change()
        await until(lambda: search.keys)


@pytest.mark.parametrize(
    ("found", "state", "text"),
    [
        (
            replace(QUICK, note="compiled 1.9 x", is_final=True),
            "done",
            "bf16 stays (compiled 1.9 x)",
        ),
        (SearchFailedError("ended by signal 9"), "failed", "ended by signal 9"),
        (RuntimeError("a bug"), "failed", "a mistake of the service"),
    ],
)
async def test_workers_stay_if_nothing_better_is_found(caplog, found, state, text):
    pool = RaisedPool()
    assert await search_to(pool, FakeSearch(found), state) == text
    assert not pool.changed
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == (state == "failed")


async def test_workers_that_come_up_with_other_weights_later_are_searched_for_too():
    pool, search = RaisedPool(), FakeSearch(FOUND, replace(FOUND, key="new"))
    async with searching_for(pool, search) as searching:
        pool.raise_all()
        searching.on_change()
        await until(lambda: searching.progress("m").state == "done")
        pool.raise_all(replace(FIRST, key="new"))
        searching.on_change()
        await until(lambda: len(search.keys) == 2 and searching.progress("m").state == "done")
    assert search.keys == ["key", "new"]
    assert len(pool.changed) == 4


async def test_what_failed_is_not_tried_again_when_a_worker_comes_back():
    pool, search = RaisedPool(), FakeSearch(SearchFailedError("no"), FOUND)
    async with searching_for(pool, search) as searching:
        pool.raise_all()
        for _ in range(9):
            searching.on_change()
            await asyncio.sleep(0)
        assert searching.progress("m").state == "failed"
    assert search.keys == ["key"]


async def test_the_others_stay_if_the_first_does_not_come_up():
    pool = RaisedPool(comes_up=False)
    await search_to(pool, FakeSearch(), "failed")
    assert pool.changed == [("m/0", "compiled_bf16")]


async def test_there_is_no_search_without_a_candidate_or_a_compiler(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    pool, search = RaisedPool(), FakeSearch()
    await search_to(pool, search, "off", SpeedReport())
    await search_to(pool, search, "done", replace(FOUND, key="key"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    without_compiler = await search_to(pool, search, "off")
    monkeypatch.setenv("CXX", "sh")
    without_memory = await search_to(pool, search, "off", compiler_bytes=1 << 60)
    assert not search.keys
    assert without_compiler == "there is no C++ compiler (no-such-compiler)"
    assert "GiB of memory" in without_memory
    for message, reason in zip(caplog.messages, (without_compiler, without_memory), strict=True):
        assert message.endswith(reason)


async def test_forgotten_search_ends_with_its_process_and_gives_its_turn_to_the_next():
    pool, other, search = RaisedPool(), RaisedPool(name="n"), FakeSearch(None)
    async with searching_for(pool, search) as searching:
        searching.add(other)  # type: ignore[arg-type]
        pool.raise_all()
        other.raise_all()
        searching.on_change()
        await until(lambda: searching.progress("m").state == "searching")
        search.found = [FOUND, FOUND]
        await searching.forget("m")
        assert search.was_cancelled
        assert searching.progress("m").state == "off"
        await until(lambda: searching.progress("n").state == "done")
        assert not pool.changed
        await searching.forget("never added")
        searching.add(pool)  # type: ignore[arg-type]
        await until(lambda: searching.progress("m").state == "done")
        assert pool.changed


def cache_of(tmp_path: Path, folder: Path | str, speed: str = "auto") -> SpeedCache:
    env = {"INFERPOOL_CACHE_DIR": str(folder)}
    return SpeedCache(load({"model": "echo", "speed": speed}, env, tmp_path).settings)


def test_the_cache_folder_is_created(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    wanted = tmp_path / "deep" / "cache"
    cache_of(tmp_path, wanted, speed="exact").close()  # there are no presets to choose from
    assert not wanted.exists()
    cache = cache_of(tmp_path, wanted)
    assert cache.folder == str(wanted)
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700
    assert not list(wanted.iterdir())
    cache.close()
    assert wanted.is_dir()
    temporary = cache_of(tmp_path, "none")
    assert temporary.folder is not None
    temporary.close()
    assert not Path(temporary.folder).exists()
    assert not caplog.messages


def test_unwritable_folder_is_named_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    wanted = tmp_path / "file" / "cache"
    with caplog.at_level(logging.WARNING):
        cache = cache_of(tmp_path, wanted)
    (line,) = caplog.messages
    assert str(wanted) in line
    assert "Not a directory" in line
    assert cache.folder is not None
    assert stat.S_IMODE(Path(cache.folder).stat().st_mode) == 0o700
    cache.close()
    assert not Path(cache.folder).exists()
