"""Decides which calls are traced, and keeps them when they are over. Runs in the event loop."""

from collections import deque
from collections.abc import Callable
from threading import Event
from typing import NamedTuple

from inferpool.service.api.exchange import Call
from inferpool.service.telemetry.metrics import ModelMetrics

MAX_WAITING = 2048
"""Calls that wait to be exported, a few KB each; more are dropped."""
MAX_BATCH = 128
"""Calls that are exported together."""
_KEPT = (b"host", b"user-agent")
"""The headers that a call's span shows. Others may be long, and are dropped."""
_MAX_BYTES = 256
_SAMPLED, _NOT_SAMPLED = "01", "00"
_BEYOND_ALL = "g"
"""A text that sorts behind every hexadecimal digit."""


class Ended(NamedTuple):
    """A call that is over."""

    call: Call
    status: int
    duration_s: float


class Recorder:
    """Decides at the beginning of a call, and keeps it at its end for the thread that exports."""

    def __init__(
        self,
        ratio: float,
        *,
        is_parent_based: bool,
        metrics: Callable[[str], ModelMetrics],
    ) -> None:
        """Start with no calls.

        Args:
            ratio: The share of calls to trace if the caller has not decided. The trace id decides
                (OpenTelemetry, trace SDK, TraceIdRatioBased), so that services agree.
            is_parent_based: Follow the caller's decision if there is one.
            metrics: Returns the metrics of a model, which get exemplars.
        """
        self._bound = _BEYOND_ALL if ratio >= 1 else f"{round(ratio * 2**64):016x}"
        self._is_parent_based = is_parent_based
        self._metrics = metrics
        self.waiting: deque[Ended] = deque()
        """Finished calls, added here and taken by the exporting thread."""
        self.wake = Event()
        """Set when there are enough for an export."""
        self.num_dropped = 0
        """Calls for which there was no room."""

    def begin(self, call: Call) -> None:
        """Decide whether a call is traced, and set its fields."""
        if call.parent_id and self._is_parent_based:
            is_sampled = call.flags[1] in "13"
        else:
            is_sampled = call.trace_id[16:] < self._bound
            call.flags = _SAMPLED if is_sampled else _NOT_SAMPLED
        if is_sampled:
            call.steps = []
            call.ref.trace = f"{call.trace_id}-{call.span_id}"
        else:
            call.steps = None
            if not call.parent_id:
                call.ref.trace = ""

    def take(self, call: Call, status: int, duration_s: float) -> None:
        """Store a traced call that is over; never blocks."""
        waiting = self.waiting
        if len(waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        headers = call.headers
        call.headers = {name: headers[name][:_MAX_BYTES] for name in _KEPT if name in headers}
        call.path, call.query = call.path[:_MAX_BYTES], b""
        call.protocol = None  # it may hold a body
        if call.entry is not None:
            self._metrics(call.entry.name).exemplars.note(duration_s, call.trace_id)
        waiting.append(Ended(call, status, duration_s))
        if len(waiting) == MAX_BATCH:
            self.wake.set()
