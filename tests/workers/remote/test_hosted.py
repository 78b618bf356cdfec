import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

import inferpool.workers.remote.hosted
from inferpool.models.files.opened import FileMark, mark_of
from inferpool.models.spec import Placement
from inferpool.models.speed_names import SpeedReport
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.remote.hosted import HostedWorker, HostedWorkers, with_digests
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from tests.workers.contract import config_of, until
from tests.workers.remote.cluster import LoadingEngine, ready_of

ID = WorkerId(model="m", slot=0)


pytestmark = pytest.mark.usefixtures("virtual_time")


def on(*visible: str) -> WorkerConfig:
    devices = tuple(f"cuda:{number}" for number in range(len(visible)))
    return config_of(placement=Placement(devices=devices, visible=visible))


@contextlib.asynccontextmanager
async def hosting(*, loads: bool = True) -> AsyncIterator[tuple[LoadingEngine, HostedWorkers]]:
    """Have the workers of a host in the block, which a front end has joined."""
    engine = LoadingEngine(loads=loads)
    workers = HostedWorkers(engine, "/cache")
    workers.begin()
    yield engine, workers
    await workers.stop(5)


async def claimed(
    workers: HostedWorkers, config: WorkerConfig, tell: Callable[[str], None] = lambda _: None
) -> HostedWorker:
    worker = await workers.claim(ID, config, tell)
    await worker.loading
    return worker


async def test_worker_that_stays_loaded_is_used_again_by_the_same_configuration():
    async with hosting() as (engine, workers):
        first = await claimed(workers, config_of(host="h", cache_dir="/theirs"))
        assert (engine.configs[0].host, engine.configs[0].cache_dir) == ("", "/cache")
        assert first.handle is engine.started[0]
        second = await claimed(workers, config_of(host="h"))
        assert second is not first  # which a connection uses
        workers.release()
        workers.begin()
        found = config_of(host="h", chosen=SpeedReport(), cache_dir="/else")
        again = [await claimed(workers, found) for _ in range(2)]
        assert again == [first, second]
        assert await claimed(workers, found) not in again
        assert len(engine.started) == 3
    assert engine.is_closed
    assert all(worker.is_gone for worker in engine.started)


@pytest.mark.parametrize(
    "change",
    [{"max_batch_size": 9}, {"options": {"max_rows": 3}}, {"credit": 3}, {"speed": "auto"}],
)
async def test_other_configuration_gets_a_worker_of_its_own(change: dict[str, object]):
    async with hosting() as (engine, workers):
        await claimed(workers, config_of())
        workers.release()
        await claimed(workers, config_of(**change))
        assert [worker.is_gone for worker in engine.started] == [True, False]


async def test_worker_whose_files_have_changed_is_not_used_again(tmp_path: Path):
    async with hosting() as (engine, workers):
        file = tmp_path / "weights"
        file.write_text("1")
        mark = mark_of(str(file))
        assert mark is not None
        engine.ready = ready_of(files=[mark])
        first = await claimed(workers, config_of())
        (told,) = await workers.files_of(engine.started[0])
        assert (told.path, len(told.digest)) == (str(file), 32)
        workers.release()
        assert await claimed(workers, config_of()) is first
        workers.release()
        file.write_text("22")
        assert await claimed(workers, config_of()) is not first
        assert engine.started[0].is_gone


