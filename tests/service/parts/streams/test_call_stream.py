"""Answers in parts, over real sockets: on our own server, under ASGI."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inferpool.models.spec import Interface
from inferpool.service.errors import (
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    UnavailableError,
)
from tests.service.api.fakes import FakeModel, endpoint, post, result
from tests.service.api.server import PredictServer, RawClient, Way, serve, until

STREAMS = Interface(streams=True)
WAYS = ("asgi", "protocol")
TWO = b'{"instances": [1, 2]}'


def ask(accept: str = "text/event-stream", body: bytes = b"x", version: str = "1.1") -> bytes:
    kind = "application/json" if body == TWO else "image/png"
    head = (
        f"POST /predict HTTP/{version}\r\nhost: h\r\naccept: {accept}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class StreamTeller:
    """A model that gives the parts that a test says, when it says so."""

    def __init__(self, server: PredictServer) -> None:
        self.model = server.model

    async def begun(self, num: int = 1) -> None:
        await until(lambda: len(self.model.futures) >= num)

    def give(self, *parts: object, index: int = 0) -> None:
        reader = self.model.readers[index]
        assert reader is not None
        reader.on_parts([json.dumps(part).encode() for part in parts])

    def end(self, index: int = 0, error: Exception | None = None) -> None:
        if error is None:
            self.model.futures[index].set_result(result(b"[]"))
        else:
            self.model.futures[index].set_exception(error)


@contextlib.asynccontextmanager
async def streaming(
    way: Way = "protocol", **options: Any
) -> AsyncIterator[tuple[PredictServer, StreamTeller]]:
    model = FakeModel(lambda _: None, interface=STREAMS)
    async with serve(model, way, **options) as server:
        yield server, StreamTeller(server)


async def read_chunk(client: RawClient) -> bytes:
    size = int(await client.reader.readuntil(b"\r\n"), 16)
    return (await client.reader.readexactly(size + 2))[:-2]


async def read_rest(client: RawClient) -> bytes:
    """The chunks until the answer's end, as one."""
    found = b""
    while chunk := await read_chunk(client):
        found += chunk
    return found


def events_in(text: bytes) -> list[tuple[str, Any]]:
    found = []
    for each in text.decode().split("\n\n")[:-1]:
        name, data = each.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_each_part_is_sent_as_it_comes_and_the_connection_goes_on(way: Way) -> None:
    async with streaming(way) as (server, teller), server.connect() as client:
        for num in range(2):
            client.send(ask())
            await teller.begun(num + 1)
            teller.give("a", index=num)
            status, headers = await client.read_head()
            assert (status, headers["content-type"]) == (200, "text/event-stream")
            assert headers["x-accel-buffering"] == "no"
            assert "no-store" in headers["cache-control"]
            assert headers["transfer-encoding"] == "chunked"
            assert len(headers["x-request-id"]) == 32
            part = {"instance": 0, "part": "a"}
            assert events_in(await read_chunk(client)) == [("part", part)]
            teller.give({"b": [1]}, None, index=num)
            *parts, done = events_in(await read_chunk(client))
            assert [data["part"] for _, data in (*parts, done)] == [{"b": [1]}, None]
            teller.end(num)
            ((name, data),) = events_in(await read_rest(client))
            assert (name, data["instance"], data["num_parts"]) == ("done", 0, 3)
            assert set(data["timing"]) == {"queue_ms", "preprocess_ms", "inference_ms"}
        assert server.statuses == [200, 200]


@pytest.mark.parametrize("accept", ["application/jsonl", "application/x-ndjson"])
async def test_lines_of_json(accept: str) -> None:
    async with streaming() as (server, teller), server.connect() as client:
        client.send(ask(accept))
        await teller.begun()
        teller.give("a", "b")
        _, headers = await client.read_head()
        assert headers["content-type"] == "application/jsonl"
        teller.end(error=ModelFailedError("no more"))
        *lines, last = map(json.loads, (await read_rest(client)).splitlines())
        assert lines == [{"instance": 0, "part": "a"}, {"instance": 0, "part": "b"}]
        assert (last["instance"], last["error"]["code"]) == (0, "model_error")
        assert last["error"]["parts_sent"] == 2


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_after_some_parts_is_an_event(way: Way) -> None:
    async with streaming(way) as (server, teller), server.connect() as client:
        client.send(ask())
        await teller.begun()
        teller.give(1, 2)
        teller.end(error=ModelFailedError("it broke"))
        assert (await client.read_head())[0] == 200
        *_, (name, data) = events_in(await read_rest(client))
        assert (name, data["code"], data["detail"]) == ("error", "model_error", "it broke")
        assert (data["index"], data["parts_sent"], data["status"]) == (0, 2, 500)
        assert data["instance"] == "/predict" or data["instance"] == "/mounted/predict"
        assert server.statuses == [500]
        client.send(ask())  # the connection serves on
        await teller.begun(2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("error", "status"),
    [(ModelFailedError("no"), 500), (OverloadedError("busy"), 429), (UnavailableError("-"), 503)],
)
async def test_a_failure_before_the_first_part_has_its_status(
    way: Way, error: Exception, status: int
) -> None:
    async with streaming(way) as (server, teller), server.connect() as client:
        client.send(ask())
        await teller.begun()
        teller.end(error=error)
        answer = await client.read_answer()
        assert answer.status == answer.json["status"] == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert server.statuses == [status]


