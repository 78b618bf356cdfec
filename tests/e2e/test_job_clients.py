"""Jobs from the clients to real services, through broken connections and restarts."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferpool.service.client import AsyncClient, Client, InferpoolError, InvalidInputError, Retry
from inferpool.service.client.errors import (
    IdempotencyError,
    SlowBodyError,
)
from tests.e2e.running import FAULTY, Running, running, until
from tests.ports import free_port

FAST = Retry(backoff_s=0.01)
HELD = {"n": 0, "do": "wait"}
"""An instance that is computed while there is no gate."""


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    """Return a file that holds instances up while it exists."""
    return tmp_path_factory.mktemp("gate") / "gate"


def settings_of(gate: Path, **more: object) -> dict[str, object]:
    options = {"gate": str(gate)}
    model = {"source": FAULTY, "replicas": 1, "max_batch_size": 1, "options": options}
    return {"models": {"m": model}, **more}


@pytest.fixture(scope="module")
def service(gate: Path) -> Iterator[Running]:
    with running(settings=settings_of(gate, body_gap_s=2.0)) as service:
        yield service


async def test_an_async_client_submits_waits_and_iterates(service):
    async def inputs():
        for each in range(100):
            await asyncio.sleep(0)
            yield {"n": each}

    async with AsyncClient(service.url) as client:
        job = await client.submit(inputs(), id="from-async")
        assert (await job.wait(60)).num_done == 100
        assert [each.value["twice"] async for each in job] == [2 * each for each in range(100)]
        assert [each.id async for each in client.jobs(limit=1)] == ["from-async"]
        again = await client.submit([{"n": each} for each in range(100)], id="from-async")
        assert again.state == "succeeded"  # the same job
        with pytest.raises(IdempotencyError):
            await client.submit([{"n": 1}], id="from-async")


def test_inputs_that_come_too_slowly_for_the_service_are_drawn_and_sent_again(service):
    told: list[InferpoolError] = []
    too_slow = 'requests_total{code="408",model="-"}'
    before = service.metric(too_slow)

    def inputs():
        yield {"n": 1}
        until(lambda: service.metric(too_slow) > before)
        yield {"n": 2}

    with Client(service.url, retries=FAST, on_retry=lambda error, _: told.append(error)) as client:
        results = client.submit(inputs()).result(60)
    assert [each.value["twice"] for each in results] == [2, 4]
    assert [type(error) for error in told] == [SlowBodyError]


def test_what_is_wrong_with_an_instance_stands_in_its_place(service, tmp_path: Path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"n": 1}\nno json\n{"n": "x"}\n{"n": 4}\n')
    with Client(service.url) as client:
        job = client.submit(file)
        results = job.result(60, return_errors=True)
        assert [getattr(each, "code", "") for each in results] == [
            "", "bad_request", "invalid_input", "",
        ]  # fmt: skip
        assert [each.index for each in results] == [0, 1, 2, 3]
        assert (job.info.num_failed, job.state) == (2, "succeeded")
        failed = client.submit([{"n": "x"}])
        assert failed.wait(60).state == "failed"
        with pytest.raises(InvalidInputError):
            failed.result()


def test_waiting_and_reading_survive_a_service_that_is_killed_and_started_again(tmp_path: Path):
    gate = tmp_path / "gate"
    settings = settings_of(gate, job_store=str(tmp_path / "store"))
    port = free_port()
    is_told = threading.Event()
    with ThreadPoolExecutor(2) as threads, Client(f"http://127.0.0.1:{port}") as client:
        with running(settings=settings, port=port) as service:
            gate.touch()  # it would hold up the start, too
            job = client.submit([*({"n": each} for each in range(256)), HELD])
            reader = client.job(job.id)
            waiting = threads.submit(job.wait, 120, lambda _: is_told.set())
            reading = threads.submit(lambda: [each.value["twice"] for each in reader])
            assert is_told.wait(60)
            service.signal(signal.SIGKILL)
            service.wait()
        gate.unlink()
        assert not waiting.done()
        with running(settings=settings, port=port):
            info = waiting.result(120)
            assert (info.state, info.num_done, info.num_failed) == ("succeeded", 257, 0)
            assert reading.result(60) == [2 * each for each in range(256)] + [0]
            lines = [json.loads(line)["index"] for line in job.lines()]
            assert lines == list(range(257))
