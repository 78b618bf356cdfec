import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

import inferpool.workers.remote.session
from inferpool.models.files.opened import mark_of
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.remote.hosted import HostedWorkers
from inferpool.workers.remote.link import HostLink
from inferpool.workers.remote.session import AgentSession
from inferpool.workers.remote.wire import (
    MAX_BODY_BYTES,
    BatchLost,
    BatchOutcomes,
    Beat,
    Challenge,
    Measure,
    Measured,
    Message,
    Progress,
    Pulse,
    Refusal,
    RunBatch,
    StartWorker,
    StopWorker,
    ToAgent,
    ToFrontEnd,
    Views,
    WorkerEnded,
    WorkerNotStarted,
    WorkerStarted,
    found,
    frame_start,
)
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemError, ItemRef, TensorBlob
from tests.workers.contract import config_of, until
from tests.workers.remote.cluster import LoadedWorker, LoadingEngine, ready_of

pytestmark = pytest.mark.usefixtures("virtual_time")  # what goes through a socket pair is there

ID = WorkerId(model="m", slot=0)
M = TypeVar("M", bound=Message)


class FrontEnd:
    """A front end that does what the test says."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[ToFrontEnd] = []
        self.bodies: list[bytes] = []
        self.ends: list[str] = []
        self.link: HostLink[ToFrontEnd] = HostLink(
            sock, ToFrontEnd, self, max_body_bytes=MAX_BODY_BYTES
        )

    def room_for(self, message: ToFrontEnd, num_bytes: int) -> Views:
        return [memoryview(bytearray(num_bytes))]

    def on_message(self, message: ToFrontEnd, body: Views) -> None:
        if isinstance(message, Refusal):
            self.link.close(message.reason)
        self.messages.append(message)
        self.bodies.append(b"".join(body))

    def on_closed(self, reason: str) -> None:
        self.ends.append(reason)

    async def next(self, kind: type[M]) -> M:
        """Wait for the next message of a kind, and take it."""
        await until(lambda: any(isinstance(each, kind) for each in self.messages))
        message = next(each for each in self.messages if isinstance(each, kind))
        self.messages.remove(message)
        return message

    def run(self, id: int, *payloads: bytes, number: int = 1, ahead_s: float = 0.0) -> None:
        """Send a batch, by a clock that the agent's is ahead of."""
        now = time.monotonic() - ahead_s
        items = [ItemRef("bytes", 12345, len(payload), now + 10.0) for payload in payloads]
        body = [memoryview(payload) for payload in payloads]
        self.link.send(RunBatch(number, id, now, items), body)

    async def started(self, number: int = 1) -> WorkerStarted:
        """Start a worker."""
        self.link.send(StartWorker(number, ID, config_of()))
        return await self.next(WorkerStarted)


class AgentSide:
    """A session with workers that answer when the test says so."""

    def __init__(self, sock: socket.socket, arena: Arena, engine: LoadingEngine) -> None:
        self.engine = engine
        self.arena = arena
        self.workers = HostedWorkers(engine, None)
        self.workers.begin()
        sock.setblocking(False)
        link: HostLink[ToAgent] = HostLink(
            sock,
            ToAgent,
            None,
            max_body_bytes=MAX_BODY_BYTES,  # type: ignore[arg-type]
        )
        self.session = link.listener = AgentSession(link, arena, self.workers, tuple)
        self.link = link

    @property
    def worker(self) -> LoadedWorker:
        return self.engine.started[-1]

    def payloads(self, number: int = 0) -> list[bytes]:
        """Return the payloads of a batch that the worker holds, as it reads them."""
        items, _ = self.worker.batches[number]
        return [self.arena.read(item.offset, item.num_bytes) for item in items]


