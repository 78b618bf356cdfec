"""Early refusals of calls as TorchServe, SageMaker and Vertex AI have them, in their forms.

They are those of `/predict`, on each way to the endpoint, and so with one front and several.
"""

from typing import Any, NamedTuple

import pytest

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
from tests.service.api.fakes import FakeModel
from tests.service.api.server import WAYS, PredictServer, RawAnswer, Way, serve
from tests.service.parts.torchserve.fake_archives import archive

KEY, ADMIN = "k" * 20, "a" * 20
APP = "https://app.example"
ROUTE = "/v1/endpoints/1/deployedModels/2:predict"


class ServerProtocol(NamedTuple):
    """A setting that turns calls on, a path and a body that fits, and the texts of an error."""

    setting: str
    path: str
    body: bytes
    texts: tuple[str, ...]
    full: int = 429
    has_code: bool = True

    def head(self, method: str = "POST", path: str = "") -> bytes:
        return f"{method} {path or self.path} HTTP/1.1\r\nhost: h\r\n".encode()

    def call(self, lines: str = "", path: str = "", body: bytes | None = None) -> bytes:
        body = self.body if body is None else body
        lines += "content-type: application/json\r\n"
        whole = self.head(path=path) + lines.encode()
        return whole + b"content-length: %d\r\n\r\n%b" % (len(body), body)

    def model(self, **options: Any) -> FakeModel:
        return archive(**options) if self.setting == "torchserve" else FakeModel(**options)

    def tables(self) -> list[dict[str, str]]:
        table = CALLS_BY_SETTING[self.setting]
        return [{path or self.path: call for path, call in table.items()}]


_CODED = ("type", "message")
PROTOCOLS = {
    "torchserve": ServerProtocol("torchserve", "/predictions/fake", b'{"a":1}', _CODED, full=503),
    "its other path": ServerProtocol("torchserve", "/fake/predict", b"[1]", _CODED, full=503),
    "its form for SageMaker": ServerProtocol(
        "torchserve", "/invocations?model_name=fake", b'"a"', _CODED, full=503
    ),
    "sagemaker": ServerProtocol("sagemaker", "/invocations", b'{"instances":["x"]}', _CODED),
    "vertex": ServerProtocol(
        "vertex_predict_route", ROUTE, b'{"instances":["x"]}', ("error",), has_code=False
    ),
}


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> ServerProtocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]  # one of them


def check(protocol: ServerProtocol, answer: RawAnswer, status: int, about: object = "") -> str:
    """Check an error, and return its message."""
    assert answer.status == status, (about, answer)
    texts = [answer.json[name] for name in protocol.texts]
    assert all(isinstance(each, str) and each for each in texts), (about, answer)
    if protocol.has_code:
        assert answer.json["code"] == status
    assert answer.headers["x-request-id"]
    return str(texts[-1])


async def ask(protocol: ServerProtocol, server: PredictServer, data: bytes) -> RawAnswer:
    server.protocol.predict.optional = protocol.tables()
    server.protocol.predict.default = "fake"
    return await server.answer_to(data)


async def test_a_head_or_body_that_is_wrong_is_refused(protocol: ServerProtocol, way: Way) -> None:
    length = b"content-length: %b\r\n\r\n"
    rows: list[tuple[bytes, int]] = [
        (protocol.head("OPTIONS") + b"\r\n", 405),
        (protocol.call("x-priority: 12\r\n"), 400),
        (protocol.call("x-timeout-ms: soon\r\n"), 400),
        (protocol.head() + length % b"1001", 413),
        (protocol.head() + length % (b"9" * 17), 413),
        (protocol.call("content-encoding: snappy\r\n"), 415),
    ]
    if protocol.setting != "torchserve":  # there a handler gets them as they are
        rows += [(protocol.call(body=b"{"), 400), (protocol.call(body=b""), 400)]
        rows += [(protocol.head(method) + b"\r\n", 405) for method in ("DELETE", "PATCH")]
    if "fake" in protocol.path:
        rows.append((protocol.call(path=protocol.path.replace("fake", "nobody")), 404))
    if way != "asgi":  # there uvicorn answers these, in its own words
        rows += [
            (protocol.head() + b"x: y\r\n" * 101 + b"\r\n", 431),
            (protocol.head() + length % b"x", 400),
        ]
    model = protocol.model()
    async with serve(model, way=way, max_body_bytes=1000) as server:
        for data, status in rows:
            check(protocol, await ask(protocol, server, data), status, data[:200])
        assert not model.payloads
        assert (await ask(protocol, server, protocol.call())).status == 200


async def test_a_call_without_the_right_key_is_refused_before_its_body(
    protocol: ServerProtocol, way: Way
) -> None:
    guard = Guard(predict=read_keys(KEY), admin=read_keys(ADMIN))
    async with serve(protocol.model(), way=way, guard=guard) as server:
        for line in (b"", b"authorization: Bearer x\r\n"):
            data = protocol.head() + line + b"content-length: 900000\r\n\r\n"
            answer = await ask(protocol, server, data)
            check(protocol, answer, 401)
            assert answer.headers["www-authenticate"].startswith("Bearer")
        other = b"x-api-key: %b\r\ncontent-length: 9\r\n\r\n" % ADMIN.encode()
        check(protocol, await ask(protocol, server, protocol.head() + other), 403)
        answer = await ask(protocol, server, protocol.call(f"authorization: Bearer {KEY}\r\n"))
        assert answer.status == 200


async def test_a_body_that_stops_coming_is_given_up(protocol: ServerProtocol, way: Way) -> None:
    async with serve(protocol.model(), way=way, body_gap_s=0.1) as server:
        data = protocol.head() + b"content-length: 99\r\n\r\n{"
        check(protocol, await ask(protocol, server, data), 408)


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
async def test_what_admission_refuses_is_answered_in_the_server_s_form(
    protocol: ServerProtocol, way: Way, error: Any, status: int
) -> None:
    model = protocol.model(refusals=[error, error])
    async with serve(model, way=way) as server:
        for _ in range(2):  # the second head is known
            answer = await ask(protocol, server, protocol.call())
            message = check(protocol, answer, protocol.full if status == 429 else status)
            assert error.message.removeprefix("instance") in message
            if status == 429:
                assert answer.headers["retry-after"] == "3"


async def test_pages_of_other_origins_may_ask_where_that_is_allowed(
    protocol: ServerProtocol, way: Way
) -> None:
    lines = f"origin: {APP}\r\n"
    async with serve(protocol.model(), way=way, cors=Cors([APP])) as server:
        for data in (protocol.call(lines), protocol.call(lines + "x-priority: 12\r\n")):
            answer = await ask(protocol, server, data)
            assert answer.headers["access-control-allow-origin"] == APP


async def test_nothing_becomes_a_job_since_the_protocol_knows_none(
    protocol: ServerProtocol, way: Way
) -> None:
    async with serve(protocol.model(), way=way) as server:
        answer = await ask(protocol, server, protocol.call("prefer: respond-async\r\n"))
        assert answer.status == 200
