import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from inferpool.workers.host.engine import Ending, Vitals, WorkerId
from inferpool.workers.remote.host import RemoteHost, RemoteWorker
from inferpool.workers.remote.wire import (
    BatchLost,
    BatchOutcomes,
    HostVitals,
    Measure,
    Measured,
    Message,
    Progress,
    Pulse,
    Refusal,
    RunBatch,
    StartWorker,
    StopWorker,
    WorkerEnded,
    WorkerNotStarted,
    WorkerPulse,
    WorkerStarted,
    frame_start,
)
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, Stored, TensorBlob
from tests.workers.contract import Put, config_of, until
from tests.workers.remote.cluster import HostNotes, OtherSide, facts_of, front, ready_of

ID = WorkerId(model="m", slot=0)
ENDED = Ending(cause="signal", reason="SIGKILL")


@contextlib.asynccontextmanager
async def joined(arena: Arena) -> AsyncIterator[tuple[RemoteHost, OtherSide, HostNotes]]:
    """Run a front end with one host, whose agent does what the test says."""
    async with front(arena) as (hosts, watcher):
        peer = OtherSide(facts_of("h"))
        host = await peer.join(hosts)
        try:
            yield host, peer, watcher
        finally:
            peer.link.close()


async def loaded(host: RemoteHost, peer: OtherSide) -> RemoteWorker:
    start = asyncio.ensure_future(host.start(ID, config_of(), lambda _: None))
    message = await peer.next()
    assert isinstance(message, StartWorker)
    peer.link.send(WorkerStarted(message.number, 2, ready_of(pid=77)))
    return await start


async def settled(peer: OtherSide, host: RemoteHost) -> None:
    """Wait until the front end has handled what was sent."""
    peer.link.send(Pulse(0.0, HostVitals(arena_bytes=len(peer.beats) + 1), []))
    before = host.vitals
    await until(lambda: host.vitals is not before)


def done_of(id: int, *outcomes: object) -> BatchDone:
    return BatchDone(id, list(outcomes or [b"{}"]), 0.0, 0.001)  # type: ignore[arg-type]


async def test_worker_starts_computes_and_ends_as_the_agent_tells(arena: Arena, put: Put):
    async with joined(arena) as (host, peer, _):
        stages: list[str] = []
        start = asyncio.ensure_future(host.start(ID, config_of(), stages.append))
        message = await peer.next()
        assert isinstance(message, StartWorker)
        assert message == StartWorker(message.number, ID, config_of())
        peer.link.send(Progress(message.number, "loading"))
        peer.link.send(WorkerStarted(message.number, 3, ready_of(pid=77)))
        worker = await start
        assert stages == ["loading"]
        assert (worker.credit, worker.ready.pid, worker.id) == (3, 77, ID)
        batch = worker.run([put({"n": 1}), put({"n": 22})])
        order = await peer.next()
        assert isinstance(order, RunBatch)
        assert peer.bodies[-1] == b'{"n": 1}{"n": 22}'
        assert 0 <= time.monotonic() - order.sent_at < 30
        large = b"x" * 5000
        outcome = [TensorBlob("y", "uint8", (5000,), Stored(0, 5000))]
        answer = BatchOutcomes(message.number, done_of(order.id, outcome, b"{}"))
        peer.link.send(answer, [memoryview(large)])
        done = await batch
        assert bytes(done.outcomes[0][0].buffer) == large  # type: ignore[union-attr,index]
        peer.link.send(WorkerEnded(message.number, ENDED))
        assert await worker.wait() == ENDED
        assert not host._workers


async def test_start_that_fails_says_why(arena: Arena):
    async with joined(arena) as (host, peer, _):
        start = asyncio.ensure_future(host.start(ID, config_of(), print))
        message = await peer.next()
        peer.link.send(
            WorkerNotStarted(message.number, "no luck", permanent=True, traceback="in load")
        )  # type: ignore[union-attr]
        with pytest.raises(WorkerStartError, match="no luck") as caught:
            await start
        assert caught.value.permanent
        assert caught.value.traceback == "in load"
        for options in ({"x": object()}, {"x": 1 << 70}):
            with pytest.raises(WorkerStartError, match="cannot be sent to another host") as wrong:
                await host.start(ID, config_of(options=options), print)
            assert wrong.value.permanent
        assert not host._starting


async def test_start_that_is_given_up_is_stopped_and_its_answer_comes_too_late(arena: Arena):
    async with joined(arena) as (host, peer, watcher):
        for answer in (
            lambda number: WorkerStarted(number, 2, ready_of()),
            lambda number: WorkerNotStarted(number, "given up", permanent=False),
        ):
            start = asyncio.ensure_future(host.start(ID, config_of(), print))
            number = (await peer.next()).number  # type: ignore[union-attr]
            start.cancel()
            assert await peer.next() == StopWorker(number, 0.0)
            peer.link.send(answer(number))
            peer.link.send(WorkerEnded(number, ENDED))
        await settled(peer, host)
        assert not host._workers
        assert not watcher.lost


