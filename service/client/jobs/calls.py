"""The common work of both clients on jobs, without input or output; see `service.client.calls`."""

import math
import os
import time
import uuid
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import replace
from urllib.parse import quote

import httpx

from ..bodies import RequestBody, are_many, make_body, query_of
from ..calls import Calls, Pause, Steps
from ..errors import (
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
    UnknownJobError,
    UnsendableError,
)
from ..options import SubmitOptions, check_names
from ..retries import doubled_s
from .body import JobBody
from .documents import JobInfo, read_job, read_jobs

_STALL_S = 300.0
"""A connection without progress for this long is given up while a job is sent."""
_POLL_S = 30
"""The longest wait for the end of a job in one request; proxies cut off requests after 60 s."""
_NOTED_S = 1
"""The same while a caller watches the progress."""
_PAGE_LINES = 64
"""Lines of the first page of a result; later pages have more if lines are short."""
_MAX_PAGE_LINES = 4096
_PAGE_BYTES = 1 << 20
_PAGE_JOBS = 100
_DELETED = 204
_PASSING = (ConnectError, DeadlineExceededError, OverloadedError, UnavailableError)
"""Errors of a service that is busy, ends or starts."""


def submit(
    calls: Calls, inputs: object | AsyncIterable[object], options: SubmitOptions
) -> Steps["JobSteps"]:
    """Yield the steps of submitting a job."""
    check_names(options, SubmitOptions)
    deadline = calls.deadline(options.get("timeout_s"))
    request_id = options.get("request_id") or uuid.uuid4().hex
    named = {"model": options.get("model"), "webhook": options.get("webhook")}
    query = {name: value for name, value in named.items() if value is not None}
    headers = {"Idempotency-Key": options.get("idempotency_key") or uuid.uuid4().hex}
    if (priority := options.get("priority")) is not None:
        headers["X-Priority"] = str(priority)
    if traceparent := options.get("traceparent"):
        headers["traceparent"] = traceparent
    id = options.get("id")
    path = "/jobs" if id is None else f"/jobs/{quote(id, safe='')}"
    body = _body_of(calls, inputs, options)
    if taken := sorted(body.query.keys() & named.keys()):
        raise UnsendableError(f"a parameter of a job cannot have the name {taken[0]!r}")

    def request() -> httpx.Request:
        return calls.request(
            "POST" if id is None else "PUT",
            path,
            deadline,
            request_id,
            query=query,
            headers=headers,
            body=body,
            stall_s=_STALL_S,
        )

    lines = body if isinstance(body, JobBody) else None
    try:
        info = yield from calls.retried(request, read_job, deadline, request_id, lines)
    finally:
        if lines is not None:
            lines.close()
    return JobSteps(calls, info)


def find(calls: Calls, id: str) -> Steps["JobSteps"]:
    """Yield the steps of reading a job."""
    return JobSteps(calls, (yield from calls.ask("GET", _path_of(id), read_job)))


class JobPages:
    """Lists jobs in some states, or in any if none is named; the newest first."""

    def __init__(self, calls: Calls, states: Iterable[str], limit: int | None) -> None:
        self._calls = calls
        named = list(states)
        self._query: dict[str, str | Sequence[str]] = {"state": named} if named else {}
        self._num_left = math.inf if limit is None else limit

    def next_page(self) -> Steps[list["JobSteps"]]:
        """Yield the steps of reading some more jobs; return none after the last one."""
        if self._num_left <= 0:
            return []
        self._query["limit"] = str(min(self._num_left, _PAGE_JOBS))
        infos, after = yield from self._calls.ask("GET", "/jobs", read_jobs, self._query)
        self._num_left -= len(infos)
        if after is None:
            self._num_left = 0
        else:
            self._query["after"] = after
        return [JobSteps(self._calls, info) for info in infos]


