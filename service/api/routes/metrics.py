"""GET /metrics, for Prometheus."""

from typing import Protocol

from fastapi import APIRouter, Request, Response

_FORMS = {
    "text/plain": {
        "schema": {"type": "string"},
        "example": "# TYPE inferpool_queue_depth gauge\n"
        'inferpool_queue_depth{model="resnet"} 3.0\n',
    },
    "application/openmetrics-text": {"schema": {"type": "string"}},
}
"""Content types that `Accept` chooses from."""


class MetricsSource(Protocol):
    """Counts, and renders the counts."""

    async def refresh(self) -> None:
        """Fetch the counts of other processes, if that takes no time to speak of."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type as `Accept` chooses it."""


def metrics_router(source: MetricsSource) -> APIRouter:
    """Return the route, answering from a source."""
    router = APIRouter(tags=["health"])

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": _FORMS}},
    )
    async def metrics(request: Request) -> Response:
        """In the text format, or in OpenMetrics where `Accept` asks for that."""
        await source.refresh()
        body, content_type = source.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router
