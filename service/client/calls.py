"""The work that both clients share: requests, retries and answers, without input or output.

A call is a generator. It yields `Send` and `Pause`, receives the outcome of each, and returns the
result. Each client only sends, sleeps, and drives the generator.
"""

import base64
import contextlib
import json
import math
import ssl
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar
from urllib.parse import quote

import httpx

from inferpool.service.client.bodies import RequestBody, file_question, make_body, names_file
from inferpool.service.client.errors import (
    AnswerError,
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    ProtocolError,
    UnavailableError,
    UnsendableError,
    error_class,
)
from inferpool.service.client.options import ClientOptions, ManyOptions, PredictOptions, check_names
from inferpool.service.client.results import (
    Health,
    Json,
    Prediction,
    Reply,
    Timing,
    read_health,
    read_instance_error,
    read_prediction,
    read_stages,
)
from inferpool.service.client.retries import Retry, RetryBudget, pause_before_retry, retry_after_s
from inferpool.service.settings.urls import DEFAULT_URL, problem_of_address, without_password

_T = TypeVar("_T")

_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_CONCURRENCY = 16
_KEEP_ALIVE_S = 15.0
"""Idle time of a connection: shorter than the service's (75 s by default) or a proxy's."""
_ANSWER_S = 0.1
"""Time kept for the answer to arrive: the service's deadline is earlier by this, at most 10 %."""
_POLL_S = 0.1
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
"""Errors before anything was sent."""
_HOPELESS = (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.LocalProtocolError)
_LONGEST_S = 1e6
"""Longest socket timeout; above it we set none, since some systems cannot count so far."""


@dataclass(frozen=True, slots=True)
class Send:
    """Step: send a request and read its answer, before a moment of `time.monotonic`."""

    request: httpx.Request
    deadline: float

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


