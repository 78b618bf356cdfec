"""The common work of both clients: requests, retries and answers, without input or output.

A call is a generator. It yields steps, receives the outcome of each, and returns the result. Each
client only performs the steps: it sends, sleeps or draws inputs.
"""

import base64
import math
import ssl
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast
from urllib.parse import quote

import httpx

from .bodies import RequestBody, file_question, make_body, names_file
from .connecting import find_way
from .errors import (
    AnswerError,
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    UnavailableError,
    UnsendableError,
)
from .jobs.body import JobBody
from .options import (
    ClientOptions,
    JobPeriods,
    ManyOptions,
    PredictOptions,
    check_names,
)
from .results import (
    Health,
    Prediction,
    Reply,
    Timing,
    read_health,
    read_prediction,
    read_stages,
)
from .retries import (
    UNSENT,
    Retry,
    RetryBudget,
    pause_before_retry,
    raise_unanswered,
    refusal_of,
)
from .streams import EVENTS_TYPE, PartReader
from .urls import DEFAULT_URL, problem_of_address, without_password

_T = TypeVar("_T")

_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_CONCURRENCY = 16
_KEEP_ALIVE_S = 15.0
"""Idle time of a connection: shorter than the service's (75 s by default) or a proxy's."""
_ANSWER_S = 0.1
"""Time reserved for the answer's way: the service's deadline is earlier by this, at most 10 %."""
_POLL_S = 0.1
_GOOD = (200, 202, 204)
_LONGEST_S = 1e6
"""Longest socket timeout; longer ones are not set, since some systems cannot count that far."""


@dataclass(frozen=True, slots=True)
class Send:
    """Step: send a request and read its answer, before a moment of `time.monotonic`."""

    request: httpx.Request
    deadline: float
    is_stream: bool = False
    """Leave an answer of status 200 open, with its body unread."""

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None for no limit."""
        left_s = self.deadline - time.monotonic()
        return None if left_s > _LONGEST_S else left_s

    def check_time(self) -> None:
        """Check the deadline while an answer arrives.

        Raises:
            httpx.ReadTimeout: The deadline has passed.
        """
        if time.monotonic() > self.deadline:
            raise httpx.ReadTimeout("the answer did not end in time", request=self.request)


@dataclass(frozen=True, slots=True)
class Pause:
    """Step: wait."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Draw:
    """Step: draw all inputs of a job that have not been sent, before they are sent again."""

    body: JobBody


Step = Send | Pause | Draw
StepOutcome = Reply | httpx.RequestError | None
"""Outcome of a step: None unless something was sent."""
Steps = Generator[Step, StepOutcome, _T]


