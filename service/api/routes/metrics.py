"""GET /metrics, for Prometheus."""

from fastapi import APIRouter, Request, Response

from inferpool.service.telemetry.metrics import Metrics

_FORMS = {
    "text/plain": {
        "schema": {"type": "string"},
        "example": "# TYPE inferpool_queue_depth gauge\n"
        'inferpool_queue_depth{model="resnet"} 3.0\n',
    },
    "application/openmetrics-text": {"schema": {"type": "string"}},
}
"""Content types that `Accept` chooses from."""


def metrics_router(source: Metrics) -> APIRouter:
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
