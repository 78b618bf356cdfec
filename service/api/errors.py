"""The ONE table from exceptions to statuses and problem documents (RFC 9457), for the whole app.

Errors that only HTTP knows are defined here, beside those of `service.errors`:

ServiceError
+-- UnauthorizedError          no key, or no known one: 401
+-- ForbiddenError             a key for something else: 403
+-- NotFoundError              nothing is at this path: 404
+-- MethodNotAllowedError      the path has no such method: 405
+-- LongUrlError               the URL is too long: 414
+-- LargeHeadError             too many headers, or too long ones: 431
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Meta

from inferpool.service.errors import (
    BadRequestError,
    CancelledByClientError,
    ConflictError,
    DeadlineExceededError,
    GivenUpError,
    IdempotencyError,
    InternalError,
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
    NotAcceptableError,
    NotSavedError,
    OverloadedError,
    OverQuotaError,
    OverShareError,
    QuarantinedError,
    ReaderTooSlowError,
    RestartFailedError,
    ServiceError,
    SlowBodyError,
    StoreFullError,
    StreamBrokenError,
    StreamGapError,
    StreamTooLongError,
    TooLargeError,
    UnavailableError,
    UnknownJobError,
    UnknownModelError,
    UnsupportedTypeError,
    VersionRefusedError,
    WorkerCrashedError,
)

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, as in ASGI."""
Answer = tuple[int, Headers, bytes]
"""Status, headers and body."""

CALL_KEY = "inferpool.call"
"""The key of the `Call` in the scope of an ASGI call."""
WAS_HEAD = "inferpool.was_head"
"""A key in the scope of a HEAD call, which is answered like GET."""
PROBLEM_TYPE = b"application/problem+json"
_TYPE_PREFIX = "urn:problem-type:inferpool:"
"""RFC 9457 (3.1.1) asks for a URI; this one names the code and promises no page."""
INTERNAL_MESSAGE = "this is an error of the service; its log has the details"


class UnauthorizedError(ServiceError):
    """There is no key, or no known one."""

    code = "unauthorized"


class ForbiddenError(ServiceError):
    """The key is for something else."""

    code = "forbidden"


class NotFoundError(ServiceError):
    """Nothing is at this path."""

    code = "not_found"


class MethodNotAllowedError(ServiceError):
    """The path is there, and this method is not."""

    code = "method_not_allowed"


class LongUrlError(ServiceError):
    """The URL is too long."""

    code = "url_too_long"


class LargeHeadError(ServiceError):
    """There are too many headers, or they are too long."""

    code = "head_too_large"


class ErrorKind(NamedTuple):
    """How HTTP shows one kind of error."""

    status: int
    title: str
    is_retryable: bool
    """The same request may succeed later."""


TABLE: dict[type[ServiceError], ErrorKind] = {
    BadRequestError: ErrorKind(400, "The request cannot be read", False),
    UnauthorizedError: ErrorKind(401, "A valid key is needed", False),
    ForbiddenError: ErrorKind(403, "The key is for something else", False),
    UnknownModelError: ErrorKind(404, "No such model", False),
    UnknownJobError: ErrorKind(404, "No such job", False),
    NotFoundError: ErrorKind(404, "Not Found", False),
    MethodNotAllowedError: ErrorKind(405, "Method not allowed", False),
    NotAcceptableError: ErrorKind(406, "No answer in an accepted form", False),
    ReaderTooSlowError: ErrorKind(408, "The client reads too slowly", True),
    SlowBodyError: ErrorKind(408, "The body did not arrive in time", True),
    ConflictError: ErrorKind(409, "Something else is being done", True),
    TooLargeError: ErrorKind(413, "Too large", False),
    LongUrlError: ErrorKind(414, "The URL is too long", False),
    UnsupportedTypeError: ErrorKind(415, "Unsupported content type", False),
    InvalidInputError: ErrorKind(422, "The input does not fit", False),
    VersionRefusedError: ErrorKind(422, "The version is refused", False),
    IdempotencyError: ErrorKind(422, "The key belongs to another job", False),
    QuarantinedError: ErrorKind(422, "The input is in quarantine", False),
    OverloadedError: ErrorKind(429, "Overloaded", True),
    OverShareError: ErrorKind(429, "The key has its share", True),
    OverQuotaError: ErrorKind(429, "The key has its quota of jobs", True),
    LargeHeadError: ErrorKind(431, "The headers are too large", False),
    CancelledByClientError: ErrorKind(499, "The client hung up", False),
    ModelFailedError: ErrorKind(500, "The model failed on this input", False),
    NonFiniteOutputError: ErrorKind(500, "The model's output is not finite", False),
    WorkerCrashedError: ErrorKind(500, "Workers died of this input", False),
    StreamBrokenError: ErrorKind(500, "The stream broke off", True),
    StreamTooLongError: ErrorKind(500, "The stream is too long", False),
    RestartFailedError: ErrorKind(500, "The restart failed", False),
    NotSavedError: ErrorKind(507, "The change could not be kept", False),
    StoreFullError: ErrorKind(507, "The store of jobs is full", True),
    InternalError: ErrorKind(500, "Internal error", False),
    UnavailableError: ErrorKind(503, "Unavailable", True),
    GivenUpError: ErrorKind(503, "Given up", False),
    DeadlineExceededError: ErrorKind(504, "Deadline exceeded", True),
    StreamGapError: ErrorKind(504, "The stream stood still", True),
}
"""A subclass is shown as its nearest base here. 499 is seen in metrics and logs only."""

