"""Early refusals of calls in other protocols than ours: their clients look for a string `error`.

They are those of `/predict`, on each way to the endpoint, and so with one front and several.
"""

import asyncio
from typing import Any, NamedTuple

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
from tests.service.api.server import WAYS, PredictServer, RawAnswer, RawClient, Way, serve, until

V1_BODY = b'{"instances":["x"]}'
V2_BODY = b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["x"]}]}'
KEY, ADMIN = "k" * 20, "a" * 20
APP = b"https://app.example"


class Protocol(NamedTuple):
    """A protocol's path of a model, and a body that fits."""

    path: bytes
    body: bytes

    def head(self, method: bytes = b"POST", path: bytes | None = None) -> bytes:
        return b"%b %b HTTP/1.1\r\nhost: h\r\n" % (method, path or self.path)

    def call(
        self, lines: bytes = b"", path: bytes | None = None, body: bytes | None = None
    ) -> bytes:
        body = self.body if body is None else body
        return self.head(path=path) + lines + b"content-length: %d\r\n\r\n%b" % (len(body), body)


PROTOCOLS = {
    "v1": Protocol(b"/v1/models/fake:predict", V1_BODY),
    "v2": Protocol(b"/v2/models/fake/infer", V2_BODY),
}


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]  # one of them


def check(answer: RawAnswer, status: int, about: object = "") -> None:
    assert answer.status == status, (about, answer)
    assert isinstance(answer.json["error"], str), (about, answer)
    assert answer.headers["x-request-id"]
    if status in (429, 503) and answer.json["code"] != "given_up":
        assert int(answer.headers["retry-after"]) >= 1


async def ask(server: PredictServer, data: bytes) -> RawAnswer:
    async with server.connect() as client:
        client.send(data)
        return await client.read_answer()


async def test_a_head_that_is_wrong_is_refused(protocol: Protocol, way: Way) -> None:
    own, name = protocol.path, protocol.path.replace(b"fake", b"%b")
    length = b"content-length: %b\r\n\r\n"
    rows: list[tuple[bytes, int]] = [
        (protocol.call(path=name % b"nobody"), 404),
        (protocol.call(path=name % b"fake/versions/7"), 404),
        (protocol.call(path=name % b"fake/versions/x"), 404),
        (protocol.call(path=name % b"%ff%00"), 404),
        (protocol.call(path=name % b""), 404),
        (protocol.call(b"x-model-version: 7\r\n"), 404),
        (protocol.head(b"GET") + b"\r\n", 405),
        (protocol.head(b"DELETE") + b"\r\n", 405),
        (protocol.call(b"x-priority: 12\r\n"), 400),
        (protocol.call(b"x-timeout-ms: soon\r\n"), 400),
        (protocol.head() + length % b"1001", 413),
        (protocol.head() + length % (b"9" * 17), 413),
        (protocol.call(b"content-encoding: snappy\r\n"), 415),
        (protocol.call(body=b"{"), 400),
        (protocol.call(body=b""), 400),
    ]
    if way != "asgi":  # there uvicorn answers these, in its own words
        rows += [
            (protocol.head(path=own + b"?" + b"a" * 8200) + b"\r\n", 414),
            (protocol.head() + b"x: y\r\n" * 101 + b"\r\n", 431),
            (protocol.head() + b"x: %b\r\n\r\n" % (b"y" * 66_000), 431),
            (protocol.head() + length % b"x", 400),
        ]
    async with serve(way=way, max_body_bytes=1000) as server:
        for data, status in rows:
            check(await ask(server, data), status, data[:80])
        async with server.connect() as client:
            client.send(protocol.head() + b"transfer-encoding: chunked\r\n\r\n")
            client.send(b"4b0\r\n" + b"x" * 0x4B0 + b"\r\n0\r\n\r\n")
            check(await client.read_answer(), 413)
        assert not server.model.payloads


async def test_a_call_without_the_right_key_is_refused_before_its_body(
    protocol: Protocol, way: Way
) -> None:
    guard = Guard(predict=read_keys(KEY), admin=read_keys(ADMIN))
    async with serve(way=way, guard=guard) as server:
        for line, status in ((b"", 401), (b"x-api-key: x\r\n", 401)):
            answer = await ask(server, protocol.head() + line + b"content-length: 900000\r\n\r\n")
            check(answer, status)
            assert answer.headers["www-authenticate"].startswith("Bearer")
        other = b"x-api-key: %b\r\n" % ADMIN.encode()
        check(await ask(server, protocol.head() + other + b"content-length: 9\r\n\r\n"), 403)


