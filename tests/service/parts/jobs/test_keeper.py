"""While the store cannot be used, calls are told at once, and it comes back by itself."""

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from inferpool.service.errors import StartError, UnavailableError
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.keeper import StoreKeeper
from inferpool.service.parts.jobs.webhooks import Webhooks
from inferpool.workers.shared.arena import Arena
from tests.service.api.server import until
from tests.service.parts.jobs.conftest import LIMITS, drop_tables
from tests.service.parts.jobs.test_jobs import answering, instances, new_job

CHECK_S = 0.02


@contextlib.asynccontextmanager
async def kept(place: str, arena: Arena, *, hang_s: float = 60.0) -> AsyncIterator[Jobs]:
    keeper = StoreKeeper(place, LIMITS, check_s=CHECK_S, hang_s=hang_s)
    async with answering(arena) as pool:
        jobs = Jobs(keeper, {"m": pool}, "m", Webhooks((), b""))
        jobs.start()
        try:
            await until(lambda: jobs.is_open)
            yield jobs
        finally:
            await jobs.stop()


async def finish(jobs: Jobs, id: str) -> None:
    await jobs.create(new_job(id), lambda: instances(3))
    assert (await jobs.watches.until(id, "", 60)).state == "succeeded"


async def until_state(jobs: Jobs, state: str) -> None:
    await until(lambda: jobs.keeper.health().state == state)


async def refusal(jobs: Jobs) -> str:
    """Return why a call is refused, which must be at once."""
    waiting = asyncio.create_task(jobs.job("a", ""))
    for _ in range(10):
        await asyncio.sleep(0)
    assert waiting.done()
    with pytest.raises(UnavailableError) as refused:
        await waiting
    return str(refused.value)


def move_away(folder: Path) -> Callable[[], object]:
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    return lambda: elsewhere.rename(folder)


def move_file_away(folder: Path) -> Callable[[], object]:
    files = [each for each in folder.iterdir() if each.name.startswith("jobs.sqlite3")]
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    for file in files:
        file.rename(elsewhere / file.name)
    return lambda: [(elsewhere / file.name).rename(file) for file in files]


@pytest.mark.parametrize("take", [move_away, move_file_away])
async def test_a_store_that_was_away_is_opened_again_with_its_jobs(
    take: Callable[[Path], Callable[[], object]], arena: Arena, tmp_path: Path
) -> None:
    place = tmp_path / "jobs"
    async with kept(str(place), arena) as jobs:
        await finish(jobs, "a")
        bring_back = take(place)
        await until_state(jobs, "gone")
        assert "store of jobs (job_store) is gone" in await refusal(jobs)
        assert str(tmp_path) not in await refusal(jobs)
        health = jobs.keeper.health()
        assert (health.place, "is gone" in health.reason) == (str(place), True)
        for _ in range(10):  # nothing is made in its place
            await asyncio.sleep(CHECK_S)
        assert not (place / "jobs.sqlite3").exists()
        bring_back()
        await until_state(jobs, "open")
        assert (await jobs.job("a", "")).is_over
        await finish(jobs, "b")
        assert jobs.num_answered == 6


async def test_a_store_that_was_deleted_begins_anew_in_a_new_folder(
    arena: Arena, tmp_path: Path
) -> None:
    place = tmp_path / "jobs"
    async with kept(str(place), arena) as jobs:
        shutil.rmtree(place.rename(tmp_path / "gone"))  # at once: somebody may be writing there
        with pytest.raises(UnavailableError):  # no job is accepted that would be lost
            await jobs.create(new_job("a"), lambda: instances(3))
        await until_state(jobs, "gone")
        place.mkdir()
        await until_state(jobs, "open")
        await finish(jobs, "a")


async def test_a_store_that_is_locked_refuses_at_once(arena: Arena, tmp_path: Path) -> None:
    async with kept(str(tmp_path), arena) as jobs:
        await finish(jobs, "a")
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite3")) as other:
            other.isolation_level = None
            other.execute("BEGIN EXCLUSIVE")
            await until_state(jobs, "failing")
            assert "(job_store) is locked by another program" in await refusal(jobs)
            other.execute("ROLLBACK")
        await until_state(jobs, "open")
        await finish(jobs, "b")


async def test_those_behind_a_call_that_finds_the_store_locked_do_not_wait(
    arena: Arena, tmp_path: Path
) -> None:
    async with kept(str(tmp_path), arena) as jobs:
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite3")) as other:
            other.isolation_level = None
            other.execute("BEGIN IMMEDIATE")
            made = [jobs.create(new_job(f"{n}"), lambda: instances(1)) for n in range(30)]
            async with asyncio.timeout(30):  # each alone waits for two seconds
                answers = await asyncio.gather(*made, return_exceptions=True)
            assert {type(answer) for answer in answers} == {UnavailableError}


async def test_a_check_that_fails_unforeseen_is_no_end(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inferpool.service.parts.jobs.store.store import JobStore

    def fail(_: JobStore) -> None:
        raise RuntimeError("unforeseen")

    async with kept(str(tmp_path), arena) as jobs:
        with monkeypatch.context() as patch:
            patch.setattr(JobStore, "check", fail)
            await until_state(jobs, "failing")
        await until_state(jobs, "open")
        await finish(jobs, "a")


async def test_a_disk_that_does_not_answer_keeps_nobody_waiting(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from inferpool.service.parts.jobs.store.store import JobStore

    is_back = threading.Event()
    async with kept(str(tmp_path), arena, hang_s=0.05) as jobs:
        monkeypatch.setattr(JobStore, "check", lambda _: is_back.wait(60))
        await until_state(jobs, "failing")
        assert "(job_store) does not answer" in await refusal(jobs)
        is_back.set()
        await until_state(jobs, "open")


async def test_a_second_service_on_a_folder_does_not_start(arena: Arena, tmp_path: Path) -> None:
    async with kept(str(tmp_path), arena) as jobs:
        with pytest.raises(StartError, match="another service keeps its jobs in"):
            StoreKeeper(str(tmp_path), LIMITS).hold()
        await finish(jobs, "a")
    keeper = StoreKeeper(str(tmp_path), LIMITS)
    keeper.hold()
    with pytest.raises(StartError):
        StoreKeeper(str(tmp_path), LIMITS).hold()
    await keeper.close()  # it was never opened
    async with kept(str(tmp_path), arena) as jobs:
        assert (await jobs.job("a", "")).is_over


class Cable:
    """A connection to a server that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()

    async def plug(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for end in list(self._ends):
            end.transport.abort()
        await self._server.wait_closed()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self._ends.discard(writer)


async def test_a_server_that_was_lost_is_used_again(
    arena: Arena, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = make_url(postgres_url)
    assert url.port is not None
    cable = Cable(url.port)
    await cable.plug()
    place = url.set(port=cable.port, password="secret").render_as_string(hide_password=False)
    try:
        async with kept(place, arena) as jobs:
            await finish(jobs, "a")
            await cable.cut()
            await until_state(jobs, "failing")
            assert "(job_store) does not answer" in await refusal(jobs)
            assert "secret" not in jobs.keeper.health().place + caplog.text
            await cable.plug()
            await until_state(jobs, "open")
            assert (await jobs.job("a", "")).is_over
            await finish(jobs, "b")
    finally:
        await cable.cut()
        drop_tables(postgres_url)
