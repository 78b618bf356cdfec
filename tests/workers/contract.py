"""What every engine must do. A test module of an engine subclasses `EngineContract`.

It provides `engine` and `put`, a fixture that stores a payload and returns its `ItemRef`.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable

import msgspec
import psutil
import pytest

from inferpool.models.spec import Placement, TensorHeader
from inferpool.workers.config import ModelConfig, WorkerConfig
from inferpool.workers.errors import WorkerLostError, WorkerStartError
from inferpool.workers.host.engine import Engine, WorkerHandle, WorkerId
from inferpool.workers.messages import BatchDone, ItemError, ItemRef

Put = Callable[..., ItemRef]


def config_of(source: str = "tests.fault_model:FaultModel", **changes: object) -> WorkerConfig:
    options = changes.pop("options", {})
    assert isinstance(options, dict)
    model = ModelConfig(name="m", source=source, options=options)
    base: dict[str, object] = {"batch_timeout_s": 20.0, "load_timeout_s": 60.0}
    return WorkerConfig(
        model=model,
        placement=Placement(devices=("cpu",)),
        **{**base, **changes},  # type: ignore[arg-type]
    )


async def started(engine: Engine, **changes: object) -> WorkerHandle:
    return await engine.start(WorkerId(model="m", slot=0), config_of(**changes), lambda stage: None)


def answers(done: BatchDone) -> list[object]:
    return [
        outcome.code if isinstance(outcome, ItemError) else json.loads(outcome)["twice"]  # type: ignore[arg-type]
        for outcome in done.outcomes
    ]


def pid_of(handle: WorkerHandle) -> int:
    return handle.ready.pid


def suspend(pid: int) -> None:
    """Stop a process, and see it stopped: the signal may need a while on a busy machine."""
    process = psutil.Process(pid)
    process.suspend()
    until = time.monotonic() + 20
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.001)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def is_quick(measure: Callable[[], Awaitable[float]], limit_s: float) -> bool:
    """Whether what is measured takes less than that in one of a few times: machines pause."""
    for _ in range(5):
        if await measure() < limit_s:
            return True
    return False


class EngineContract:
    """The tests; run as coroutines by the `run` fixture."""

    def test_batch_comes_back_in_order(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            done = await worker.run([put({"n": n}) for n in range(5)])
            assert answers(done) == [0, 2, 4, 6, 8]
            assert worker.vitals().num_batches == 1
            await worker.stop(5)
            assert is_gone(pid_of(worker))

        run(go())

    def test_ready_says_what_it_runs_on_and_what_the_model_yields(self, engine, put, run: "Run"):
        async def go():
            stages: list[str] = []
            worker = await engine.start(WorkerId(model="m", slot=0), config_of(), stages.append)
            assert worker.ready.device == "cpu"
            assert worker.ready.example == b'{"n": 0}'
            assert [spec.name for spec in worker.ready.outputs] == ["twice", "share"]
            assert stages[-2].startswith("loading tests.")
            assert stages[-1] == "warming up"
            await worker.stop(5)

        run(go())

    def test_batch_that_cannot_be_said_is_refused_and_not_held(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine)
            long = TensorHeader("x", "uint8", (10**30, 0), 0)
            unsayable = msgspec.structs.replace(put({"n": 1}), headers=(long,))
            for _ in range(worker.credit + 1):
                with pytest.raises(OverflowError):
                    worker.run([put({"n": 2}), unsayable])
            assert worker.vitals().batch_age_s == 0
            assert answers(await worker.run([put({"n": 1})])) == [2]
            await worker.stop(5)

        run(go())

    def test_only_the_items_at_fault_fail(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            refs = [put({"n": n, "do": "raise" if n in (2, 5) else "ok"}) for n in range(8)]
            refs[7] = put("not what it takes")
            done = await worker.run(refs)
            assert answers(done) == [0, 2, "model_error", 6, 8, "model_error", 12, "invalid_input"]
            await worker.stop(5)

        run(go())

    def test_too_few_rows_fail_the_item_that_causes_it(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            done = await worker.run([put({"n": 1}), put({"n": 2, "do": "rows"}), put({"n": 3})])
            assert answers(done) == [2, "model_error", 6]
            await worker.stop(5)

        run(go())

    @pytest.mark.parametrize(
        ("act", "code"), [("nan", "non_finite_output"), ("shape", "model_error")]
    )
    def test_output_that_breaks_a_promise_fails_alone(
        self, engine: Engine, put: Put, run: "Run", act: str, code: str
    ):
        async def go():
            worker = await started(engine)
            refs = [put({"n": n, "do": act if n == 3 else "ok"}) for n in range(6)]
            assert answers(await worker.run(refs)) == [0, 2, 4, code, 8, 10]
            await worker.stop(5)

        run(go())

    def test_batch_that_does_not_fit_is_computed_in_parts(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine, options={"max_rows": 3}, max_batch_size=3)
            for _ in range(2):
                done = await worker.run([put({"n": n}) for n in range(7)])
                assert answers(done) == [0, 2, 4, 6, 8, 10, 12]
            await worker.stop(5)

        run(go())

    def test_lost_device_ends_the_incarnation_and_is_given_as_the_reason(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine)
            with pytest.raises(WorkerLostError, match="the device's context is lost") as lost:
                await worker.run([put({"n": 1, "do": "device"})])
            assert lost.value.started
            ending = await worker.wait()
            assert ending.cause == "device"
            assert ending.reason.endswith("CUDA error: device-side assert triggered")

        run(go())

    def test_worker_has_proved_itself_before_it_counts_as_started(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            with pytest.raises(WorkerStartError, match="hung: a sample of its own"):
                await started(engine, options={"load": "dumb"}, batch_timeout_s=0.5)
            worker = await started(engine)
            assert 0 < worker.vitals().last_answer_age_s < 5
            assert not worker.has_worked
            assert worker.vitals().num_batches == 0
            await worker.stop(5)

        run(go())

    def test_late_items_are_not_computed(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            late = put({"n": 1, "do": "kill"}, deadline=time.monotonic() - 1)
            assert answers(await worker.run([late, put({"n": 2})])) == ["deadline_exceeded", 4]
            await worker.stop(5)

        run(go())

    def test_parameters_reach_the_model(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            refs = [put({"n": 1}), put({"n": 2}, parameters=b'{"fail": 1}')]
            assert answers(await worker.run(refs)) == [2, "invalid_input"]
            await worker.stop(5)

        run(go())

    def test_preparation_of_the_next_batch_overlaps_the_forward_pass(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine, options={"forward_s": 0.2, "prepare_s": 0.2})
            await worker.run([put({"n": 0})])

            async def four_batches() -> float:
                began = time.monotonic()
                await asyncio.gather(*(worker.run([put({"n": n})]) for n in range(2)))
                await asyncio.gather(*(worker.run([put({"n": n})]) for n in range(2)))
                return time.monotonic() - began

            assert await is_quick(four_batches, 1.55)  # 4 x (0.2 + 0.2) one after the other
            await worker.stop(5)

        run(go())

    def test_death_fails_what_was_held_and_says_what_had_begun(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine, credit=3)
            batches = [
                worker.run([put({"n": 1, "do": "kill"})]),
                worker.run([put({"n": 2})]),
            ]
            lost = await asyncio.gather(*batches, return_exceptions=True)
            assert [type(error) for error in lost] == [WorkerLostError, WorkerLostError]
            assert lost[0].started  # type: ignore[union-attr]
            assert "SIGKILL" in (await worker.wait()).reason
            with pytest.raises(WorkerLostError):
                await worker.run([put({"n": 3})])

        run(go())

    def test_death_while_idle_is_seen_at_once(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            async def death() -> float:
                worker = await started(engine)
                began = time.monotonic()
                os.kill(pid_of(worker), signal.SIGKILL)
                assert "SIGKILL" in (await worker.wait()).reason
                return time.monotonic() - began

            assert await is_quick(death, 0.5)

        run(go())

    def test_exit_code_is_told(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            with pytest.raises(WorkerLostError, match="exit code 7"):
                await worker.run([put({"n": 1, "do": "exit"})])

        run(go())

    def test_hung_worker_is_killed_after_the_batch_timeout(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            async def end() -> float:
                worker = await started(engine, batch_timeout_s=0.5)
                began = time.monotonic()
                with pytest.raises(WorkerLostError, match="hung"):
                    await worker.run([put({"n": 1, "do": "hang"})])
                took_s = time.monotonic() - began
                assert took_s > 0.4
                assert is_gone(pid_of(worker))
                return took_s

            assert await is_quick(end, 1.5)

        run(go())

    @pytest.mark.parametrize("act", ["hang early", "spin early", "spin"])
    def test_worker_that_hangs_anywhere_is_killed(
        self, engine: Engine, put: Put, run: "Run", act: str
    ):
        async def go():
            worker = await started(engine, batch_timeout_s=0.5)
            with pytest.raises(WorkerLostError, match="hung"):
                await worker.run([put({"n": 1, "do": act})])
            assert (await worker.wait()).cause == "hang"
            assert is_gone(pid_of(worker))

        run(go())

    def test_death_while_an_input_is_prepared_is_laid_to_its_batch(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine)
            with pytest.raises(WorkerLostError, match="SIGKILL") as lost:
                await worker.run([put({"n": 1, "do": "kill early"})])
            assert lost.value.started
            assert (await worker.wait()).was_at_work

        run(go())

    def test_stop_waits_for_the_batch_that_runs(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            batch = worker.run([put({"n": 1, "do": "sleep"})])
            await worker.stop(5)
            assert answers(await batch) == [2]

        run(go())

    def test_worker_that_will_not_stop_is_killed(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            batch = worker.run([put({"n": 1, "do": "hang"})])
            await asyncio.sleep(0.2)
            await worker.stop(0.2)
            with pytest.raises(WorkerLostError):
                await batch
            assert is_gone(pid_of(worker))

        run(go())

    def test_wrong_model_is_a_permanent_failure(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            with pytest.raises(WorkerStartError, match="these are not the weights") as caught:
                await started(engine, options={"load": "wrong"})
            assert caught.value.permanent

        run(go())

    @pytest.mark.parametrize(
        ("load", "message"),
        [("raise", "no luck today"), ("exit", "exit code 3"), ("kill", "SIGKILL from outside")],
    )
    def test_bad_luck_while_loading_is_not_permanent(
        self, engine: Engine, put: Put, run: "Run", load: str, message: str
    ):
        async def go():
            with pytest.raises(WorkerStartError, match=message) as caught:
                await started(engine, options={"load": load})
            assert not caught.value.permanent
            assert ("in load\n" in caught.value.traceback) == (load == "raise")

        run(go())

    def test_load_that_hangs_is_given_up(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            with pytest.raises(WorkerStartError, match="load_timeout_s"):
                await started(engine, options={"load": "hang"}, load_timeout_s=0.5)

        run(go())

    def test_sigterm_and_sigint_from_elsewhere_are_ignored(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            worker = await started(engine)
            os.kill(pid_of(worker), signal.SIGTERM)
            os.kill(pid_of(worker), signal.SIGINT)
            assert answers(await worker.run([put({"n": 4})])) == [8]
            await worker.stop(5)

        run(go())

    def test_exit_of_the_model_while_the_next_batch_is_awaited_is_seen_at_once(
        self, engine: Engine, put: Put, run: "Run"
    ):
        async def go():
            async def end() -> float:
                worker = await started(engine, options={"forward_s": 0.05})
                await worker.run([put({"n": 0})])
                began = time.monotonic()
                with pytest.raises(WorkerLostError, match="exit code 9"):
                    await worker.run([put({"n": 1, "do": "leave"})])
                return time.monotonic() - began

            assert await is_quick(end, 1)

        run(go())

    def test_time_spent_loading_is_not_held_against_a_worker(self, engine: Engine, run: "Run"):
        async def go():
            worker = await started(engine, options={"load_s": 2.0})
            assert worker.vitals().last_beat_age_s < 1.5
            await worker.stop(5)

        run(go())

    def test_many_batches_in_flight_all_come_back(self, engine: Engine, put: Put, run: "Run"):
        async def go():
            worker = await started(engine)
            for _ in range(50):
                batches = [[put({"n": n}) for n in range(size)] for size in (1, 7)]
                done = await asyncio.gather(*map(worker.run, batches))
                assert [len(answers(each)) for each in done] == [1, 7]
            await worker.stop(5)

        run(go())


Run = Callable[[Awaitable[None]], None]
