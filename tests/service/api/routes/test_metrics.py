from fastapi import FastAPI

from inferpool.service.api.routes.metrics import metrics_router
from tests.service.api.fakes import call


class EchoingSource:
    is_fresh = False

    async def refresh(self) -> None:
        self.is_fresh = True

    def render(self, accept: str) -> tuple[bytes, str]:
        assert self.is_fresh
        return accept.encode(), "text/plain; version=0.0.4; charset=utf-8"


def test_metrics_are_fresh_and_sent_as_rendered_for_accept() -> None:
    app = FastAPI()
    app.include_router(metrics_router(EchoingSource()))
    response = call(app, "GET", "/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.content == b"application/openmetrics-text"
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