def test_only_a_file_that_is_as_it_was_opened_gets_a_digest(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    opened, known = mark_of(str(path)), dict[FileMark, bytes]()
    assert opened is not None
    (told,) = with_digests([opened], known)
    assert told.digest == sha256(b"weights").digest()
    known[opened] = b"read before"
    assert with_digests([opened], known)[0].digest == b"read before"
    path.write_bytes(b"more weights")
    assert with_digests([opened], known) == [opened]


async def test_digests_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with hosting() as (engine, workers):
        monkeypatch.setattr(inferpool.workers.remote.hosted, "_MOST_DIGESTS", 3)
        worker = await claimed(workers, config_of())
        handle = worker.handle
        assert handle is not None
        for number in range(20):
            file = tmp_path / f"{number}"
            file.write_text("x")
            engine.started[0].ready = msgspec.structs.replace(
                engine.ready, files=[mark_of(str(file)) or FileMark("", 0, 0, 0)]
            )
            assert (await workers.files_of(handle))[0].digest
            assert len(workers._digests) <= 4


async def test_room_is_made_on_the_same_devices_alone():
    async with hosting() as (engine, workers):
        for names in (("GPU-0",), ("GPU-1",), ("GPU-2", "GPU-3"), ("GPU-4",)):
            await claimed(workers, on(*names))
        kept = [worker for worker in workers._workers if worker.key.placement.visible == ("GPU-4",)]
        workers.release()
        kept[0].is_claimed = True
        await claimed(workers, on("GPU-1", "GPU-2"))
        assert [worker.is_gone for worker in engine.started] == [False, True, True, False, False]
        await claimed(workers, on("GPU-4", "GPU-5"))  # on devices that others use, as it was told
        assert not engine.started[3].is_gone


async def test_room_is_made_only_after_others_may_have_asked():
    async with hosting() as (engine, workers):
        for name in ("GPU-0", "GPU-1"):
            await claimed(workers, on(name))
        workers.release()
        workers.begin()
        starting = asyncio.ensure_future(workers.claim(ID, on("GPU-0", "GPU-1"), print))
        await asyncio.sleep(0.99)
        assert (await claimed(workers, on("GPU-0"))).handle is engine.started[0]
        assert not starting.done()
        await asyncio.sleep(0.02)
        await starting
        assert [worker.is_gone for worker in engine.started] == [False, True, False]


async def test_what_nobody_asks_for_is_stopped_after_half_a_minute():
    async with hosting() as (engine, workers):
        for credit in (2, 3):
            await claimed(workers, on(f"GPU-{credit}"))
        workers.release()
        workers.begin()
        await claimed(workers, on("GPU-2"))
        await asyncio.sleep(29.9)
        assert not engine.started[1].is_gone
        await asyncio.sleep(0.2)
        assert engine.started[1].is_gone
        await until(lambda: len(workers._workers) == 1)
        assert not engine.started[0].is_gone


async def test_wait_of_an_earlier_connection_stops_nothing():
    async with hosting() as (engine, workers):
        await claimed(workers, config_of())
        await asyncio.sleep(20.0)
        workers.release()
        workers.begin()
        await asyncio.sleep(20.0)
        assert not engine.started[0].is_gone


async def test_start_under_way_goes_on_and_is_claimed_with_its_stage():
    async with hosting(loads=False) as (engine, workers):
        stages: list[str] = []
        first = await workers.claim(ID, config_of(), stages.append)
        await until(lambda: stages[-1:] == ["loading"])
        workers.release()
        first.tell("warming up")
        later: list[str] = []
        second = await workers.claim(ID, config_of(), later.append)
        assert second is first
        assert later == ["warming up"]
        first.tell("ready")
        assert (stages[-1], later[-1]) == ("loading", "ready")
        engine.may_load.set()
        assert await second.loading is engine.started[0]


async def test_start_that_has_failed_is_not_claimed():
    async with hosting() as (engine, workers):
        engine.failures = [WorkerStartError("no luck", permanent=False)]
        first = await workers.claim(ID, config_of(), print)
        with pytest.raises(WorkerStartError):
            await first.loading
        workers.release()
        workers._workers[:] = [first]  # it is forgotten a little later
        second = await workers.claim(ID, config_of(), print)
        assert second is not first
        await second.loading
        await until(lambda: first not in workers._workers)


async def test_worker_that_is_being_stopped_is_not_claimed_and_its_room_is_waited_for():
    async with hosting() as (engine, workers):
        first = await claimed(workers, config_of())
        engine.started[0].may_stop.clear()
        stopping = asyncio.ensure_future(first.stop(30))
        await asyncio.sleep(0)
        workers.release()
        starting = asyncio.ensure_future(workers.claim(ID, config_of(), print))
        await asyncio.sleep(10.0)
        assert not starting.done()
        engine.started[0].may_stop.set()
        second = await starting
        assert second is not first
        await stopping


async def test_claim_that_is_given_up_leaves_the_worker_to_others():
    async with hosting() as (_, workers):
        first = await claimed(workers, config_of())
        workers.release()
        looking = asyncio.ensure_future(workers.claim(ID, config_of(), print))
        await asyncio.sleep(0)
        assert first.is_claimed
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert not first.is_claimed
        assert await claimed(workers, config_of()) is first


async def test_start_is_given_up_when_it_is_stopped():
    async with hosting(loads=False) as (engine, workers):
        worker = await workers.claim(ID, config_of(), print)
        await until(lambda: engine.configs)
        await worker.stop(5)
        assert engine.num_given_up == 1
        assert worker.handle is None
        await until(lambda: not workers._workers)


async def test_what_is_loaded_stays_while_there_is_no_front_end():
    async with hosting() as (engine, workers):
        await claimed(workers, config_of())
        workers.release()  # the connection has ended, and nobody has joined since
        await asyncio.sleep(40.0)
        assert not engine.started[0].is_gone
