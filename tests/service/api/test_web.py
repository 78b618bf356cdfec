import asyncio
import re
import subprocess
import sys
import threading

import httpx
import pytest
from fastapi import APIRouter

from inferpool.service.api.auth import Guard
from inferpool.service.api.cors import Cors
from inferpool.service.api.exchange import Predict
from inferpool.service.api.web import App
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, call, endpoint, post

IMAGE = {"content-type": "image/png"}


def make_app() -> App:
    router = APIRouter()

    @router.get("/predictions")
    async def predictions() -> str:
        return "another route"

    app = App(version="1.2.3", routers=[router])
    app.predict = endpoint(FakeModel())
    return app


def test_predict_goes_to_the_endpoint_and_the_rest_to_the_routes() -> None:
    app = make_app()
    assert post(app, content=b"x", headers=IMAGE).json() == {"predictions": [0]}
    assert post(app, "/predict/fake", content=b"x", headers=IMAGE).status_code == 200
    assert call(app, "GET", "/predictions").json() == "another route"
    app_without = App(version="0")
    for each, path in ((app, "/predict/none"), (app, "/nowhere"), (app_without, "/predict")):
        response = post(each, path, content=b"x", headers=IMAGE)
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/problem+json"


def test_the_documentation_has_the_endpoint_first_with_the_models_of_now() -> None:
    app = make_app()
    document = call(app, "GET", "/openapi.json").json()
    *predict, last = document["paths"]
    assert predict == ["/predict", "/predict/{model}", "/predict/{model}/versions/{version}"]
    assert last == "/predictions"
    assert document["info"]["version"] == "1.2.3"
    assert "image/*" in document["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert "Problem" in document["components"]["schemas"]
    app.predict = Predict({"new": FakeModel(name="new")})
    paths = call(app, "GET", "/openapi.json").json()["paths"]
    assert "/predict" not in paths
    assert paths["/predict/{model}"]["post"]["parameters"][0]["schema"]["enum"] == ["new"]


def test_the_documentation_page_asks_no_other_host_for_anything() -> None:
    app = make_app()
    page = call(app, "GET", "/docs")
    links = re.findall(r"""(?:href|src)="([^"]+)""", page.text)
    assert len(links) == 3
    assert "://" not in page.text
    for link in links:
        assert call(app, "GET", link).status_code == 200


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("parts.fronts.front", {"inferpool.service.parts.tracing", "google.protobuf"}),
        ("api.web", {"torch", "torchvision", "numpy", "fastapi_offline"}),
    ],
)
def test_a_front_end_does_not_import_what_only_some_need(modules: str, absent: set[str]) -> None:
    script = f"import inferpool.service.{modules}, sys; assert not {absent} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def test_pages_of_allowed_origins_may_ask_the_other_routes_too() -> None:
    router = APIRouter()

    @router.get("/health")
    async def health() -> str:
        return "well"

    guard = Guard(metrics=read_keys("a-key-of-sixteen-characters"))
    app = App(version="0", routers=[router], guard=guard, cors=Cors(["https://app.example"]))
    page = {"origin": "https://app.example"}
    asks = {**page, "access-control-request-method": "GET"}
    may = call(app, "OPTIONS", "/health", headers=asks)
    assert may.status_code == 204
    assert "Authorization" in may.headers["access-control-allow-headers"]
    for answer in (may, call(app, "GET", "/health", headers=page)):
        assert answer.headers.get_list("access-control-allow-origin") == ["https://app.example"]
        assert len(answer.headers.get_list("server-timing")) == 1
    assert call(app, "GET", "/health").headers.get("access-control-allow-origin") is None


def test_routes_that_wait_for_their_first_call_are_made_with_it_and_described() -> None:
    made = []

    def make() -> list[APIRouter]:
        router = APIRouter(tags=["predict"])
        router.add_api_route("/v2/things", lambda: "a thing", name="things", summary="Things")
        made.append(router)
        return [router]

    app = App(version="0", guard=Guard())
    app.later = {"v2": make}
    assert call(app, "GET", "/v1/things").status_code == 404
    assert not made
    assert call(app, "GET", "/v2/things").json() == "a thing"
    assert call(app, "GET", "/v2/things/").json() == "a thing"
    assert (len(made), app.scopes["/v2/things"]) == (1, "predict")
    app = App(version="0", guard=Guard(predict=read_keys("a-key-of-sixteen-characters")))
    app.later = {"v2": make}
    assert call(app, "GET", "/v2/things").status_code == 401
    assert len(made) == 1
    assert "/v2/things" in call(app, "GET", "/openapi.json").json()["paths"]


async def test_other_calls_are_answered_while_routes_are_made() -> None:
    router, quick = APIRouter(tags=["predict"]), APIRouter(tags=["predict"])
    router.add_api_route("/v2/things", lambda: "a thing", name="things", summary="Things")
    quick.add_api_route("/health", lambda: "well", name="health", summary="Health")
    may_end, made = threading.Event(), []

    def make() -> list[APIRouter]:
        assert may_end.wait(60)
        made.append(router)
        return [router]

    app = App(version="0", routers=[quick], guard=Guard())
    app.later = {"v2": make}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://host"
    ) as http:
        asked = [asyncio.create_task(http.get("/v2/things")) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await http.get("/health")).json() == "well"
        assert not made
        may_end.set()
        assert [(await each).json() for each in asked] == ["a thing"] * 3
    assert len(made) == 1
