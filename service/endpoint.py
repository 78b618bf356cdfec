"""Builds `/predict` and its server from the settings, in whichever process takes the calls."""

import logging
import ssl
from collections.abc import Callable, Mapping
from functools import partial

import uvicorn
from uvicorn.config import LifespanType

from inferpool.service.api.addresses import Addresses
from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.exchange import Call, ModelEntry, Predict, Tracing
from inferpool.service.api.optional_calls import calls_of
from inferpool.service.api.wire.budgets import (
    EdgeLimits,
    UnfinishedRequests,
    UnreadAnswers,
)
from inferpool.service.api.wire.handshakes import TlsHandshake
from inferpool.service.api.wire.held import HeldBytes
from inferpool.service.api.wire.listening import BACKLOG
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.trust import TrustedPeers
from inferpool.service.telemetry.logs import LogThrottle
from inferpool.service.telemetry.metrics import ModelMetrics, recorder

logger = logging.getLogger(__name__)

_MAX_LOGGED_PATH = 200
_WARNINGS_PER_S = 3
"""Warnings a second about failed answers, for each status."""


def make_guard(settings: Settings) -> Guard:
    """Return the guard with the keys of the settings."""
    return Guard(
        predict=settings.predict_keys,
        metrics=settings.metrics_keys,
        admin=settings.admin_keys,
        tells_apart=settings.key_share < 1,
        share=settings.per_key_share,
        only_predictions=settings.only_predictions,
        loads_models=settings.sagemaker_models is not None,
    )


def make_cors(settings: Settings) -> Cors | None:
    """Return which pages may call; None: only those of this host."""
    return Cors(settings.cors_origins) if settings.cors_origins else None


def make_addresses(settings: Settings) -> Addresses:
    """Build addresses that trust the settings' proxies; by default none."""
    peers = TrustedPeers(settings.forwarded_allow_ips if settings.proxy_headers else ())
    return Addresses(peers, settings.root_path)


def make_limits(settings: Settings) -> Limits:
    """Return the limits of one call."""
    return Limits(
        max_body_bytes=settings.max_body_bytes,
        max_json_bytes=settings.max_json_bytes,
        max_job_bytes=settings.max_job_bytes if settings.has_jobs else 0,
        body_gap_s=settings.body_gap_s,
        stream_buffer_parts=settings.stream_buffer_parts,
        stream_buffer_bytes=settings.stream_buffer_bytes,
        max_instances=settings.max_instances_per_request,
        default_timeout_s=settings.default_timeout_s,
        max_timeout_s=settings.max_timeout_s,
    )


def make_predict(
    models: Mapping[str, ModelEntry],
    settings: Settings,
    guard: Guard,
    tracer: Tracing | None,
    metrics: Callable[[str], ModelMetrics],
    edge: EdgeLimits | None = None,
    unfinished: HeldBytes | None = None,
) -> Predict:
    """Build the endpoint; `unfinished` counts requests if several processes do so together."""
    edge = edge or EdgeLimits()
    max_unfinished_bytes = edge.max_unfinished_bytes
    return Predict(
        models,
        default=settings.default_model,
        optional=calls_of(settings),
        root_path=settings.root_path.encode(),
        limits=make_limits(settings),
        unfinished=UnfinishedRequests(
            max(max_unfinished_bytes, settings.max_body_bytes), share=guard.share, held=unfinished
        ),
        unread=UnreadAnswers(edge.max_unread_bytes, share=guard.share),
        guard=guard,
        cors=make_cors(settings),
        tracing=tracer,
        on_done=recorder(metrics),
        on_failure=failure_log(),
    )


def server_config(
    app: Callable[..., object],
    http: type[PredictProtocol],
    settings: Settings,
    tls: ssl.SSLContext | None,
    lifespan: LifespanType = "on",
) -> uvicorn.Config:
    """Return how uvicorn serves an application to clients."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=http if tls is None else partial(TlsHandshake, http, tls),  # type: ignore[arg-type]  # it only calls it
        ws="none",
        lifespan=lifespan,
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # it would change the peer's address, which shares and logs follow
        server_header=False,
        headers=[("x-content-type-options", "nosniff")],
        timeout_keep_alive=int(settings.keep_alive_s),
        backlog=BACKLOG,
    )


def failure_log() -> Callable[[Call, int, float], None]:
    """Return a function that logs failures of ours; mistakes of callers go to the debug level.

    It warns a few times a second for each status and then with a count, since an outage fails all.
    """
    warnings: dict[int, LogThrottle] = {}

    def warn_of_rest(status: int, num: int) -> None:
        logger.warning("%d more answers of %d in the last second", num, status)

    def log_failure(call: Call, status: int, duration_s: float) -> None:
        level = logging.DEBUG
        if status >= 500:
            if status not in warnings:
                warnings[status] = LogThrottle(partial(warn_of_rest, status), most=_WARNINGS_PER_S)
            if warnings[status].may_write():
                level = logging.WARNING
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "%s %s: %d after %.3f s",
                call.method,
                call.path[:_MAX_LOGGED_PATH],
                status,
                duration_s,
                extra=call.log_ids(),
            )

    return log_failure
