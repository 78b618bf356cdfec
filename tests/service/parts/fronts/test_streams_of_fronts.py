"""Streams that a front reads, and whose parts come through the main process."""

import asyncio
from collections.abc import Sequence

import pytest

from inferpool.service.errors import ReaderTooSlowError, StreamBrokenError
from inferpool.service.parts.fronts import main_side
from tests.fakes import StreamingWorker, ref_to
from tests.service.api.server import until
from tests.service.parts.fronts.test_sides import Sides, open_sides


class PartsOfFront:
    """A reader in a front, which keeps all parts."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def on_parts(self, parts: Sequence[bytes]) -> None:
        self.parts += parts


async def begun(
    sides: Sides, reader: PartsOfFront | None
) -> tuple[asyncio.Future, StreamingWorker]:
    """Have a worker that streams begin an instance that the front submits."""
    sides.model.dispatcher.detach(sides.worker)
    worker = StreamingWorker(joins=True, credit=4, slot=1)
    sides.model.dispatcher.attach(worker)
    future = sides.front.submit(ref_to(b"x"), [b"x"], reader=reader)
    await until(lambda: worker.batches)
    return future, worker


async def test_parts_come_in_order_and_before_the_end():
    async with open_sides() as b:
        reader = PartsOfFront()
        stream, worker = await begun(b, reader)
        worker.give(b"1", b"2")
        await until(lambda: len(reader.parts) == 2)
        assert not stream.done()
        worker.give(b"3", None)
        worker.give_back()
        await stream
        assert reader.parts == [b"1", b"2", b"3"]
        assert stream.num_parts == 3
        await until(lambda: not b.part.held)


async def test_without_a_reader_the_parts_are_collected():
    async with open_sides() as b:
        stream, worker = await begun(b, None)
        worker.give(b"1", b"2", None)
        worker.give_back()
        assert (await stream).value == b"[1,2]"


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_stream_that_breaks_says_how_much_came(is_read: bool):
    async with open_sides() as b:
        stream, worker = await begun(b, PartsOfFront() if is_read else None)
        worker.give(b"1", b"2")
        worker.die()
        with pytest.raises(StreamBrokenError) as broken:
            await stream
        assert broken.value.num_parts == 2
        assert list(broken.value.parts) == ([] if is_read else [b"1", b"2"])


async def test_a_reader_that_is_too_slow_ends_its_stream_there_and_here():
    async with open_sides() as b:
        reader = PartsOfFront()
        stream, worker = await begun(b, reader)
        worker.give(b"1")
        await until(lambda: reader.parts)
        stream.end(ReaderTooSlowError("too slow"))  # type: ignore[attr-defined]
        with pytest.raises(ReaderTooSlowError):
            await stream
        await until(lambda: worker.dropped)
        assert b.model.metrics.failed == 1
        assert b.model.metrics.cancelled == 0


async def test_a_client_that_leaves_ends_its_stream_in_the_worker():
    async with open_sides() as b:
        stream, worker = await begun(b, PartsOfFront())
        worker.give(b"1")
        stream.cancel()
        await until(lambda: worker.dropped)
        assert b.model.metrics.cancelled == 1


async def test_a_front_that_reads_nothing_loses_its_streams_and_no_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(main_side, "_MAX_WAITING_BYTES", 1 << 20)
    async with open_sides() as b:
        stream, worker = await begun(b, PartsOfFront())
        loop = asyncio.get_running_loop()
        loop.remove_reader(b.front_side.link._reader.fd)  # it hangs
        for _ in range(100):
            worker.give(bytes(1 << 17))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert worker.dropped == [(0, 0)]
        assert b.main_side.link.num_waiting_bytes < 3 << 20
        assert b.model.metrics.failed == 1
        b.main_side.close()
        stream.cancel()


async def test_a_front_that_dies_ends_its_streams():
    async with open_sides() as b:
        stream, worker = await begun(b, PartsOfFront())
        worker.give(b"1")
        b.main_side.close()
        assert worker.dropped == [(0, 0)]
        assert b.model.metrics.cancelled == 1
        stream.cancel()
