"""Sets tracing up as the settings say, in each process that serves calls."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from inferpool.service.errors import StartError
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import ModelMetrics

if TYPE_CHECKING:
    from inferpool.service.parts.tracing.tracer import Tracer

logger = logging.getLogger(__name__)


class TraceError(StartError):
    """Calls cannot be traced as the settings say."""


def set_up_tracing(
    settings: Settings, origin: str, metrics: Callable[[str], ModelMetrics]
) -> tuple[Settings, "Tracer | None"]:
    """Return the settings in force and the tracer, if tracing is on.

    A variable of OpenTelemetry may be set for the whole host. If it cannot be followed, tracing is
    switched off with a warning.

    Args:
        settings: The settings.
        origin: The origin of the endpoint's setting; see `LoadedSettings`.
        metrics: Returns the metrics of a model.

    Raises:
        TraceError: A setting of inferpool's own asks for traces, and they are not possible.
    """
    try:
        return settings, make_tracer(settings, metrics)
    except TraceError as error:
        if not origin.startswith("environment OTEL_"):
            raise
        logger.warning("calls are not traced although %s asks for it: %s", origin, error)
        return settings.model_copy(update={"trace_endpoint": None}), None


def make_tracer(settings: Settings, metrics: Callable[[str], ModelMetrics]) -> "Tracer | None":
    """Build the tracer if tracing is on. Only then it imports OpenTelemetry.

    Raises:
        TraceError: OpenTelemetry is not installed, or a file is missing.
    """
    if settings.trace_endpoint is None:
        return None
    try:
        from inferpool.service.parts.tracing.tracer import Tracer
    except ModuleNotFoundError as error:
        raise TraceError(
            f"traces are to go to {settings.trace_endpoint} (trace_endpoint), and what that takes "
            f"is not installed ({error.name}): pip install 'inferpool[otel]', or set "
            "OTEL_SDK_DISABLED=true"
        ) from error
    try:
        return Tracer(settings, metrics)
    except OSError as error:
        path = settings.trace_certificate
        raise TraceError(f"trace_certificate: {path} cannot be used: {error}") from error
    except FlagError as error:
        raise TraceError(f"traces are to go to {settings.trace_endpoint}, but {error}") from error