RETRY_STATUSES = (429, 503)
"""Statuses that say when to come back (RFC 9110, 10.2.3), in whole seconds from 1."""
_CHALLENGE = (b"www-authenticate", b'Bearer realm="inferpool"')
"""A header that a 401 must have (RFC 9110, 11.6.1)."""


_ENCODINGS = (b"accept-encoding", b"identity")
"""The header of a 415 for the encoding of a body (RFC 9110, 15.5.16)."""


class InstanceError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why one instance of several has no prediction."""

    code: Annotated[str, Meta(description="A stable name.")]
    message: Annotated[str, Meta(description="For a person.")]
    status: Annotated[int, Meta(description="The status that it would get alone.")]
    index: Annotated[int | None, Meta(description="The place of the instance, from 0.")] = None


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error: the five members of RFC 9457 (3.1), and some more."""

    type: Annotated[
        str,
        Meta(description=f"`{_TYPE_PREFIX}` and the code.", extra_json_schema={"format": "uri"}),
    ]
    title: Annotated[str, Meta(description="The kind of error.")]
    status: Annotated[int, Meta(description="The status of the answer.")]
    detail: Annotated[str, Meta(description="What was wrong, where, and what to do.")]
    instance: Annotated[
        str,
        Meta(
            description="The path that was asked for.",
            extra_json_schema={"format": "uri-reference"},
        ),
    ]
    code: Annotated[
        str, Meta(description="A stable name of the error, to decide by. More may come.")
    ]
    error: Annotated[str, Meta(description="The same as `detail`; many clients look for it.")]
    request_id: Annotated[str, Meta(description="The same as in `X-Request-ID`.")]
    retryable: Annotated[bool, Meta(description="The same request may succeed later.")]
    retry_after_s: Annotated[int | None, Meta(description="The same as in `Retry-After`.")] = None
    figures: Annotated[
        Mapping[str, Any],
        Meta(description="Why a version of a model was refused, in figures: see `SwapFigures`."),
    ] = {}
    errors: Annotated[
        Sequence[InstanceError],
        Meta(description="The error of each instance, if there were several and all failed."),
    ] = ()


def kind_of(error: ServiceError) -> ErrorKind:
    """Return the table's row for an error."""
    bases = (TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    return TABLE.get(type(error)) or next(bases, TABLE[InternalError])


def instance_error(error: ServiceError, index: int | None = None) -> InstanceError:
    """Return an error as it stands for one instance of several."""
    return InstanceError(
        code=error.code, message=error.message, status=kind_of(error).status, index=index
    )


def problem(
    error: ServiceError,
    request_id: str,
    instance_path: str,
    *,
    errors: Sequence[InstanceError] = (),
) -> Answer:
    """Render an error, or the errors of several instances."""
    kind = kind_of(error)
    retry_after_s = error.retry_after_s
    if kind.is_retryable and kind.status in RETRY_STATUSES:
        retry_after_s = max(1, retry_after_s or 1)
    status, headers, body = render_problem(
        kind.status,
        kind.title,
        error.code,
        error.message,
        path=instance_path,
        request_id=request_id,
        is_retryable=kind.is_retryable,
        retry_after_s=retry_after_s,
        errors=errors,
        figures=error.figures,
    )
    if isinstance(error, UnsupportedTypeError) and error.is_encoding:
        headers.append(_ENCODINGS)
    return status, headers, body


@lru_cache(maxsize=64)
def _quoted(path: str) -> str:
    """Cached, because an overloaded server refuses the same path thousands of times."""
    return quote(path)


def render_problem(
    status: int,
    title: str,
    code: str,
    message: str,
    *,
    path: str,
    request_id: str,
    is_retryable: bool,
    retry_after_s: int | None = None,
    errors: Sequence[InstanceError] = (),
    figures: Mapping[str, object] | None = None,
) -> Answer:
    """Render a problem document of any status; see `Problem`."""
    document = Problem(
        type=_TYPE_PREFIX + code,
        title=title,
        status=status,
        detail=message,
        instance=_quoted(path),
        code=code,
        error=message,
        request_id=request_id,
        retryable=is_retryable,
        retry_after_s=retry_after_s,
        errors=errors,
        figures=figures or {},
    )
    body = msgspec.json.encode(document)
    headers = [(b"content-type", PROBLEM_TYPE), (b"content-length", b"%d" % len(body))]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append(_CHALLENGE)
    return status, headers, body
