"""Both clients read streams of a real service, and of servers that break off."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from inferpool.service.client import (
    ConnectError,
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    NotAcceptableError,
    ProtocolError,
)
from tests.service.client.conftest import open_client

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n"
PART = b'event: part\ndata: {"instance":0,"part":"%b"}\n\n'


def test_parts_come_one_by_one(client):
    for _ in range(2):
        parts = client.stream({"n": 4, "parts": 3}, model="counts")
        assert next(parts) == 4
        assert list(parts) == [5, 6]


def test_a_stream_may_be_left_early(client, service):
    for part in client.stream({"n": 1, "parts": 10_000}, model="counts"):
        assert part == 1
        break
    del part
    assert list(client.stream({"n": 2, "parts": 1}, model="counts")) == [2]


def test_a_failure_is_raised_after_the_parts_before_it(client):
    parts = client.stream({"n": 7, "parts": 3, "do": "raise", "at": 2}, model="counts")
    assert [next(parts), next(parts)] == [7, 8]
    with pytest.raises(ModelFailedError) as raised:
        next(parts)
    assert raised.value.status == 500
    assert raised.value.request_id


@pytest.mark.parametrize(
    ("value", "model", "error"),
    [
        ({"n": "no"}, "counts", InvalidInputError),
        ({"n": 1, "do": "raise", "at": 0}, "counts", ModelFailedError),
        ("hello", "echo", NotAcceptableError),
    ],
)
def test_a_failure_before_the_first_part_is_raised(client, value, model, error):
    with pytest.raises(error):
        next(client.stream(value, model=model))


def test_the_first_part_has_a_deadline(client):
    parts = client.stream({"n": 1, "delay_s": 5}, model="counts", timeout_s=0.5)
    with pytest.raises(DeadlineExceededError):
        next(parts)


def test_a_prediction_collects_all_parts(client):
    assert client.predict({"n": 4, "parts": 3}, model="counts").value == [4, 5, 6]
    broken = client.predict({"n": 7, "parts": 3, "do": "raise", "at": 2}, model="counts")
    (error,) = broken.errors
    assert isinstance(error, ModelFailedError)
    assert list(error.parts) == [7, 8]
    with pytest.raises(ModelFailedError):
        assert broken.value


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that gives one answer and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "parts", "error"),
    [
        (HEAD % b"text/event-stream" + PART % b"a" + PART[:20], ["a"], ConnectError),
        (HEAD % b"text/event-stream" + PART % b"a", ["a"], ConnectError),
        (HEAD % b"text/event-stream" + b"event: part\ndata: {\n\n", [], ProtocolError),
        (HEAD % b"application/json" + b'{"predictions":[1]}', [], ProtocolError),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(kind, answer, parts, error):
    found = []
    with answering(answer) as url, open_client(kind, url, retries=0) as client:
        stream = client.stream("x")
        with pytest.raises(error):
            found.extend(stream)
    assert found == parts
