"""Bodies of calls to handlers: their parts, as TorchServe hands them over. Runs in the event loop.

A handler gets a dict of parts: fields of a form, fields of the query, or the body itself as "body".
A worker gets their bytes one after another, and a table of them in the parameters. Source:
`InferenceRequestHandler.parseRequest` of pytorch/serve (0.12).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from inferpool.service.api.codecs.body import Decoded, Limits, Payload
from inferpool.service.api.codecs.forms import read_parts
from inferpool.service.api.codecs.requests import check_encoding
from inferpool.service.api.errors import LargeHeadError
from inferpool.service.api.exchange import Call, Exchange
from inferpool.service.errors import BadRequestError, TooLargeError
from inferpool.service.parts.torchserve.paths import MAX_FIELDS, AskedPath, fields_of
from inferpool.service.queue.instance import Buffer
from inferpool.service.queue.quarantine import CALL_HEADERS

_BODY = "body"
_FORM, _ENCODED = b"multipart/form-data", b"application/x-www-form-urlencoded"
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_MAX_ESCAPES = 65_536
"""Escapes in an encoded form: 30 ms of the event loop, as measured with 10 MB of them."""
_FILE_TYPE = "application/octet-stream"
"""The type of a file that says none (Netty, `HttpPostBodyUtil.DEFAULT_BINARY_CONTENT_TYPE`)."""
_MAX_HEADERS, _MAX_BYTES = 64, 16 * 1024
"""The most that a handler is told of a call: headers, and names and types of parts."""
_KEYS = (b"authorization", b"x-api-key")
"""Headers that have keys of this service, if it needs any."""


class Field(NamedTuple):
    """One part of a call."""

    name: str
    content: bytes
    media_type: str = ""


def read_form(call: Call, chunks: Sequence[Buffer], limits: Limits) -> list[Field] | None:
    """Return the parts of a form; None if the body is none.

    Raises:
        BadRequestError: It is no form, or ends early.
        TooLargeError: It has too many parts.
        UnsupportedTypeError: It is compressed.
    """
    check_encoding(call.headers)
    given = call.headers.get(b"content-type", b"")
    media_type = _bare(given).lower()
    if media_type == _ENCODED:
        fields = _read_encoded(b"".join(chunks), limits)
    elif media_type == _FORM and b"boundary=" in given:
        fields = []
        for segment, content in read_parts(given, [b"".join(chunks)], MAX_FIELDS):
            assert content is not None  # nothing is too long
            # Only files have types there; what their charset is makes no difference.
            kind = (segment.content_type or _FILE_TYPE) if segment.filename is not None else ""
            fields.append(Field(segment.name, content, kind.partition(";")[0].strip()))
    else:
        return None
    return fields


def _read_encoded(body: bytes, limits: Limits) -> list[Field]:
    """Read the fields of an encoded form; what has no "=" is left out, as by Netty."""
    if len(body) > limits.max_json_bytes or body.count(b"%") > _MAX_ESCAPES:
        raise TooLargeError(
            f"an encoded form may have {limits.max_json_bytes} bytes (the setting max_json_bytes) "
            f"and {_MAX_ESCAPES} escapes with '%'; send more as multipart/form-data (curl -F)"
        )
    if body.count(b"&") > MAX_FIELDS:
        raise TooLargeError(f"the form has more than {MAX_FIELDS} fields")
    if _BAD_ESCAPE.search(body):
        raise BadRequestError("the form: a '%' is not followed by two hexadecimal digits")
    pairs = fields_of(b"&".join([each for each in body.split(b"&") if b"=" in each]))
    return [Field(name.decode(errors="replace"), value) for name, value in pairs]


def read_call(
    exchange: Exchange, asked: AskedPath, form: Sequence[Field] | None, chunks: Sequence[Buffer]
) -> Decoded:
    """Return the only instance of a call, with its parameters.

    Args:
        exchange: The call.
        asked: What its path asks for.
        form: The parts of its body; None if it is no form.
        chunks: Its body.

    Raises:
        LargeHeadError: It has too many headers, or too long ones.
        TooLargeError: It has too many fields, or too long names of them.
    """
    call = exchange.call
    pairs = fields_of(call.query) if asked.has_fields else []
    fields = [Field(name.decode(errors="replace"), value) for name, value in pairs]
    if len(fields) > MAX_FIELDS:
        raise TooLargeError(f"the query has more than {MAX_FIELDS} fields")
    pieces: list[Buffer] = []
    table: list[tuple[str, int, int, str, str]] = []
    num_bytes = 0
    for name, content, media_type in (*fields, *(form or ())):
        start, num_bytes = num_bytes, num_bytes + len(content)
        table.append((name, start, num_bytes, _kind_of(media_type), media_type))
        pieces.append(content)
    if form is None:
        media_type = _bare(call.headers.get(b"content-type", b"")).decode("latin-1")
        end = num_bytes + sum(map(len, chunks))
        table.append((_BODY, num_bytes, end, _kind_of(media_type), media_type))
        pieces += chunks
    if sum(len(name) + len(media_type) for name, *_, media_type in table) > _MAX_BYTES:
        raise TooLargeError(f"the names and types of the parts are longer than {_MAX_BYTES} bytes")
    headers = msgspec.json.encode(_headers_of(exchange, asked))
    shown = msgspec.json.encode(table)  # of one name, the last counts
    parameters = b'{"parts":%b,%b%b}' % (shown, CALL_HEADERS, headers)
    payload = Payload("bytes", [each for each in pieces if len(each)] or (b"",))
    is_whole = form is None and not fields
    return Decoded([payload], is_batch=False, parameters=parameters, is_whole=is_whole)


def _headers_of(exchange: Exchange, asked: AskedPath) -> dict[str, str]:
    """Return the headers that a handler may ask for.

    Raises:
        LargeHeadError: They are too many, or too long.
    """
    headers, guard = exchange.call.headers, exchange.predict.guard
    found = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if guard is None or name not in _KEYS
    }
    if len(found) > _MAX_HEADERS or sum(map(len, (*found, *found.values()))) > _MAX_BYTES:
        raise LargeHeadError(
            f"a handler is given {_MAX_HEADERS} headers of {_MAX_BYTES} bytes in all at most; send "
            "fewer or shorter ones"
        )
    if not asked.has_fields:
        found |= {"url_path": asked.rest, "explain": "False"}
    return found


def _kind_of(media_type: str) -> str:
    """Return how a worker hands over a part, as `otf_message_handler.py` of TorchServe does.

    Like there, the type must be in lower case.
    """
    if media_type == "application/json":
        return "json"
    return "text" if media_type.startswith("text") else "bytes"


def _bare(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip()
