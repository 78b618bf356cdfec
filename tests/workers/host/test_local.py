import asyncio
import builtins
import contextlib
import os
import select
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from inferpool.models.base import Model
from inferpool.models.spec import Placement
from inferpool.models.speed.verdicts import VerdictStore
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.local_worker import batch_timeout_s
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemError
from tests.descriptors import num_open
from tests.hostile_model import ACTS
from tests.workers.contract import (
    HANGS_AFTER_S,
    PATIENT,
    StreamingContract,
    answers,
    hurried,
    is_gone,
    pid_of,
    started,
    suspend,
    until,
    until_begun,
)

HUNG = f"hung: a batch ran for more than {HANGS_AFTER_S} s"


class TestLocalEngine(StreamingContract):
    pass


def stacks_in(caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """Return the message and the trace of the only record that has stacks."""
    ((message, trace),) = [
        (record.getMessage(), record.exc_text or "")
        for record in caplog.records
        if "stacks" in record.getMessage() or "killing it" in record.getMessage()
    ]
    return message, trace


@pytest.mark.parametrize(
    ("act", "message", "where"),
    [
        pytest.param("spin", HUNG, "in _act", marks=pytest.mark.measures),
        pytest.param("hang early", HUNG, "in preprocess", marks=pytest.mark.measures),
        ("segfault", "left its stacks (SIGSEGV)", "in _act"),
    ],
)
async def test_stacks_of_a_hung_or_crashed_worker_are_logged_with_its_requests(
    engine: LocalEngine, put, caplog: pytest.LogCaptureFixture, act: str, message: str, where: str
):
    # A crash may take longer than a hang, if the kernel writes a core.
    worker = await (started if act == "segfault" else hurried)(engine)
    with pytest.raises(WorkerLostError):
        await worker.run([put({"n": n, "do": act}, request_id=f"call-{n}") for n in range(10)])
    logged, trace = stacks_in(caplog)
    assert f"m/0#0 {message}, at work on call-0, call-1," in logged
    assert "and 2 more" in logged
    assert where in trace
    assert ("Segmentation fault" if act == "segfault" else "Thread 0x") in trace


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
async def test_load_that_exits_fails_with_the_line_that_did(engine: LocalEngine, kind: str):
    with pytest.raises(WorkerStartError, match=rf"loading failed: {kind}.* \({__file__}:\d+\)"):
        await started(engine, source=f"{__name__}:LoadsNoMore", options={"kind": kind})


class LoadsNoMore(Model):
    """A model whose load raises what is no `Exception`."""

    def __init__(self, *, kind: str) -> None:
        self._kind = kind

    def load(self, placement: Placement) -> None:
        raise getattr(builtins, self._kind)


async def test_stacks_of_a_worker_that_hangs_while_it_loads_are_logged(
    engine: LocalEngine, caplog: pytest.LogCaptureFixture
):
    for timeout_s in (1, 10, 100):
        caplog.clear()
        with pytest.raises(WorkerStartError):
            await started(engine, options={"load": "hang"}, load_timeout_s=timeout_s)
        message, trace = stacks_in(caplog)
        assert f"not ready after {timeout_s} s" in message
        if "fault_model.py" in trace:  # a busy machine may take longer to get there
            break
    assert "in load\n" in trace


async def test_suspended_worker_is_killed_and_the_log_says_that_it_was_stopped(
    engine: LocalEngine, put, caplog: pytest.LogCaptureFixture
):
    worker = await hurried(engine)
    batch = worker.run([put({"n": 1, "do": "hang"})])
    await until_begun(worker)
    suspend(pid_of(worker))
    with pytest.raises(WorkerLostError, match="hung"):
        await batch
    message, trace = stacks_in(caplog)
    assert "it is stopped" in message
    assert trace == ""


async def test_idle_worker_that_does_not_begin_a_batch_has_less_time_than_one_that_computes(
    engine: LocalEngine, put
):
    worker = await started(engine, batch_timeout_s=600)
    worker.carrier.held.patience_s = 0.5
    suspend(pid_of(worker))
    with pytest.raises(WorkerLostError, match="took up no work") as lost:
        await worker.run([put({"n": 1})])
    assert not lost.value.started


@pytest.fixture
def watchful(arena: Arena, no_process_left: None) -> LocalEngine:
    """An engine that often sends canaries, and soon kills a worker that is to leave."""
    return LocalEngine(arena, replace(PATIENT, look_s=0.05, canary_every_s=0.2, retire_s=0.1))


async def test_idle_worker_that_is_stopped_is_found_by_a_canary(watchful: LocalEngine):
    worker = await started(watchful)
    worker.carrier.held.patience_s = 0.5
    suspend(pid_of(worker))
    ending = await worker.wait()
    assert ending.cause == "hang"
    assert not ending.was_at_work
    assert is_gone(pid_of(worker))


async def test_idle_worker_goes_on_proving_itself_and_no_canary_is_counted_as_work(
    watchful: LocalEngine, put
):
    worker = await started(watchful)
    for _ in range(3):
        proven_at = worker.carrier.proven_at
        await until(lambda before=proven_at: worker.carrier.proven_at > before)
    assert not worker.has_worked
    assert worker.vitals().num_batches == 0
    assert answers(await worker.run([put({"n": 4})])) == [8]
    assert worker.vitals().num_batches == 1
    await worker.stop(5)


async def test_worker_whose_model_has_gone_bad_is_replaced(watchful: LocalEngine, put):
    worker = await started(watchful)
    await worker.run([put({"n": 1, "do": "ill"})])
    ending = await worker.wait()
    assert ending.cause == "canary"
    assert "it failed on a sample of its own: the model's output" in ending.reason
    with pytest.raises(WorkerLostError) as lost:
        await worker.run([put({"n": 1})])
    assert not lost.value.started


async def test_good_answers_to_requests_keep_a_worker_whose_sample_fails_now_and_then(
    watchful: LocalEngine, put
):
    worker = await started(watchful)
    failed = BatchDone(1, [ItemError("model_error", "no")], 0.0, 0.0)
    for _ in range(3):
        worker.carrier.canary.record(failed)
        assert answers(await worker.run([put({"n": 1})])) == [2]
        assert not worker.carrier.canary.is_ill
    await worker.stop(5)


async def test_batch_is_not_blamed_for_an_end_that_others_cause(engine: LocalEngine, put):
    worker = await started(engine)
    batch = worker.run([put({"n": 1, "do": "hang"})])
    await until_begun(worker)
    await worker.stop(0.2)
    with pytest.raises(WorkerLostError) as lost:
        await batch
    assert not lost.value.started
    assert not (await worker.wait()).was_at_work


async def test_worker_that_is_to_be_replaced_may_take_the_time_of_a_batch(
    watchful: LocalEngine, put, tmp_path: Path
):
    gate = tmp_path / "gate"
    worker = await started(watchful, options={"gate": str(gate)})
    gate.touch()
    batch = worker.run([put({"n": 1, "do": "wait"})])
    await until_begun(worker)
    failed = BatchDone(1, [ItemError("model_error", "no")], 0.0, 0.0)
    for _ in range(2):
        worker.carrier.canary.record(failed)
    await asyncio.sleep(0.4)  # longer than it may take to leave
    gate.unlink()
    assert answers(await batch) == [2]
    assert (await worker.wait()).cause == "canary"


async def test_batch_that_is_computed_in_parts_reports_progress(engine: LocalEngine, put):
    worker = await started(engine, options={"max_rows": 1}, max_batch_size=1)
    assert not worker.lead.heartbeat.progressed_at
    assert answers(await worker.run([put({"n": n}) for n in range(4)])) == [0, 2, 4, 6]
    assert worker.lead.heartbeat.progressed_at
    await worker.stop(5)


async def test_batches_have_the_time_that_follows_from_the_warm_up(engine: LocalEngine):
    worker = await started(engine, batch_timeout_s=None)
    assert worker.ready.warmup_s
    assert worker.carrier.held.batch_timeout_s == batch_timeout_s(None, worker.ready.warmup_s)
    await worker.stop(5)


async def test_worker_killed_in_the_middle_of_an_answer_loses_that_batch_alone(
    engine: LocalEngine, put
):
    worker = await started(engine)
    batch = worker.run([put({"n": 1}, parameters=b'{"big": 1}')])
    # This blocks the loop, so that nothing is read; the answer is larger than the pipe.
    assert select.select([worker.lead.outbox.reader.fileno()], [], [], 60)[0]
    os.kill(pid_of(worker), signal.SIGKILL)
    with pytest.raises(WorkerLostError) as lost:
        await batch
    assert lost.value.started
    again = await started(engine)
    assert answers(await again.run([put({"n": 2})])) == [4]
    await again.stop(5)


async def test_whatever_a_model_returns_or_raises_fails_alone_and_is_cut(
    engine: LocalEngine, put, caplog: pytest.LogCaptureFixture
):
    worker = await started(engine, source="tests.hostile_model:HostileModel")
    for act, expected in ACTS.items():
        for wants_tensors in (False, True):
            refs = [put("ok"), put(act), put("ok")]
            done = await worker.run(
                [msgspec.structs.replace(ref, wants_tensors=wants_tensors) for ref in refs]
            )
            codes = [getattr(outcome, "code", "ok") for outcome in done.outcomes]
            assert codes == ["ok", expected[wants_tensors], "ok"], act
            for outcome in done.outcomes:
                assert not isinstance(outcome, ItemError) or len(outcome.message) < 1000
    await worker.stop(5)
    assert worker.vitals().num_batches == 0
    assert (await worker.wait()).reason == "stopped"
    sizes = [len(each.getMessage()) + len(each.exc_text or "") for each in caplog.records]
    assert max(sizes) < 50_000
    assert sum(sizes) < 2_000_000
    assert any("cannot be formatted" in each.getMessage() for each in caplog.records)


async def test_worker_gives_way_for_memory_before_the_front_end(engine: LocalEngine):
    worker = await started(engine)
    own, theirs = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ("self", pid_of(worker))
    )
    assert theirs == min(1000, own + 500)
    await worker.stop(5)