@contextlib.asynccontextmanager
async def connected(
    *, loads: bool = True, arena_bytes: int = 1 << 16
) -> AsyncIterator[tuple[FrontEnd, AgentSide]]:
    theirs, ours = socket.socketpair()
    arena = Arena(arena_bytes)
    front, agent = FrontEnd(theirs), AgentSide(ours, arena, LoadingEngine(loads=loads))
    try:
        yield front, agent
    finally:
        front.link.close()
        agent.link.close()
        await agent.session.until_over()
        agent.engine.may_load.set()
        await agent.session.wind_up()
        await agent.workers.stop(5)
        assert arena.used_bytes == 0
        agent.session._memory = memoryview(b"")
        arena.close()


def codes(answer: BatchOutcomes) -> list[object]:
    return [each.code if isinstance(each, ItemError) else each for each in answer.done.outcomes]


async def test_worker_is_started_used_and_ended(tmp_path: Path):
    file = tmp_path / "weights"
    file.write_text("1")
    async with connected() as (front, agent):
        mark = mark_of(str(file))
        assert mark is not None
        agent.engine.ready = ready_of(files=[mark])
        started = await front.started()
        assert started.credit == 2
        assert [len(each.digest) for each in started.ready.files] == [32]
        assert (await front.next(Progress)).stage in ("waiting to start", "loading")
        front.run(5, b"first", b"", b"second")
        await until(lambda: agent.worker.batches)
        assert agent.payloads() == [b"first", b"", b"second"]
        agent.worker.answer()
        answer = await front.next(BatchOutcomes)
        assert (answer.number, answer.done.id, len(answer.done.outcomes)) == (1, 5, 3)
        assert agent.arena.used_bytes == 0
        front.link.send(StopWorker(1, 5.0))
        ended = await front.next(WorkerEnded)
        assert ended.number == 1
        await until(lambda: not agent.session._tasks)
        assert not agent.session._hosted


async def test_start_that_fails_is_told_with_all_that_is_known(caplog: pytest.LogCaptureFixture):
    async with connected() as (front, agent):
        agent.engine.failures = [
            WorkerStartError("no luck", permanent=True, traceback="in load"),
            RuntimeError("what?"),  # type: ignore[list-item]
        ]
        front.link.send(StartWorker(1, ID, config_of()))
        assert await front.next(WorkerNotStarted) == WorkerNotStarted(1, "no luck", True, "in load")
        front.link.send(StartWorker(2, ID, config_of()))
        told = await front.next(WorkerNotStarted)
        assert (told.number, told.permanent) == (2, False)
        assert "a mistake of the agent: RuntimeError('what?')" in told.message
        assert "m/0#0 could not be started" in caplog.text


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
async def test_deadlines_travel_as_time_left(ahead_s: float):
    async with connected() as (front, agent):
        await front.started()
        front.run(1, b"x", ahead_s=ahead_s)
        await until(lambda: agent.worker.batches)
        items, future = agent.worker.batches.pop()
        assert items[0].deadline == pytest.approx(time.monotonic() + 10.0, abs=1.0)
        began = time.monotonic()
        future.set_result(BatchDone(0, [b"{}"], 0.1, 0.2, 0, began, began))
        done = (await front.next(BatchOutcomes)).done
        assert done.prepare_began == pytest.approx(began - ahead_s, abs=1.0)
        assert done.compute_began == done.prepare_began


async def test_batches_wait_for_room_in_their_order_and_are_answered_right():
    async with connected(arena_bytes=8192) as (front, agent):
        await front.started()
        front.run(1, b"1" * 3000)
        front.run(2, b"2" * 8000)
        front.run(3, b"3")  # there is room for it, but it would keep the second one waiting
        front.run(4, b"4" * 4000, b"5" * 3000)
        front.link.send(Beat(1.0))
        await front.next(Pulse)
        for expected in ([b"1" * 3000], [b"2" * 8000], [b"3"], [b"4" * 4000, b"5" * 3000]):
            await until(lambda: agent.worker.batches)
            assert len(agent.worker.batches) == 1
            assert agent.payloads() == expected
            agent.worker.answer()
        await until(lambda: sum(isinstance(each, BatchOutcomes) for each in front.messages) == 4)


