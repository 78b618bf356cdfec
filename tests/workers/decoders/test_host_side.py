import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from inferpool.workers.decoders import host_side as decoders
from inferpool.workers.decoders.ring import NewDecoder, NewRing
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.forkserver import Forkserver
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.host.observed import OomKills
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import BatchDone, ItemError, StartProgress
from inferpool.workers.shared.queues import FrameError
from tests.workers.contract import PATIENT, Put, answers, is_gone, started, suspend, until

MODEL = "tests.apart_model:ApartModel"


@asynccontextmanager
async def serving(engine: LocalEngine, num: int, **changes: Any) -> AsyncIterator[WorkerHandle]:
    """Run a worker in the block that is to have decoders."""
    worker = await started(engine, **{"source": MODEL, "decoders": num, **changes})
    try:
        yield worker
    finally:
        await worker.stop(5)


@asynccontextmanager
async def with_decoders(
    engine: LocalEngine, num: int, **changes: object
) -> AsyncIterator[WorkerHandle]:
    """Run a worker in the block, and wait until all of its decoders take tasks."""
    async with serving(engine, num, **changes) as worker:
        await until(lambda: len(worker.vitals().decoders) == num)
        yield worker


def pids(worker: WorkerHandle) -> set[int]:
    return {each.pid for each in worker.vitals().decoders}


def prepared_by(done: BatchDone) -> list[int]:
    return [json.loads(outcome)["by"] for outcome in done.outcomes]  # type: ignore[arg-type]


async def until_used(worker: WorkerHandle, put: Put) -> None:
    """Send batches until each decoder has prepared something."""
    used: set[int] = set()
    deadline = time.monotonic() + 60
    while used != pids(worker) or not used:
        assert time.monotonic() < deadline, (used, pids(worker))
        done = await worker.run([put({"n": n}) for n in range(1, 9)])
        used = set(prepared_by(done)) & pids(worker)
        await asyncio.sleep(0.05)  # payloads are never freed here, and decoders take time to start


async def test_decoders_prepare_the_instances_of_a_worker(engine: LocalEngine, put: Put):
    async with with_decoders(engine, 2) as worker:
        await until_used(worker, put)
        assert worker.credit == 3
        done = await worker.run([put({"n": n}) for n in range(1, 9)])
        assert [json.loads(each)["twice"] for each in done.outcomes] == list(range(2, 18, 2))  # type: ignore[arg-type]
        assert set(prepared_by(done)) <= pids(worker)