@pytest.mark.parametrize("num_decoders", [0, 2])
async def test_code_that_writes_to_every_descriptor_changes_nothing_but_its_own(
    engine: LocalEngine, arena: Arena, put, num_decoders: int
):
    other = await started(engine)
    source = "tests.scribbling_model:ScribblingModel"
    worker = await started(engine, source=source, decoders=num_decoders)
    await until(lambda: len(worker.vitals().decoders) == num_decoders)
    held, scribbled = put({"n": 21}), put({"n": 666})
    theirs = [other.outputs.memory.fileno(), other.lead.stacks._fileno()]
    before = hash(arena.memory.map[:]), [os.pread(fd, 1 << 16, 0) for fd in theirs]
    with contextlib.suppress(WorkerLostError):  # it has spoilt its own messages
        assert answers(await worker.run([scribbled])) == ["worker_crashed"]
    await worker.stop(60)
    assert before == (hash(arena.memory.map[:]), [os.pread(fd, 1 << 16, 0) for fd in theirs])
    again = await started(engine, source=source)  # what starts workers is whole, too
    for each in (other, again):
        assert answers(await each.run([held])) == [42]
        await each.stop(60)


async def test_workers_leave_no_descriptor_open(engine: LocalEngine, put):
    for _ in range(2):
        before = num_open()
        worker = await started(engine)
        with pytest.raises(WorkerLostError):
            await worker.run([put({"n": 1, "do": "kill"})])
        await worker.wait()
    assert num_open() <= before


