"""Early refusals of calls in other protocols than ours: their clients read errors of other forms.

They are those of `/predict`, on each way to the endpoint, and so with one front and several.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferpool.service.api.auth import Guard
from inferpool.service.api.cors import Cors
from inferpool.service.errors import (
    DeadlineExceededError,
    GivenUpError,
    InvalidInputError,
    OverloadedError,
    QuarantinedError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.queue.instance import CanaryShare
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel
from tests.service.api.server import WAYS, PredictServer, RawClient, Way, serve, until
from tests.service.parts.refused_calls import PROTOCOLS, RefusedProtocol

KEY, ADMIN = "k" * 20, "a" * 20
APP = "https://app.example"


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> RefusedProtocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]  # one of them


@asynccontextmanager
async def serving(
    protocol: RefusedProtocol, model: FakeModel | None = None, **options: Any
) -> AsyncIterator[PredictServer]:
    async with serve(model or protocol.model(), **options) as server:
        protocol.turn_on(server)
        yield server


async def test_a_head_or_body_that_is_wrong_is_refused(protocol: RefusedProtocol, way: Way) -> None:
    length = b"content-length: %b\r\n\r\n"
    rows: list[tuple[bytes, int]] = [
        *((protocol.call(path=path), 404) for path in protocol.wrong_paths),
        *((protocol.head(method) + b"\r\n", 405) for method in protocol.wrong_methods),
        (protocol.call("x-priority: 12\r\n"), 400),
        (protocol.call("x-timeout-ms: soon\r\n"), 400),
        (protocol.head() + length % b"1001", 413),
        (protocol.head() + length % (b"9" * 17), 413),
        (protocol.call("content-encoding: snappy\r\n"), 415),
        (protocol.call("x-model-version: 7\r\n"), 404),
        *((protocol.call(body=body), protocol.unfit) for body in protocol.wrong_bodies),
    ]
    if '"model"' in protocol.body:
        fields = json.loads(protocol.body)
        for name, status in (("nobody", 404), (3, 400)):
            body = json.dumps({**fields, "model": name}).encode()
            rows.append((protocol.call(body=body), status))
    if way != "asgi":  # there uvicorn answers these, in its own words
        long = protocol.path + "?&"["?" in protocol.path] + "a" * 8200
        rows += [
            (protocol.head(path=long) + b"\r\n", 414),
            (protocol.head() + b"x: y\r\n" * 101 + b"\r\n", 431),
            (protocol.head() + b"x: %b\r\n\r\n" % (b"y" * 66_000), 431),
            (protocol.head() + length % b"x", 400),
        ]
    async with serving(protocol, way=way, max_body_bytes=1000) as server:
        for data, status in rows:
            found = await server.answer_to(data)
            if status == 422 and found.status == 400:
                status = 400  # it is no JSON
            protocol.check(found, status, data[:200])
        async with server.connect() as client:
            client.send(protocol.head() + b"transfer-encoding: chunked\r\n\r\n")
            client.send(b"4b0\r\n" + b"x" * 0x4B0 + b"\r\n0\r\n\r\n")
            protocol.check(await client.read_answer(), 413)
        assert not server.model.payloads
        assert (await server.answer_to(protocol.call())).status == 200


async def test_a_call_without_the_right_key_is_refused_before_its_body(
    protocol: RefusedProtocol, way: Way
) -> None:
    guard = Guard(predict=read_keys(KEY), admin=read_keys(ADMIN))
    length = "content-length: 900000\r\n\r\n"
    async with serving(protocol, way=way, guard=guard) as server:
        for line in ("", "x-api-key: x\r\n", "authorization: Bearer x\r\n"):
            answer = await server.answer_to(protocol.head() + (line + length).encode())
            protocol.check(answer, 401)
            assert answer.headers["www-authenticate"].startswith("Bearer")
        other = f"x-api-key: {ADMIN}\r\n{length}".encode()
        protocol.check(await server.answer_to(protocol.head() + other), 403)
        for line in (f"x-api-key: {KEY}\r\n", f"authorization: Bearer {KEY}\r\n"):
            assert (await server.answer_to(protocol.call(line))).status == 200


async def test_a_body_that_stops_coming_is_given_up(protocol: RefusedProtocol, way: Way) -> None:
    begun = b"content-length: 99\r\n\r\n{"
    async with serving(protocol, way=way, body_gap_s=0.1) as server:
        protocol.check(await server.answer_to(protocol.head() + begun), 408)
    late = protocol.head() + b"x-timeout-ms: 100\r\n" + begun
    async with serving(protocol, way=way) as server:
        protocol.check(await server.answer_to(late), 408)


async def test_a_body_that_has_not_come_when_the_server_stops_is_refused(
    protocol: RefusedProtocol,
) -> None:
    async with serving(protocol) as server, server.connect() as client:
        client.send(protocol.head() + b"content-length: 99\r\n\r\n{")
        await until(lambda: server.connections and server.connections[0].cycle is not None)
        await asyncio.sleep(0)
        server.shut_connections_down()
        protocol.check(await client.read_answer(), 503)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full", retry_after_s=3), "full"),
        (UnavailableError("no worker is ready"), 503),
        (GivenUpError("no worker can be started"), 503),
        (DeadlineExceededError("the deadline passed in the queue"), 504),
        (InvalidInputError("instance: has no x"), "unfit"),
        (QuarantinedError("it killed workers"), "unfit"),
    ],
    ids=lambda value: value.code if isinstance(value, ServiceError) else str(value),
)
async def test_what_admission_refuses_is_answered_in_the_protocol_s_form(
    protocol: RefusedProtocol, way: Way, error: Any, status: Any
) -> None:
    status = getattr(protocol, str(status), status)
    model = protocol.model(refusals=[error, error])
    async with serving(protocol, model, way=way) as server, server.connect() as client:
        for _ in range(2):  # the second head is known
            answer = await client.ask(protocol.call())
            may_retry = not isinstance(error, GivenUpError)
            message = protocol.check(answer, status, may_retry=may_retry)
            assert error.message.removeprefix("instance") in message
            if isinstance(error, OverloadedError):
                assert answer.headers["retry-after"] == "3"


async def test_pages_of_other_origins_may_ask_where_that_is_allowed(
    protocol: RefusedProtocol, way: Way
) -> None:
    origin = f"origin: {APP}\r\n"
    async with serving(protocol, way=way, cors=Cors([APP])) as server:
        answer = await server.answer_to(protocol.call(origin))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, APP)
        by_head = await server.answer_to(protocol.call(origin + "x-priority: 12\r\n"))
        protocol.check(by_head, 400)
        by_body = [protocol.call(origin, body=body) for body in protocol.wrong_bodies]
        for answer in (by_head, *[await server.answer_to(data) for data in by_body]):
            assert answer.status in (400, protocol.unfit)
            assert answer.headers["access-control-allow-origin"] == APP


async def read_head(client: RawClient, data: bytes) -> tuple[int, dict[str, str]]:
    client.send(data)
    return await client.read_head()


async def test_preflights_and_heads_are_answered_as_elsewhere(
    protocol: RefusedProtocol, way: Way
) -> None:
    lines = f"origin: {APP}\r\naccess-control-request-method: POST\r\n\r\n".encode()
    async with serving(protocol, way=way, cors=Cors([APP])) as server, server.connect() as client:
        status, headers = await read_head(client, protocol.head("OPTIONS") + lines)
        assert (status, headers["access-control-allow-origin"]) == (204, APP)
        status, headers = await read_head(client, protocol.head("HEAD") + b"\r\n")
        assert (status, headers["allow"]) == (405, protocol.methods)
        protocol.check(await client.ask(protocol.head("OPTIONS") + b"\r\n"), 405)


async def test_nothing_becomes_a_job_since_the_protocol_knows_none(
    protocol: RefusedProtocol, way: Way
) -> None:
    async with serving(protocol, way=way) as server:
        call = protocol.call("prefer: respond-async\r\n")
        assert (await server.answer_to(call)).status == 200


@pytest.mark.parametrize("protocol", ["v1", "v2"], indirect=True)
async def test_calls_get_the_version_that_they_name_or_that_has_their_share(
    protocol: RefusedProtocol,
) -> None:
    first, second = FakeModel(), FakeModel()
    async with serving(protocol, first) as server:
        second.version, second.is_serving = 2, False
        models = server.protocol.predict.models
        models |= {"fake/versions/1": first, "fake/versions/2": second}  # type: ignore[operator]  # a dict here
        named = protocol.path.replace("fake", "fake/versions/2")
        by_header = protocol.call("x-model-version: 2\r\n")
        first.canary, first.is_serving = CanaryShare("fake/versions/2", 0.5), False  # type: ignore[assignment]  # as a catalog does
        shared = [protocol.call(f"x-request-id: call-{number}\r\n") for number in range(16)]
        calls = [by_header, protocol.call(path=named), *shared]
        answers = [await server.answer_to(each) for each in calls]
    versions = [answer.headers["x-model-version"] for answer in answers]
    assert {answer.status for answer in answers} == {200}
    assert versions[:2] == ["2", "2"]
    assert set(versions[2:]) == {"1", "2"}
    assert len(second.payloads) == versions.count("2")
