"""Calls for vectors of many texts, to a service with two front ends and a short queue."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import Running, running, until
from tests.text_model import floats_of, vector_of

PATH = "/v1/embeddings"
MAX_QUEUE = 64
MANY = [f"the text with the number {number}" for number in range(600)]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is there once a worker has died."""
    return tmp_path_factory.mktemp("texts") / "once"


@pytest.fixture(scope="module")
def service(once: Path) -> Iterator[Running]:
    model = {
        "source": "tests.text_model:TextFaultModel",
        "options": {"once": str(once), "gate": str(once.with_name("gate"))},
        "devices": "cpu",
        "replicas": 1,
        "max_batch_size": 8,
    }
    settings = {
        "models": {"texts": model},
        "front_ends": 2,
        "max_queue_length": MAX_QUEUE,
        "job_store": "none",
    }
    with running(settings=settings) as service:
        yield service


def vectors(service: Running, texts: list[str], *, tokens: int = 0, **arguments: Any) -> list[Any]:
    """The vectors of texts; `tokens` is the number of each, where it is not that of its words."""
    answer = service.post(PATH, json={"input": texts, "model": "texts", **arguments})
    assert answer.status_code == 200, answer.text
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(texts)))
    num_tokens = sum(tokens or len(text.split()) for text in texts)
    assert answer.json()["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return [each["embedding"] for each in answer.json()["data"]]


def test_a_call_with_far_more_texts_than_the_queue_has_room_for_is_answered(
    service: Running,
) -> None:
    expected = [vector_of(text) for text in MANY]
    for _ in range(4):  # a connection each, so that both front ends are asked
        found = vectors(service, MANY, encoding_format="base64")
        assert [floats_of(each) for each in found] == expected
    assert vectors(service, MANY[:100]) == expected[:100]


def test_a_body_of_megabytes_is_answered(service: Running) -> None:
    texts = [f"{'word ' * 300}{number}" for number in range(2048)]
    found = vectors(service, texts, encoding_format="base64", truncate=True, tokens=16)
    assert [floats_of(each) for each in found] == [vector_of(text) for text in texts]
    until(lambda: service.metric("arena_used_bytes") == 0)


def test_texts_that_a_dead_worker_had_are_computed_again(service: Running, once: Path) -> None:
    texts = [*MANY[:150], "kill 7", *MANY[150:300]]
    assert vectors(service, texts) == [vector_of(text) for text in texts]
    assert once.exists()
    service.wait_until_full()


def test_a_text_that_fails_ends_a_long_call_and_no_other(service: Running) -> None:
    answer = service.post(PATH, json={"input": [*MANY[:100], "raise 7", *MANY]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        500, "model_error", "server_error",
    )  # fmt: skip
    assert error["message"].startswith("input[100]: ")
    assert answer.headers["x-should-retry"] == "false"
    assert vectors(service, ["ok 7"]) == [vector_of("ok 7")]


def num_of(service: Running, outcome: str) -> float:
    return service.metric(f'instances_total{{model="texts",outcome="{outcome}"}}')


def num_in_flight(service: Running) -> float:
    return service.metric('instances_in_flight{model="texts"}')


def test_a_client_that_hangs_up_leaves_nothing_behind(service: Running, once: Path) -> None:
    gate = once.with_name("gate")
    gate.touch()
    before, cancelled = num_of(service, "accepted"), num_of(service, "cancelled")
    body = json.dumps({"input": ["wait 7", *MANY]}).encode()
    try:
        with socket.create_connection(service.address) as client:
            client.sendall(
                b"POST /v1/embeddings HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            until(lambda: num_in_flight(service) > 1)
        until(lambda: num_of(service, "cancelled") > cancelled)
    finally:
        gate.unlink()
    until(lambda: num_in_flight(service) == 0)
    assert num_of(service, "accepted") - before < 2 * MAX_QUEUE  # the others were never submitted
    assert vectors(service, ["ok 7"]) == [vector_of("ok 7")]


def test_the_deadline_counts_for_the_whole_call(service: Running, once: Path) -> None:
    gate = once.with_name("gate")
    gate.touch()
    started = time.monotonic()
    try:
        answer = service.post(
            PATH, json={"input": ["wait 7", *MANY]}, headers={"x-timeout-ms": "500"}
        )
    finally:
        gate.unlink()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - started < 30
    until(lambda: num_in_flight(service) == 0)
