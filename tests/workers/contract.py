"""Tests that every engine must pass, and helpers for tests with real workers."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from inferpool.models.spec import Placement, TensorHeader
from inferpool.workers.host.engine import Engine, WorkerHandle, WorkerId, WorkerPeriods
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemError, ItemRef, StreamPart

Put = Callable[..., ItemRef]
PATIENT = WorkerPeriods(
    look_s=0.1, patience_s=60.0, retire_s=60.0, give_up_s=60.0, exit_s=60.0, stacks_step_s=0.1
)
"""Periods of engines in tests: a busy machine ends no worker, and one that hangs is soon found."""
HANGS_AFTER_S = 0.5
"""Seconds after which a batch of a worker from `hurried` counts as hung."""


def config_of(source: str = "tests.fault_model:FaultModel", **changes: object) -> WorkerConfig:
    options = changes.pop("options", {})
    assert isinstance(options, dict)
    model = ModelConfig(name="m", source=source, options=options)
    base: dict[str, object] = {
        "placement": Placement(devices=("cpu",)),
        "batch_timeout_s": 60.0,
        "load_timeout_s": 600.0,
    }
    return WorkerConfig(model=model, **{**base, **changes})  # type: ignore[arg-type]


async def started(engine: Engine, **changes: object) -> WorkerHandle:
    return await engine.start(WorkerId(model="m", slot=0), config_of(**changes), lambda stage: None)


async def hurried(engine: Engine, **changes: object) -> LocalWorker:
    """Start a worker whose batches soon count as hung, but not its first canary."""
    worker = await started(engine, **changes)
    assert isinstance(worker, LocalWorker)
    worker.carrier.held.batch_timeout_s = HANGS_AFTER_S
    return worker


def answers(done: BatchDone) -> list[object]:
    return [
        outcome.code if isinstance(outcome, ItemError) else json.loads(outcome)["twice"]  # type: ignore[arg-type]
        for outcome in done.outcomes
    ]


def pid_of(handle: WorkerHandle) -> int:
    return handle.ready.pid


def suspend(pid: int) -> None:
    """Stop a process, and wait until it is stopped, which takes a while on a busy machine."""
    process = psutil.Process(pid)
    process.suspend()
    deadline = time.monotonic() + 60
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(claim: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def until_begun(worker: WorkerHandle) -> None:
    """Wait until a worker computes a batch that is no canary."""
    held = worker.carrier.held  # type: ignore[attr-defined]  # the worker is a `LocalWorker`
    await until(lambda: held.is_any_begun and not held.is_oldest_canary)


async def is_quick(measure: Callable[[], Awaitable[float]], limit_s: float) -> bool:
    """Measure up to five times; return whether it once took less than that: machines pause."""
    for _ in range(5):
        if await measure() < limit_s:
            return True
    return False


class StreamsOfBatch:
    """Parts of the streams of one batch, as they come."""

    def __init__(self, worker: WorkerHandle, items: list[ItemRef]) -> None:
        self.parts: dict[int, list[object]] = {index: [] for index in range(len(items))}
        self.ends: dict[int, ItemError | None] = {}
        self._worker = worker
        self.future = worker.run(items, self._take)

    def drop(self, *indices: int) -> None:
        self._worker.drop(self.future, indices)

    def _take(self, parts: Sequence[StreamPart]) -> None:
        assert not self.future.done()
        for part in parts:
            assert part.index not in self.ends
            if isinstance(part.value, bytes):
                self.parts[part.index].append(json.loads(part.value))
            else:
                self.ends[part.index] = part.value


class EngineContract:
    """Tests that every engine passes; the module of an engine provides the fixture `engine`."""

    async def test_batches_come_back_in_order_and_only_items_at_fault_fail(
        self, engine: Engine, put: Put
    ):
        stages: list[str] = []
        began = time.monotonic()
        worker = await engine.start(WorkerId(model="m", slot=0), config_of(), stages.append)
        assert stages[-3].startswith("loading tests.")
        assert stages[-2:] == ["warming up", "checking its answers"]
        assert worker.ready.device == "cpu"
        assert worker.ready.example == b'{"n": 0}'
        assert [spec.name for spec in worker.ready.outputs] == ["twice", "share"]
        assert 0 < worker.vitals().last_answer_age_s < time.monotonic() - began
        assert not worker.has_worked
        assert worker.vitals().num_batches == 0
        os.kill(pid_of(worker), signal.SIGTERM)  # only the front end may end it
        os.kill(pid_of(worker), signal.SIGINT)
        unencodable = msgspec.structs.replace(
            put({"n": 1}), headers=(TensorHeader("x", "uint8", (10**30, 0), 0),)
        )
        for _ in range(worker.credit + 1):
            with pytest.raises(OverflowError):
                worker.run([put({"n": 2}), unencodable])
        assert worker.vitals().batch_age_s == 0
        failed = "model_error"
        raising = [put({"n": n, "do": "raise" if n in (1, 4) else "ok"}) for n in range(5)]
        batches: list[tuple[list[ItemRef], list[object]]] = [
            ([put({"n": n}) for n in range(5)], [0, 2, 4, 6, 8]),
            ([*raising, put("not what it takes")], [0, failed, 4, 6, failed, "invalid_input"]),
            ([put({"n": 1}), put({"n": 2, "do": "rows"}), put({"n": 3})], [2, "model_error", 6]),
            ([put({"n": 1, "do": "nan"}), put({"n": 2})], ["non_finite_output", 4]),
            ([put({"n": 1, "do": "shape"}), put({"n": 2})], ["model_error", 4]),
            ([put({"n": 1, "do": "leave"}), put({"n": 2})], ["model_error", 4]),
            ([put({"n": 1, "do": "quit early"}), put({"n": 2})], ["model_error", 4]),
            ([put({"n": 1, "do": "kill"}, timeout_s=-1), put({"n": 2})], ["deadline_exceeded", 4]),
            ([put({"n": 1}), put({"n": 2}, parameters=b'{"fail": 1}')], [2, "invalid_input"]),
        ]
        for items, expected in batches:
            assert answers(await worker.run(items)) == expected
        assert worker.vitals().num_batches == len(batches)
        for _ in range(50):
            pair = [[put({"n": n}) for n in range(size)] for size in (1, 7)]
            done = await asyncio.gather(*map(worker.run, pair))
            assert [len(answers(each)) for each in done] == [1, 7]
        batch = worker.run([put({"n": 1, "do": "sleep"})])
        await worker.stop(60)
        assert answers(await batch) == [2]
        assert is_gone(pid_of(worker))

    async def test_batch_that_does_not_fit_is_computed_in_parts(self, engine: Engine, put: Put):
        worker = await started(engine, options={"max_rows": 3}, max_batch_size=3)
        for _ in range(2):
            done = await worker.run([put({"n": n}) for n in range(7)])
            assert answers(done) == [0, 2, 4, 6, 8, 10, 12]
        await worker.stop(5)

    async def test_preparation_of_the_next_batch_overlaps_the_forward_pass(
        self, engine: Engine, put: Put, tmp_path: Path
    ):
        gate = tmp_path / "gate"
        worker = await started(engine, options={"gate": str(gate), "forward_s": 0.01})
        await worker.run([put({"n": 0})])  # it overlaps only what takes a while
        gate.touch()
        computed = worker.run([put({"n": 1, "do": "wait"})])
        prepared = worker.run([put({"n": 2, "do": "open early"})])  # for which the first one waits
        assert answers(await computed) == [2]
        assert answers(await prepared) == [4]
        await worker.stop(5)

    @pytest.mark.parametrize(
        ("act", "reason", "cause"),
        [
            ("device", "the device's context is lost", "device"),
            ("exit", "exit code 7", "exit"),
            ("kill early", "SIGKILL", "signal"),
            pytest.param("hang", "hung", "hang", marks=pytest.mark.measures),
            pytest.param("pretend", "answered nothing", "hang", marks=pytest.mark.measures),
            pytest.param(
                "spin early", "hung", "hang", marks=[pytest.mark.measures, pytest.mark.slow]
            ),
        ],
    )
    async def test_batch_that_ends_its_worker_is_lost_for_that_reason(
        self, engine: Engine, put: Put, act: str, reason: str, cause: str
    ):
        limits = {"batch_timeout_s": 2.0} if cause == "hang" else {}  # the canary has it too
        worker = await started(engine, **limits)
        with pytest.raises(WorkerLostError, match=reason) as lost:
            await worker.run([put({"n": 1, "do": act})])
        assert lost.value.started
        ending = await worker.wait()
        assert (ending.cause, ending.was_at_work) == (cause, True)
        if act == "device":
            assert ending.reason.endswith("CUDA error: device-side assert triggered")
        assert is_gone(pid_of(worker))

    async def test_death_fails_all_batches_and_names_those_that_had_begun(
        self, engine: Engine, put: Put
    ):
        worker = await started(engine, credit=3)
        batches = [worker.run([put({"n": 1, "do": "kill"})]), worker.run([put({"n": 2})])]
        lost = await asyncio.gather(*batches, return_exceptions=True)
        assert [type(error) for error in lost] == [WorkerLostError, WorkerLostError]
        assert lost[0].started  # type: ignore[union-attr]
        assert "SIGKILL" in (await worker.wait()).reason
        with pytest.raises(WorkerLostError):
            await worker.run([put({"n": 3})])

    @pytest.mark.measures
    async def test_death_while_idle_is_seen_at_once(self, engine: Engine):
        async def death() -> float:
            worker = await started(engine)
            began = time.monotonic()
            os.kill(pid_of(worker), signal.SIGKILL)
            assert "SIGKILL" in (await worker.wait()).reason
            return time.monotonic() - began

        assert await is_quick(death, 0.5)

    async def test_worker_that_will_not_stop_is_killed(self, engine: Engine, put: Put):
        worker = await started(engine)
        batch = worker.run([put({"n": 1, "do": "hang"})])
        await worker.stop(0.2)
        with pytest.raises(WorkerLostError):
            await batch
        assert is_gone(pid_of(worker))

    @pytest.mark.parametrize(
        ("load", "message"),
        [
            ("wrong", "these are not the weights"),
            ("raise", "no luck today"),
            ("exit", "exit code 3"),
            ("kill", "SIGKILL from outside"),
            ("hang", "load_timeout_s"),
            ("dumb", "hung: (a sample of its own|it was idle)"),  # a busy machine begins it late
        ],
    )
    async def test_only_a_wrong_model_is_a_permanent_failure_to_start(
        self, engine: Engine, load: str, message: str
    ):
        limits = {
            "hang": {"load_timeout_s": 0.5},
            "dumb": {"batch_timeout_s": 0.5},  # it never answers its first canary
        }
        with pytest.raises(WorkerStartError, match=message) as caught:
            await started(engine, options={"load": load}, **limits.get(load, {}))
        assert caught.value.permanent == (load == "wrong")
        assert ("in load\n" in caught.value.traceback) == (load == "raise")

    async def test_time_spent_loading_is_not_held_against_a_worker(self, engine: Engine):
        worker = await started(engine, options={"load_s": 2.0})
        await until(lambda: worker.vitals().last_beat_age_s < 1.5)
        await worker.stop(5)


class StreamingContract(EngineContract):
    """Also holds for engines of workers that answer in parts: those that are not split."""

    @pytest.mark.parametrize("model", ["JoiningStream", "CountingBatches"])
    async def test_streams_come_in_parts_and_end_when_they_are_dropped(
        self, engine: Engine, put: Put, model: str
    ):
        joins = model == "JoiningStream"
        worker = await started(engine, source=f"tests.streaming_model:{model}", max_batch_size=3)
        assert worker.ready.interface.streams
        assert worker.credit >= (3 if joins else 1)
        values = {"n": 7}, {"n": 100, "parts": 100_000, "delay_s": 0.01}, {"n": 9, "do": "early"}
        items = [put(value) for value in values]
        if joins:
            each = [StreamsOfBatch(worker, [item]) for item in items]
            short, endless, bad = [(streams, 0) for streams in each]
        else:
            each = [StreamsOfBatch(worker, items)]
            short, endless, bad = [(each[0], index) for index in range(3)]
        for streams, index in (short, bad):
            await until(lambda streams=streams, index=index: index in streams.ends)
        assert short[0].parts[short[1]] == [7, 8, 9]
        assert short[0].ends[short[1]] is None
        streams, index = endless
        await until(lambda: len(streams.parts[index]) > 3)
        streams.drop(index)
        num = len(streams.parts[index])
        outcomes = [outcome for every in each for outcome in (await every.future).outcomes]
        assert streams.parts[index] == [*range(100, 100 + num)], "nothing came after it"
        assert outcomes[0] == b""
        assert isinstance(outcomes[1], ItemError)
        assert isinstance(outcomes[2], ItemError)
        assert worker.vitals().batch_age_s == 0
        again = StreamsOfBatch(worker, [put({"n": 1, "parts": 2})])
        await worker.stop(60)  # it ends what it holds first
        assert (await again.future).outcomes == [b""]
        assert again.parts == {0: [1, 2]}

    async def test_the_generator_of_a_dropped_stream_is_closed(
        self, engine: Engine, put: Put, tmp_path: Path
    ):
        closed = tmp_path / "closed"
        options = {"closed": str(closed)}
        source = "tests.streaming_model:CountingStream"
        worker = await started(engine, source=source, options=options, max_batch_size=1)
        streams = StreamsOfBatch(worker, [put({"n": 100, "parts": 100_000, "delay_s": 0.01})])
        await until(lambda: streams.parts[0])
        streams.drop(0)
        await streams.future
        assert "100\n" in closed.read_text()
        await worker.stop(60)

    async def test_a_stream_is_lost_with_its_worker_after_all_parts_that_it_had_sent(
        self, engine: Engine, put: Put
    ):
        source = "tests.streaming_model:JoiningStream"
        worker = await started(engine, source=source, max_batch_size=3)
        other = StreamsOfBatch(worker, [put({"n": 50, "parts": 100_000})])
        await until(lambda: other.parts[0])  # else the worker might die before it has read of it
        dies = StreamsOfBatch(worker, [put({"n": 5, "parts": 9, "do": "kill", "at": 4})])
        for streams in (dies, other):
            with pytest.raises(WorkerLostError) as lost:
                await streams.future
            assert lost.value.started
        assert dies.parts == {0: [5, 6, 7, 8]}
        num = len(other.parts[0])
        assert other.parts == {0: [*range(50, 50 + num)]}

    @pytest.mark.measures
    async def test_a_stream_may_take_longer_than_a_batch_but_no_step_may(
        self, engine: Engine, put: Put
    ):
        source = "tests.streaming_model:CountingStream"
        worker = await started(engine, source=source, max_batch_size=1, batch_timeout_s=1.0)
        long = StreamsOfBatch(worker, [put({"n": 5, "parts": 15, "delay_s": 0.2})])
        await long.future
        assert long.parts == {0: [*range(5, 20)]}
        hangs = StreamsOfBatch(worker, [put({"n": 5, "parts": 9, "do": "hang", "at": 2})])
        with pytest.raises(WorkerLostError, match="hung"):
            await hangs.future
        assert hangs.parts == {0: [5, 6]}
