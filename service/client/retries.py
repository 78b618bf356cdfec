"""When a request that failed is sent again, and when not."""

import email.utils
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from inferpool.service.client.errors import ConnectError, DeadlineExceededError, InferpoolError

_MAX_PAUSE_S = 3600.0
"""Where nothing else ends the waiting: who asks for more of it is not busy, but wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How to try again. All of it ends at the request's deadline in any case.

    Tried again are refusals that may pass (429, 502, 503, 408), and connections that could not be
    made or broke before an answer. The latter may have been computed already: a prediction is
    computed once more then, which does no harm as long as models have no side effects. Errors that
    another try would meet again (4xx, a model that fails) are raised at once.
    """

    max_attempts: int = 8
    """With the first; 1 tries nothing again."""
    backoff_s: float = 0.1
    """Before the second attempt, and twice as long before each further one, of which a random half
    is left out so that clients do not come back all at once. What `Retry-After` asks for comes
    before it."""
    max_backoff_s: float = 5.0
    budget_ratio: float = 0.2
    """Retries that reach the service, for each request: in the long run a client adds no more than
    this to a service that is overloaded."""
    budget_reserve: int = 100
    """Retries that may be saved up for bad times."""
    budget_per_s: float = 1.0
    """Retries that come for free with time."""
    after_sending: bool = True
    """Whether to try again where a connection broke after the request may have been read."""


class RetryBudget:
    """What is left of the retries of one client. Any thread may call it."""

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
        """Take one retry, if there is one."""
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


def pause_before_retry(
    error: InferpoolError,
    *,
    retry: Retry,
    budget: RetryBudget,
    num_attempts: int,
    left_s: float,
    was_sent: bool,
) -> float:
    """How long to wait before the next attempt.

    Args:
        error: Of the last attempt.
        retry: How to try again.
        budget: Of the client.
        num_attempts: So far.
        left_s: Until the deadline.
        was_sent: The last attempt may have reached the service.

    Raises:
        InferpoolError: The error, with a note that says why it is not tried again, where it might.
    """
    if not error.is_retryable or isinstance(error, DeadlineExceededError):
        raise error
    if num_attempts >= retry.max_attempts:
        error.add_note(f"not tried again after {num_attempts} attempts")
        raise error
    if isinstance(error, ConnectError) and was_sent and not retry.after_sending:
        error.add_note("not tried again: the service may have read it")
        raise error
    longest_s = min(retry.backoff_s * 2.0 ** (num_attempts - 1), retry.max_backoff_s)
    pause_s = (error.retry_after_s or 0.0) + longest_s * random.uniform(0.5, 1.0)
    if pause_s > _MAX_PAUSE_S:
        error.add_note(f"not tried again: {pause_s:.2g} s is longer than anyone waits")
        raise error
    if pause_s >= left_s:
        error.add_note(
            f"not tried again: {pause_s:.2g} s from now is past the deadline, in {left_s:.2g} s"
        )
        raise error
    if was_sent and not budget.withdraw():
        error.add_note("not tried again: too many requests of this client had to be, lately")
        raise error
    return pause_s


def retry_after_s(headers: httpx.Headers) -> float | None:
    """Seconds that `Retry-After` asks for (RFC 9110, 10.2.3): a number, or a date."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    try:  # by the clock that wrote the date
        now = email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        now = time.time()
    return max(0.0, until - now)