async def test_a_refused_instance_has_its_status() -> None:
    model = FakeModel(interface=STREAMS, refusals=[OverloadedError("busy", retry_after_s=3)])
    async with serve(model) as server:
        answer = await server.answer_to(ask())
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")


async def test_instances_of_one_call_are_told_apart() -> None:
    async with streaming() as (server, teller), server.connect() as client:
        client.send(ask(body=TWO))
        await teller.begun(2)
        teller.end(1, ModelFailedError("the second"))
        teller.give("a")
        assert (await client.read_head())[0] == 200
        teller.end(0)
        part, error, done = events_in(await read_rest(client))
        assert (error[0], error[1]["index"]) == ("error", 1)
        assert part == ("part", {"instance": 0, "part": "a"})
        assert (done[0], done[1]["instance"], done[1]["num_parts"]) == ("done", 0, 1)


async def test_if_all_instances_fail_before_a_part_the_answer_is_a_problem() -> None:
    async with streaming() as (server, teller), server.connect() as client:
        client.send(ask(body=TWO))
        await teller.begun(2)
        for index in range(2):
            teller.end(index, InvalidInputError("instance: no"))
        answer = await client.read_answer()
        assert answer.status == 422
        assert [each["index"] for each in answer.json["errors"]] == [0, 1]


async def test_a_stream_may_have_no_parts() -> None:
    async with streaming() as (server, teller):
        for accept, num in (("text/event-stream", 1), ("application/jsonl", 0)):
            async with server.connect() as client:
                client.send(ask(accept))
                await teller.begun(len(teller.model.futures) + 1)
                teller.end(-1)
                assert (await client.read_head())[0] == 200
                assert len((await read_rest(client)).splitlines()) == 3 * num


async def test_http_1_0_gets_parts_until_the_connection_closes() -> None:
    async with streaming() as (server, teller):
        for num in range(2):
            async with server.connect() as client:
                client.send(
                    ask(version="1.0").replace(b"\r\n\r\n", b"\r\nconnection: keep-alive\r\n\r\n")
                )
                await teller.begun(num + 1)
                teller.give("a", index=num)
                teller.end(num)
                _, headers = await client.read_head()
                assert headers["connection"] == "close"
                assert "transfer-encoding" not in headers
                assert [name for name, _ in events_in(await client.reader.read())] == [
                    "part",
                    "done",
                ]


async def test_calls_in_line_wait_for_the_end_of_a_stream() -> None:
    async with streaming() as (server, teller), server.connect() as client:
        client.send(ask() + ask())
        await teller.begun()
        teller.give("first")
        await client.read_head()
        teller.end()
        await read_rest(client)
        await teller.begun(2)
        teller.give("second", index=1)
        teller.end(1)
        await client.read_head()
        assert b"second" in await read_rest(client)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_parts", [0, 1])
async def test_a_hangup_cancels_the_instances(way: Way, num_parts: int) -> None:
    async with streaming(way) as (server, teller):
        async with server.connect() as client:
            client.send(ask(body=TWO))
            await teller.begun(2)
            for _ in range(num_parts):
                teller.give("a")
                await client.read_head()
        await until(lambda: all(each.cancelled() for each in teller.model.futures))
        await until(lambda: server.statuses)
        assert server.statuses == [499]
        assert server.use.unread_bytes == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limits", [{"stream_buffer_parts": 3}, {"stream_buffer_bytes": 1 << 18}])
