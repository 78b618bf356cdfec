"""Calls on each way to the endpoint: heads that are known, bodies in pieces, keys, refusals."""

import json

import pytest

from inferpool.models.spec import USUAL_INTERFACE
from inferpool.service.api.auth import Guard
from inferpool.service.api.cors import Cors
from inferpool.service.errors import OverloadedError
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import WAYS, PredictServer, Way, serve, until
from tests.service.parts.torchserve.fake_archives import (
    OPTIONAL,
    answer,
    archive,
    part,
    parts_of,
)

APP = "https://app.example"


def turn_on(server: PredictServer) -> None:
    server.protocol.predict.optional = OPTIONAL


def head(
    lines: bytes = b"", path: bytes = b"/predictions/fake/1.0", method: bytes = b"POST"
) -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: h\r\n%b" % (method, path, lines)


def ask(body: bytes, lines: bytes = b"content-type: image/png\r\n") -> bytes:
    return head(lines) + b"content-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("way", WAYS)
async def test_a_known_head_is_read_as_the_first_one(way: Way) -> None:
    model = archive(reply=lambda index: answer(b"%d" % index, status=200 + index))
    async with serve(model, way) as server:
        turn_on(server)
        async with server.connect() as client:
            answers = [await client.ask(ask(each)) for each in (b"aa", b"bb", b"cc")]
        heads = server.protocol.known_heads
    assert [(each.status, each.body) for each in answers] == [
        (200, b"0"), (201, b"1"), (202, b"2"),
    ]  # fmt: skip
    assert [parts_of(model, index) for index in range(3)] == [
        [("body", each, "bytes", "image/png")] for each in (b"aa", b"bb", b"cc")
    ]
    if way != "asgi":
        assert [known.call.form is not None for known in heads.values()] == [True]


async def test_a_version_of_another_kind_is_asked_anew_under_a_known_head() -> None:
    model = archive()
    async with serve(model) as server:
        turn_on(server)
        async with server.connect() as client:
            for _ in range(2):
                assert (await client.ask(ask(b"a"))).body == b"ok"
            model.interface = archive(streams=True).interface
            model._reply = lambda _: None
            client.send(ask(b"a"))
            await until(lambda: len(model.futures) == 3)
            reader = model.readers[2]
            assert reader is not None
            reader.on_parts([part(b"in parts")])
            assert (await client.read_head())[1]["transfer-encoding"] == "chunked"
            model.futures[2].set_result(answer())
            assert b"in parts" in await client.reader.readuntil(b"0\r\n\r\n")
            model.interface = USUAL_INTERFACE
            model._reply = lambda _: result(b"1")
            assert (await client.ask(ask(b"a"))).json == {"predictions": [1]}
    assert model.payloads[-1].kind == "image"


@pytest.mark.parametrize("way", WAYS)
async def test_a_form_under_a_known_head_is_read_anew(way: Way) -> None:
    model = archive()
    lines = b"content-type: application/x-www-form-urlencoded\r\n"
    async with serve(model, way) as server:
        turn_on(server)
        async with server.connect() as client:
            for body in (b"a=1", b"b=2"):
                assert (await client.ask(ask(body, lines))).status == 200
    assert [parts_of(model, index) for index in range(2)] == [
        [("a", b"1", "bytes", "")],
        [("b", b"2", "bytes", "")],
    ]


@pytest.mark.parametrize("way", WAYS)
async def test_a_body_in_chunks_is_one_part(way: Way) -> None:
    model = archive()
    async with serve(model, way) as server:
        turn_on(server)
        chunks = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        call = head(b"transfer-encoding: chunked\r\n", method=b"PUT") + b"\r\n" + chunks
        assert (await server.answer_to(call)).status == 200
    assert parts_of(model) == [("body", b"abcde", "bytes", "")]


@pytest.mark.parametrize("way", WAYS)
async def test_calls_are_refused_in_the_form_of_torchserve(way: Way) -> None:
    key = "k" * 20
    model = archive(reply=lambda _: OverloadedError("full", retry_after_s=3))
    guard = Guard(predict=read_keys(key))
    authorized = b"authorization: Bearer %b\r\n" % key.encode()
    async with serve(model, way, guard=guard, max_body_bytes=1000) as server:
        turn_on(server)
        rows = [
            (ask(b"x"), 401, "InvalidKeyException"),
            (ask(b"x", authorized), 503, "ServiceUnavailableException"),
            (head(authorized) + b"content-length: 1001\r\n\r\n", 413, "BadRequestException"),
            (head(authorized, b"/predictions/no") + b"\r\n", 404, "ModelNotFoundException"),
            (ask(b"x", authorized + b"x-timeout-ms: soon\r\n"), 400, "BadRequestException"),
            (head(authorized, method=b"TRACE") + b"\r\n", 405, "MethodNotAllowedException"),
        ]
        for call, status, kind in rows:
            found = await server.answer_to(call)
            assert (found.status, found.json["type"]) == (status, kind)
            assert found.json["code"] == status
            assert found.headers["x-request-id"]
        busy = await server.answer_to(ask(b"x", authorized))
        assert busy.headers["retry-after"] == "3"


@pytest.mark.parametrize("way", WAYS)
async def test_pages_of_allowed_origins_may_call(way: Way) -> None:
    async with serve(archive(), way, cors=Cors([APP])) as server:
        turn_on(server)
        found = await server.answer_to(ask(b"x", b"origin: %b\r\n" % APP.encode()))
        assert found.headers["access-control-allow-origin"] == APP
        preflight = b"origin: %b\r\naccess-control-request-method: POST\r\n" % APP.encode()
        async with server.connect() as client:
            client.send(head(preflight, method=b"OPTIONS") + b"\r\n")
            assert (await client.read_head())[0] == 204


async def test_a_model_that_is_no_archive_is_asked_as_usual_under_a_known_head() -> None:
    model = FakeModel()
    lines = b"content-type: application/json\r\n"
    async with serve(model) as server:
        turn_on(server)
        async with server.connect() as client:
            call = head(lines, b"/predictions/fake") + b"content-length: 17\r\n\r\n"
            for _ in range(2):
                found = await client.ask(call + b'{"instances":[7]}')
                assert list(json.loads(found.body)) == ["predictions"]
            image = head(b"content-type: image/png\r\n", b"/predictions/fake")
            for body in (b"a", b"b"):
                assert (await client.ask(image + b"content-length: 1\r\n\r\n" + body)).status == 200
    assert model.bodies == [b"7", b"7", b"a", b"b"]
