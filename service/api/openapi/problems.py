"""The error answers of the document, made from the one table of errors and rendered as they are."""

from collections.abc import Iterable, Mapping

import msgspec

from inferpool.service.api.codecs.answers import MEDIA_TYPES
from inferpool.service.api.codecs.requests import TYPES
from inferpool.service.api.errors import (
    PROBLEM_TYPE,
    TABLE,
    ForbiddenError,
    LargeHeadError,
    LongUrlError,
    MethodNotAllowedError,
    NotFoundError,
    SlowBodyError,
    UnauthorizedError,
    instance_error,
    problem,
)
from inferpool.service.api.openapi.headers import COMMON, Json, answer_headers
from inferpool.service.errors import (
    BadRequestError,
    ConflictError,
    DeadlineExceededError,
    GivenUpError,
    InternalError,
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
    NotAcceptableError,
    OverloadedError,
    QuarantinedError,
    RestartFailedError,
    ServiceError,
    TooLargeError,
    UnavailableError,
    UnknownModelError,
    UnsupportedTypeError,
    WorkerCrashedError,
)

_DETAILS: Mapping[type[ServiceError], str] = {
    BadRequestError: "the body: malformed JSON: trailing characters (byte 19)",
    UnauthorizedError: "this needs a key: `Authorization: Bearer KEY`, or `X-API-Key: KEY`",
    ForbiddenError: "this key is for something else; this needs one of admin_keys",
    UnknownModelError: "no model is called 'resnet'; there are: efficientnet_lite0",
    NotFoundError: "resnet has 2 workers, counted from 0",
    MethodNotAllowedError: "/predict takes POST, not GET",
    NotAcceptableError: "Accept: text/html leaves none of "
    + ", ".join(media_type.decode() for media_type in MEDIA_TYPES),
    SlowBodyError: "the body was not complete before the deadline",
    ConflictError: "workers of resnet are being restarted",
    TooLargeError: "the body has more than 16777216 bytes, which is the limit",
    LongUrlError: "the URL has more than 8192 bytes",
    UnsupportedTypeError: f"Content-Type is missing; it must be one of {', '.join(TYPES)}",
    InvalidInputError: "instances: is empty; one instance at least is needed",
    QuarantinedError: "workers have died while they computed this very input; it is not tried "
    "again within the next 280 s",
    OverloadedError: "the queue is full (1024 requests wait)",
    LargeHeadError: "there are more than 100 headers",
    ModelFailedError: "forward raised ValueError: index out of range",
    NonFiniteOutputError: "the model's output for this input has NaN or an infinity in it",
    WorkerCrashedError: "2 workers died while they computed this input (the last: killed by "
    "SIGSEGV)",
    RestartFailedError: "resnet/0 was not replaced, and serves on as it was: module 'nets' fails "
    "on import: SyntaxError: '(' was never closed (nets.py:12)",
    InternalError: "this is a mistake of the service; its log has more",
    UnavailableError: "no worker is ready (starting: loading weights)",
    GivenUpError: "no worker of resnet can be started (there is no file weights.pth)",
    DeadlineExceededError: "the deadline passed in the queue, 30.00 s after it came",
}
"""What each error may say, for its example."""

_MEANINGS: Mapping[int, str] = {
    400: "The request cannot be read.",
    401: "A key is needed, and there is none that is known.",
    403: "The key is for something else.",
    404: "There is no such model, worker or page.",
    405: "The path has no such method.",
    406: "No form that `Accept` allows can be answered in.",
    408: "The body was not complete before the deadline.",
    409: "Something else is being done, which must end first.",
    413: "A body, or a part of one, is over its limit.",
    414: "The URL is longer than 8 KiB.",
    415: "The content type, or the content encoding, is not read here.",
    422: "It was read, and does not fit.",
    429: "The queue is full, or the deadline cannot be met.",
    431: "The headers are longer than 64 KiB, or more than 100.",
    500: "The model, or the service, failed on this input; or a restart failed.",
    503: "Starting, shutting down, no worker, or too many connections.",
    504: "The deadline passed before there was an answer.",
}
_ADDED_HEADERS: Mapping[int, str] = {
    401: "WWW-Authenticate",
    405: "Allow",
    429: "Retry-After",
    503: "Retry-After",
}
_OF_ADMIN = (ForbiddenError, NotFoundError, ConflictError, RestartFailedError)
_MEDIA_TYPE = PROBLEM_TYPE.decode()
_REQUEST_ID = "order-1234"

