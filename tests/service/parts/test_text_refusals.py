"""Early refusals of calls about texts: each protocol's clients read errors of another form.

They are those of `/predict`, on each way to the endpoint, and so with one front and several.
"""

import json
from typing import Any, NamedTuple

import pytest

from inferpool.models.spec import Interface, TextFacts
from inferpool.service.api.auth import Guard
from inferpool.service.api.cors import Cors
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.errors import (
    DeadlineExceededError,
    GivenUpError,
    InvalidInputError,
    OverloadedError,
    QuarantinedError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import WAYS, PredictServer, RawAnswer, Way, serve

KEY, ADMIN = "k" * 20, "a" * 20
APP = "https://app.example"


class TextProtocol(NamedTuple):
    """A path, a body that fits, the model's facts and answer, and the texts of an error."""

    path: str
    body: dict[str, object]
    task: Any
    answer: bytes
    error: tuple[str, ...]
    unfit: int = 400

    def head(self, method: str = "POST") -> bytes:
        return f"{method} {self.path} HTTP/1.1\r\nhost: h\r\n".encode()

    def call(self, lines: str = "", body: object = None) -> bytes:
        body = self.body if body is None else body
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head() + lines.encode() + b"content-length: %d\r\n\r\n%b" % (len(text), text)

    def model(self, **options: Any) -> FakeModel:
        facts = TextFacts(task=self.task, max_tokens=8, vocab_size=9, num_dimensions=1)
        return FakeModel(lambda _: result(self.answer), interface=Interface(text=facts), **options)


_OPENAI = ("error.message", "error.type", "error.code")
_COHERE = ("message", "detail", "code")
_TEI = ("error", "error_type")
_LABELS = b'[3,[{"label":"a","index":0,"score":0.5}]]'
PROTOCOLS = {
    "embeddings": TextProtocol(
        "/v1/embeddings", {"model": "fake", "input": "a"}, "embedding", b"[3,[0.5]]", _OPENAI
    ),
    "rerank": TextProtocol(
        "/v1/rerank",
        {"model": "fake", "query": "q", "documents": ["a"]},
        "reranking",
        b"[3,0.5]",
        _COHERE,
    ),
    "rerank, version 2": TextProtocol(
        "/v2/rerank",
        {"model": "fake", "query": "q", "documents": ["a"]},
        "reranking",
        b"[3,0.5]",
        _COHERE,
    ),
    "classify": TextProtocol(
        "/v1/classify", {"model": "fake", "input": "a"}, "classification", _LABELS, _COHERE
    ),
    "embed": TextProtocol("/embed", {"inputs": "a"}, "embedding", b"[3,[0.5]]", _TEI, 422),
    "rank by name": TextProtocol(
        "/tei/fake/rerank", {"query": "q", "texts": ["a"]}, "reranking", b"[3,0.5]", _TEI, 422
    ),
}


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> TextProtocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]  # one of them


def check(protocol: TextProtocol, answer: RawAnswer, status: int, about: object = "") -> str:
    """Check an error, and return its message."""
    assert answer.status == status, (about, answer)
    assert answer.headers["content-type"] == "application/json"
    texts = []
    for name in protocol.error:
        found = answer.json
        for part in name.split("."):
            found = found[part]
        texts.append(found)
    assert all(isinstance(each, str) and each for each in texts), (about, answer)
    assert answer.headers["x-request-id"]
    return str(texts[0])


async def ask(server: PredictServer, data: bytes) -> RawAnswer:
    server.protocol.predict.optional = [CALLS_BY_SETTING["tei"]]
    return await server.answer_to(data)