async def test_no_warning_tells_of_a_decoder_whose_worker_has_ended(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    told: list[NewDecoder] = []
    tell = decoders.DecoderHost._tell

    def tell_ring_alone(self, message: NewRing | NewDecoder, fds: list[int]) -> None:
        if isinstance(message, NewDecoder):
            told.append(message)
            raise BrokenPipeError
        tell(self, message, fds)

    monkeypatch.setattr(decoders.DecoderHost, "_tell", tell_ring_alone)
    async with serving(engine, 1):
        await until(lambda: len(told) >= 2)  # so the end of the first was noted
        await until(lambda: is_gone(told[0].pid))
    assert "decoder" not in caplog.text


async def test_a_decoder_that_dies_costs_nobody_an_answer(engine: LocalEngine, put: Put, tmp_path):
    async with with_decoders(engine, 2, options={"once": str(tmp_path / "once")}) as worker:
        await until_used(worker, put)
        before = pids(worker)
        refs = [put({"n": n, "do": "kill early" if n == 3 else "ok"}) for n in range(1, 9)]
        done = await worker.run(refs)
        assert answers(done) == list(range(2, 18, 2))
        assert set(prepared_by(done)) <= before
        await until(lambda: len(pids(worker) - before) == 1)
        assert sum(each.restarts for each in worker.vitals().decoders) == 1


@pytest.mark.parametrize(
    ("act", "batch_timeout_s"),
    [("kill early", 60.0), pytest.param("hang early", 4.0, marks=pytest.mark.measures)],
)
async def test_an_input_that_decoders_die_of_fails_alone(
    engine: LocalEngine, put: Put, act: str, batch_timeout_s: float
):
    async with with_decoders(engine, 2, batch_timeout_s=batch_timeout_s) as worker:
        await until_used(worker, put)
        refs = [put({"n": n, "do": act if n == 3 else "ok"}) for n in range(1, 9)]
        done = await worker.run(refs)
        assert answers(done) == [2, 4, "worker_crashed", 8, 10, 12, 14, 16]
        outcome = done.outcomes[2]
        assert isinstance(outcome, ItemError)
        assert outcome.message == "2 workers died while they computed this input (both decoders)"
        await until(lambda: len(pids(worker)) == 2)
        await until_used(worker, put)


@pytest.mark.measures  # the canary has the time of a batch as well
async def test_a_stopped_decoder_costs_nobody_an_answer(engine: LocalEngine, put: Put):
    async with with_decoders(engine, 2, batch_timeout_s=4.0) as worker:
        assert isinstance(worker, LocalWorker)
        worker.carrier.held.batch_timeout_s = 60.0  # that of the decoders stays
        await until_used(worker, put)
        stopped = min(pids(worker))
        suspend(stopped)
        done = await worker.run([put({"n": n}) for n in range(1, 9)])
        assert answers(done) == list(range(2, 18, 2))
        assert is_gone(stopped)


async def test_a_worker_without_living_decoders_prepares_itself(engine: LocalEngine, put: Put):
    async with with_decoders(engine, 1) as worker:
        await until_used(worker, put)
        for _ in range(3):
            (pid,) = pids(worker)
            os.kill(pid, signal.SIGKILL)
            done = await worker.run([put({"n": n}) for n in range(1, 9)])
            assert answers(done) == list(range(2, 18, 2))
            await until(lambda pid=pid: pids(worker) - {pid})
        await until_used(worker, put)


async def test_errors_are_those_of_the_worker_itself(engine: LocalEngine, put: Put):
    bad = [{"n": 1, "do": "raise early"}, {"n": "one"}, {"n": 2}]
    found = []
    for num in (0, 1):
        async with with_decoders(engine, num) as worker:
            if num:
                await until_used(worker, put)
            found.append((await worker.run([put(each) for each in bad])).outcomes[:2])
    assert found[0] == found[1]
    assert [each.code for each in found[0]] == ["unfit_input", "invalid_input"]  # type: ignore[union-attr]


async def test_a_model_that_exits_in_a_decoder_fails_that_instance(engine: LocalEngine, put: Put):
    async with with_decoders(engine, 2) as worker:
        await until_used(worker, put)
        before = pids(worker)
        done = await worker.run([put({"n": n, "do": "quit early"}) for n in range(1, 9)])
        assert answers(done) == ["model_error"] * 8
        assert pids(worker) == before


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_decoders_end_with_their_worker(engine: LocalEngine, put: Put, caplog, way: str):
    async with with_decoders(engine, 2) as worker:
        before = pids(worker)
        if way == "kill":
            os.kill(worker.vitals().pid, signal.SIGKILL)
            await worker.wait()
    await worker.wait()
    assert all(is_gone(pid) for pid in before)
    assert "starting another" not in caplog.text


async def test_a_worker_ends_although_there_is_no_forkserver_for_its_next_decoder(
    engine: LocalEngine, put: Put, monkeypatch: pytest.MonkeyPatch
):
    is_down, waits = asyncio.Event(), asyncio.Event()
    ready = Forkserver.ready

    async def ready_unless_down(self: Forkserver) -> None:
        if is_down.is_set():
            waits.set()
            await asyncio.Event().wait()
        await ready(self)

    monkeypatch.setattr(Forkserver, "ready", ready_unless_down)
    async with with_decoders(engine, 1) as worker:
        is_down.set()
        os.kill(min(pids(worker)), signal.SIGKILL)
        await waits.wait()
        os.kill(worker.vitals().pid, signal.SIGKILL)
        await worker.wait()


@pytest.mark.parametrize(
    "source",
    ["tests.fault_model:FaultModel", "tests.apart_model:OddSamplesApart"],
    ids=["not allowed", "cannot prepare its samples"],
)
async def test_a_model_that_decoders_cannot_serve_gets_none(
    engine: LocalEngine, put: Put, source: str
):
    async with serving(engine, 2, source=source) as worker:
        assert not worker.ready.plans.get("decoders")
        assert worker.credit == 2
        assert answers(await worker.run([put({"n": 1})])) == [2]
        assert not worker.vitals().decoders


async def test_decoders_that_die_at_once_are_given_up(
    arena: Arena, no_process_left: None, put: Put, caplog
):
    engine = LocalEngine(arena, replace(PATIENT, max_decoder_pause_s=0.01))
    async with serving(engine, 1, source="tests.apart_model:UnbuildableApart") as worker:
        await until(lambda: "does without" in caplog.text)
        assert answers(await worker.run([put({"n": 1})])) == [2]


async def test_idle_decoders_that_are_killed_come_back(
    arena: Arena, no_process_left: None, put: Put
):
    periods = replace(PATIENT, max_decoder_pause_s=0.1, decoder_rest_s=0.1)
    engine = LocalEngine(arena, periods)
    async with with_decoders(engine, 1) as worker:
        for _ in range(6):
            (before,) = pids(worker)
            os.kill(before, signal.SIGKILL)
            await until(lambda before=before: pids(worker) - {before})
        await until_used(worker, put)


async def test_a_decoder_does_not_speak_for_the_worker():
    life = decoders._DecoderLife(WorkerId(model="m", slot=0), 0, OomKills(), PATIENT)
    for message in (BatchDone(1, [], 0.0, 0.0), StartProgress("loading")):
        with pytest.raises(FrameError, match="which a decoder may not send"):
            life.on_message(life.process, message)
    life.close()
