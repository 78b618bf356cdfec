"""Sends spans to a collector by OTLP over HTTP, in a thread that no call waits for.

What the collector does not take is kept only while it is tried again; meanwhile the calls that
find no room are dropped and counted.
"""

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from inferpool.service.tracing.recorder import MAX_BATCH, Ended, Recorder
from inferpool.service.tracing.spans import Attributes, SpanMaker, describe

logger = logging.getLogger(__name__)

_EXPORT_EVERY_S = 1.0
"""How long a call waits for others to be exported with, at most."""
_PAUSES_S = (1.0, 2.0, 4.0)
"""Before each further try (OTLP 1.5, "Failures": exponential backoff)."""
_TRY_AGAIN = (429, 502, 503, 504)
"""What OTLP counts as passing; all else it does not want sent again."""
_TIMEOUT_S = 5.0
_MOST_OF_ITS_TIME = 0.2
"""The share of a core that this thread may take from the event loop: some 2,000 calls a second."""
_NUM_AT_A_STRETCH = 8
"""Calls whose spans are made before the event loop is let in: they take 0.5 ms."""
_LOG_EVERY_S = 60.0
"""While a collector is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Where spans go, and what is said of who sends them."""

    endpoint: str
    headers: Mapping[str, str]
    certificate: str | None
    """A PEM file with the authority to trust besides those that the system knows."""
    resource: Attributes
    """Attributes of this process."""
    version: str
    """Of inferpool."""


class _RefusedError(Exception):
    """The collector does not take this; trying again is of no use."""


class Exporter:
    """The thread."""

    def __init__(self, recorder: Recorder, maker: SpanMaker, collector: Collector) -> None:
        """Prepare; nothing is sent before `start`.

        Raises:
            OSError: The certificate cannot be read, or is none.
        """
        self.num_exported = 0
        """Calls whose spans the collector has taken."""
        self.num_lost = 0
        """Calls whose spans it has not."""
        self._recorder = recorder
        self._maker = maker
        self._collector = collector
        self._verify = _verify(collector)
        self._is_stopping = threading.Event()
        self._is_down = False
        self._log_due = 0.0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # or it logs each of our requests

    @property
    def num_dropped(self) -> int:
        """Calls that are traced and will never be seen."""
        return self.num_lost + self._recorder.num_dropped

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Send what waits, if the collector takes it within that time."""
        self._is_stopping.set()
        self._recorder.wake.set()
        self._thread.join(timeout_s)
        if num_left := len(self._recorder.waiting):
            logger.warning("%d traced calls were not exported before the end", num_left)

    def _run(self) -> None:
        recorder, collector = self._recorder, self._collector
        headers = {
            "user-agent": f"inferpool/{collector.version}",
            **collector.headers,
            "content-type": "application/x-protobuf",
        }
        with httpx.Client(headers=headers, timeout=_TIMEOUT_S, verify=self._verify) as client:
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
            self.num_lost += len(batch)
            self._note_down(error)
        except Exception:  # a mistake of ours must not end the thread that exports all others
            self.num_lost += len(batch)
            logger.exception("spans could not be made or sent")
        else:
            self.num_exported += len(batch)
            self._note_up()

    def _message(self, batch: Sequence[Ended]) -> ExportTraceServiceRequest:
        epoch_ns = time.time_ns() - time.monotonic_ns()
        request = ExportTraceServiceRequest()
        of_process = request.resource_spans.add()
        describe(of_process.resource, self._collector.resource)
        spans = of_process.scope_spans.add()
        spans.scope.name, spans.scope.version = "inferpool", self._collector.version
        for number, ended in enumerate(batch, 1):
            self._maker.add_spans(ended, epoch_ns, spans)
            if not number % _NUM_AT_A_STRETCH:
                time.sleep(0)  # lets the event loop run, which may be waiting for this thread
        return request

    def _send(self, client: httpx.Client, body: bytes) -> None:
        """Post it, and again where that may help.

        Raises:
            httpx.HTTPError: The collector cannot be reached, or is too busy.
            _RefusedError: It does not take this.
        """
        for pause_s in (*_PAUSES_S, None):
            try:
                answer = client.post(self._collector.endpoint, content=body)
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
            self._log_sparingly(f"the collector refused {num} spans: {why[:200]}")

    def _note_down(self, error: Exception) -> None:
        self._is_down = True
        self._log_sparingly(
            f"traces cannot be sent to {self._collector.endpoint}: {error or type(error).__name__} "
            f"(calls go on untraced; {self.num_dropped} are lost so far)"
        )

    def _note_up(self) -> None:
        if self._is_down:
            self._is_down = False
            self._log_due = 0.0
            logger.info("traces are sent again; %d calls were lost", self.num_dropped)

    def _log_sparingly(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._log_due:
            self._log_due = now + _LOG_EVERY_S
            logger.warning("%s", text)


def _verify(collector: Collector) -> ssl.SSLContext | bool:
    if not collector.endpoint.startswith("https:"):
        return False  # to make a context takes 0.1 s
    context = httpx.create_ssl_context()
    if collector.certificate is not None:
        context.load_verify_locations(collector.certificate)
    return context