@pytest.mark.parametrize("payloads", [(b"x" * 9000,), (b"x" * 3000, b"y" * 3000, b"z" * 3000)])
@pytest.mark.parametrize("is_busy", [False, True])
async def test_batch_that_can_never_fit_is_refused(payloads: tuple[bytes, ...], is_busy: bool):
    async with connected(arena_bytes=8192) as (front, agent):
        await front.started()
        if is_busy:
            front.run(1, b"x")
        front.run(2, *payloads)
        front.run(3, b"y")
        if is_busy:
            await until(lambda: agent.worker.batches)
            agent.worker.answer()
            await front.next(BatchOutcomes)
        answer = await front.next(BatchOutcomes)
        assert answer.done.id == 2
        assert codes(answer) == ["exhausted"] * len(payloads)
        await until(lambda: agent.worker.batches)
        assert agent.payloads() == [b"y"]
        agent.worker.answer()


async def test_waiting_batches_of_a_worker_that_has_ended_hold_up_nobody():
    async with connected(arena_bytes=8192) as (front, agent):
        await front.started(1)
        await front.started(2)
        first, second = agent.engine.started
        front.run(1, b"x" * 8000, number=1)
        front.run(2, b"y" * 8000, number=1)
        front.run(3, b"z" * 8000, number=2)
        await until(lambda: first.batches)
        await until(lambda: len(agent.session._waiting) == 2)
        first.die()
        lost = [await front.next(BatchLost) for _ in range(2)]
        assert [(each.id, each.started) for each in lost] == [(1, True), (2, False)]
        await until(lambda: second.batches)
        second.answer()
        await front.next(BatchOutcomes)


async def test_end_of_a_worker_is_told_after_the_batches_that_it_held():
    async with connected() as (front, agent):
        await front.started()
        for id in (1, 2):
            front.run(id, b"x")
        await until(lambda: len(agent.worker.batches) == 2)
        agent.worker.die()
        ended = await front.next(WorkerEnded)
        assert ended.ending.was_at_work
        assert [each for each in front.messages if isinstance(each, BatchLost)] == [
            BatchLost(1, 1, "SIGKILL", True),
            BatchLost(1, 2, "SIGKILL", False),
        ]
        front.run(3, b"x")
        front.run(4, b"x", number=99)
        await until(lambda: sum(isinstance(each, BatchLost) for each in front.messages) == 4)
        lost = [each for each in front.messages if isinstance(each, BatchLost)]
        assert lost[2:] == [
            BatchLost(number, id, "the worker had ended", False) for number, id in ((1, 3), (99, 4))
        ]


async def test_batch_that_cannot_be_given_to_a_worker_is_answered():
    async with connected() as (front, agent):
        await front.started()

        def run(items: object) -> None:
            raise OverflowError("too large")

        agent.worker.run = run  # type: ignore[method-assign,assignment]
        front.run(1, b"x", b"y")
        answer = await front.next(BatchOutcomes)
        assert codes(answer) == ["exhausted", "exhausted"]


async def test_answer_that_is_too_large_for_a_message_is_told(monkeypatch: pytest.MonkeyPatch):
    async with connected() as (front, agent):
        await front.started()
        front.run(1, b"x")
        await until(lambda: agent.worker.batches)
        with monkeypatch.context() as patch:
            patch.setattr("inferpool.workers.remote.wire.MAX_HEAD_BYTES", 1000)
            agent.worker.answer([b"x" * 2000])
            answer = await front.next(BatchOutcomes)
        assert codes(answer) == ["exhausted"]
        outcome = answer.done.outcomes[0]
        assert isinstance(outcome, ItemError)
        assert "the outputs of its batch are too large" in outcome.message


async def test_large_outputs_go_into_the_body():
    async with connected() as (front, agent):
        await front.started()
        front.run(1, b"x")
        await until(lambda: agent.worker.batches)
        agent.worker.answer([[TensorBlob("y", "uint8", (9000,), b"y" * 9000)]])
        await until(lambda: any(front.bodies))
        answer = await front.next(BatchOutcomes)
        done = found(answer.done, memoryview(max(front.bodies)))
        assert bytes(done.outcomes[0][0].buffer) == b"y" * 9000  # type: ignore[union-attr,index]


