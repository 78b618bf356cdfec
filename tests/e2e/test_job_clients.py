"""Jobs from the clients to real services, through broken connections and restarts."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferpool.service.client import AsyncClient, Client, InferpoolError, InvalidInputError, Retry
from inferpool.service.client.errors import (
    IdempotencyError,
    JobCancelledError,
    OverQuotaError,
    SlowBodyError,
    UnknownJobError,
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
    with running(settings=settings_of(gate, body_gap_s=0.5)) as service:
        yield service


@contextlib.contextmanager
def breaking(service: Running, num_broken: int, after: str) -> Iterator[tuple[str, list[str]]]:
    """Pass connections on, and break the first ones: after part of a body, or before an answer.

    Yields the URL to ask, and a list that gets a word for each connection.
    """
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(8) as threads:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                is_broken = len(told) < num_broken
                told.append("broken" if is_broken else "whole")
                server = socket.create_connection(service.address)
                threads.submit(_pass, client, server, 200_000 if is_broken and not answers else 0)
                threads.submit(_pass, server, client, 1 if is_broken and answers else 0)

        answers = after == "answer"
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", told
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _pass(source: socket.socket, target: socket.socket, most: int) -> None:
    """Pass bytes on until the end; close both connections when `most` have come, if that is not 0.

    What has come then is not passed on.
    """
    num_bytes = 0
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            num_bytes += len(piece)
            if most and num_bytes >= most:
                break
            target.sendall(piece)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def numbers(num: int, drawn: list[int]) -> Iterator[object]:
    """Yield instances of 1 KB each, and tell which were drawn."""
    for each in range(num):
        drawn.append(each)
        yield {"n": each, "text": "x" * 1000}


@pytest.mark.slow
def test_a_generator_of_a_thousand_is_read_while_it_is_computed_and_cancelled(service, gate):
    gate.touch()
    drawn: list[int] = []

    def inputs():
        yield from numbers(1000, drawn)
        yield from [HELD] * 10

    with Client(service.url) as client:
        job = client.submit(inputs())
        assert job.info.num_instances == 1010
        iterator = iter(job)
        seen = [next(iterator) for _ in range(960)]  # whole parts of 64
        assert job.state == "running"
        assert [each.index for each in seen] == list(range(960))
        assert [each.value["twice"] for each in seen] == [2 * each for each in range(960)]
        assert {each.version for each in seen} == {1}
        assert job.cancel().state == "cancelled"
        gate.unlink()
        results = job.result(return_errors=True)
        assert len(results) == 1010
        assert isinstance(results[-1], JobCancelledError)
        job.delete()
        with pytest.raises(UnknownJobError):
            client.job(job.id)


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


@pytest.mark.slow
@pytest.mark.parametrize("after", ["answer", "part of the body"])
@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_broken_connection_makes_no_second_job(service, kind, after):
    drawn: list[int] = []
    inputs = numbers(1000, drawn)
    with (
        breaking(service, 2, after) as (url, told),
        Client(url, retries=FAST) as client,
        Client(service.url) as direct,
    ):
        before = {job.id for job in direct.jobs()}
        job = client.submit(inputs if kind == "generator" else list(inputs))
        assert told == ["broken", "broken", "whole"]
        assert {job.id for job in direct.jobs()} - before == {job.id}
        results = job.result(60)
    assert [each.value["twice"] for each in results] == [2 * each for each in range(1000)]
    assert drawn == list(range(1000))


def test_inputs_that_come_too_slowly_for_the_service_are_drawn_and_sent_again(service):
    told: list[InferpoolError] = []

    def inputs():
        yield {"n": 1}
        until(lambda: service.metric('requests_total{code="408",model="-"}') == 1)
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


def test_a_quota_is_told_at_once_and_deleting_makes_room(tmp_path: Path):
    settings = {"models": {"echo": {"source": "echo", "replicas": 1}}, "max_jobs": 2}
    with running(settings=settings) as service, Client(service.url) as client:
        jobs = [client.submit([each]) for each in range(2)]
        with pytest.raises(OverQuotaError) as raised:
            client.submit([3])
        assert raised.value.num_attempts == 1
        jobs[0].wait(60)
        jobs[0].delete()
        assert client.submit([3]).result(60)[0].value == 3
