"""How errors and the metadata of calls look in gRPC. Event loop."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import grpc

from inferpool.service.api.errors import INTERNAL_MESSAGE, kind_of
from inferpool.service.errors import InternalError, ServiceError

STATUSES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    406: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Statuses by those of HTTP for the same errors. A 408 is of a client that is too slow."""
_RETRIED = (429, 503)
_KNOWN = frozenset(
    (
        "authorization", "x-api-key", "x-request-id", "traceparent", "tracestate", "x-priority",
        "x-timeout-ms", "x-model-version",
    )
)  # fmt: skip
"""Metadata that mean the same as headers of HTTP."""

Headers = list[tuple[bytes, bytes]]


def status_of(error: ServiceError) -> grpc.StatusCode:
    """Return the status of an error."""
    return STATUSES.get(kind_of(error).status, grpc.StatusCode.INTERNAL)


def metadata_of(error: ServiceError, request_id: str) -> tuple[tuple[str, str], ...]:
    """Return what comes with an error: the call's id, and the seconds until another try."""
    found = [("x-request-id", request_id)] if request_id else []
    kind = kind_of(error)
    if kind.is_retryable and kind.status in _RETRIED:
        found.append(("retry-after", str(max(1, error.retry_after_s or 1))))
    return tuple(found)


async def refuse(context: Any, error: ServiceError, request_id: str = "") -> NoReturn:
    """End a call with an error."""
    await context.abort(status_of(error), error.message, metadata_of(error, request_id))
    raise AssertionError("unreachable: abort raises")


def internal() -> InternalError:
    """Return the error of a mistake of ours, which the log explains."""
    return InternalError(INTERNAL_MESSAGE)


def headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Headers:
    """Return the metadata that mean the same as headers of HTTP."""
    return [
        (key.encode(), value.strip().encode("latin-1", "replace"))
        for key, value in metadata or ()
        if key in _KNOWN and isinstance(value, str)
    ]


def wants_gzip(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether a client asks for compressed answers, by `accept-encoding: gzip`.

    Every client of gRPC can read them, and most lose time by that: so it must ask.
    """
    return any(key == "accept-encoding" and "gzip" in str(value) for key, value in metadata or ())