async def test_connection_that_ends_within_a_payload_gives_back_its_room():
    async with connected() as (front, agent):
        await front.started()
        item = ItemRef("bytes", 0, 2000, 0.0)
        head = frame_start(RunBatch(1, 1, 0.0, [item]), 2000)
        front.link._sock.send(head + b"x" * 100)
        await until(lambda: agent.arena.used_bytes)
        front.link.close()
        await agent.session.until_over()
        assert agent.arena.used_bytes == 0


@pytest.mark.parametrize(
    "message", [Challenge(b""), StartWorker(1, ID, config_of()), RunBatch(1, 1, 0.0, [])]
)
async def test_message_that_makes_no_sense_ends_the_connection(message: ToAgent):
    async with connected() as (front, agent):
        is_order = isinstance(message, Challenge)
        front.link.send(message, [] if is_order else [memoryview(b"body")])
        reason = await agent.session.until_over()
        assert "makes no sense" in reason


async def test_pulse_answers_a_beat_with_the_state_of_all_workers():
    async with connected() as (front, agent):
        await front.started(3)
        front.link.send(Beat(123.5))
        pulse = await front.next(Pulse)
        assert pulse.sent_at == 123.5
        assert [each.number for each in pulse.workers] == [3]
        assert pulse.vitals.arena_bytes == agent.arena.num_bytes
        assert abs(pulse.vitals.wall_time - time.time()) < 30


async def test_signs_of_life_go_on_while_beats_wait_behind_payloads():
    async with connected() as (front, _):
        assert [(await front.next(Pulse)).sent_at for _ in range(2)] == [0.0, 0.0]


async def test_front_end_that_is_silent_is_lost():
    async with connected() as (_, agent):
        began = time.monotonic()
        reason = await agent.session.until_over()
        assert reason == "no sign of life from the front end for 3 s"
        assert time.monotonic() - began == pytest.approx(3.0, abs=0.1)


async def test_front_end_whose_payload_is_on_its_way_is_alive():
    async with connected() as (front, agent):
        await front.started()
        head = frame_start(RunBatch(1, 1, time.monotonic(), [ItemRef("bytes", 0, 20, 0.0)]), 20)
        front.link._sock.send(head)
        for _ in range(20):
            await asyncio.sleep(2.9)
            front.link._sock.send(b"x")
        await until(lambda: agent.worker.batches)
        agent.worker.answer()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_start_is_given_up_on_demand(has_begun: bool):
    async with connected(loads=False) as (front, agent):
        front.link.send(StartWorker(1, ID, config_of()))
        if has_begun:
            await until(lambda: agent.engine.configs)
        front.link.send(StopWorker(1, 0.0))
        await until(lambda: not agent.session._tasks and not agent.workers._workers)
        assert "given up" in (await front.next(WorkerNotStarted)).message
        assert not agent.engine.started
        front.link.send(StopWorker(1, 0.0))
        front.link.send(StopWorker(99, 0.0))
        front.link.send(Beat(1.0))
        await front.next(Pulse)


async def test_end_of_the_connection_lets_workers_finish_and_keeps_them():
    async with connected() as (front, agent):
        await front.started()
        front.run(1, b"x")
        await until(lambda: agent.worker.batches)
        front.link.close()
        await agent.session.until_over()
        winding_up = asyncio.ensure_future(agent.session.wind_up())
        await asyncio.sleep(2.9)
        assert not winding_up.done()
        agent.worker.answer()
        await winding_up
        assert not agent.worker.is_gone
        hosted = await agent.workers.claim(ID, config_of(), print)
        assert hosted.handle is agent.worker