async def test_a_reader_that_reads_nothing_loses_its_stream_alone(
    way: Way, limits: dict[str, int]
) -> None:
    async with streaming(way, **limits) as (server, teller):
        async with server.connect(rcvbuf_bytes=4096) as slow, server.connect() as other:
            slow.stop_reading()
            slow.send(ask())
            await teller.begun()
            other.send(ask())
            await teller.begun(2)
            teller.give("b", index=1)
            await other.read_head()
            slow_one = teller.model.futures[0]
            num = 0
            while not slow_one.done():
                teller.give("a" * 100_000)
                num += 1
                await asyncio.sleep(0)
            assert "stream_buffer_" in str(slow_one.exception())
            assert server.use.unread_bytes < 1 << 20
            teller.end(1)
            assert [name for name, _ in events_in(await read_rest(other))] == ["part", "done"]
            slow.read_on(1 << 30)
            await slow.read_head()
            *parts, (name, data) = events_in(await read_rest(slow))
            assert (name, data["code"]) == ("error", "reader_too_slow")
            assert {event for event, _ in parts} == {"part"}
            assert len(parts) < num
        await until(lambda: server.use.unread_bytes == 0)


@pytest.mark.parametrize("way", WAYS)
async def test_many_parts_at_once_are_no_fault_of_a_client_that_reads(way: Way) -> None:
    async with streaming(way) as (server, teller), server.connect() as client:
        client.send(ask())
        await teller.begun()
        for _ in range(2):
            for num in range(300):  # as from a model that computes nothing between them
                teller.give(num)
            if not _:
                await client.read_head()
        teller.end()
        *parts, (name, data) = events_in(await read_rest(client))
        assert (name, data["num_parts"]) == ("done", 600)
        assert [each["part"] for _, each in parts] == [*range(300)] * 2


async def test_a_slow_reader_gets_every_part_if_it_reads_in_time() -> None:
    async with streaming() as (server, teller):
        async with server.connect(rcvbuf_bytes=4096) as client:
            client.send(ask())
            await teller.begun()
            sent = []
            for num in range(60):
                sent.append(f"{num}" * 30_000)
                teller.give(sent[-1])
                if num % 20 == 19:
                    await asyncio.sleep(0)
            assert server.use.unread_bytes > 0
            teller.end()
            await client.read_head()
            *parts, done = events_in(await read_rest(client))
            assert [data["part"] for _, data in parts] == sent
            assert done[1]["num_parts"] == 60
        await until(lambda: server.use.unread_bytes == 0)


async def test_unread_parts_are_taken_from_the_slowest_if_all_have_too_much() -> None:
    limits = {"max_unread_bytes": 1 << 20, "stream_buffer_bytes": 1 << 30}
    async with (
        streaming(**limits, stream_buffer_parts=1 << 20) as (server, teller),
        server.connect(rcvbuf_bytes=4096) as client,
        server.connect() as other,
    ):
        client.stop_reading()
        for index, each in enumerate((client, other)):
            each.send(ask())
            await teller.begun(index + 1)
            teller.give("-", index=index)
        while not teller.model.futures[0].done():
            teller.give("a" * 100_000)
            await asyncio.sleep(0)
        assert not teller.model.futures[1].done()


@pytest.mark.parametrize(
    ("accept", "status", "kind"),
    [
        ("*/*", 200, "application/json"),
        ("application/json, text/event-stream", 200, "application/json"),
        ("application/json;q=0.5, text/event-stream", 200, "text/event-stream"),
        ("text/*", 200, "text/event-stream"),
        ("application/x-npy", 406, "application/problem+json"),
        ("image/png", 406, "application/problem+json"),
    ],
)
def test_accept_chooses_the_form(accept: str, status: int, kind: str) -> None:
    model = FakeModel(lambda _: result(b'["a","b"]'), interface=STREAMS)
    headers = {"content-type": "image/png", "accept": accept}
    answer = post(endpoint(model), content=b"x", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, kind)
    if kind == "application/json":
        assert answer.json() == {"predictions": [["a", "b"]]}


def test_what_does_not_stream_is_not_given_in_parts() -> None:
    for accept in ("text/event-stream", "application/jsonl"):
        headers = {"content-type": "image/png", "accept": accept}
        assert post(endpoint(FakeModel()), content=b"x", headers=headers).status_code == 406


async def test_a_known_head_finds_a_version_that_does_not_stream() -> None:
    async with streaming() as (server, teller), server.connect() as client:
        for num in range(2):
            client.send(ask())
            await teller.begun(num + 1)
            teller.end(num)
            await client.read_head()
            await read_rest(client)
        assert server.protocol.known_heads
        teller.model.interface = Interface()
        assert await client.status(ask()) == 406
        assert not (await client.reader.read(0))


def test_a_collected_stream_that_failed_shows_its_parts() -> None:
    error = ModelFailedError("it broke")
    error.parts = [b'"a"', b"2"]
    answer = post(
        endpoint(FakeModel(lambda _: error, interface=STREAMS)),
        content=b"x",
        headers={"content-type": "image/png"},
    )
    (found,) = answer.json()["predictions"]
    assert answer.status_code == 200
    assert (found["error"]["code"], found["parts"]) == ("model_error", ["a", 2])
