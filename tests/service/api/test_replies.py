"""Header lines of answers, whatever a client has put into its call."""

import asyncio
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.service.api.cors import Cors
from inferpool.service.api.exchange import Exchange, Predict, Reply, begin_call, refusal_of
from inferpool.service.api.web import with_call_headers
from inferpool.service.errors import BadRequestError
from tests.service.api.fakes import NoWire

LINE = re.compile(rb"([a-z-]+): [ -~]*")
OURS = frozenset(
    b"access-control-allow-origin access-control-expose-headers connection content-length "
    b"content-type retry-after server-timing traceparent tracestate vary x-request-id".split()
)
FINE = {
    b"x-request-id": b"a-1",
    b"traceparent": b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
    b"tracestate": b"a=b",
    b"origin": b"https://app.example",
    b"content-length": b"3",
}
EVIL = (b"\r\nx-evil: 1", b"\n", b"\r", b"\0", b"\x7f", b"\x85", b"\xfc", b"\t", b" ", b"%0d%0a")


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(sorted(FINE)), st.tuples(st.integers(0, 60), st.sampled_from(EVIL))
    ),
    st.text(max_size=5),
)
def test_a_call_can_neither_add_nor_end_a_header(
    evil: dict[bytes, tuple[int, bytes]], path: str
) -> None:
    headers = dict(FINE)
    for name, (place, piece) in evil.items():
        headers[name] = headers[name][:place] + piece + headers[name][place:]
    predict = Predict({}, cors=Cors(["https://app.example"]))
    replies: list[Reply] = []
    wire = NoWire(replies.append)
    exchange = Exchange.open(
        wire, predict, "POST", f"/predict/{path}", b"a=%0d%0a", list(headers.items())
    )
    exchange.start()
    replies.append(refusal_of(exchange.call, BadRequestError(f"no {path}")))
    assert len(replies) == 2
    for reply in replies:
        lines = reply[1].split(b"\r\n")
        assert lines.pop() == b""
        for line in lines:
            match = LINE.fullmatch(line)
            assert match, line
            assert match[1] in OURS, line


def test_a_lack_of_memory_is_not_told_as_the_clients_fault() -> None:
    call = begin_call("POST", "/predict", b"", ())
    status, lines, body = refusal_of(call, MemoryError())
    assert status == 503
    assert b"retry-after: 1" in lines
    assert json.loads(body)["retryable"] is True


def test_a_route_that_would_end_a_header_answers_nothing_rather() -> None:
    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    call = begin_call("GET", "/health", b"", ())
    start = {"type": "http.response.start", "status": 200}
    sending = with_call_headers(call, send)
    with pytest.raises(ValueError, match="cannot be sent"):
        asyncio.run(sending({**start, "headers": [(b"x", b"a\r\nx-evil: 1")]}))
    assert not sent
    asyncio.run(sending({**start, "headers": [(b"x", b"a")]}))
    assert len(sent) == 1
