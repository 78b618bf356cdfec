"""Answers of handlers: status, headers and body as the worker rendered them. Event loop.

The worker sends the length of a head (4 bytes, little-endian), the head as JSON, and the body.
"""

import re
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from inferpool.service.api.codecs.answers import JSON_TYPE, Outcome
from inferpool.service.api.errors import Answer, Headers
from inferpool.service.errors import ModelFailedError, ServiceError
from inferpool.service.parts.torchserve.errors import UNCACHED
from inferpool.service.parts.torchserve.json import error_body
from inferpool.service.queue.instance import Buffer
from inferpool.workers.shared.messages import ContentBlob

MEDIA_TYPE = "application/vnd.inferpool.handler-answer"
_NO_ANSWER = "the worker returned no answer of a handler"
_LENGTH_BYTES = 4
_BODILESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
"""Statuses whose answers end with their head (RFC 9110, 15.3.5 and 15.4.5)."""
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TEXT = re.compile(r"[\x20-\x7e]*")
_OF_CONNECTION = (
    "connection",
    "content-length",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
_OF_US = (
    "server-timing",
    "traceparent",
    "tracestate",
    "ts_stream_next",
    "x-content-type-options",
    "x-request-id",
)
_OURS = frozenset((*_OF_CONNECTION, *_OF_US, *(name.decode() for name, _ in UNCACHED)))
"""Headers that a handler cannot set: those of the connection, ours, and as in TorchServe, those
against caches."""
_ALWAYS: Headers = [
    *UNCACHED,
    # So that a browser runs nothing that a client sent and a handler returns. The server adds
    # nosniff, as to all answers.
    (b"content-security-policy", b"sandbox"),
]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a handler's answer."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    content_type: str | None = None
    error: str | None = None
    """The message of an error that the handler chose, with the status."""


class _Part(msgspec.Struct, frozen=True):
    """A part of a stream: content in JSON."""

    b64: bytes


_head = msgspec.json.Decoder(_Head)
_part = msgspec.json.Decoder(_Part)


def handler_answer(outcome: Outcome) -> Answer:
    """Render the answer of a handler.

    Raises:
        ServiceError: It raised, or set what cannot be sent.
    """
    if isinstance(outcome, ServiceError):
        raise outcome
    blob = outcome.value
    if not isinstance(blob, ContentBlob) or blob.media_type != MEDIA_TYPE:
        raise ModelFailedError(_NO_ANSWER)
    status, headers, body = _read(blob.buffer)
    if status in _BODILESS:
        return status, headers, b""
    return status, [*headers, (b"content-length", b"%d" % len(body))], body


def first_piece(part: bytes) -> Answer:
    """Return status, headers and body of the first part of a stream.

    Raises:
        ModelFailedError: It set what cannot be sent.
    """
    status, headers, body = _read(_frame_in(part))
    if status in _BODILESS:
        raise ModelFailedError(f"the handler set the status {status}, and answers in parts")
    return status, headers, body


def next_piece(part: bytes) -> bytes:
    """Return the bytes of a later part of a stream.

    Raises:
        ModelFailedError: It is no such part, or an error.
    """
    head, body = _split(_frame_in(part))
    if head.error is not None:
        raise ModelFailedError(head.error)
    return body


def _frame_in(part: bytes) -> bytes:
    try:
        return _part.decode(part).b64
    except msgspec.MsgspecError:
        raise ModelFailedError(_NO_ANSWER) from None


def _split(buffer: Buffer) -> tuple[_Head, bytes]:
    data = memoryview(buffer)
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        return _head.decode(data[_LENGTH_BYTES:start]), bytes(data[start:])
    except msgspec.MsgspecError:
        raise ModelFailedError(_NO_ANSWER) from None


def _read(buffer: Buffer) -> Answer:
    head, body = _split(buffer)
    if not 200 <= head.status <= 599:
        raise ModelFailedError(f"the handler set the status {head.status}; it must be 200 to 599")
    if head.error is not None:
        body = error_body(head.status, "InternalServerException", head.error)
        return head.status, [*_ALWAYS, (b"content-type", JSON_TYPE)], body
    own = {} if head.content_type is None else {"content-type": head.content_type}
    own |= {name.lower(): value for name, value in head.headers if name.lower() not in _OURS}
    for name, value in own.items():
        if not (_TOKEN.fullmatch(name) and _TEXT.fullmatch(value)):
            raise ModelFailedError(f"the handler set a header that cannot be sent: {name[:80]!r}")
    set_here = [(name.encode(), value.encode()) for name, value in own.items()]
    return head.status, [each for each in _ALWAYS if each[0].decode() not in own] + set_here, body
