"""The ONE table from exceptions to statuses and problem documents (RFC 9457), for the whole app.

What only HTTP can get wrong has its exceptions here, beside those of `service.errors`:

ServiceError
+-- UnauthorizedError          no key, or none that is known: 401
+-- ForbiddenError             a key for something else: 403
+-- NotFoundError              nothing is at this path: 404
+-- MethodNotAllowedError      the path has no such method: 405
+-- SlowBodyError              the body did not arrive in time: 408
+-- LongUrlError               the URL is too long: 414
+-- LargeHeadError             too many headers, or too long ones: 431
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from inferpool.service.api.trace import new_ids, request_id_of
from inferpool.service.errors import (
    BadRequestError,
    CancelledByClientError,
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

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""
Answer = tuple[int, Headers, bytes]
"""Status, headers and body."""

CALL_KEY = "inferpool.call"
"""Where the application keeps the `Call` in the scope of an ASGI call."""
PROBLEM_TYPE = b"application/problem+json"
_TYPE_PREFIX = "urn:problem-type:inferpool:"
"""RFC 9457 (3.1.1) asks for a URI; this one names the code and promises no page."""
_STATUSES = frozenset(HTTPStatus)


class UnauthorizedError(ServiceError):
    """There is no key, or none that is known."""

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


class SlowBodyError(ServiceError):
    """The body did not arrive before the deadline."""

    code = "slow_body"


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
    NotFoundError: ErrorKind(404, "Not Found", False),
    MethodNotAllowedError: ErrorKind(405, "Method not allowed", False),
    NotAcceptableError: ErrorKind(406, "No answer in an accepted form", False),
    SlowBodyError: ErrorKind(408, "The body did not arrive in time", True),
    ConflictError: ErrorKind(409, "Something else is being done", True),
    TooLargeError: ErrorKind(413, "Too large", False),
    LongUrlError: ErrorKind(414, "The URL is too long", False),
    UnsupportedTypeError: ErrorKind(415, "Unsupported content type", False),
    InvalidInputError: ErrorKind(422, "The input does not fit", False),
    QuarantinedError: ErrorKind(422, "The input is in quarantine", False),
    OverloadedError: ErrorKind(429, "Overloaded", True),
    LargeHeadError: ErrorKind(431, "The headers are too large", False),
    CancelledByClientError: ErrorKind(499, "The client hung up", False),
    ModelFailedError: ErrorKind(500, "The model failed on this input", False),
    NonFiniteOutputError: ErrorKind(500, "The model's output is not finite", False),
    WorkerCrashedError: ErrorKind(500, "Workers died of this input", False),
    RestartFailedError: ErrorKind(500, "The restart failed", False),
    InternalError: ErrorKind(500, "Internal error", False),
    UnavailableError: ErrorKind(503, "Unavailable", True),
    GivenUpError: ErrorKind(503, "Given up", False),
    DeadlineExceededError: ErrorKind(504, "Deadline exceeded", True),
}
"""A subclass is shown as its nearest base here. 499 is seen in metrics and logs only."""

_RETRY_STATUSES = (429, 503)
"""Those that say when to come back (RFC 9110, 10.2.3), in whole seconds, one at least."""
_CHALLENGE = (b"www-authenticate", b'Bearer realm="inferpool"')
"""What a 401 must say (RFC 9110, 11.6.1)."""


class InstanceError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why one instance has no prediction, as it stands in its place or in a list of them."""

    code: str
    message: str
    status: int
    index: int | None = None
    """Its place among the instances, where that does not show otherwise."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document: the five members of RFC 9457 (3.1) and ours."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    """The path that was asked for."""
    code: str
    error: str
    """The detail again, for the many clients that look for a string of this name."""
    request_id: str
    retryable: bool
    retry_after_s: int | None = None
    errors: Sequence[InstanceError] = ()
    """Of each instance, where there were several."""


def kind_of(error: ServiceError) -> ErrorKind:
    """The row of the table for an error."""
    kind = TABLE.get(type(error))
    if kind is not None:
        return kind
    for cls in type(error).__mro__:
        kind = TABLE.get(cls)
        if kind is not None:
            return kind
    return TABLE[InternalError]


def instance_error(error: ServiceError, index: int | None = None) -> InstanceError:
    """An error as it stands for one instance of several."""
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
    """Render an error.

    Args:
        error: What went wrong.
        request_id: For the person who will look for it in the log.
        instance_path: The path of the request.
        errors: What went wrong with each instance, where there were several.
    """
    kind = kind_of(error)
    retry_after_s = error.retry_after_s
    if kind.is_retryable and kind.status in _RETRY_STATUSES:
        retry_after_s = max(1, retry_after_s or 1)
    return _render(
        Problem(
            type=_TYPE_PREFIX + error.code,
            title=kind.title,
            status=kind.status,
            detail=error.message,
            instance=_quoted(instance_path),
            code=error.code,
            error=error.message,
            request_id=request_id,
            retryable=kind.is_retryable,
            retry_after_s=retry_after_s,
            errors=errors,
        )
    )


def problem_response(request: Request, error: ServiceError) -> Response:
    """Render an error for a route of FastAPI's."""
    request_id = _request_id(request)
    return _response(problem(error, request_id, request.url.path), request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the app's other routes a problem document too."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_unexpected)


@lru_cache(maxsize=64)
def _quoted(path: str) -> str:
    """What an overloaded server refuses thousands of times is quoted once."""
    return quote(path)


def _render(document: Problem) -> Answer:
    body = msgspec.json.encode(document)
    headers = [(b"content-type", PROBLEM_TYPE), (b"content-length", b"%d" % len(body))]
    if document.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % document.retry_after_s))
    if document.status == HTTPStatus.UNAUTHORIZED:
        headers.append(_CHALLENGE)
    return document.status, headers, body


def _response(answer: Answer, request_id: str) -> Response:
    status, headers, body = answer
    response = Response(body, status)
    response.raw_headers = [*headers, (b"x-request-id", request_id.encode())]
    return response


def _request_id(request: Request) -> str:
    call = request.scope.get(CALL_KEY)
    if call is not None:
        return str(call.request_id)
    given = request.headers.get("x-request-id", "").encode("latin-1", "replace")
    return request_id_of(given) or new_ids()[0]  # an application that is not ours


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return problem_response(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: an unknown route, a wrong method."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    known = HTTPStatus(status) if status in _STATUSES else HTTPStatus.INTERNAL_SERVER_ERROR
    phrase, code = known.phrase, known.name.lower()
    detail = str(error.detail)
    if status == HTTPStatus.NOT_FOUND and detail == phrase:
        detail = f"there is nothing at {request.url.path[:200]}; /docs lists what there is"
    allowed = (error.headers or {}).get("Allow")
    if status == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
        detail = f"{request.url.path[:200]} takes {allowed}, not {request.method}"
    request_id = _request_id(request)
    answer = _render(
        Problem(
            type=_TYPE_PREFIX + code,
            title=phrase,
            status=status,
            detail=detail,
            instance=quote(request.url.path),
            code=code,
            error=detail,
            request_id=request_id,
            retryable=status in _RETRY_STATUSES,
        )
    )
    response = _response(answer, request_id)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    places = "; ".join(
        f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()
    )
    return problem_response(request, InvalidInputError(places))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Answer only: Starlette raises the error again, and the server logs its traceback."""
    return problem_response(
        request, InternalError("this is a mistake of the service; its log has more")
    )