class Calls:
    """Calls to one service. Any thread may use it."""

    def __init__(self, url: str, options: ClientOptions) -> None:
        """Check the arguments of a client.

        Raises:
            ValueError: The URL, the key or another option is invalid.
        """
        check_names(options, ClientOptions)
        if problem := problem_of_address(url):
            shown = without_password(url)
            raise ValueError(f"{shown!r} is no URL of a service, as {DEFAULT_URL} is: {problem}")
        parsed = httpx.URL(url)
        self.url = str(parsed.copy_with(userinfo=None)).rstrip("/")
        """URL without its password, if it had one."""
        retries = options.get("retries", Retry())
        self.retry = Retry(max_attempts=1 + retries) if isinstance(retries, int) else retries
        self.job_periods = JobPeriods()
        self._budget = RetryBudget(self.retry)
        self._on_retry = options.get("on_retry")
        self.timeout_s = options.get("timeout_s", _TIMEOUT_S)
        self._connect_timeout_s = options.get("connect_timeout_s", _CONNECT_TIMEOUT_S)
        self.max_concurrency = options.get("max_concurrency", _MAX_CONCURRENCY)
        if self.max_concurrency < 1:
            raise ValueError("max_concurrency must be at least 1")
        verify = options.get("verify", True)
        self.verify = (
            ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
        )
        self.way = find_way(self.url, options.get("proxy"))
        self.limits = httpx.Limits(
            max_connections=self.max_concurrency,
            max_keepalive_connections=self.max_concurrency,
            keepalive_expiry=_KEEP_ALIVE_S,
        )
        self._host = parsed.netloc.decode()
        self._headers = {"User-Agent": "inferpool-client", **options.get("headers", {})}
        if key := options.get("key"):
            key = key.strip()
            if not (key.isascii() and key.isprintable()):  # httpx's own error would show the key
                raise ValueError("the key has characters that no header may have")
            self._headers["Authorization"] = f"Bearer {key}"
        if parsed.userinfo:  # as a header, since httpx logs each URL
            pair = f"{parsed.username}:{parsed.password}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"

    def predict(self, value: object, options: PredictOptions) -> Steps[Prediction]:
        """Yield the steps of one prediction."""
        check_names(options, PredictOptions)
        started = time.monotonic()
        deadline = self.deadline(options.get("timeout_s", self.timeout_s))
        request_id = options.get("request_id") or uuid.uuid4().hex
        model = options.get("model")
        envelope = options.get("envelope", True)
        body = make_body(value, options.get("parameters"), envelope=envelope)
        headers = _predict_headers(options)
        path = "/predict" if model is None else f"/predict/{quote(model, safe='')}"

        sent_at: list[float] = []  # the moment of each attempt

        def request() -> httpx.Request:
            sent_at.append(time.monotonic())
            timeout = _timeout_header(deadline - time.monotonic())
            return self.request(
                "POST", path, deadline, request_id, headers={**headers, **timeout}, body=body
            )

        def read(reply: Reply) -> Prediction:
            return read_prediction(
                reply,
                model=model,
                envelope=envelope,
                request_id=request_id,
                num_attempts=len(sent_at),
                timing=_timing(reply, sent_at[-1], started),
            )

        try:
            return (yield from self.retried(request, read, deadline, request_id))
        except InferpoolError as error:
            _add_file_question(error, value)
            raise

    def open_stream(self, value: object, options: PredictOptions) -> Steps[Reply]:
        """Yield the steps until the first part of a stream; the answer is open."""
        check_names(options, PredictOptions)
        timeout_s = options.get("timeout_s", self.timeout_s)
        deadline = self.deadline(timeout_s)
        request_id = options.get("request_id") or uuid.uuid4().hex
        model = options.get("model")
        envelope = options.get("envelope", True)
        body = make_body(value, options.get("parameters"), envelope=envelope)
        headers = {**_predict_headers(options), "Accept": EVENTS_TYPE}
        path = "/predict" if model is None else f"/predict/{quote(model, safe='')}"

        def request() -> httpx.Request:
            timeout = _timeout_header(deadline - time.monotonic())
            return self.request(
                "POST", path, math.inf, request_id, headers={**headers, **timeout}, body=body,
                stall_s=math.inf if timeout_s is None else timeout_s,
            )  # fmt: skip

        try:
            return (
                yield from self.retried(
                    request, lambda reply: reply, deadline, request_id, is_stream=True
                )
            )
        except InferpoolError as error:
            _add_file_question(error, value)
            raise

    def reader_of(self, reply: Reply) -> PartReader:
        """Return the reader of an answer that `open_stream` has opened."""
        return PartReader(reply, "", self.url + self.way.through)

    def predict_one_of_many(
        self, value: object, options: ManyOptions, index: int
    ) -> Steps[Prediction]:
        """Yield the steps of one prediction of several; the result has its index."""
        shared = {k: v for k, v in options.items() if k in PredictOptions.__annotations__}
        own = cast("PredictOptions", shared)
        return replace((yield from self.predict(value, own)), index=index)

    def health(self) -> Steps[Health]:
        """Yield the steps of `GET /health`."""
        return read_health((yield from self.send("GET", "/health")))

    def is_ready(self) -> Steps[bool]:
        """Yield the steps of `GET /health/ready`; return whether the service is ready."""
        try:
            yield from self.send("GET", "/health/ready")
        except (ConnectError, UnavailableError, DeadlineExceededError):
            return False
        return True

    def wait_until_ready(self, timeout_s: float) -> Steps[None]:
        """Ask `GET /health/ready` until it answers 200."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                yield from self.send("GET", "/health/ready", deadline)
            except (ConnectError, UnavailableError) as error:
                pause_s = max(_POLL_S, min(error.retry_after_s or 0.0, 1.0))
                if not error.is_retryable or time.monotonic() + pause_s >= deadline:
                    error.add_note(f"the service was not ready in {timeout_s:g} s")
                    raise
            else:
                return
            yield Pause(pause_s)

    def ask(
        self,
        method: str,
        path: str,
        read: Callable[[Reply], _T],
        query: Mapping[str, str | Sequence[str]] | None = None,
    ) -> Steps[_T]:
        """Yield the steps of a request with the client's time and retries."""
        deadline = self.deadline(self.timeout_s)
        request_id = uuid.uuid4().hex

        def request() -> httpx.Request:
            return self.request(method, path, deadline, request_id, query=query)

        return (yield from self.retried(request, read, deadline, request_id))

    def send(
        self,
        method: str,
        path: str,
        deadline: float | None = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Steps[Reply]:
        """Yield the steps of a request without retries, by default with the client's time."""
        if deadline is None:
            deadline = self.deadline(self.timeout_s)
        request_id = uuid.uuid4().hex
        request = self.request(method, path, deadline, request_id, query=query, headers=headers)
        return self.reply((yield Send(request, deadline)), deadline, request_id)

    def retried(
        self,
        request: Callable[[], httpx.Request],
        read: Callable[[Reply], _T],
        deadline: float,
        request_id: str,
        body: JobBody | None = None,
        *,
        is_stream: bool = False,
    ) -> Steps[_T]:
        """Repeat a request until its answer, as far as the retry policy and the deadline allow.

        Args:
            request: Makes the request of each attempt.
            read: Reads an answer.
            deadline: Moment of `time.monotonic`.
            request_id: Name of the request in the service's log.
            body: Body of the requests, if it is produced while it is sent.
            is_stream: Leave a good answer open.
        """
        self._budget.deposit()
        num_attempts = 0
        while True:
            num_attempts += 1
            outcome = yield Send(request(), deadline, is_stream)
            try:
                return read(self.reply(outcome, deadline, request_id))
            except InferpoolError as error:
                error.num_attempts = num_attempts
                pause_s = pause_before_retry(
                    error,
                    retry=self.retry,
                    budget=self._budget,
                    num_attempts=num_attempts,
                    left_s=deadline - time.monotonic(),
                    was_sent=not isinstance(outcome, UNSENT),
                )
                self.tell_retry(error, pause_s)
            yield Pause(pause_s)
            if body is not None:
                yield Draw(body)

    def tell_retry(self, error: InferpoolError, pause_s: float) -> None:
        """Report why there is another attempt, and when, to the user of the client."""
        if self._on_retry is not None:
            self._on_retry(error, pause_s)

    def request(
        self,
        method: str,
        path: str,
        deadline: float,
        request_id: str,
        *,
        query: Mapping[str, str | Sequence[str]] | None = None,
        headers: Mapping[str, str] | None = None,
        body: RequestBody | JobBody | None = None,
        stall_s: float = math.inf,
    ) -> httpx.Request:
        """Return a request; no step of it may take longer than `stall_s`.

        Raises:
            UnsendableError: A header has invalid characters.
        """
        extra = {} if body is None else {"Host": self._host, **body.headers}
        given = {**self._headers, "X-Request-ID": request_id, **(headers or {}), **extra}
        for name, text in given.items():
            if not (text.isascii() and text.isprintable()):
                raise UnsendableError(
                    f"the value for {name} has characters that no header may have"
                )
        return httpx.Request(
            method,
            self.url + path,
            params={**(query or {}), **({} if body is None else body.query)} or None,
            headers=given,
            stream=body,
            extensions={"timeout": _Timeouts(deadline, self._connect_timeout_s, stall_s)},
        )

    def reply(self, outcome: StepOutcome, deadline: float, request_id: str) -> Reply:
        """Return an answer of status 200, 202 or 204.

        Raises:
            InferpoolError: There is no answer, or another one.
        """
        if isinstance(outcome, httpx.RequestError):
            raise_unanswered(outcome, deadline, self.url + self.way.through, request_id)
        assert outcome is not None, "only a request has an outcome"
        if outcome.status not in _GOOD:
            raise refusal_of(outcome, request_id, self.way.through)
        return outcome

    def deadline(self, timeout_s: float | None) -> float:
        """Return the moment of `time.monotonic` at which a timeout that begins now ends.

        Raises:
            ValueError: The time is not more than 0.
        """
        if timeout_s is None:
            return math.inf
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, or None: {timeout_s}")
        return time.monotonic() + timeout_s


class _Timeouts(dict[str, float | None]):
    """Timeouts for httpx: the time left until the deadline, whenever httpx starts a step."""

    def __init__(self, deadline: float, connect_timeout_s: float, stall_s: float) -> None:
        super().__init__()
        self._deadline = deadline
        self._connect_timeout_s = connect_timeout_s
        self._stall_s = stall_s

    def get(self, name: str, default: object = None) -> float | None:
        left_s = min(max(self._deadline - time.monotonic(), 1e-3), self._stall_s)
        if name == "connect":
            return min(left_s, self._connect_timeout_s)
        return None if left_s > _LONGEST_S else left_s


def _predict_headers(options: PredictOptions) -> dict[str, str]:
    headers = {}
    accept = options.get("accept")
    if options.get("as_arrays"):
        if accept is not None:
            raise UnsendableError("as_arrays asks for safetensors: it goes with no `accept`")
        accept = "application/safetensors"
    if accept is not None:
        headers["Accept"] = accept
    if (priority := options.get("priority")) is not None:
        headers["X-Priority"] = str(priority)
    if (version := options.get("version")) is not None:
        headers["X-Model-Version"] = str(version)
    if traceparent := options.get("traceparent"):
        headers["traceparent"] = traceparent
    return headers


def _timeout_header(left_s: float) -> dict[str, str]:
    if left_s == math.inf:
        return {}
    return {"X-Timeout-Ms": str(max(1, int((left_s - min(_ANSWER_S, left_s / 10)) * 1e3)))}


def _timing(reply: Reply, sent: float, started: float) -> Timing:
    stages = read_stages(reply.headers)
    now = time.monotonic()
    return Timing(
        queue_s=stages.get("queue"),
        preprocess_s=stages.get("preprocess"),
        inference_s=stages.get("inference"),
        total_s=stages.get("total"),
        round_trip_s=now - sent,
        elapsed_s=now - started,
    )


def _add_file_question(error: InferpoolError, value: object) -> None:
    """Ask whether a text that looks like a file name was meant to be the file."""
    if isinstance(error, AnswerError) and isinstance(value, str) and names_file(value):
        question = file_question(value)
        if question not in error.detail:
            error.detail = f"{error.detail}; {question}"
