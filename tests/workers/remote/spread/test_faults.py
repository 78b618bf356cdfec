"""Faults that only hosts together can have: other files, and a rank that stands still far away."""

import msgspec
import pytest

from inferpool.models.files.opened import FileMark
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.remote.spread.worker import SpreadWorker
from inferpool.workers.remote.wire import WorkerStarted
from inferpool.workers.remote.worker import RemoteWorker
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import FilesChangedError
from tests.workers.contract import config_of, is_gone, suspend, until
from tests.workers.remote.cluster import connected, ready_of
from tests.workers.remote.spread.test_worker import over

ID = WorkerId(model="m", slot=0)


class _NoLink:
    """A connection over which nothing is ever sent."""

    round_trip_s = 0.0
    is_silent = False

    def order(self, *_: object) -> None:
        raise AssertionError("nothing is to be sent")


def part(*files: tuple[str, bytes]) -> RemoteWorker:
    marks = [FileMark(path, 1, 2, 3, digest) for path, digest in files]
    ready = msgspec.structs.replace(ready_of(), files=marks)
    return RemoteWorker(ID, WorkerStarted(1, 2, ready), _NoLink())


async def test_hosts_must_have_the_same_files_and_all_are_told():
    same, own = ("net.py", b"1"), ("part.bin", b"2")
    worker = SpreadWorker(ID, {"a": part(same), "b": part(same, own)})
    assert [mark.path for mark in worker.ready.files] == ["net.py", "part.bin"]
    with pytest.raises(FilesChangedError, match=r"net\.py is not the same on a and b"):
        SpreadWorker(ID, {"a": part(same), "b": part(("net.py", b"3"))})


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_left")
async def test_rank_that_stands_still_on_another_host_is_found_out_by_a_canary(arena: Arena):
    async with connected(arena, "a", "b") as (hosts, _):
        config = over(config_of(batch_timeout_s=3.0), ["a", "b"])
        worker = await hosts.start(ID, config, lambda _: None)
        await until(lambda: len(worker.vitals().ranks) == 2)
        pids = [rank.pid for rank in worker.vitals().ranks]
        suspend(pids[1])
        ending = await worker.wait()
        assert ending.cause == "hang"
        assert not ending.was_at_work
        await until(lambda: all(map(is_gone, pids)))
