"""`/ping`, what is refused, and the documentation of calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from inferpool.service.api.exchange import Predict
from inferpool.service.api.web import App
from inferpool.service.errors import StartError
from inferpool.service.parts.torchserve.routes import check_root_path, inference_router
from tests.service.api.fakes import call
from tests.service.parts.torchserve.fake_archives import OPTIONAL, archive

FORM = "inferpool.service.parts.torchserve.errors:error_answer"
SEGMENTS = ("ping", "predictions", "invocations", "explanations", "wfpredict")


@pytest.fixture
def state() -> Any:
    return SimpleNamespace(ready=True, models=["fake"], draining=False)


@pytest.fixture
def app(state: Any) -> App:
    made = App(version="0", routers=[inference_router(lambda: state)])
    made.forms_of_errors = dict.fromkeys(SEGMENTS, FORM)
    made.predict = Predict({"fake": archive()}, optional=OPTIONAL)
    return made


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_ping_says_whether_this_host_is_ready(app: App, state: Any, method: str) -> None:
    found = call(app, method, "/ping")
    assert (found.status_code, found.content) == (200, b'{\n  "status": "Healthy"\n}\n')
    assert found.headers["content-type"] == "application/json"
    assert found.headers["pragma"] == "no-cache"
    assert found.headers["x-request-id"]
    state.ready = False
    found = call(app, method, "/ping/")
    assert (found.status_code, found.json()) == (500, {"status": "Unhealthy"})
    assert call(app, "HEAD", "/ping").content == b""
    state.models = []
    assert call(app, method, "/ping").json() == {"status": "Healthy"}
    state.draining = True
    assert call(app, method, "/ping").status_code == 500


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/explanations/fake", "ask /predictions/fake"),
        ("/explanations/fake/1.0", "Explanations are not served here"),
        ("/wfpredict/flow", "Workflows are not served here"),
        ("/predictions", "there is nothing at /predictions"),
        ("/explanations", "there is nothing at /explanations"),
    ],
)
def test_what_there_is_not_is_refused_plainly(app: App, path: str, said: str) -> None:
    found = call(app, "POST", path, content=b"x")
    document = found.json()
    assert (found.status_code, document["code"]) == (404, 404)
    assert document["type"] == "ResourceNotFoundException"
    assert said in document["message"]


def test_calls_go_past_the_routes_that_describe_them(app: App) -> None:
    assert call(app, "POST", "/predictions/fake/1.0").text == "ok"
    paths = call(app, "GET", "/openapi.json").json()["paths"]
    assert {each for each in paths if each.split("/")[1] in SEGMENTS} == {
        "/ping", "/predictions/{model}", "/predictions/{model}/{version}", "/invocations",
    }  # fmt: skip
    described = paths["/predictions/{model}"]["post"]
    assert "multipart/form-data" in described["requestBody"]["content"]
    assert {"200", "404", "503"} <= set(described["responses"])
    assert list(paths["/ping"]) == ["get"]


@pytest.mark.parametrize("path", ["/models", "/predictions/x"])
def test_a_root_path_may_not_hide_torchserves_paths(path: str) -> None:
    check_root_path("/mine")
    check_root_path("")
    with pytest.raises(StartError, match="hides those of TorchServe"):
        check_root_path(path)