StepOutcome = Reply | httpx.RequestError | None
"""Outcome of a step: None after a pause."""
Steps = Generator[Send | Pause, StepOutcome, _T]


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
        self._retry = Retry(max_attempts=1 + retries) if isinstance(retries, int) else retries
        self._budget = RetryBudget(self._retry)
        self._on_retry = options.get("on_retry")
        self._timeout_s = options.get("timeout_s", _TIMEOUT_S)
        self._connect_timeout_s = options.get("connect_timeout_s", _CONNECT_TIMEOUT_S)
        self.max_concurrency = options.get("max_concurrency", _MAX_CONCURRENCY)
        if self.max_concurrency < 1:
            raise ValueError("max_concurrency must be at least 1")
        verify = options.get("verify", True)
        self.verify = (
            ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
        )
        self.proxy = options.get("proxy")
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
        """Take the steps of one prediction."""
        check_names(options, PredictOptions)
        started = time.monotonic()
        deadline = _deadline(started, options.get("timeout_s", self._timeout_s))
        request_id = options.get("request_id") or uuid.uuid4().hex
        model = options.get("model")
        body = make_body(value, options.get("parameters"))
        headers = self._predict_headers(options, request_id)
        path = "/predict" if model is None else f"/predict/{quote(model, safe='')}"
        self._budget.deposit()
        num_attempts = 0
        while True:
            sent = time.monotonic()
            num_attempts += 1
            outcome = yield Send(
                self._post(path, body, headers, deadline - sent, deadline), deadline
            )
            try:
                reply = self._reply(outcome, deadline, request_id)
                return read_prediction(
                    reply,
                    model=model,
                    request_id=request_id,
                    num_attempts=num_attempts,
                    timing=_timing(reply, sent, started),
                )
            except InferpoolError as error:
                error.num_attempts = num_attempts
                _add_file_question(error, value)
                pause_s = pause_before_retry(
                    error,
                    retry=self._retry,
                    budget=self._budget,
                    num_attempts=num_attempts,
                    left_s=deadline - time.monotonic(),
                    was_sent=not isinstance(outcome, _UNSENT),
                )
                if self._on_retry is not None:
                    self._on_retry(error, pause_s)
            yield Pause(pause_s)

    def predict_one_of_many(
        self, value: object, options: ManyOptions, index: int
    ) -> Steps[Prediction]:
        """Take the steps of one prediction of several; the result has its index."""
        own = PredictOptions(as_arrays=options.get("as_arrays", False))
        for name in ("model", "version", "parameters", "priority", "timeout_s"):
            if name in options:
                own[name] = options[name]
        return replace((yield from self.predict(value, own)), index=index)

    def health(self) -> Steps[Health]:
        """Take the steps of `GET /health`."""
        return read_health((yield from self._get("/health")))

    def is_ready(self) -> Steps[bool]:
        """Take the steps of `GET /health/ready`; return whether the service is ready."""
        try:
            yield from self._get("/health/ready")
        except (ConnectError, UnavailableError, DeadlineExceededError):
            return False
        return True

    def wait_until_ready(self, timeout_s: float) -> Steps[None]:
        """Ask `GET /health/ready` until it answers 200."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                yield from self._get("/health/ready", deadline)
            except (ConnectError, UnavailableError) as error:
                pause_s = max(_POLL_S, min(error.retry_after_s or 0.0, 1.0))
                if not error.is_retryable or time.monotonic() + pause_s >= deadline:
                    error.add_note(f"the service was not ready in {timeout_s:g} s")
                    raise
            else:
                return
            yield Pause(pause_s)

    def _get(self, path: str, deadline: float | None = None) -> Steps[Reply]:
        if deadline is None:
            deadline = _deadline(time.monotonic(), self._timeout_s)
        request_id = uuid.uuid4().hex
        request = httpx.Request(
            "GET",
            self.url + path,
            headers={**self._headers, "X-Request-ID": request_id},
            extensions={"timeout": _Timeouts(deadline, self._connect_timeout_s)},
        )
        return self._reply((yield Send(request, deadline)), deadline, request_id)

    def _post(
        self, path: str, body: RequestBody, headers: dict[str, str], left_s: float, deadline: float
    ) -> httpx.Request:
        timeout = {}
        if left_s < math.inf:
            left_ms = int((left_s - min(_ANSWER_S, left_s / 10)) * 1e3)
            timeout["X-Timeout-Ms"] = str(max(1, left_ms))
        return httpx.Request(
            "POST",
            self.url + path,
            params=body.query or None,
            headers={"Host": self._host, **headers, **timeout, **body.headers},
            stream=body,
            extensions={"timeout": _Timeouts(deadline, self._connect_timeout_s)},
        )

    def _predict_headers(self, options: PredictOptions, request_id: str) -> dict[str, str]:
        headers = {**self._headers, "X-Request-ID": request_id}
        if options.get("as_arrays"):
            headers["Accept"] = "application/safetensors"
        if (priority := options.get("priority")) is not None:
            headers["X-Priority"] = str(priority)
        if (version := options.get("version")) is not None:
            headers["X-Model-Version"] = str(version)
        if traceparent := options.get("traceparent"):
            headers["traceparent"] = traceparent
        for name, text in headers.items():
            if not (text.isascii() and text.isprintable()):
                raise UnsendableError(
                    f"the value for {name} has characters that no header may have"
                )
        return headers

    def _reply(self, outcome: StepOutcome, deadline: float, request_id: str) -> Reply:
        """Return an answer of status 200; raise an `InferpoolError` for anything else."""
        if isinstance(outcome, httpx.RequestError):
            _raise_unanswered(outcome, deadline, self.url, request_id)
        assert outcome is not None, "a pause has no outcome"
        if outcome.status != 200:
            raise _refusal(outcome, request_id)
        return outcome


class _Timeouts(dict[str, float | None]):
    """Timeouts for httpx: the time left until the deadline, whenever httpx starts a step."""

    def __init__(self, deadline: float, connect_timeout_s: float) -> None:
        super().__init__()
        self._deadline = deadline
        self._connect_timeout_s = connect_timeout_s

    def get(self, name: str, default: object = None) -> float | None:
        left_s = max(self._deadline - time.monotonic(), 1e-3)
        if name == "connect":
            return min(left_s, self._connect_timeout_s)
        return None if left_s > _LONGEST_S else left_s


def _deadline(started: float, timeout_s: float | None) -> float:
    if timeout_s is None:
        return math.inf
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be more than 0, or None: {timeout_s}")
    return started + timeout_s


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


def _raise_unanswered(
    error: httpx.RequestError, deadline: float, url: str, request_id: str
) -> NoReturn:
    """Raise our error for one of httpx's, after which there is no answer."""
    message = str(error) or type(error).__name__
    if isinstance(error, _HOPELESS):
        raise UnsendableError(f"this cannot be asked: {message}", request_id=request_id) from error
    if isinstance(error, httpx.DecodingError):
        raise ProtocolError(
            f"the answer cannot be read: {message}", request_id=request_id
        ) from error
    if isinstance(error, httpx.TimeoutException) and (
        not isinstance(error, httpx.ConnectTimeout) or time.monotonic() >= deadline
    ):
        what = "no connection was free" if isinstance(error, httpx.PoolTimeout) else "no answer"
        raise DeadlineExceededError(f"{what} in time", request_id=request_id) from error
    raise ConnectError(
        f"no answer from {url}: {message}",
        request_id=request_id,
        is_retryable=not _is_untrusted(error),
    ) from error


def _is_untrusted(error: BaseException | None) -> bool:
    """Return whether a bad certificate is the cause; a retry would meet it again."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refusal(reply: Reply, request_id: str) -> InferpoolError:
    """Return the error in an answer: from its problem document, or else from its status."""
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
    start = " ".join(reply.content[:200].decode("utf-8", "replace").split())
    if status < 400:
        leads = f", a redirect to {place}" if (place := reply.headers.get("location")) else ""
        return ProtocolError(
            f"an answer of status {status} is not one of inferpool's{leads}: {start!r}",
            status=status,
            request_id=request_id,
        )
    return error_class("", status)(
        f"the answer is not one of inferpool's; a proxy may have sent it: {start!r}",
        code=f"http_{status}",
        status=status,
        request_id=request_id,
        retry_after_s=wait_s,
    )


def _add_file_question(error: InferpoolError, value: object) -> None:
    """Ask whether a text that looks like a file name was meant to be the file."""
    if isinstance(error, AnswerError) and isinstance(value, str) and names_file(value):
        question = file_question(value)
        if question not in error.detail:
            error.detail = f"{error.detail}; {question}"
