"""Traces the calls of one process, and sends their spans to a collector by OTLP over HTTP.

A thread sends them, and no call waits for it. While the collector accepts no spans, calls beyond a
bound are dropped and counted.
"""

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from inferpool.service.client.connecting import find_way, open_client
from inferpool.service.parts.tracing.recorder import MAX_BATCH, Ended, Recorder
from inferpool.service.parts.tracing.spans import add_spans, describe
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tracing import pairs_of
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.service.telemetry.versions import version_of

logger = logging.getLogger(__name__)

_EXPORT_EVERY_S = 1.0
"""The longest time that a call waits for others to be exported with."""
_TRY_AGAIN = (429, 502, 503, 504)
"""Status codes after which OTLP allows another try. Nothing else may be sent again."""
_MOST_OF_ITS_TIME = 0.2
"""The share of a core that the thread may take from the event loop: some 2,000 calls a second."""
_NUM_AT_A_STRETCH = 8
"""Calls that get their spans before the event loop may run again; they take 0.5 ms."""
_LOG_EVERY_S = 60.0
"""Seconds between log lines while a collector is down."""
_NAME = "service.name"


class _RefusedError(Exception):
    """The collector refuses this, so another try would fail too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPeriods:
    """How long a collector is waited for."""

    request_s: float = 5.0
    """Longest wait for a part of a request."""
    pauses_s: Sequence[float] = (1.0, 2.0, 4.0)
    """Pauses before each further try (OTLP 1.5, "Failures": exponential backoff)."""
    flush_s: float = 2.0
    """How long it may hold up the end."""


_PERIODS = ExportPeriods()


class Tracer:
    """Records the calls of one process, and exports them in a thread."""

    def __init__(
        self,
        settings: Settings,
        metrics: Callable[[str], ModelMetrics],
        *,
        periods: ExportPeriods = _PERIODS,
    ) -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            settings: Name the collector.
            metrics: Returns the metrics of a model.
            periods: How long the collector is waited for.

        Raises:
            OSError: The certificate cannot be read, or is not one.
            UnusableProxyError: The proxy on the way to the collector cannot be used.
        """
        assert settings.trace_endpoint is not None
        self.recorder = Recorder(
            settings.trace_sample_ratio,
            is_parent_based=settings.trace_parent_based,
            metrics=metrics,
        )
        self._periods = periods
        self._version = version_of()
        self._endpoint = settings.trace_endpoint
        self._headers = {
            "user-agent": f"inferpool/{self._version}",
            **dict(settings.trace_headers.pairs),
            "content-type": "application/x-protobuf",
        }
        self._resource = _resource(settings)
        self._scheme = "http" if settings.tls_certificate is None else "https"
        self._verify = _verify(settings)
        self._way = find_way(self._endpoint, None)
        self._num_exported = 0
        self._num_lost = 0
        self._taken = (0, 0)
        self._is_stopping = threading.Event()
        self._is_down = False
        self._log_due = 0.0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # or it logs each of our requests

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def stop(self) -> None:
        """Export what waits. This blocks for `flush_s` at most."""
        self._is_stopping.set()
        self.recorder.wake.set()
        self._thread.join(self._periods.flush_s)
        if num_left := len(self.recorder.waiting):
            logger.warning("%d traced calls were not exported before the end", num_left)

    def counts(self) -> tuple[int, int]:
        """Return how many traced calls the collector has taken, and how many are lost."""
        return self._num_exported, self._num_dropped

    def take_counts(self) -> tuple[int, int]:
        """Return the `counts` since the last call of this method."""
        before, self._taken = self._taken, self.counts()
        return self._taken[0] - before[0], self._taken[1] - before[1]

    @property
    def _num_dropped(self) -> int:
        return self._num_lost + self.recorder.num_dropped

    def _run(self) -> None:
        recorder = self.recorder
        with open_client(
            self._way,
            headers=self._headers,
            timeout=httpx.Timeout(self._periods.request_s),
            verify=self._verify,
        ) as client:
            while True:
                recorder.wake.wait(_EXPORT_EVERY_S)
                recorder.wake.clear()
                is_last = self._is_stopping.is_set()
                while recorder.waiting:
                    num = min(MAX_BATCH, len(recorder.waiting))
                    began = time.thread_time()
                    self._export(client, [recorder.waiting.popleft() for _ in range(num)])
                    worked_s = time.thread_time() - began
                    self._is_stopping.wait(worked_s * (1 / _MOST_OF_ITS_TIME - 1))
                    if len(recorder.waiting) < MAX_BATCH and not is_last:
                        break
                if is_last:
                    return

    def _export(self, client: httpx.Client, batch: Sequence[Ended]) -> None:
        try:
            self._send(client, self._message(batch).SerializeToString())
        except (_RefusedError, httpx.HTTPError) as error:
            self._num_lost += len(batch)
            self._note_down(error)
        except Exception:  # a mistake of ours must not end the thread that exports all others
            self._num_lost += len(batch)
            logger.exception("spans could not be made or sent")
        else:
            self._num_exported += len(batch)
            self._note_up()

    def _message(self, batch: Sequence[Ended]) -> ExportTraceServiceRequest:
        epoch_ns = time.time_ns() - time.monotonic_ns()
        request = ExportTraceServiceRequest()
        of_process = request.resource_spans.add()
        describe(of_process.resource, self._resource)
        spans = of_process.scope_spans.add()
        spans.scope.name, spans.scope.version = "inferpool", self._version
        for number, ended in enumerate(batch, 1):
            add_spans(ended, self._scheme, epoch_ns, spans)
            if not number % _NUM_AT_A_STRETCH:
                time.sleep(0)  # the event loop may be waiting for this thread
        return request

    def _send(self, client: httpx.Client, body: bytes) -> None:
        """Post spans, and try again where that may help.

        Raises:
            httpx.HTTPError: The collector cannot be reached, or is too busy.
            _RefusedError: It does not accept this.
        """
        for pause_s in (*self._periods.pauses_s, None):
            try:
                answer = client.post(self._endpoint, content=body)
                if answer.status_code not in _TRY_AGAIN:
                    self._check(answer)
                    return
                answer.raise_for_status()
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                self._note_down(error)
                if pause_s is None or self._is_stopping.wait(pause_s):
                    raise

    def _check(self, answer: httpx.Response) -> None:
        if not answer.is_success:
            raise _RefusedError(f"{answer.status_code} {answer.reason_phrase}")
        told = ExportTraceServiceResponse()
        with contextlib.suppress(DecodeError):
            told.ParseFromString(answer.content)
        if told.partial_success.rejected_spans:
            num, why = told.partial_success.rejected_spans, told.partial_success.error_message
            self._log_seldom(f"the collector refused {num} spans: {why[:200]}")

    def _note_down(self, error: Exception) -> None:
        self._is_down = True
        self._log_seldom(
            f"traces cannot be sent to {self._endpoint}: {error or type(error).__name__} "
            f"(calls go on untraced; {self._num_dropped} are lost so far)"
        )

    def _note_up(self) -> None:
        if self._is_down:
            self._is_down = False
            self._log_due = 0.0
            logger.info("traces are sent again; %d calls were lost", self._num_dropped)

    def _log_seldom(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._log_due:
            self._log_due = now + _LOG_EVERY_S
            logger.warning("%s", text)


def _verify(settings: Settings) -> ssl.SSLContext | bool:
    assert settings.trace_endpoint is not None
    if not settings.trace_endpoint.startswith("https:"):
        return False  # making a context takes 0.1 s
    context = httpx.create_ssl_context()
    if settings.trace_certificate is not None:
        context.load_verify_locations(settings.trace_certificate)
    return context


def _resource(settings: Settings) -> dict[str, str | int]:
    """Return the attributes of this process (semantic conventions: service, host and process)."""
    resource: dict[str, str | int] = {
        _NAME: settings.trace_service_name,
        "service.version": version_of(),
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **pairs_of(settings.trace_resource),
    }
    if settings.trace_service_name != Settings.model_fields["trace_service_name"].default:
        resource[_NAME] = settings.trace_service_name  # which overrides a list of attributes
    return resource
