"""GET /metrics, for Prometheus."""

from typing import Protocol

from fastapi import APIRouter, Request, Response


class MetricsSource(Protocol):
    """Who counts."""

    async def refresh(self) -> None:
        """Have what others have counted brought here, if that takes no time to speak of."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their content type, as `Accept` chooses it."""


def metrics_router(source: MetricsSource) -> APIRouter:
    """The route, answering from a source."""
    router = APIRouter(tags=["health"])

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        await source.refresh()
        body, content_type = source.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router