async def test_workers_at_work_beyond_the_lease_are_ended(caplog: pytest.LogCaptureFixture):
    async with connected() as (front, agent):
        await front.started(1)
        await front.started(2)
        front.run(1, b"x", number=1)
        busy, idle = agent.engine.started
        await until(lambda: busy.batches)
        front.link.close()
        await agent.session.until_over()
        began = time.monotonic()
        await agent.session.wind_up()
        assert time.monotonic() - began == pytest.approx(3.0, abs=0.1)
        assert (busy.is_gone, idle.is_gone) == (True, False)
        await until(lambda: not agent.arena.used_bytes)
        assert "1 workers were still at work after the lease" in caplog.text


async def test_stop_that_takes_long_does_not_keep_the_agent_from_dialing_again():
    async with connected() as (front, agent):
        await front.started()
        agent.worker.may_stop.clear()
        front.link.send(StopWorker(1, 600.0))
        await until(lambda: agent.session._stopping)
        front.link.close()
        await agent.session.until_over()
        await agent.session.wind_up()
        agent.worker.may_stop.set()


async def test_agent_that_leaves_loses_no_batch_and_takes_none():
    async with connected() as (front, agent):
        await front.started()
        for id in range(1, 4):
            front.run(id, b"x")
        await until(lambda: len(agent.worker.batches) == 3)
        agent.worker.may_stop.clear()
        leaving = asyncio.ensure_future(agent.session.leave(5.0, "told to stop"))
        await asyncio.sleep(0)
        front.run(4, b"x")
        front.link.send(StartWorker(2, ID, config_of()))
        assert (await front.next(BatchLost)).reason == "its host is leaving"
        assert (await front.next(WorkerNotStarted)).message == "its host is leaving"
        agent.worker.may_stop.set()
        await leaving
        kinds = [type(each) for each in front.messages if not isinstance(each, Pulse | Progress)]
        assert kinds == [BatchOutcomes] * 3 + [WorkerEnded, Refusal]
        assert front.messages[-1] == Refusal("told to stop")


async def test_answers_that_a_slow_front_end_has_not_read_yet_are_not_lost_by_leaving():
    async with connected() as (front, agent):
        await front.started()
        front.run(1, b"x")
        await until(lambda: agent.worker.batches)
        asyncio.get_running_loop().remove_reader(front.link._fd)
        large = [TensorBlob("y", "uint8", (8 << 20,), bytes(8 << 20))]
        agent.worker.answer([large])
        await until(lambda: agent.link.num_unsent_bytes)
        leaving = asyncio.ensure_future(agent.session.leave(5.0, "told to stop"))
        await asyncio.sleep(2.0)
        asyncio.get_running_loop().add_reader(front.link._fd, front.link._on_readable)
        await leaving
        assert any(isinstance(each, BatchOutcomes) for each in front.messages)
        assert max(map(len, front.bodies)) == 8 << 20


async def test_front_end_that_lives_but_does_not_read_keeps_nobody_from_leaving():
    async with connected() as (front, agent):
        asyncio.get_running_loop().remove_reader(front.link._fd)
        for at_s in range(10):
            asyncio.get_running_loop().call_later(at_s, front.link.send, Beat(1.0))
        began = time.monotonic()
        await agent.session.leave(5.0, "told to stop")
        assert agent.link.is_closed
        assert time.monotonic() - began == pytest.approx(3.0, abs=0.1)


async def test_start_that_waits_for_room_keeps_nobody_from_leaving():
    async with connected() as (front, agent):
        await front.started()
        agent.workers.release()
        agent.workers.begin()
        front.link.send(StartWorker(2, ID, config_of(credit=9)))
        front.link.send(Beat(1.0))
        await front.next(Pulse)
        await agent.session.leave(5.0, "told to stop")
        assert len(agent.engine.started) == 1


async def test_connection_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.remote.session, "MAX_MEASURED_BYTES", 1000)
    async with connected() as (front, agent):
        front.link.send(Measure(1, 1 << 40), [memoryview(bytes(1000))])
        assert await front.next(Measured) == Measured(1)
        assert len(front.bodies[-1]) == 1000
        front.link.send(Measure(2, 0), [memoryview(bytes(1001))])
        assert "does not fit its head" in await agent.session.until_over()