class LoadsAPackage(Model):
    """A model whose load of a compiled package never ends."""

    def __init__(self, *, folder: str) -> None:
        self._store = VerdictStore(Path(folder))

    def load(self, placement: Placement) -> None:
        path = self._store.package("key", "compiled")
        assert path is not None
        with self._store.loading(path):
            signal.pause()


@pytest.mark.parametrize("is_asked", [True, False])
async def test_package_is_not_blamed_for_a_start_that_was_given_up(
    engine: LocalEngine, tmp_path: Path, is_asked: bool
):
    store = VerdictStore(tmp_path)
    store.make_package("key", "compiled", lambda draft: draft.write_bytes(b"good"))

    def loads() -> list[Path]:
        return list(tmp_path.glob("*-loading-*"))

    source, folder = f"{__name__}:LoadsAPackage", str(tmp_path)
    start = asyncio.create_task(
        started(engine, source=source, options={"folder": folder}, cache_dir=folder)
    )
    await until(loads)
    if is_asked:
        start.cancel()
    else:
        os.kill(int(loads()[0].name.split("-")[-2]), signal.SIGSEGV)
    with pytest.raises((asyncio.CancelledError, WorkerStartError)):
        await start
    assert (store.package("key", "compiled") is not None) == is_asked
    assert not loads()