async def test_a_body_that_stops_coming_is_given_up(protocol: Protocol, way: Way) -> None:
    async with serve(way=way, body_gap_s=0.1) as server:
        check(await ask(server, protocol.head() + b"content-length: 99\r\n\r\n{"), 408)
        late = protocol.head() + b"x-timeout-ms: 100\r\ncontent-length: 99\r\n\r\n{"
    async with serve(way=way) as server:
        check(await ask(server, late), 408)


async def test_a_body_that_has_not_come_when_the_server_stops_is_refused(
    protocol: Protocol,
) -> None:
    async with serve() as server, server.connect() as client:
        client.send(protocol.head() + b"content-length: 99\r\n\r\n{")
        await until(lambda: server.connections and server.connections[0].cycle is not None)
        await asyncio.sleep(0)
        server.shut_connections_down()
        check(await client.read_answer(), 503)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full", retry_after_s=3), 429),
        (UnavailableError("no worker is ready"), 503),
        (GivenUpError("no worker can be started"), 503),
        (DeadlineExceededError("the deadline passed in the queue"), 504),
        (InvalidInputError("instance: has no x"), 400),
        (QuarantinedError("it killed workers"), 400),
    ],
    ids=lambda value: value.code if isinstance(value, ServiceError) else str(value),
)
async def test_what_admission_refuses_is_answered_in_the_protocol_s_form(
    protocol: Protocol, way: Way, error: Any, status: int
) -> None:
    model = FakeModel(refusals=[error, error])
    async with serve(model, way=way) as server, server.connect() as client:
        for _ in range(2):  # the second head is known
            answer = await client.ask(protocol.call())
            check(answer, status)
            assert error.message.removeprefix("instance") in answer.json["error"]


async def read_head(client: RawClient, data: bytes) -> tuple[int, dict[str, str]]:
    client.send(data)
    return await client.read_head()


async def test_preflights_and_heads_are_answered_as_elsewhere(protocol: Protocol, way: Way) -> None:
    ask_first = b"origin: %b\r\naccess-control-request-method: POST\r\n\r\n" % APP
    async with serve(way=way, cors=Cors([APP.decode()])) as server, server.connect() as client:
        status, headers = await read_head(client, protocol.head(b"OPTIONS") + ask_first)
        assert (status, headers["access-control-allow-origin"]) == (204, APP.decode())
        status, headers = await read_head(client, protocol.head(b"HEAD") + b"\r\n")
        assert (status, headers["allow"]) == (405, "POST")
        check(await client.ask(protocol.head(b"OPTIONS") + b"\r\n"), 405)
        answer = await client.ask(protocol.call(b"origin: %b\r\nx-priority: 0\r\n" % APP))
        check(answer, 400)
        assert answer.headers["access-control-allow-origin"] == APP.decode()


async def test_nothing_becomes_a_job_since_the_protocol_knows_none(
    protocol: Protocol, way: Way
) -> None:
    async with serve(way=way) as server:
        assert (await ask(server, protocol.call(b"prefer: respond-async\r\n"))).status == 200


async def test_calls_get_the_version_that_they_name_or_that_has_their_share(
    protocol: Protocol,
) -> None:
    first, second = FakeModel(), FakeModel()
    async with serve(first) as server:
        second.version, second.is_serving = 2, False
        models = server.protocol.predict.models
        models |= {"fake/versions/1": first, "fake/versions/2": second}  # type: ignore[operator]  # a dict here
        named = protocol.path.replace(b"fake", b"fake/versions/2")
        by_header = protocol.call(b"x-model-version: 2\r\n")
        first.canary, first.is_serving = CanaryShare("fake/versions/2", 0.5), False  # type: ignore[assignment]  # as a catalog does
        shared = [protocol.call(b"x-request-id: call-%d\r\n" % number) for number in range(16)]
        calls = [by_header, protocol.call(path=named), *shared]
        answers = [await ask(server, each) for each in calls]
    versions = [answer.headers["x-model-version"] for answer in answers]
    assert {answer.status for answer in answers} == {200}
    assert versions[:2] == ["2", "2"]
    assert set(versions[2:]) == {"1", "2"}
    assert len(second.payloads) == versions.count("2")
