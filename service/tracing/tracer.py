"""Tracing in a process that answers calls, as the settings have it."""

import os
import socket
import uuid
from collections.abc import Callable

from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tracing import pairs_of
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.service.telemetry.versions import version_of
from inferpool.service.tracing.exporter import Collector, Exporter
from inferpool.service.tracing.recorder import Recorder
from inferpool.service.tracing.spans import SpanMaker

_FLUSH_S = 2.0
"""How long a collector may hold up the end."""
_NAME = "service.name"


class Tracer:
    """Traces the calls of one process."""

    def __init__(self, settings: Settings, metrics: Callable[[str], ModelMetrics]) -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            settings: With an endpoint.
            metrics: Finds what counts the calls of a model.

        Raises:
            OSError: The certificate cannot be read, or is none.
        """
        assert settings.trace_endpoint is not None
        self.recorder = Recorder(
            settings.trace_sample_ratio,
            is_parent_based=settings.trace_parent_based,
            metrics=metrics,
        )
        collector = Collector(
            endpoint=settings.trace_endpoint,
            headers=dict(settings.trace_headers.pairs),
            certificate=settings.trace_certificate,
            resource=_resource(settings),
            version=version_of(),
        )
        self._taken = (0, 0)
        scheme = "http" if settings.tls_certificate is None else "https"
        self._exporter = Exporter(self.recorder, SpanMaker(scheme), collector)

    def start(self) -> None:
        """Begin to export."""
        self._exporter.start()

    def stop(self) -> None:
        """Export what waits, for two seconds at most, in which it blocks."""
        self._exporter.stop(_FLUSH_S)

    def counts(self) -> tuple[int, int]:
        """Traced calls that the collector has taken, and those that it will never see."""
        return self._exporter.num_exported, self._exporter.num_dropped

    def take_counts(self) -> tuple[int, int]:
        """As `counts`, since this was last asked."""
        before, self._taken = self._taken, self.counts()
        return self._taken[0] - before[0], self._taken[1] - before[1]


def _resource(settings: Settings) -> dict[str, str | int]:
    """What is said of this process (semantic conventions: service, host and process)."""
    resource: dict[str, str | int] = {
        _NAME: settings.trace_service_name,
        "service.version": version_of(),
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **pairs_of(settings.trace_resource),
    }
    if settings.trace_service_name != Settings.model_fields["trace_service_name"].default:
        resource[_NAME] = settings.trace_service_name  # which goes over a list of attributes
    return resource
