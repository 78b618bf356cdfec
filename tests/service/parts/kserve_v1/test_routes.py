"""`/v1/models` for versions that are ready or not."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from inferpool.service.api.web import App
from inferpool.service.parts.kserve_v1.routes import v1_router
from tests.service.api.fakes import call


def version(name: str, number: int, reason: str = "") -> Any:
    pool = SimpleNamespace(is_ready=not reason, reason=reason)
    return SimpleNamespace(name=name, number=number, path=f"{name}/versions/{number}", pool=pool)


OLD, NEW, LATE = version("net", 1), version("net", 2), version("late", 1, "loading weights")
ENTRIES = {"net": OLD, OLD.path: OLD, NEW.path: NEW, "late": LATE, LATE.path: LATE, "/own": OLD}


@pytest.fixture(scope="module")
def app() -> App:
    made = App(version="0", routers=[v1_router(ENTRIES)])
    made.forms_of_errors = {"v1": "inferpool.service.parts.texts.errors:error_answer"}
    return made


def test_all_models_are_listed_for_clients_of_kserve_and_of_openai(app: App) -> None:
    found = call(app, "GET", "/v1/models").json()
    assert (found["models"], found["object"]) == (["net", "late"], "list")
    started = int(psutil.Process().create_time())
    assert found["data"] == [
        {"id": name, "object": "model", "created": started, "owned_by": "inferpool"}
        for name in ("net", "late")
    ]
    assert call(app, "HEAD", "/v1/models").status_code == 200


@pytest.mark.parametrize("path", ["net", "net/versions/2", "net%2Fversions%2F2"])
def test_one_model_is_shown_as_openai_has_it(app: App, path: str) -> None:
    found = call(app, "GET", f"/v1/models/{path}").json()
    assert (found["id"], found["object"]) == (path.replace("%2F", "/"), "model")
    assert found["owned_by"] == "inferpool"


@pytest.mark.parametrize(
    ("path", "versions"), [("", ["2", "1"]), ("/versions/2", ["2"]), ("/", ["2", "1"])]
)
def test_a_model_that_is_ready_says_so_and_which_versions_it_has(
    app: App, path: str, versions: list[str]
) -> None:
    answer = call(app, "GET", f"/v1/models/net{path}")
    found = answer.json()
    assert (answer.status_code, found["name"], found["ready"]) == (200, "net", True)
    shown = found["model_version_status"]
    assert [each["version"] for each in shown] == versions
    assert {each["state"] for each in shown} == {"AVAILABLE"}
    assert shown[0]["status"] == {"error_code": "OK", "error_message": ""}


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/models/late", 503, "late is not ready: loading weights"),
        ("GET", "/v1/models/late/versions/1", 503, "loading weights"),
        ("GET", "/v1/models/nobody", 404, "there are: net, late"),
        ("GET", "/v1/models/net/versions/3", 404, "net/versions/3"),
        ("GET", "/v1/models/net/versions/1/metadata", 404, "nothing"),
        ("GET", "/v1", 404, "nothing"),
        ("POST", "/v1/models", 405, "takes GET, not POST"),
        ("POST", "/v1/models/net:explain", 405, "takes GET"),
        ("POST", "/v1/models/net:predict/", 404, "nothing"),
        ("POST", "/v1/models/net/versions/1:predict/", 404, "nothing"),
    ],
)
def test_what_is_not_there_or_not_ready_is_refused_with_a_sentence(
    app: App, method: str, path: str, status: int, said: str
) -> None:
    answer = call(app, method, path)
    error = answer.json()["error"]
    codes = {405: "method_not_allowed", 503: "unavailable"}
    not_found = "not_found" if said == "nothing" else "model_not_found"
    assert error["code"] == codes.get(status, not_found)
    assert (answer.status_code, said in error["message"]) == (status, True)
    assert answer.headers["content-type"] == "application/json"
    assert ("retry-after" in answer.headers) == (status == 503)