async def test_mistake_in_showing_progress_ends_no_connection(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with joined(arena) as (host, peer, watcher):
        start = asyncio.ensure_future(host.start(ID, config_of(), lambda stage: {}[stage]))
        number = (await peer.next()).number  # type: ignore[union-attr]
        peer.link.send(Progress(number, "loading"))
        peer.link.send(WorkerStarted(number, 2, ready_of()))
        await start
        assert not watcher.lost
        assert "the progress of m/0#0 could not be noted" in caplog.text


async def test_all_that_a_host_holds_fails_once_when_its_connection_ends(arena: Arena, put: Put):
    async with joined(arena) as (host, peer, watcher):
        worker = await loaded(host, peer)
        batches = [worker.run([put({"n": n})]) for n in range(3)]
        start = asyncio.ensure_future(host.start(ID, config_of(), print))
        measuring = asyncio.ensure_future(host.measure(10))
        await until(lambda: len(peer.messages) == 5)
        number_of_calls: list[int] = []
        for batch in batches:
            batch.add_done_callback(lambda _: number_of_calls.append(1))
        were_told: list[bool] = []
        watcher.on_lost = lambda *_: were_told.append(all(batch.done() for batch in batches))  # type: ignore[method-assign]
        peer.link.send(BatchOutcomes(1, done_of(1)))
        peer.link.close()
        results = await asyncio.gather(start, measuring, *batches, return_exceptions=True)
        assert isinstance(results[0], WorkerStartError)
        assert not results[0].permanent
        assert isinstance(results[1], ConnectionError)
        assert isinstance(results[2], BatchDone)
        for error in results[3:]:
            assert isinstance(error, WorkerLostError)
            assert (error.with_host, error.started) == (True, False)
            assert str(error) == "h was lost: the other side closed the connection"
        assert len(number_of_calls) == 3
        assert were_told == [True]
        assert (await worker.wait()).cause == "host"
        assert worker.has_worked
        assert not worker.is_stalled
        with pytest.raises(WorkerStartError, match="h is not connected"):
            await host.start(ID, config_of(), print)
        with pytest.raises(ConnectionError, match="h is not connected"):
            await host.measure(10)
        with pytest.raises(WorkerLostError):
            await worker.run([put({"n": 1})])


@pytest.mark.parametrize(
    ("message", "body", "reason"),
    [
        (BatchOutcomes(9, done_of(1)), b"", "worker 9, which was not started"),
        (BatchLost(9, 1, "x", started=False), b"", "worker 9, which was not started"),
        (BatchOutcomes(1, done_of(2)), b"", "an answer to batch 2"),
        (BatchOutcomes(1, done_of(1, b"", b"")), b"", "2 outcomes for 1 instances"),
        (
            BatchOutcomes(1, done_of(1, [TensorBlob("y", "uint8", (9,), Stored(0, 9))])),
            b"12345678",
            "an output of 9 bytes at 0 of 8",
        ),
        (
            BatchOutcomes(1, done_of(1, [TensorBlob("y", "uint8", (9,), Stored(0, 9))])),
            b"",
            "an output of 9 bytes at 0 of 0",
        ),
        (BatchOutcomes(9, done_of(1)), b"body", "worker 9, which was not started"),
        (Progress(1, "x"), b"body", "Progress with a body"),
    ],
)
async def test_answer_that_makes_no_sense_ends_the_connection_and_harms_nothing_else(
    arena: Arena, put: Put, message: Message, body: bytes, reason: str
):
    async with joined(arena) as (host, peer, watcher):
        worker = await loaded(host, peer)
        batch = worker.run([put({"n": 1})])
        peer.link.send(message, [memoryview(body)])
        with pytest.raises(WorkerLostError, match=reason) as lost:
            await batch
        assert lost.value.with_host
        assert reason in watcher.lost[0][1]


async def test_late_words_about_what_is_unknown_change_nothing(arena: Arena, put: Put):
    async with joined(arena) as (host, peer, watcher):
        worker = await loaded(host, peer)
        for message in (
            Progress(9, "loading"),
            WorkerStarted(9, 2, ready_of()),
            WorkerNotStarted(9, "no", permanent=False),
            WorkerEnded(9, ENDED),
            Measured(9),
            Pulse(0.0, HostVitals(), [WorkerPulse(9, True, worker.vitals())]),
        ):
            peer.link.send(message)
        await settled(peer, host)
        batch = worker.run([put({"n": 1})])
        peer.link.send(BatchOutcomes(1, done_of(1)))
        await batch
        assert not watcher.lost


async def test_batches_on_their_way_to_a_worker_that_ends_come_back_and_it_is_forgotten(
    arena: Arena, put: Put
):
    async with joined(arena) as (host, peer, watcher):
        worker = await loaded(host, peer)
        batches = [worker.run([put({"n": n})]) for n in range(3)]
        peer.link.send(BatchLost(1, 1, "SIGKILL", started=True))
        peer.link.send(WorkerEnded(1, ENDED))
        await worker.wait()
        assert 1 in host._workers
        refused = worker.run([put({"n": 4})])
        peer.link.send(BatchLost(1, 2, "the worker had ended", started=False))
        peer.link.send(BatchOutcomes(1, done_of(3)))
        *lost, done = await asyncio.gather(refused, *batches, return_exceptions=True)
        assert isinstance(done, BatchDone)
        assert [(error.started, error.with_host) for error in lost] == [  # type: ignore[union-attr]
            (False, False),
            (True, False),
            (False, False),
        ]
        await settled(peer, host)
        assert not host._workers
        assert not watcher.lost


async def test_beats_tell_the_round_trip_and_the_clock_of_the_host(arena: Arena):
    async with joined(arena) as (host, peer, _):
        peer.answers_beats = False
        await until(lambda: peer.beats)
        peer.link.send(
            Pulse(
                time.monotonic() - 2.0,
                HostVitals(wall_time=time.time() + 100.0, arena_bytes=5),
                [],
            )
        )
        await until(lambda: host.vitals.arena_bytes == 5)
        first_s = host.round_trip_s
        assert host.clock_offset_s == pytest.approx(100.0 + first_s / 2, abs=20)
        assert first_s > 0
        await settled(peer, host)  # an unasked sign of life tells nothing of the network
        assert host.round_trip_s == first_s
        peer.link.send(Pulse(time.monotonic() + 100, HostVitals(arena_bytes=6), []))
        await until(lambda: host.vitals.arena_bytes == 6)
        assert 0 <= host.round_trip_s < first_s


async def test_pulse_tells_of_each_worker(arena: Arena):
    async with joined(arena) as (host, peer, _):
        worker = await loaded(host, peer)
        vitals = Vitals(
            pid=77, rss_bytes=5, last_beat_age_s=0.0, num_batches=1, last_answer_age_s=0.0
        )
        peer.link.send(Pulse(0.0, HostVitals(), [WorkerPulse(1, True, vitals)]))
        await until(lambda: worker.is_stalled)
        assert worker.vitals().rss_bytes == 5


async def test_silent_host_is_lost_once_its_lease_is_out(arena: Arena, put: Put):
    async with joined(arena) as (host, peer, watcher):
        worker = await loaded(host, peer)
        batch = worker.run([put({"n": 1})])
        asyncio.get_running_loop().remove_reader(peer.link._fd)
        assert not host.is_silent
        await until(lambda: host.is_silent)
        assert not batch.done()
        assert worker.is_stalled
        assert host.last_beat_age_s > 1.0
        with pytest.raises(WorkerLostError, match="no sign of life for 3 s"):
            await batch
        assert watcher.lost == [("h", "no sign of life for 3 s")]


async def test_host_whose_long_answer_is_on_its_way_is_alive(arena: Arena, put: Put):
    async with joined(arena) as (host, peer, watcher):
        worker = await loaded(host, peer)
        batch = worker.run([put({"n": 1})])
        asyncio.get_running_loop().remove_reader(peer.link._fd)  # it says nothing else
        host._lease._lease_s = 1.0
        body = bytes(20)
        outcome = [TensorBlob("y", "uint8", (20,), Stored(0, 20))]
        start = frame_start(BatchOutcomes(1, done_of(1, outcome)), len(body))
        peer.link._sock.send(start)
        for number in range(len(body)):
            await asyncio.sleep(0.1)
            peer.link._sock.send(body[number : number + 1])
        await batch
        assert not watcher.lost


@pytest.mark.parametrize(("asked", "sent"), [(1000, 1000), (1 << 40, 2000)])
async def test_connection_is_measured_both_ways_within_bounds(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, asked: int, sent: int
):
    monkeypatch.setattr("inferpool.workers.remote.host.MAX_MEASURED_BYTES", 2000)
    async with joined(arena) as (host, peer, _):
        measuring = asyncio.ensure_future(host.measure(asked))
        there = await peer.next()
        assert isinstance(there, Measure)
        assert (len(peer.bodies[-1]), there.num_bytes) == (sent, 0)
        peer.link.send(Measured(there.id))
        back = await peer.next()
        assert isinstance(back, Measure)
        assert (len(peer.bodies[-1]), back.num_bytes) == (0, sent)
        peer.link.send(Measured(back.id), [memoryview(bytes(sent))])
        assert min(await measuring) > 0
        assert not host._measuring


async def test_host_that_sends_more_than_is_measured_is_lost(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("inferpool.workers.remote.host.MAX_MEASURED_BYTES", 2000)
    async with joined(arena) as (host, peer, watcher):
        peer.link.send(Measured(9), [memoryview(bytes(2000))])
        await settled(peer, host)
        assert not watcher.lost
        peer.link.send(Measured(9), [memoryview(bytes(2001))])
        await until(lambda: watcher.lost)
        assert "Measured with a body of 2001 bytes" in watcher.lost[0][1]


async def test_both_sides_may_refuse_to_go_on(arena: Arena):
    async with joined(arena) as (_, peer, watcher):
        peer.link.send(Refusal("its agent was told to stop"))
        await until(lambda: watcher.lost == [("h", "its agent was told to stop")])
    async with joined(arena) as (host, peer, watcher):
        host.refuse("standing by")
        assert await peer.next() == Refusal("standing by")
        await until(lambda: watcher.lost == [("h", "standing by")])
        host.refuse("again")
