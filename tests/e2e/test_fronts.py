"""Several front ends before one pool, in real processes: the same answers, and nothing lost."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import safetensors.numpy

from tests.e2e.load import Tally, ask_until
from tests.e2e.running import FAULTY, Running, faulty, running, until

KEY = "a-key-for-predictions"
KEYS = {"INFERPOOL_PREDICT_KEYS": KEY, "INFERPOOL_ADMIN_KEYS": "an-administrators-key"}
SETTINGS = {
    "max_body_bytes": 400_000,
    "max_instances_per_request": 8,
    "models": {"echo": {}, "m": {"source": FAULTY, "replicas": 1}},
}
BYTES = "content-type: application/octet-stream"
JSON = "content-type: application/json"


def request(line: str, *headers: str, body: bytes = b"", key: str = KEY) -> bytes:
    lines = [f"{line} HTTP/1.1", "host: h", f"x-api-key: {key}", *headers]
    if body or line.startswith(("POST", "PUT")):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


TENSORS = safetensors.numpy.save({"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
REQUESTS = {
    "bytes": request("POST /predict", BYTES, body=b"hello"),
    "model": request("POST /predict/echo", BYTES, body=b"hello"),
    "json": request("POST /predict/m", JSON, body=b'{"instances": [{"n": 2}, {"n": 3}]}'),
    "some fail": request(
        "POST /predict/m", JSON, body=b'{"instances": [{"n": 2}, {"n": 3, "do": "raise"}, 7]}'
    ),
    "fails": request("POST /predict/m", JSON, body=b'{"instances": [{"n": 3, "do": "raise"}]}'),
    "tensors": request("POST /predict", "content-type: application/safetensors", body=TENSORS),
    "want tensors": request(
        "POST /predict", BYTES, "accept: application/safetensors", body=b"hello"
    ),
    "large tensors": request(
        "POST /predict",
        "content-type: application/safetensors",
        "accept: application/safetensors",
        body=safetensors.numpy.save({"x": np.arange(40_000, dtype=np.float32)}),
    ),
    "parameters": request("POST /predict?top_k=3", BYTES, body=b"hello"),
    "own id": request("POST /predict", BYTES, "x-request-id: mine-7", body=b"hello"),
    "trace": request(
        "POST /predict", BYTES, f"traceparent: 00-{'1' * 32}-{'2' * 16}-01", body=b"hello"
    ),
    "escaped": request("POST /%70redict", BYTES, body=b"hello"),
    "priority": request("POST /predict", BYTES, "x-priority: 1", body=b"hello"),
    "bad priority": request("POST /predict", BYTES, "x-priority: 12", body=b"hello"),
    "bad json": request("POST /predict", JSON, body=b'{"instances": [1'),
    "no instances": request("POST /predict", JSON, body=b"{}"),
    "too many": request("POST /predict", JSON, body=b'{"instances": [%s1]}' % (b"1," * 20)),
    "too large": request("POST /predict", BYTES, body=b"x" * 500_000),
    "bad type": request("POST /predict", "content-type: text/rtf", body=b"hello"),
    "bad accept": request("POST /predict", BYTES, "accept: image/png", body=b"hello"),
    "no key": request("POST /predict", BYTES, body=b"hello", key="nobody-knows-this-key"),
    "no model": request("POST /predict/none", BYTES, body=b"hello"),
    "no time": request("POST /predict/m", JSON, "x-timeout-ms: 0", body=b'{"instances": [1]}'),
    "get": request("GET /predict"),
    "chunked": (
        request("POST /predict", BYTES, "transfer-encoding: chunked").replace(
            b"content-length: 0\r\n", b""
        )
        + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    ),
    "pipelined": request("POST /predict", BYTES, body=b"1") * 3,
    "pipelined with others": (
        request("GET /health/live") + request("POST /predict", BYTES, body=b"1")
    ),
    "expect": request("POST /predict", BYTES, "expect: 100-continue", body=b"hello"),
    "old": request("POST /predict", BYTES, body=b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "garbage": b"what is this?\r\n\r\n",
    "long url": request(f"GET /{'x' * 9000}"),
    "live": request("GET /health/live"),
    "head": request("HEAD /health/live"),
    "ready": request("GET /health/ready"),
    "docs": request("GET /docs"),
    "openapi": request("GET /openapi.json"),
    "an asset": request("GET /docs/assets/swagger-ui.css"),
    "root": request("GET /"),
    "nothing": request("GET /nothing%20there?x=1"),
    "wrong method": request("POST /health", body=b"what for"),
    "metrics without a key": request("GET /metrics", key=""),
    "admin without a key": request("POST /admin/drain"),
    "admin": request("GET /admin/log-level", key="an-administrators-key"),
    "bad change": request(
        "POST /admin/models", JSON, body=b'{"name": "a b"}', key="an-administrators-key"
    ),
    "large change": request(
        "POST /admin/models", JSON, body=b" " * 300_000, key="an-administrators-key"
    ),
    "change without a key": request("POST /admin/models", JSON, body=b'{"name": "a"}'),
}  # fmt: skip


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[Running, Running]]:
    """Two services of the same settings: one has one front end, the other two."""
    with (
        running("--front-ends", "1", settings=SETTINGS, env=KEYS) as one,
        running("--front-ends", "2", settings=SETTINGS, env=KEYS) as two,
    ):
        yield one, two


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    with running("--front-ends", "2", settings=faulty(replicas=2)) as service:
        yield service


def answer_to(service: Running, sent: bytes) -> bytes:
    """Return all that comes back until the connection is at rest or closed."""
    with socket.create_connection(service.address) as connection:
        connection.sendall(sent)
        answer = b""
        connection.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while not is_whole(answer, sent):
                data = connection.recv(1 << 16)
                if not data:
                    return answer + b"<closed>"
                answer += data
    return answer


def is_whole(answer: bytes, sent: bytes) -> bool:
    num_left = sent.count(b" HTTP/1.1\r\n")
    while num_left and (end := answer.find(b"\r\n\r\n")) >= 0:
        head, answer = answer[:end].lower(), answer[end + 4 :]
        if b" 100 continue" in head:
            continue
        found = re.search(rb"content-length: (\d+)", head)
        length = int(found[1]) if found and not sent.startswith(b"HEAD") else 0
        if len(answer) < length or b"connection: close" in head:
            return False
        answer = answer[length:]
        num_left -= 1
    return not num_left and bool(sent.count(b" HTTP/1.1\r\n"))


def assert_all_have_ids_and_times(answers: bytes) -> None:
    for head in re.findall(rb"HTTP/1\.1 (.*?)\r\n\r\n", answers, re.DOTALL):
        if head.startswith(b"100"):
            continue
        for line in (
            rb"\r\nx-request-id: [A-Za-z0-9._:-]+\r\n",
            rb"\r\ntraceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]\r\n",
            rb"\r\nserver-timing: [^\r]*total;dur=[0-9.]+\r\n",
        ):
            assert len(re.findall(line, head + b"\r\n")) == 1, (line, head)


def masked(answer: bytes) -> bytes:
    """Return an answer without what differs from one call to the next."""
    num_digits = sum(map(len, re.findall(rb'"pid":(\d+)', answer)))
    answer = re.sub(
        rb"(?<=content-length: )\d+", lambda found: b"%d" % (int(found[0]) - num_digits), answer
    )
    answer = re.sub(rb"(date|server-timing|traceparent): [^\r]*", rb"\1: _", answer)
    answer = re.sub(rb"last-modified: [^\r]*|etag: [^\r]*", b"_", answer)
    return re.sub(rb'\b[0-9a-f]{32}\b|"pid":\d+', b"_", answer)


@pytest.mark.parametrize("name", REQUESTS)
def test_two_front_ends_answer_as_one_does(services: tuple[Running, Running], name: str):
    one, two = services
    whole = answer_to(one, REQUESTS[name])
    assert_all_have_ids_and_times(whole)
    expected = masked(whole)
    for _ in range(2):  # each front end gets every second connection
        assert masked(answer_to(two, REQUESTS[name])).split(b"\r\n") == expected.split(b"\r\n")


def test_large_bodies_of_one_connection_are_each_read_into_a_slot_of_their_own(
    services: tuple[Running, Running],
):
    for service in services:
        with socket.create_connection(service.address) as connection:
            connection.settimeout(30)
            for number in range(8):
                begin = b"%08d" % number
                sent = request("POST /predict", BYTES, body=begin + bytes(300_000))
                connection.sendall(sent[:100_000])
                connection.sendall(sent[100_000:])
                answer = connection.recv(1 << 16)
                assert is_whole(answer, sent)
                assert b'{"num_bytes":300008,"head":"%b"}' % begin.hex().encode() in answer
        until(lambda service=service: not service.metric("inferpool_arena_used_bytes"))


def test_each_scrape_counts_the_calls_of_all_front_ends(two: Running):
    def count() -> float:
        num = two.metric('requests_total{code="200",model="m"}')
        assert two.metric('request_duration_seconds_count{model="m"}') >= num
        return num

    before = count()
    for n in range(20):
        two.predict({"n": n})
    until(lambda: count() == before + 20)  # a busy front end may tell its counts later


def test_health_lists_the_front_ends_and_their_connections(two: Running):
    fronts: list[dict] = []

    def counts() -> list[int]:
        """Return the connections per front end, with the one of this very question."""
        fronts[:] = two.get("/health").json()["fronts"]
        return [front["num_connections"] for front in fronts]

    until(lambda: sum(counts()) == 1)  # those of earlier tests have gone
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(httpx.Client(base_url=two.url))
            assert client.get("/health/live").status_code == 200
        until(lambda: sum(counts()) == 11 and max(counts()) == 6)
    assert [front["state"] for front in fronts] == ["up", "up"]
    pids = {front["pid"] for front in fronts}
    assert pids <= {child.pid for child in psutil.Process(two.process.pid).children()}
    assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def test_a_client_that_hangs_up_is_counted_as_cancelled(two: Running):
    cancelled = 'instances_total{model="m",outcome="cancelled"}'
    before = two.metric(cancelled)
    with socket.create_connection(two.address) as client:
        client.sendall(request("POST /predict", JSON, body=b'{"instances":[{"n":1,"do":"hang"}]}'))
        until(lambda: not is_at_rest(two))
    until(lambda: two.metric(cancelled) == before + 1)
    for pid in two.worker_pids():
        os.kill(pid, signal.SIGKILL)
    tally = asyncio.run(ask_until(two.url, lambda tally: tally.right > 20))
    assert (tally.wrong, tally.unanswered) == ([], [])


def is_at_rest(service: Running) -> bool:
    """Return whether nobody waits for an answer and no worker holds anything."""
    text = service.metrics()
    return 'instances_in_flight{model="m"} 0.0' in text and "arena_used_bytes 0.0" in text


def front_pids(service: Running) -> list[int]:
    try:
        fronts = service.get("/health").json()["fronts"]
    except httpx.TransportError:  # the front that was killed had the connection
        return []
    return [front["pid"] for front in fronts if front["state"] == "up"]


def num_pipes(service: Running) -> int:
    """Return how many ends of pipes the main process has open."""
    folder = Path(f"/proc/{service.process.pid}/fd")
    return sum(os.readlink(end).startswith("pipe:") for end in list(folder.iterdir()))


def test_a_front_end_that_is_killed_comes_back_and_its_calls_alone_are_lost(two: Running):
    until(lambda: is_at_rest(two) and len(two.worker_pids()) == 2)
    num_before = num_pipes(two)

    async def go() -> Tally:
        is_back, is_under_way = asyncio.Event(), asyncio.Event()

        def is_over(tally: Tally) -> bool:
            if tally.right > 20:
                is_under_way.set()
            return is_back.is_set()

        load = asyncio.ensure_future(ask_until(two.url, is_over))
        await asyncio.wait_for(is_under_way.wait(), 60)
        victim = (await asyncio.to_thread(front_pids, two))[0]
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(
            until, lambda: victim not in (pids := front_pids(two)) and len(pids) == 2
        )
        is_back.set()
        return await load

    tally = asyncio.run(go())
    assert tally.wrong == []
    assert len(tally.unanswered) < 16  # the other front end has lost none
    assert not tally.unconnected

    until(lambda: is_at_rest(two))
    until(lambda: num_pipes(two) <= num_before)


def states(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.slow
@pytest.mark.measures
def test_the_feed_shows_load_and_deaths_and_ends_when_the_service_does():
    with running("echo", "--replicas", "1", "--front-ends", "2") as service:
        with httpx.stream("GET", f"{service.url}/events", timeout=60) as feed:
            seen = states(feed)
            first = next(state for state in seen if state["models"])  # once a second is over
            assert first["models"]["echo"]["endings"] == []
            assert service.predict("x") == ["x"]
            os.kill(service.worker_pids()[0], signal.SIGKILL)
            answered = 0.0
            for state in seen:
                sample = state["models"]["echo"]
                answered += sample["requests_per_s"]
                if answered and sample["endings"]:
                    break
            assert sample["endings"][0]["cause"] == "signal"
            assert "SIGKILL" in sample["endings"][0]["reason"]
            service.signal(signal.SIGTERM)
            began = time.monotonic()
            *_, last = seen
            assert last["health"]["status"] == "draining"
            assert time.monotonic() - began < 15  # a drain waits longer for a call in flight
        assert service.wait() == 0