async def test_a_head_or_body_that_is_wrong_is_refused(protocol: TextProtocol, way: Way) -> None:
    length = b"content-length: %b\r\n\r\n"
    rows: list[tuple[bytes, int]] = [
        (protocol.call("x-model-version: 7\r\n"), 404),
        (protocol.head("GET") + b"\r\n", 405),
        (protocol.head("DELETE") + b"\r\n", 405),
        (protocol.call("x-priority: 12\r\n"), 400),
        (protocol.call("x-timeout-ms: soon\r\n"), 400),
        (protocol.head() + length % b"1001", 413),
        (protocol.head() + length % (b"9" * 17), 413),
        (protocol.call("content-encoding: snappy\r\n"), 415),
        (protocol.call(body=b""), protocol.unfit),
        (protocol.call(body=b"{"), protocol.unfit),
        (protocol.call(body=b'"\xff"'), protocol.unfit),
        (protocol.call(body=[]), protocol.unfit),
        (protocol.call(body={}), protocol.unfit),
    ]
    if way != "asgi":  # there uvicorn answers these, in its own words
        rows += [
            (protocol.head() + b"x: y\r\n" * 101 + b"\r\n", 431),
            (protocol.head() + length % b"x", 400),
        ]
    if "model" in protocol.body:
        rows.append((protocol.call(body={**protocol.body, "model": "nobody"}), 404))
        rows.append((protocol.call(body={**protocol.body, "model": 3}), 400))
    model = protocol.model()
    async with serve(model, way=way, max_body_bytes=1000) as server:
        for data, status in rows:
            found = await ask(server, data)
            if status == 422 and found.status == 400:
                status = 400  # it is no JSON
            check(protocol, found, status, data[:200])
        assert not model.payloads
        assert (await ask(server, protocol.call())).status == 200


async def test_a_call_without_the_right_key_is_refused_before_its_body(
    protocol: TextProtocol, way: Way
) -> None:
    guard = Guard(predict=read_keys(KEY), admin=read_keys(ADMIN))
    async with serve(protocol.model(), way=way, guard=guard) as server:
        for line in (b"", b"authorization: Bearer x\r\n"):
            answer = await ask(server, protocol.head() + line + b"content-length: 900000\r\n\r\n")
            check(protocol, answer, 401)
            assert answer.headers["www-authenticate"].startswith("Bearer")
        other = b"x-api-key: %b\r\ncontent-length: 9\r\n\r\n" % ADMIN.encode()
        check(protocol, await ask(server, protocol.head() + other), 403)
        assert (await ask(server, protocol.call(f"x-api-key: {KEY}\r\n"))).status == 200


async def test_a_body_that_stops_coming_is_given_up(protocol: TextProtocol, way: Way) -> None:
    async with serve(protocol.model(), way=way, body_gap_s=0.1) as server:
        check(protocol, await ask(server, protocol.head() + b"content-length: 99\r\n\r\n{"), 408)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full", retry_after_s=3), 429),
        (UnavailableError("no worker is ready"), 503),
        (GivenUpError("no worker can be started"), 503),
        (DeadlineExceededError("the deadline passed in the queue"), 504),
        (InvalidInputError("instance: has no x"), "unfit"),
        (QuarantinedError("it killed workers"), "unfit"),
    ],
    ids=lambda value: value.code if isinstance(value, ServiceError) else str(value),
)
async def test_what_admission_refuses_is_answered_in_the_protocol_s_form(
    protocol: TextProtocol, way: Way, error: Any, status: int | str
) -> None:
    model = protocol.model(refusals=[error, error])
    async with serve(model, way=way) as server:
        for _ in range(2):  # the second head is known
            answer = await ask(server, protocol.call())
            message = check(protocol, answer, protocol.unfit if status == "unfit" else int(status))
            assert error.message.removeprefix("instance") in message
            if status == 429:
                assert answer.headers["retry-after"] == "3"


async def test_pages_of_other_origins_may_ask_where_that_is_allowed(
    protocol: TextProtocol, way: Way
) -> None:
    lines = f"origin: {APP}\r\n"
    async with serve(protocol.model(), way=way, cors=Cors([APP])) as server:
        for data in (protocol.call(lines), protocol.call(lines, b"{")):
            answer = await ask(server, data)
            assert answer.headers["access-control-allow-origin"] == APP


async def test_nothing_becomes_a_job_since_the_protocol_knows_none(
    protocol: TextProtocol, way: Way
) -> None:
    async with serve(protocol.model(), way=way) as server:
        assert (await ask(server, protocol.call("prefer: respond-async\r\n"))).status == 200