SCHEMAS: Mapping[str, Json] = {
    "InstanceError": {
        "type": "object",
        "description": "Why one instance of several has no prediction.",
        "required": ["code", "message", "status"],
        "properties": {
            "code": {"type": "string", "description": "A stable name."},
            "message": {"type": "string", "description": "For a person."},
            "status": {"type": "integer", "description": "What it would get alone."},
            "index": {"type": "integer", "description": "The place of the instance, from 0."},
        },
    },
    "Problem": {
        "type": "object",
        "description": "An error.",
        "externalDocs": {
            "description": "RFC 9457, Problem Details for HTTP APIs",
            "url": "https://www.rfc-editor.org/rfc/rfc9457",
        },
        "required": [
            *("type", "title", "status", "detail", "instance"),
            *("code", "error", "request_id", "retryable"),
        ],
        "properties": {
            "type": {
                "type": "string",
                "format": "uri",
                "description": "`urn:problem-type:inferpool:` and the code.",
            },
            "title": {"type": "string", "description": "What kind of error this is."},
            "status": {"type": "integer", "description": "The status of the answer."},
            "detail": {"type": "string", "description": "What was wrong, where, and what to do."},
            "instance": {
                "type": "string",
                "format": "uri-reference",
                "description": "The path that was asked for.",
            },
            "code": {
                "type": "string",
                "description": "A stable name of the error, to decide by. More may come.",
                "examples": list(dict.fromkeys(error.code for error in _DETAILS)),
            },
            "error": {"type": "string", "description": "The same as `detail`."},
            "request_id": {"type": "string", "description": "As in `X-Request-ID`."},
            "retryable": {
                "type": "boolean",
                "description": "The same request may succeed later.",
            },
            "retry_after_s": {"type": "integer", "description": "As in `Retry-After`."},
            "errors": {
                "type": "array",
                "description": "Of each instance, where there were several and all failed.",
                "items": {"$ref": "#/components/schemas/InstanceError"},
            },
        },
    },
}
"""What error answers hold."""

ALWAYS = (400, 414, 431, 500, 503)
"""What any route may answer: its calls are read, and connections taken, in the same way."""
OF_PREDICT = tuple(
    sorted({TABLE[error].status for error in _DETAILS if error is not ConflictError})
)
"""What `/predict` may answer."""


def responses() -> dict[str, Json]:
    """A component for each status, with an example of each code that it may have."""
    statuses = sorted({TABLE[error].status for error in _DETAILS})
    return {f"Problem{status}": _response(status) for status in statuses}


def refer_to(statuses: Iterable[int]) -> dict[str, Json]:
    """The error answers of an operation, by the components that describe them."""
    return {
        str(status): {"$ref": f"#/components/responses/Problem{status}"}
        for status in sorted(statuses)
    }


def _response(status: int) -> Json:
    errors = [error for error in _DETAILS if TABLE[error].status == status]
    codes = ", ".join(f"`{error.code}`" for error in errors)
    added = [_ADDED_HEADERS[status]] if status in _ADDED_HEADERS else []
    return {
        "description": f"{_MEANINGS[status]} Codes: {codes}.",
        "headers": answer_headers(*COMMON, *added),
        "content": {
            _MEDIA_TYPE: {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "examples": {error.code: _example(error) for error in errors},
            }
        },
    }


def _example(error: type[ServiceError]) -> Json:
    kind = TABLE[error]
    path = "/admin/models/resnet/restart" if error in _OF_ADMIN else "/predict"
    each = error(_DETAILS[error])
    errors = [instance_error(each, index) for index in (0, 1)] if error is InvalidInputError else []
    _, _, body = problem(each, _REQUEST_ID, path, errors=errors)
    return {"summary": kind.title, "value": msgspec.json.decode(body)}
