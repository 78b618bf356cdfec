"""The error answers of the document, made from the table of errors and rendered like real ones."""

from collections.abc import Iterable, Mapping

import msgspec

from inferpool.service.api.codecs.answers import MEDIA_TYPES
from inferpool.service.api.codecs.requests import TYPES
from inferpool.service.api.errors import (
    INTERNAL_MESSAGE,
    PROBLEM_TYPE,
    TABLE,
    Problem,
    instance_error,
    problem,
)
from inferpool.service.api.openapi.headers import COMMON, Json, answer_headers
from inferpool.service.errors import ServiceError

_DETAILS: Mapping[str, str] = {
    "bad_request": "the body: malformed JSON: trailing characters (byte 19)",
    "unauthorized": "this needs a key: `Authorization: Bearer KEY`, or `X-API-Key: KEY`",
    "forbidden": "this key is for something else; this needs one of admin_keys",
    "unknown_model": "no model is called 'resnet'; there are: efficientnet_lite0",
    "unknown_job": "there is no job 'd4c1'; it may have expired",
    "not_found": "resnet has 2 workers, counted from 0",
    "method_not_allowed": "/predict takes POST, not GET",
    "not_acceptable": "Accept: text/html allows none of "
    + ", ".join(media_type.decode() for media_type in MEDIA_TYPES),
    "slow_body": "the body was not complete before the deadline",
    "reader_too_slow": "the client has not read the parts beyond stream_buffer_parts = 64",
    "conflict": "workers of resnet are being restarted",
    "too_large": "the body is larger than the limit of 16777216 bytes",
    "url_too_long": "the URL has more than 8192 bytes",
    "unsupported_type": f"Content-Type is missing; use one of {', '.join(TYPES)}",
    "invalid_input": "instances: is empty; one instance at least is needed",
    "idempotency_mismatch": "another call has made a job with this Idempotency-Key; use a new one "
    "for another call",
    "quarantined": "workers have died while they computed this very input; it is not tried "
    "again within the next 280 s",
    "version_refused": "its answer agrees for 91.00% of 212 inputs, min_agreement is 99.00%",
    "overloaded": "the queue is full (1024 requests wait)",
    "over_share": "the 768 requests of this key that wait have its share (per_key_share = 0.75 of "
    "what other keys leave)",
    "over_quota": "there are 10000 jobs already, which is max_jobs; delete some that are over",
    "head_too_large": "there are more than 100 headers",
    "model_error": "forward raised ValueError: index out of range",
    "non_finite_output": "the model's output for this input has NaN or an infinity in it",
    "worker_crashed": "2 workers died while they computed this input (the last: killed by SIGSEGV)",
    "stream_broken": "the worker died after part 12 of this stream (killed by SIGSEGV)",
    "stream_too_long": "the stream has more than 10000 parts (max_stream_parts)",
    "stream_gap": "the next part did not come within 60 s (stream_gap_s)",
    "restart_failed": "resnet/0 was not replaced, and serves on as it was: module 'nets' fails "
    "on import: SyntaxError: '(' was never closed (nets.py:12)",
    "not_saved": '/srv/inferpool.state.json: No space left on device; with "ephemeral": true, the '
    "next start forgets the change",
    "store_full": "the store of jobs has no room left; delete jobs that are over, or try again "
    "later",
    "internal_error": INTERNAL_MESSAGE,
    "unavailable": "no worker is ready (starting: loading weights)",
    "given_up": "no worker of resnet can be started (there is no file weights.pth)",
    "deadline_exceeded": "the deadline passed in the queue, 30.00 s after it came",
}
"""A message of each error, for its example."""

_ADDED_HEADERS: Mapping[int, str] = {
    401: "WWW-Authenticate",
    405: "Allow",
    429: "Retry-After",
    503: "Retry-After",
}
_ADMIN_CODES = (
    "forbidden",
    "not_found",
    "conflict",
    "restart_failed",
    "version_refused",
    "not_saved",
)
_JOB_CODES = ("unknown_job", "idempotency_mismatch", "over_quota", "store_full")
_MEDIA_TYPE = PROBLEM_TYPE.decode()
_REQUEST_ID = "order-1234"
_ERRORS: Mapping[str, type[ServiceError]] = {
    error.code: error for error in TABLE if error.code in _DETAILS
}
"""The errors that are documented, by code: those that a client can see."""

SCHEMAS = msgspec.json.schema_components([Problem], ref_template="#/components/schemas/{name}")[1]
"""Schemas of error answers."""
SCHEMAS["Problem"]["properties"]["code"]["examples"] = list(_ERRORS)
SCHEMAS["Problem"]["externalDocs"] = {"url": "https://www.rfc-editor.org/rfc/rfc9457"}
for _schema in SCHEMAS.values():
    for _property in _schema["properties"].values():  # a field that is not set is left out
        if _kinds := _property.pop("anyOf", None):
            _property.pop("default", None)
            _property.update(next(each for each in _kinds if each != {"type": "null"}))

COMMON_STATUSES = (400, 414, 431, 500, 503)
"""Statuses that any route may answer: its calls are read, and connections taken, in one way."""
PREDICT_STATUSES = tuple(sorted({TABLE[each].status for each in _ERRORS.values()} - {409, 507}))
"""Error statuses of `/predict`."""


def responses() -> dict[str, Json]:
    """Return a component for each status, with an example of each of its codes."""
    statuses = sorted({TABLE[error].status for error in _ERRORS.values()})
    return {f"Problem{status}": _response(status) for status in statuses}


def refer_to(statuses: Iterable[int]) -> dict[str, Json]:
    """Return the error answers of an operation as references to their components."""
    return {
        str(status): {"$ref": f"#/components/responses/Problem{status}"}
        for status in sorted(statuses)
    }


def _response(status: int) -> Json:
    errors = [error for error in _ERRORS.values() if TABLE[error].status == status]
    titles = "; ".join(dict.fromkeys(TABLE[error].title for error in errors))
    codes = ", ".join(f"`{error.code}`" for error in errors)
    added = [_ADDED_HEADERS[status]] if status in _ADDED_HEADERS else []
    return {
        "description": f"{titles}. Codes: {codes}.",
        "headers": answer_headers(*COMMON, *added),
        "content": {
            _MEDIA_TYPE: {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "examples": {error.code: _example(error) for error in errors},
            }
        },
    }


def _example(error: type[ServiceError]) -> Json:
    path = "/admin/models/resnet/restart" if error.code in _ADMIN_CODES else "/predict"
    path = "/jobs" if error.code in _JOB_CODES else path
    each = error(_DETAILS[error.code])
    is_of_instances = error.code == "invalid_input"
    errors = [instance_error(each, index) for index in (0, 1)] if is_of_instances else []
    _, _, body = problem(each, _REQUEST_ID, path, errors=errors)
    return {"summary": TABLE[error].title, "value": msgspec.json.decode(body)}
