"""Jobs by either client: what is sent, and what is done when calls fail."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from inferpool.service.client import (
    AsyncClient,
    Client,
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    InvalidInputError,
    Prediction,
    ProtocolError,
    Retry,
    UnavailableError,
    UnsendableError,
)
from inferpool.service.client.errors import (
    IdempotencyError,
    JobCancelledError,
    OverQuotaError,
    UnknownJobError,
)
from inferpool.service.client.jobs import calls
from inferpool.service.client.options import JobPeriods
from tests.service.client.conftest import open_client, problem_of
from tests.service.client.fake_jobs import BrokenOff, FakeJobs, Lost

REFUSED = httpx.ConnectError("refused")
RESET = httpx.ReadError("reset")
FAST = Retry(backoff_s=0.001)
QUICK = JobPeriods(max_pause_s=0.01, piece_s=60.0)


@pytest.fixture
def fake() -> FakeJobs:
    return FakeJobs()


@pytest.fixture
def client(kind, fake):
    with open_client(kind, "http://host", transport=fake, retries=FAST) as client:
        client._calls.job_periods = QUICK
        yield client


def drawn_of(num: int, drawn: list):
    """Yield numbers with text, 64 KiB a piece, and tell which were drawn."""
    for each in range(num):
        drawn.append(each)
        yield {"n": each, "text": "x" * 70_000}


def sent_by(fake: FakeJobs) -> list:
    return [json.loads(line) for line in fake.bodies[-1].splitlines()]


def test_many_inputs_of_every_kind_are_lines_of_json(client, fake, tmp_path: Path):
    (tmp_path / "a.txt").write_text("é")
    (tmp_path / "b.json").write_text('{\n"k": 1\n}')
    (tmp_path / "c.bin").write_bytes(b"\xff\xd8")
    inputs = [
        "text", 1.5, [1, [2]], {"x": np.ones(2)}, np.zeros((1, 2), np.uint8), b"bytes",
        *sorted(tmp_path.iterdir()), Image.new("RGB", (1, 1)),
    ]  # fmt: skip
    job = client.submit(inputs)
    assert job.info.num_instances == len(inputs)
    *values, picture = sent_by(fake)
    assert values == [
        "text", 1.5, [1, [2]], {"x": [1.0, 1.0]}, [[0, 0]], {"b64": "Ynl0ZXM="},
        "é", {"k": 1}, {"b64": "/9g="},
    ]  # fmt: skip
    assert base64.b64decode(picture["b64"]).startswith(b"\x89PNG")
    (request,) = fake.requests
    assert request.headers["content-type"] == "application/jsonl"
    assert request.headers["transfer-encoding"] == "chunked"


def test_options_are_sent_and_a_job_may_have_an_id(client, fake):
    client.submit(
        [1], id="a b", model="m/x", webhook="http://h/?a=b", priority=2, parameters={"k": [1]},
        idempotency_key="mine", request_id="r1", traceparent="t",
    )  # fmt: skip
    (request,) = fake.requests
    assert (request.method, request.url.raw_path.partition(b"?")[0]) == ("PUT", b"/jobs/a%20b")
    params = {"model": "m/x", "webhook": "http://h/?a=b", "k": "[1]"}
    assert dict(request.url.params) == params
    sent = {"idempotency-key": "mine", "x-priority": "2", "x-request-id": "r1", "traceparent": "t"}
    assert sent.items() <= dict(request.headers).items()
    with pytest.raises(UnsendableError, match="'webhook'"):
        client.submit([1], parameters={"webhook": 1})
    with pytest.raises(TypeError, match="did you mean 'timeout_s'"):
        client.submit([1], timeout=1)


def test_files_of_instances_are_sent_as_they_are_and_one_input_as_by_predict(
    client, fake, tmp_path: Path
):
    lines = tmp_path / "in.jsonl"
    lines.write_text('"a"\nno json\n')
    tar = tmp_path / "in.tar"
    tar.write_bytes(b"")
    fake.failures = [problem_of(422, "invalid_input")] * 4
    for inputs in (lines, tar, "text", np.zeros((3, 2), np.float32)):
        with pytest.raises(InvalidInputError):
            client.submit(inputs)
    types = [request.headers["content-type"] for request in fake.requests]
    assert types == [
        "application/jsonl", "application/x-tar", "application/json", "application/octet-stream",
    ]  # fmt: skip
    assert fake.requests[0].headers["content-length"] == str(lines.stat().st_size)
    assert fake.requests[3].headers["x-tensor-shape"] == "3,2"
    with pytest.raises(UnsendableError, match="is a folder"):
        client.submit(tmp_path)


def test_a_retry_after_a_lost_answer_makes_no_second_job(client, fake):
    fake.failures = [Lost(RESET), REFUSED, problem_of(503, "unavailable", is_retryable=True)]
    job = client.submit([1, 2])
    assert len(fake.requests) == 4
    assert list(fake.jobs) == [job.id]
    assert len({request.headers["idempotency-key"] for request in fake.requests}) == 1
    other = client.submit([1, 2])
    assert other.id != job.id


def test_a_generator_is_drawn_once_however_often_it_is_sent(client, fake):
    drawn: list[int] = []
    fake.failures = [BrokenOff(3), BrokenOff(2), Lost(RESET)]
    job = client.submit(drawn_of(8, drawn))
    assert drawn == list(range(8))
    assert [each["n"] for each in sent_by(fake)] == list(range(8))
    assert len(fake.jobs) == 1
    assert job.info.num_instances == 8


def test_slow_inputs_are_all_drawn_before_they_are_sent_again(client, fake):
    seen = []

    def inputs():
        for each in drawn_of(5, []):
            seen.append(len(fake.requests))
            yield each

    fake.failures = [BrokenOff(2)]
    assert client.submit(inputs()).info.num_instances == 5
    assert (seen, len(fake.requests)) == ([1] * 5, 2)


def test_a_list_is_not_kept_but_drawn_again(client, fake, monkeypatch):
    monkeypatch.setattr("tempfile.SpooledTemporaryFile", None)
    fake.failures = [BrokenOff(2)]
    client.submit([{"n": each, "text": "x" * 70_000} for each in range(5)])
    assert [each["n"] for each in sent_by(fake)] == list(range(5))


def test_small_slow_inputs_are_sent_before_a_piece_is_full(client, fake):
    client._calls.job_periods = replace(QUICK, piece_s=0.0)
    fake.failures = [BrokenOff(3)]
    assert client.submit(iter([1, 2, 3, 4])).info.num_instances == 4
    assert len(fake.requests) == 2  # so the first body had three pieces


def test_inputs_are_drawn_no_faster_than_sent_and_kept_for_retries_only(kind, fake, monkeypatch):
    monkeypatch.setattr("tempfile.SpooledTemporaryFile", None)
    drawn: list[int] = []
    with open_client(kind, "http://host", transport=fake, retries=0) as client:
        client.submit(drawn_of(3, drawn))
        assert [each["n"] for each in sent_by(fake)] == drawn == [0, 1, 2]
        fake.failures = [BrokenOff(2)]
        with pytest.raises(ConnectError):
            client.submit(drawn_of(9, drawn))
    assert drawn == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("error", [OSError("the disk is gone"), httpx.ReadError("their download")])
def test_an_error_of_the_inputs_ends_the_call_without_a_job(client, fake, error):
    def inputs():
        yield "x" * 70_000
        raise error

    with pytest.raises((OSError, UnsendableError), match=str(error)):
        client.submit(inputs())
    assert len(fake.requests) == 1
    assert fake.jobs == {}


def test_an_input_that_cannot_be_sent_is_named(client, fake, tmp_path: Path):
    for wrong in (float("nan"), object(), tmp_path / "missing", tmp_path / "a.npy", b""):
        with pytest.raises(UnsendableError, match="input 1: ") as raised:
            client.submit(iter([1, wrong]))
        assert raised.value.index == 1
    assert fake.jobs == {}


@pytest.mark.parametrize(
    ("answer", "cls"),
    [
        (problem_of(422, "idempotency_mismatch"), IdempotencyError),
        (problem_of(429, "over_quota", is_retryable=True), OverQuotaError),
        (httpx.Response(202, text="<html>"), ProtocolError),
        (httpx.Response(202, json={"id": 1}), ProtocolError),
    ],
)
def test_refusals_that_last_are_raised_at_once(client, fake, answer, cls):
    fake.failures = [answer]
    with pytest.raises(cls):
        client.submit([1])
    assert len(fake.requests) == 1


async def test_inputs_of_an_async_generator_are_drawn_once_too(fake):
    async def inputs():
        for each in drawn_of(5, drawn):
            yield each

    drawn: list[int] = []
    fake.failures = [BrokenOff(2)]
    async with AsyncClient("http://host", transport=fake, retries=FAST) as client:
        job = await client.submit(inputs())
    assert (job.info.num_instances, drawn) == (5, list(range(5)))
    assert [each["n"] for each in sent_by(fake)] == list(range(5))
    with (
        Client("http://host", transport=fake) as blocking,
        pytest.raises(UnsendableError, match="use AsyncClient"),
    ):
        blocking.submit(inputs())


def test_waiting_goes_on_while_the_service_is_restarted(client, fake):
    job = client.submit(range(6))
    told = []
    starting = problem_of(503, "unavailable", is_retryable=True)
    fake.failures = [None, RESET, *[REFUSED] * 20, starting, httpx.Response(502), None]
    info = job.wait(on_progress=told.append)
    assert (info.state, info.num_done, info.is_over, job.state) == (
        "succeeded", 6, True, "succeeded",
    )  # fmt: skip
    assert [each.num_done for each in told] == [2, 4, 6]
    num_requests = len(fake.requests)
    assert job.wait(0.001) == info  # nobody is asked any more
    assert len(fake.requests) == num_requests


def test_waiting_ends_with_the_time_and_with_what_does_not_pass(client, fake):
    fake.pace = 0
    job = client.submit([1])
    with pytest.raises(DeadlineExceededError, match="running still, with 0 of 1 done"):
        job.wait(0.05)
    fake.failures = [REFUSED] * 1000
    with pytest.raises(ConnectError) as raised:
        job.wait(0.05)
    assert "may go on" in raised.value.__notes__[0]
    fake.failures = [problem_of(503, "given_up")]
    with pytest.raises(UnavailableError):
        job.wait()
    fake.failures = []
    fake.jobs.clear()
    with pytest.raises(UnknownJobError):
        job.wait()


def test_a_service_that_stays_away_is_given_up(client, fake):
    client._calls.job_periods = replace(QUICK, lost_s=0.05)
    job = client.submit([1])
    fake.failures = [REFUSED] * 1000
    with pytest.raises(ConnectError):
        job.wait()
    with pytest.raises(ConnectError):
        next(iter(job))


def test_predictions_come_in_order_while_the_job_runs(client, fake, monkeypatch):
    monkeypatch.setattr(calls, "_PAGE_LINES", 1)
    job = client.submit(range(9))
    fake.failures = [None, None, REFUSED, None, RESET, httpx.Response(504)]
    seen = []
    for each in job:
        assert isinstance(each, Prediction)
        seen.append((each.index, each.value))
        assert job.info.num_done > each.index
    assert seen == [(each, each) for each in range(9)]
    assert (each.version, each.model, each.request_id) == (1, "m", "r")
    assert job.state == "succeeded"
    counts = [int(each.url.params["count"]) for each in fake.of("GET", f"/jobs/{job.id}/result")]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert [each.value for each in job.result()] == list(range(9))
    assert [each.value for each in job.predictions(first=7)] == [7, 8]
    assert next(job.lines(first=8)) == b'{"index": 8, "version": 1, "prediction": 8}'


def test_error_of_an_instance_is_raised_or_stands_in_its_place(client):
    job = client.submit([0, "bad", 2])
    iterator = iter(job)
    assert next(iterator).value == 0
    with pytest.raises(InvalidInputError) as raised:
        next(iterator)
    assert raised.value.index == 1
    with pytest.raises(InvalidInputError):
        job.result()
    results = job.result(return_errors=True)
    assert [isinstance(each, InferpoolError) for each in results] == [False, True, False]
    assert [each.index for each in results] == [0, 1, 2]
    assert job.info.num_failed == 1


def test_predictions_end_with_the_time(client, fake):
    job = client.submit(range(4))
    fake.pace = 0
    with pytest.raises(DeadlineExceededError, match="0 of 4"):
        job.result(0.05)


def test_result_that_ends_early_is_no_result(client, fake):
    job = client.submit([1, 2])
    job.wait()
    fake.failures = [httpx.Response(200, content=b"")]
    with pytest.raises(ProtocolError, match="ends at 0"):
        job.result()
    fake.failures = [httpx.Response(200, content=b"<html>\n")]
    with pytest.raises(ProtocolError, match="<html>"):
        job.result()


def test_cancelling_keeps_what_was_computed(client, fake):
    job = client.submit(range(4))
    job.refresh()
    fake.pace = 0
    assert job.cancel().state == job.state == "cancelled"
    results = job.result(return_errors=True)
    assert [isinstance(each, JobCancelledError) for each in results] == [False, False, True, True]


def test_cancelling_again_after_a_lost_answer_does_not_delete(client, fake):
    fake.pace = 0
    job = client.submit(range(4))
    fake.failures = [None, Lost(RESET)]
    assert job.cancel().state == "cancelled"
    assert len(fake.of("DELETE")) == 1
    assert job.id in fake.jobs
    fake.failures = [None, REFUSED]
    assert job.cancel().state == "cancelled"  # it is over, so nothing is asked for
    assert len(fake.of("DELETE")) == 1


def test_a_job_that_ends_while_it_is_cancelled_counts_as_cancelled(client, fake):
    job = client.submit([1])
    fake.failures = [None, httpx.Response(204)]
    fake.pace = 0
    assert job.cancel().state == "cancelled"


@pytest.mark.parametrize(
    "failures", [[], [Lost(RESET)], [None, Lost(RESET)], [REFUSED], [Lost(RESET), Lost(RESET)]]
)
def test_deleting_cancels_first_and_survives_lost_answers(client, fake, failures):
    job = client.submit([1])
    fake.failures = list(failures)
    job.delete()
    assert fake.jobs == {}
    with pytest.raises(UnknownJobError):
        job.delete()


def test_jobs_are_found_again_and_listed_in_pages(client, fake, monkeypatch):
    monkeypatch.setattr(calls, "_PAGE_JOBS", 2)
    ids = [client.submit([each], id=f"j{each}").id for each in range(5)]
    assert client.job("j3").info.num_instances == 1
    assert [each.id for each in client.jobs()] == ids[::-1]
    assert len(fake.of("GET", "/jobs")) == 3
    assert [each.id for each in client.jobs(limit=3)] == ["j4", "j3", "j2"]
    assert fake.requests[-1].url.params["limit"] == "1"
    next(client.jobs(states=["queued", "running"]))
    assert fake.requests[-1].url.params.get_list("state") == ["queued", "running"]
    with pytest.raises(UnknownJobError):
        client.job("none")
