import asyncio
from collections.abc import Sequence

import pytest

from inferpool.service.errors import (
    DeadlineExceededError,
    InternalError,
    ModelFailedError,
    OverloadedError,
    QuarantinedError,
    ServiceError,
    StreamBrokenError,
    StreamGapError,
    StreamTooLongError,
    UnavailableError,
)
from inferpool.service.queue import streams as streams_module
from inferpool.service.queue.instance import BACKGROUND, Instance, InstanceSteps
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemError
from tests.fakes import FakeWorker, StreamingWorker, ref_to
from tests.service.pools import make_dispatcher

pytestmark = pytest.mark.usefixtures("virtual_time")

GAP_S, MAX_S, MAX_PARTS = 5.0, 20.0, 6


class PartsKept:
    """A reader that keeps all parts."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def on_parts(self, parts: Sequence[bytes]) -> None:
        self.parts += parts


class StreamBench:
    """A dispatcher for a model that streams, and what to push into it."""

    def __init__(self, *, max_batch_size: int = 1) -> None:
        self.arena = arena = Arena(64 * 1024)
        self.metrics = ModelMetrics("m")
        self.dispatcher = make_dispatcher(arena, self.metrics, max_batch_size=max_batch_size)
        self.dispatcher._admission.stream_limits = (GAP_S, MAX_S, MAX_PARTS)

    def worker(self, *, joins: bool = False, credit: int = 1, slot: int = 0) -> StreamingWorker:
        worker = StreamingWorker(joins=joins, credit=credit, slot=slot)
        self.dispatcher.attach(worker)
        return worker

    async def send(
        self,
        reader: PartsKept | None = None,
        *,
        payload: bytes = b"x",
        timeout_s: float = 30.0,
        priority: int = 5,
        steps: InstanceSteps | None = None,
        is_compared: bool = False,
    ) -> Instance:
        """Submit a stream, and have it sent to a worker that can take it."""
        ref = ref_to(payload, timeout_s, priority)
        stream = self.dispatcher.submit(
            ref, [payload], steps, reader=reader, is_compared=is_compared
        )
        await turn()
        return stream

    def check_books(self) -> None:
        """Check that nothing is in flight, and that nothing is kept."""
        metrics, streams = self.metrics, self.dispatcher.streams
        assert streams is not None
        assert metrics.in_flight == self.dispatcher.num_queued == self.arena.used_bytes == 0
        assert streams.num_open == streams.num_collected_bytes == 0
        ended = metrics.succeeded + metrics.failed + metrics.expired + metrics.cancelled
        assert metrics.accepted == ended


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_reader_gets_parts_as_they_come_and_the_ledger_settles_once_at_the_end():
    bench = StreamBench()
    worker, reader = bench.worker(), PartsKept()
    stream = await bench.send(reader)
    worker.give(b"1")
    assert reader.parts == [b"1"]
    worker.give(b"2", b"3")
    assert reader.parts == [b"1", b"2", b"3"]
    assert not stream.done()
    assert bench.metrics.in_flight == 1
    assert bench.dispatcher.streams is not None
    assert bench.dispatcher.streams.num_open == 1
    worker.give(None)
    assert stream.done()
    assert bench.arena.used_bytes > 0, "the worker may read the payload until its batch is back"
    worker.give_back()
    await turn()
    assert stream.num_parts == 3
    assert stream.result().value == b"[]"
    assert bench.metrics.succeeded == 1
    assert bench.metrics.stream_parts == 3
    assert bench.metrics.stream_first_part.count == 1
    assert bench.metrics.stream_part_gap.count == 2
    assert worker.dropped == []
    bench.check_books()


async def test_without_a_reader_parts_are_collected():
    bench = StreamBench()
    worker = bench.worker()
    stream = await bench.send()
    worker.give(b"1", b'"two"')
    worker.give(None)
    worker.give_back()
    await turn()
    assert stream.result().value == b'[1,"two"]'
    bench.check_books()


async def test_an_error_after_some_parts_has_them():
    bench = StreamBench()
    worker = bench.worker()
    stream = await bench.send()
    worker.give(b"1", b"2", ItemError("model_error", "it broke"))
    worker.give_back()
    await turn()
    error = stream.exception()
    assert isinstance(error, ModelFailedError)
    assert error.parts == [b"1", b"2"]
    assert error.num_parts == 2
    assert bench.metrics.failed == bench.metrics.faults == 1
    assert worker.dropped == []
    bench.check_books()


async def test_what_fails_before_a_stream_begins_fails_with_its_batch():
    bench = StreamBench()
    worker = bench.worker()
    stream = await bench.send(PartsKept())
    worker.answer([ItemError("invalid_input", "no number")])
    await turn()
    assert isinstance(stream.exception(), ServiceError)
    bench.check_books()


async def test_a_stream_whose_caller_leaves_is_ended_in_its_worker():
    bench = StreamBench()
    worker, reader = bench.worker(), PartsKept()
    stream = await bench.send(reader)
    worker.give(b"1")
    stream.cancel()
    assert worker.dropped == [(0, 0)]
    worker.give(b"2")  # was on its way
    assert reader.parts == [b"1"]
    assert bench.metrics.cancelled == 1
    assert bench.arena.used_bytes > 0
    worker.give_back()
    await turn()
    bench.check_books()


async def test_a_reader_may_end_its_stream_with_an_error_while_it_gets_a_part():
    bench = StreamBench()

    class Slow(PartsKept):
        def on_parts(self, parts: Sequence[bytes]) -> None:
            stream.end(OverloadedError("too slow"))  # type: ignore[attr-defined]

    worker = bench.worker()
    stream = await bench.send(Slow())
    worker.give(b"1", b"2", None)
    assert isinstance(stream.exception(), OverloadedError)
    assert worker.dropped == [(0, 0)]
    worker.give_back()
    await turn()
    bench.check_books()


async def test_a_reader_that_raises_ends_its_own_stream_alone():
    bench = StreamBench()

    class Broken(PartsKept):
        def on_parts(self, parts: Sequence[bytes]) -> None:
            raise RuntimeError("no")

    worker, reader = bench.worker(joins=True, credit=4), PartsKept()
    broken, other = await bench.send(Broken()), await bench.send(reader)
    worker.give(b"1")
    worker.give(b"2", None, batch=1)
    assert isinstance(broken.exception(), InternalError)
    assert other.result()
    assert reader.parts == [b"2"]


async def test_the_deadline_is_for_the_first_part_alone():
    bench = StreamBench()
    worker = bench.worker()
    late = await bench.send(PartsKept(), timeout_s=2.0)
    await asyncio.sleep(2.1)
    assert isinstance(late.exception(), DeadlineExceededError)
    assert worker.dropped == [(0, 0)]
    worker.give_back()
    stream = await bench.send(PartsKept(), timeout_s=2.0)
    worker.give(b"1", batch=1)
    await asyncio.sleep(4.0)
    worker.give(b"2", batch=1)
    await asyncio.sleep(4.0)
    worker.give(None, batch=1)
    worker.give_back(1)
    await turn()
    assert stream.num_parts == 2
    assert stream.result()
    assert bench.metrics.expired == 1
    bench.check_books()


async def test_a_stream_ends_when_no_part_comes_or_it_goes_on_for_too_long():
    bench = StreamBench()
    worker = bench.worker(joins=True, credit=3)
    still = await bench.send(PartsKept())
    long = await bench.send(PartsKept())
    many = await bench.send(PartsKept())
    for batch in range(3):
        worker.give(b"1", batch=batch)
    worker.give(*[b"2"] * MAX_PARTS, batch=2)
    error = many.exception()
    assert isinstance(error, StreamTooLongError)
    assert error.num_parts == MAX_PARTS
    for _ in range(4):
        await asyncio.sleep(GAP_S - 0.5)
        worker.give(b"2", batch=1)
    assert isinstance(still.exception(), StreamGapError)
    assert not long.done()
    await asyncio.sleep(GAP_S - 0.5)
    assert isinstance(long.exception(), StreamTooLongError)
    assert worker.dropped == [(2, 0), (0, 0), (1, 0)]
    for batch in range(3):
        worker.give_back(batch)
    await turn()
    assert bench.metrics.failed == 3
    bench.check_books()


async def test_a_stream_is_computed_again_only_before_its_first_part():
    bench = StreamBench()
    worker = bench.worker(joins=True, credit=2)
    begun, waiting = PartsKept(), PartsKept()
    broken = await bench.send(begun, payload=b"a")
    again = await bench.send(waiting, payload=b"b")
    worker.give(b"1")
    worker.give(b"2")
    worker.die()
    worker = bench.worker(joins=True, credit=2, slot=1)
    await turn()
    error = broken.exception()
    assert isinstance(error, StreamBrokenError)
    assert error.num_parts == 2
    assert bench.metrics.retried == 1
    worker.give(b"3", None)
    worker.give_back()
    await turn()
    assert again.result()
    assert waiting.parts == [b"3"]
    bench.check_books()


async def test_a_lost_host_breaks_streams_without_blame():
    bench = StreamBench()
    for slot in range(4):
        worker = bench.worker(joins=True, credit=2, slot=slot)
        stream = await bench.send(PartsKept(), payload=b"same")
        worker.give(b"1")
        worker.lose_host()
        await turn()
        assert isinstance(stream.exception(), StreamBrokenError)
    assert bench.dispatcher.num_quarantined == 0
    bench.check_books()


async def test_a_stream_that_kills_workers_is_quarantined_even_after_its_first_part():
    bench = StreamBench()
    for slot in range(3):
        worker = bench.worker(joins=True, credit=2, slot=slot)
        stream = await bench.send(PartsKept(), payload=b"poison")
        worker.give(b"1")
        worker.die()
        await turn()
        assert isinstance(stream.exception(), StreamBrokenError)
    bench.worker(joins=True, credit=2, slot=3)
    with pytest.raises(QuarantinedError):
        await bench.send(PartsKept(), payload=b"poison")
    bench.check_books()


async def test_streams_that_join_others_come_one_by_one_up_to_the_credit():
    bench = StreamBench(max_batch_size=3)
    worker = bench.worker(joins=True, credit=3)
    streams = [await bench.send(PartsKept()) for _ in range(4)]
    assert worker.sizes == [1, 1, 1]
    worker.give(None, batch=1)
    worker.give_back(1)
    await turn()
    assert worker.sizes == [1, 1, 1]
    assert streams[1].done()
    assert len(worker.sinks) == 4, "the one that waited has the place of the one that ended"


async def test_streams_that_do_not_join_are_batched_and_each_ends_by_itself():
    bench = StreamBench(max_batch_size=4)
    worker = bench.worker()
    first = await bench.send(PartsKept())
    waiting = [bench.dispatcher.submit(ref_to(b"x"), [b"x"]) for _ in range(3)]
    await turn()
    assert worker.sizes == [1]
    worker.give(None)
    worker.give_back()
    await turn()
    assert first.done()
    assert worker.sizes == [3]
    worker.give(b"1", None, index=2, batch=1)
    assert [each.done() for each in waiting] == [False, False, True]
    worker.give(b"2", None, index=0, batch=1)
    worker.give(b"3", None, index=1, batch=1)
    worker.give_back(1)
    await turn()
    assert [each.result().value for each in waiting] == [b"[2]", b"[3]", b"[1]"]
    bench.check_books()


async def test_long_streams_refuse_nobody_who_could_begin_at_once():
    bench = StreamBench(max_batch_size=8)
    bench.dispatcher._admission.stream_limits = (GAP_S, 1000.0, 1000)
    worker = bench.worker(joins=True, credit=8)
    for batch in range(4):
        await bench.send(PartsKept())
        worker.give(b"1", batch=batch)
        for _ in range(10):
            await asyncio.sleep(3.0)
            worker.give(b"2", batch=batch)
        worker.give(None, batch=batch)
        worker.give_back(batch)
    for _ in range(8):
        await bench.send(PartsKept(), timeout_s=1.0)
    assert len(worker.batches) == 8
    assert sum(bench.metrics.rejected.values()) == 0


async def test_a_drain_lets_streams_end_and_cuts_off_the_rest():
    bench = StreamBench()
    worker = bench.worker(joins=True, credit=2)
    ends, goes_on = await bench.send(PartsKept()), await bench.send(PartsKept())
    worker.give(b"1", batch=0)
    worker.give(b"1", batch=1)
    drain = asyncio.ensure_future(bench.dispatcher.drain(3.0))
    await turn()
    worker.give(b"2", None, batch=0)
    worker.give_back(0)
    await drain
    assert ends.result()
    assert isinstance(goes_on.exception(), UnavailableError)
    assert worker.dropped == [(1, 0)]


async def test_what_is_collected_is_bounded_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch):
    bench = StreamBench()
    monkeypatch.setattr(streams_module, "MAX_COLLECTED_BYTES", 1000)
    monkeypatch.setattr(streams_module, "MAX_ALL_COLLECTED_BYTES", 1500)
    worker = bench.worker(joins=True, credit=3)
    large = await bench.send()
    worker.give(bytes(1000))
    assert isinstance(large.exception(), StreamTooLongError)
    some, more = await bench.send(), await bench.send()
    worker.give(bytes(800), batch=1)
    worker.give(bytes(800), batch=2)
    assert isinstance(more.exception(), OverloadedError)
    worker.give(b"1", None, batch=1)
    assert some.result()
    for batch in range(3):
        worker.give_back(batch)
    await turn()
    bench.check_books()


async def test_a_trace_has_the_moment_of_the_first_part():
    bench = StreamBench()
    worker, steps = bench.worker(), InstanceSteps(tries=[])
    await bench.send(PartsKept(), steps=steps)
    await asyncio.sleep(1.0)
    worker.give(b"1")
    await asyncio.sleep(1.0)
    worker.give(None)
    worker.give_back()
    await turn()
    (attempt,) = steps.tries
    assert attempt.first_part - attempt.sent == pytest.approx(1.0, abs=0.1)
    assert steps.settled - attempt.first_part == pytest.approx(1.0, abs=0.1)


async def test_jobs_and_comparisons_collect_and_a_comparison_is_no_traffic():
    bench = StreamBench()
    worker = bench.worker()
    compared = await bench.send(is_compared=True)
    assert compared.is_compared
    worker.give(b"1", None)
    worker.give_back()
    await turn()
    assert compared.result().value == b"[1]"
    assert bench.metrics.accepted == bench.metrics.stream_parts == 0
    job = await bench.send(priority=BACKGROUND)
    worker.give(b"2", None, batch=1)
    worker.give_back(1)
    await turn()
    assert job.result().value == b"[2]"
    bench.check_books()


async def test_a_model_that_does_not_stream_has_ordinary_instances():
    bench = StreamBench()
    bench.dispatcher.attach(FakeWorker())
    instance = await bench.send()
    assert type(instance) is Instance
    assert bench.dispatcher.streams is None
