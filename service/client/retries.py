"""Says why a request failed, and decides whether and when it is sent again."""

import contextlib
import email.utils
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import httpx

from .connecting import is_untrusted
from .errors import (
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    OverQuotaError,
    ProtocolError,
    StoreFullError,
    UnsendableError,
    error_class,
)
from .results import Json, Reply, read_instance_error

UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
"""Errors before anything was sent."""
_HOPELESS = (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.LocalProtocolError)
_LASTING = (DeadlineExceededError, OverQuotaError, StoreFullError)
"""Errors that may pass, but not as soon as a retry would come."""
_EARLY_S = 0.01
"""A timer may fire this much early."""
_MAX_PAUSE_S = 3600.0
"""Longest pause: a service that asks for more is not busy, but wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry policy. No retry goes past the request's deadline.

    The client retries refusals that may pass (429, 502, 503, 408) and connections that failed or
    broke before an answer. After a broken connection the service may compute the same prediction
    twice, which is harmless if the model has no side effects. Errors that a retry would meet again
    (other 4xx, a model that fails) are raised at once.
    """

    max_attempts: int = 8
    """Most attempts, the first included; 1 for no retries."""
    backoff_s: float = 0.1
    """Longest pause before the second attempt; it doubles for each further one. The pause is a
    random part of it, half at least, so that clients do not come back all at once. The time that
    `Retry-After` asks for is added."""
    max_backoff_s: float = 5.0
    budget_ratio: float = 0.2
    """Retries per request that may reach the service: in the long run, a client adds no more than
    this share to an overloaded service."""
    budget_reserve: int = 100
    """Most retries that can be saved up for bad times."""
    budget_per_s: float = 1.0
    """Retries that are added each second."""
    after_sending: bool = True
    """True: also retry if the connection broke after the service may have read the request."""


class RetryBudget:
    """Retries that one client has left. Any thread may call it."""

    def __init__(self, retry: Retry, now: Callable[[], float] = time.monotonic) -> None:
        self._retry = retry
        self._now = now
        self._tokens = float(retry.budget_reserve)
        self._as_of = now()
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """Count a request."""
        with self._lock:
            self._add(self._retry.budget_ratio)

    def withdraw(self) -> bool:
        """Use up one retry; return whether there was one."""
        with self._lock:
            self._add(0.0)
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True

    def _add(self, tokens: float) -> None:
        now = self._now()
        tokens += (now - self._as_of) * self._retry.budget_per_s
        self._tokens = min(self._tokens + tokens, float(self._retry.budget_reserve))
        self._as_of = now


def doubled_s(first_s: float, most_s: float, num_before: int) -> float:
    """Return the seconds of a pause that doubles each time, minus up to half of it at random."""
    return min(first_s * 2.0 ** min(num_before, 64), most_s) * random.uniform(0.5, 1.0)


def pause_before_retry(
    error: InferpoolError,
    *,
    retry: Retry,
    budget: RetryBudget,
    num_attempts: int,
    left_s: float,
    was_sent: bool,
) -> float:
    """Return the seconds to wait before the next attempt, after the error of the last one.

    `was_sent` is true if the last attempt may have reached the service.

    Raises:
        InferpoolError: The same error, if there is no retry; a note says why.
    """
    if not error.is_retryable or isinstance(error, _LASTING):
        raise error
    if num_attempts >= retry.max_attempts:
        error.add_note(f"not tried again after {num_attempts} attempts")
        raise error
    if isinstance(error, ConnectError) and was_sent and not retry.after_sending:
        error.add_note("not tried again: the service may have read the request")
        raise error
    backoff_s = doubled_s(retry.backoff_s, retry.max_backoff_s, num_attempts - 1)
    pause_s = (error.retry_after_s or 0.0) + backoff_s
    if pause_s > _MAX_PAUSE_S:
        error.add_note(f"not tried again: {pause_s:.2g} s is longer than anyone waits")
        raise error
    if pause_s >= left_s:
        error.add_note(
            f"not tried again: {pause_s:.2g} s from now is past the deadline, in {left_s:.2g} s"
        )
        raise error
    if was_sent and not budget.withdraw():
        error.add_note("not tried again: this client has made too many retries lately")
        raise error
    return pause_s


def retry_after_s(headers: httpx.Headers) -> float | None:
    """Read `Retry-After` (RFC 9110, 10.2.3), a number or a date; return seconds."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    try:  # compare with the clock that wrote the date
        now = email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        now = time.time()
    return max(0.0, until - now)


def raise_unanswered(
    error: httpx.RequestError, deadline: float, place: str, request_id: str
) -> NoReturn:
    """Raise our error for one of httpx's.

    Args:
        error: The error.
        deadline: Moment of `time.monotonic`.
        place: URL of the service, and the proxy on the way to it.
        request_id: Name of the request in the service's log.

    Raises:
        InferpoolError: Always.
    """
    message = str(error) or type(error).__name__
    if isinstance(error, _HOPELESS):
        raise UnsendableError(f"this cannot be asked: {message}", request_id=request_id) from error
    if isinstance(error, httpx.DecodingError):
        raise ProtocolError(
            f"the answer cannot be read: {message}", request_id=request_id
        ) from error
    has_no_room = isinstance(error, httpx.PoolTimeout)
    if isinstance(error, httpx.TimeoutException) and (
        has_no_room or time.monotonic() >= deadline - _EARLY_S
    ):
        what = "no connection was free" if has_no_room else f"no answer from {place}"
        raise DeadlineExceededError(f"{what} in time", request_id=request_id) from error
    raise ConnectError(
        f"no answer from {place}: {message}",
        request_id=request_id,
        is_retryable=not is_untrusted(error),
    ) from error


def refusal_of(reply: Reply, request_id: str, through: str = "") -> InferpoolError:
    """Return the error in an answer: from its problem document, or else from its status.

    Args:
        reply: The answer.
        request_id: Name of the request in the service's log.
        through: Text that names the proxy on the way.
    """
    status = reply.status
    problem: Json = None
    if reply.headers.get("content-type", "").startswith("application/problem+json"):
        with contextlib.suppress(ValueError, RecursionError):
            problem = json.loads(reply.content)
    wait_s = retry_after_s(reply.headers)
    match problem:
        case {"code": str(code), "detail": str(detail), "retryable": bool(is_retryable)}:
            given = problem.get("errors")
            listed = given if isinstance(given, list) else []
            several = [read_instance_error(each, i, request_id) for i, each in enumerate(listed)]
            told_s = problem.get("retry_after_s")
            if wait_s is None and isinstance(told_s, int | float):
                wait_s = max(0.0, told_s)
            return error_class(code, status)(
                detail,
                code=code,
                status=status,
                request_id=reply.headers.get("x-request-id", request_id),
                is_retryable=is_retryable,
                retry_after_s=wait_s,
                errors=[each for each in several if each is not None],
            )
    came = through and f", it came{through}"
    start = " ".join(reply.content[:200].decode("utf-8", "replace").split())
    if status < 400:
        leads = f", a redirect to {place}" if (place := reply.headers.get("location")) else ""
        return ProtocolError(
            f"an answer of status {status} is not one of inferpool's{leads}{came}: {start!r}",
            status=status,
            request_id=request_id,
        )
    return error_class("", status)(
        f"the answer is not one of inferpool's; a proxy may have sent it{came}: {start!r}",
        code=f"http_{status}",
        status=status,
        request_id=request_id,
        retry_after_s=wait_s,
    )