class JobSteps:
    """Calls about one job. One thread or task uses it at a time."""

    def __init__(self, calls: Calls, info: JobInfo) -> None:
        self._calls = calls
        self.info = info
        """The job at the last answer of the service."""
        self._page_lines = _PAGE_LINES

    def refresh(self) -> Steps[JobInfo]:
        """Yield the steps of reading it again."""
        self.info = yield from self._calls.ask("GET", _path_of(self.info.id), read_job)
        return self.info

    def wait(
        self, timeout_s: float | None, on_progress: Callable[[JobInfo], None] | None
    ) -> Steps[JobInfo]:
        """Yield the steps of waiting for its end, also while the service is restarted."""
        patience = _Patience(self._calls, self._calls.deadline(timeout_s))
        longest_s = _POLL_S if on_progress is None else _NOTED_S
        while not self.info.is_over:
            try:
                yield from self._look(min(longest_s, patience.left_s))
            except InferpoolError as error:
                yield Pause(patience.pause_after(error))
                continue
            if on_progress is not None:
                on_progress(self.info)
            if not self.info.is_over:
                patience.go_on(self.info)
        return self.info

    def next_lines(self, first: int, deadline: float) -> Steps[list[bytes]]:
        """Yield the steps of waiting for answers from `first` on; return some as lines of JSON.

        There are none after the last one.
        """
        patience = _Patience(self._calls, deadline)
        while first < self.info.num_instances or not self.info.is_over:
            try:
                if first < self.info.num_instances:
                    if lines := (yield from self._lines(first)):
                        return lines
                    if self.info.is_over:
                        raise ProtocolError(f"the result of job {self.info.id} ends at {first}")
                yield from self._look(min(_NOTED_S, patience.left_s))
            except InferpoolError as error:
                yield Pause(patience.pause_after(error))
                continue
            if not self.info.is_over:
                patience.go_on(self.info)
        return []

    def deadline(self, timeout_s: float | None) -> float:
        """Return the moment of `time.monotonic` at which a timeout that begins now ends."""
        return self._calls.deadline(timeout_s)

    def cancel(self) -> Steps[JobInfo]:
        """Yield the steps of ending it early.

        After the answer to a DELETE was lost, it is not sent again before we know that the job goes
        on: a second one would delete it.
        """
        num_attempts = 0
        while not (yield from self.refresh()).is_over:
            num_attempts += 1
            try:
                reply = yield from self._calls.send("DELETE", _path_of(self.info.id))
            except InferpoolError as error:
                if not error.is_retryable or num_attempts >= self._calls.retry.max_attempts:
                    raise
                most_s = self._calls.job_periods.max_pause_s
                yield Pause(error.retry_after_s or _pause_s(num_attempts, most_s))
                continue
            if reply.status == _DELETED:  # it had ended meanwhile
                self.info = replace(self.info, state="cancelled")
            else:
                self.info = read_job(reply)
        return self.info

    def delete(self) -> Steps[None]:
        """Yield the steps of cancelling it if it is not over, and of deleting it."""
        path, was_there = _path_of(self.info.id), False
        while True:
            try:
                status = yield from self._calls.ask("DELETE", path, lambda reply: reply.status)
            except UnknownJobError as error:
                if was_there or error.num_attempts > 1:  # an answer was lost
                    return
                raise
            if status == _DELETED:
                return
            was_there = True

    def _look(self, wait_s: float) -> Steps[None]:
        """Read the job when it is over, or else after some time."""
        asked = time.monotonic()
        deadline = self._calls.deadline(self._calls.timeout_s) + wait_s
        path, query = _path_of(self.info.id), {"wait": f"{wait_s:.3f}"}
        reply = yield from self._calls.send("GET", path, deadline, query=query)
        self.info = read_job(reply)
        left_s = wait_s - (time.monotonic() - asked)
        if not self.info.is_over and left_s > wait_s / 2:  # a service that ends answers early
            yield Pause(min(left_s, _pause_s(1, self._calls.job_periods.max_pause_s)))

    def _lines(self, first: int) -> Steps[list[bytes]]:
        """Read the answers that exist now, from an instance on."""
        reply = yield from self._calls.send(
            "GET",
            _path_of(f"{self.info.id}/result"),
            query={"first": str(first), "count": str(self._page_lines)},
            headers={"Accept": "application/jsonl"},
        )
        num_bytes = len(reply.content)
        if num_bytes > 8 * _PAGE_BYTES:
            self._page_lines = max(1, self._page_lines // 2)
        elif num_bytes < _PAGE_BYTES:
            self._page_lines = min(2 * self._page_lines, _MAX_PAGE_LINES)
        return reply.content.splitlines()


class _Patience:
    """Decides how long to wait for an unreachable service."""

    def __init__(self, calls: Calls, deadline: float) -> None:
        self._calls = calls
        self._deadline = deadline
        self._lost_at = time.monotonic() + calls.job_periods.lost_s
        self._num_failures = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def go_on(self, info: JobInfo) -> None:
        """Record an answer of the service about a job that is not over.

        Raises:
            DeadlineExceededError: The time is up.
        """
        self._lost_at = time.monotonic() + self._calls.job_periods.lost_s
        self._num_failures = 0
        if not self.left_s:
            raise DeadlineExceededError(
                f"job {info.id} is {info.state} still, with {info.num_done} of "
                f"{info.num_instances} done; it goes on",
                request_id=info.request_id,
            )

    def pause_after(self, error: InferpoolError) -> float:
        """Return the seconds to wait before the next request.

        Raises:
            InferpoolError: The same error, if it does not pass or there is no time left.
        """
        if not (error.is_retryable and isinstance(error, _PASSING)):
            raise error
        self._num_failures += 1
        most_s = self._calls.job_periods.max_pause_s
        asked_s = min(error.retry_after_s or 0.0, most_s)
        pause_s = max(_pause_s(self._num_failures, most_s), asked_s)
        end = self._lost_at if self._deadline == math.inf else self._deadline
        if time.monotonic() + pause_s >= end:
            error.add_note("the time to wait for the job is up; it may go on in the service")
            raise error
        self._calls.tell_retry(error, pause_s)
        return pause_s


def _pause_s(num_failures: int, most_s: float) -> float:
    return doubled_s(0.1, most_s, num_failures)


def _body_of(
    calls: Calls, inputs: object | AsyncIterable[object], options: SubmitOptions
) -> RequestBody | JobBody:
    parameters = options.get("parameters")
    if are_many(inputs):
        is_repeatable = calls.retry.max_attempts > 1
        query, piece_s = query_of(parameters), calls.job_periods.piece_s
        return JobBody(inputs, query, is_repeatable=is_repeatable, piece_s=piece_s)
    if isinstance(inputs, os.PathLike) and os.path.isdir(inputs):
        raise UnsendableError(
            f"{inputs} is a folder: submit its files, such as sorted(folder.iterdir())"
        )
    return make_body(inputs, parameters, envelope=options.get("envelope", True))


def _path_of(place: str) -> str:
    return f"/jobs/{quote(place)}"
