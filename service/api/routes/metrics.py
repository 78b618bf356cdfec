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
"""Which `Accept` chooses from."""


class MetricsSource(Protocol):
    """Who counts."""

    async def refresh(self) -> None:
        """Have what others have counted brought here, if that takes no time to speak of."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their content type, as `Accept` chooses it."""


def metrics_router(source: MetricsSource) -> APIRouter:
    """The route, answering from a source."""
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
