"""Paths that models may have of their own, and those that are the service's."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.api.routes.health import health_router
from inferpool.service.api.routes.metrics import metrics_router
from inferpool.service.api.web import App
from inferpool.service.app import make_app
from inferpool.service.parts.admin.routes import admin_router
from inferpool.service.parts.jobs.http.routes import jobs_router
from inferpool.service.parts.kserve_v1.routes import v1_router
from inferpool.service.parts.live.page import Page
from inferpool.service.parts.live.sampler import events_router
from inferpool.service.parts.open_inference.routes import v2_router
from inferpool.service.parts.platforms.part import parts_of_platforms
from inferpool.service.parts.swap.routes import models_router
from inferpool.service.parts.tei.routes import info_router, tei_router
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.loader import load
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.paths import OF_PROTOCOLS, OWN_PATHS, check_path
from inferpool.service.settings.settings import Settings
from tests.service.parts.torchserve.test_management import serving


@pytest.mark.parametrize("path", ["/classify", "/teams/vision", "/predict2", "/a:b@c~d", "/x/v1"])
def test_a_model_may_have_a_path_that_is_nobodys(path: str):
    assert check_path(path) == path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("classify", "is no path for a model"),
        ("/", "is no path for a model"),
        ("/a/", "no '/' at the end"),
        ("/a//b", "is no path for a model"),
        ("/a/../b", "resolve"),
        ("/./b", "resolve"),
        ("/{name}", "is no path for a model"),
        ("/a%62", "is no path for a model"),
        ("/a b", "is no path for a model"),
        ("/a?b", "is no path for a model"),
        ("/caf\u00e9", "is no path for a model"),
        ("/" + "a" * 256, "256 characters at most"),
        ("/predict/mine", "begins with /predict, which is a path of the service itself"),
        ("/openapi.json", "a path of the service itself"),
        ("/v1/chat", "begins with /v1, which is a path of the service itself"),
        ("/root/x", "begins with /root, the root_path"),
        ("/root", "begins with /root, the root_path"),
    ],
)
def test_a_path_that_could_not_work_is_refused_with_the_reason(path: str, said: str):
    with pytest.raises(ValueError, match=said):
        check_path(path, "/root")


def test_the_table_has_the_beginnings_of_all_routes_of_all_parts():
    keys = read_keys("a-key-of-sixteen-characters")
    guard = Guard(predict=keys, metrics=keys, admin=keys)
    makers = (health_router, metrics_router, admin_router, models_router)
    routers = [make(None) for make in makers]  # type: ignore[operator]  # nobody asks them
    routers.append(events_router(None, guard))  # type: ignore[arg-type]  # as above
    routers.append(jobs_router(None, guard, Limits()))  # type: ignore[arg-type]  # as above
    v2 = v2_router(None, None)  # type: ignore[arg-type]  # as above
    routers += [Page(docs=True).router(), v1_router({}), v2]
    routers += [make({}, None) for make in (info_router, tei_router)]  # type: ignore[arg-type]  # as above
    app = App(version="1", routers=routers, guard=guard)
    assert first_segments_of(app.routes) == OWN_PATHS
    assert not OWN_PATHS & OF_PROTOCOLS


def first_segments(*paths: str) -> set[str]:
    return {first for path in paths if (first := path[1:].partition("/")[0]) not in ("", "*")}


def first_segments_of(routes: Iterable[object]) -> set[str]:
    leaves = [
        each
        for route in routes
        for each in getattr(getattr(route, "original_router", None), "routes", [route])
    ]
    return first_segments(*(getattr(each, "path", "/") for each in leaves))


async def test_the_table_has_the_beginnings_of_all_paths_of_torchserve(tmp_path, caplog):
    main = "http://127.0.0.1:8080"
    async with serving(tmp_path, caplog, management=main, metrics=main) as bench:
        app, _, _ = make_app(bench.assembly)
        routed = first_segments_of(app.routes)
        others = {*app.forms_of_errors, *first_segments(*app.aliases)}
    assert {"ping", "explanations", "models", "metrics"} <= routed
    found = routed | others | first_segments(*CALLS_BY_SETTING["torchserve"])
    assert found - OWN_PATHS == OF_PROTOCOLS


def test_the_table_has_the_beginnings_of_all_paths_of_sagemaker():
    found = first_segments(*CALLS_BY_SETTING["sagemaker"])
    for folder in (None, "/models"):
        settings = Settings(models={}, default_model="", sagemaker=True, sagemaker_models=folder)
        (part,) = parts_of_platforms(settings, None, cast("Any", object()))  # type: ignore[arg-type]  # nobody asks
        found |= {*part.forms_of_errors, *part.later, *first_segments(*part.aliases)}
        for make in part.later.values():
            found |= first_segments_of(each for router in make() for each in router.routes)
    assert {"ping", "invocations", "models"} == found - OWN_PATHS
    assert found <= OWN_PATHS | OF_PROTOCOLS


TWO = '[models.a]\nsource = "echo"\npath = "/x"\n[models.b]\nsource = "echo"\npath = "%s"\n'


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("/x", "", r"models\.b\.path: '/x' is the path of the model a too; each needs one"),
        ("/jobs/x", "", r"models\.b\.path: '/jobs/x' begins with /jobs, which is a path of the"),
        ("/m/y", 'root_path = "/m/"\n', r"models\.b\.path: '/m/y' begins with /m, the root_path"),
    ],
)
def test_settings_say_which_path_cannot_be(path: str, more: str, said: str, tmp_path):
    (tmp_path / "inferpool.toml").write_text(more + TWO % path)
    with pytest.raises(SettingsError, match=said):
        load({}, {}, tmp_path)


def test_settings_of_how_clients_speak_to_a_model_come_from_all_places(tmp_path):
    (tmp_path / "inferpool.toml").write_text(TWO % "")
    environ = {"INFERPOOL_MODELS__A__ENVELOPE": "false", "INFERPOOL_MODELS__B__FORM": "instance"}
    models = load({}, environ, tmp_path).settings.models
    assert (models["a"].path, models["a"].envelope, models["b"].path) == ("/x", False, "")
    assert (models["a"].form, models["b"].form, models["b"].accepts) == (None, "instance", None)
    flags = {"model": "a", "path": "/y", "accepts": "bytes", "envelope": "true"}
    (model,) = load(flags, environ, tmp_path).settings.models.values()
    assert (model.path, model.accepts, model.envelope) == ("/y", "bytes", True)
