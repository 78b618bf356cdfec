import re
from urllib.parse import urljoin

from fastapi import APIRouter, FastAPI, Request

from inferpool.service.api.addresses import root_for
from inferpool.service.api.web import App
from inferpool.service.parts.live.page import Page
from tests.service.api.fakes import FakeModel, call, endpoint, post

IMAGE = {"content-type": "image/png"}


def mounted() -> FastAPI:
    """An application of a user that serves ours below a path."""
    router = APIRouter()

    @router.get("/jobs/{id}")
    async def job(request: Request, id: str) -> str:
        return f"{root_for(request.scope)}/jobs/{id}"

    app = App(version="0", routers=[router, Page(docs=True).router()])
    app.predict = endpoint(FakeModel())
    outer = FastAPI()
    outer.mount("/models", app)
    return outer


def test_addresses_of_a_mounted_service_are_relative_too() -> None:
    outer = mounted()
    spoofs = {"x-forwarded-prefix": "/evil", "x-forwarded-host": "evil.example"}
    for path in ("/models/jobs/1", "/models/jobs/1/"):
        answer = call(outer, "GET", path, headers=spoofs)
        assert urljoin(f"http://host{path}", answer.json()) == "http://host/models/jobs/1"
    for path in ("/models/", "/models/docs", "/models/docs/"):
        links = re.findall(r'(?:href|src)="([^"#]+)"', call(outer, "GET", path).text)
        assert len(links) >= 3
        for link in set(links) - {"health", "metrics"}:  # not served here
            assert call(outer, "GET", urljoin(path, link)).status_code == 200, link
    for path in ("/models/predict", "/models/predict/", "/models/predict/fake/"):
        assert post(outer, path, content=b"x", headers=IMAGE).status_code == 200
    document = call(outer, "GET", "/models/openapi.json").json()
    assert urljoin("http://host/models/openapi.json", document["servers"][0]["url"]) == (
        "http://host/models/"
    )
