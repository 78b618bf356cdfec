"""Renders JSON answers of protocols whose errors are no problem documents. In the event loop."""

import msgspec

from inferpool.service.api.codecs.answers import JSON_TYPE
from inferpool.service.api.errors import Answer, kind_of, problem
from inferpool.service.api.exchange import Call
from inferpool.service.errors import ServiceError

_UNREADABLE, _UNFIT = 400, 422


def json_answer(body: bytes, status: int = 200) -> Answer:
    """Answer with a JSON document."""
    headers = [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(body))]
    return status, headers, body


def status_of(error: ServiceError) -> int:
    """Return the status of an error: ours, but 400 for each input that does not fit."""
    status = kind_of(error).status
    return _UNREADABLE if status == _UNFIT else status


def error_with(document: object, error: ServiceError, call: Call, status: int) -> Answer:
    """Render an error as a document, with the other headers of our own form."""
    return error_in(msgspec.json.encode(document), error, call, status)


def error_in(body: bytes, error: ServiceError, call: Call, status: int) -> Answer:
    """Answer with the JSON of an error, and with the other headers of our own form."""
    _, headers, _ = problem(error, call.request_id, call.path)
    status, own, body = json_answer(body, status)
    return status, own + [each for each in headers if each[0] not in dict(own)], body
