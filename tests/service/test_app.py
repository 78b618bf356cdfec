import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter
from starlette.routing import BaseRoute, Mount, Route

from inferpool.service.api.auth import Guard, policy_of
from inferpool.service.api.exchange import begin_call
from inferpool.service.api.web import App
from inferpool.service.api.wire.listening import warn_if_open
from inferpool.service.app import assemble, make_app
from inferpool.service.endpoint import failure_log
from inferpool.service.errors import StartError
from inferpool.service.parts.objective import Objective
from inferpool.service.parts.token_bound import TokenBound
from inferpool.service.queue.batch_sizing import SizeLimit
from inferpool.service.settings.loader import load
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.console import Console
from inferpool.workers.host.devices import find_host
from tests.virtual_time import run_in_virtual_time

STARTS = "GpuWatch.start LiveFeed.start"
JOBS = "ModelFolder.start Jobs.start"
BEGINS_OF_STOPS = "Jobs.end Changes.end Operations.end LiveFeed.end"
JOBS_STOP = "Jobs.stop ModelFolder.stop Changes.stop"
STOPS = "Operations.stop LiveFeed.stop GpuWatch.stop"
WORKERS_STOP = "Pool.stop Catalog.stop RecordedEngine.close Arena.close SpeedCache.close"
ORDERS = {
    "front_ends=1": f"Catalog.start Pool.start {STARTS} SpeedSearch.add {JOBS} | "
    f"{BEGINS_OF_STOPS} Dispatcher.drain {JOBS_STOP} SpeedSearch.stop {STOPS} {WORKERS_STOP}",
    "front_ends=2": f"Catalog.start Pool.start {STARTS} SpeedSearch.add {JOBS} Fronts.start "
    f"Fronts.on_ready | {BEGINS_OF_STOPS} Fronts.move_clients_away Dispatcher.drain Fronts.stop "
    f"{JOBS_STOP} SpeedSearch.stop {STOPS} {WORKERS_STOP}",
    "cluster_port=0": f"Catalog.start Pool.start Cluster.open {STARTS} {JOBS} | "
    f"{BEGINS_OF_STOPS} Dispatcher.drain {JOBS_STOP} {STOPS} Cluster.close Pool.stop "
    "Catalog.stop Arena.close SpeedCache.close",
}
"""What starts, and after `|` what stops, of a service with one setting."""

KEYS = {f"INFERPOOL_{kind}_KEYS": f"{kind.lower()}-0123456789" for kind in ("PREDICT", "ADMIN")}


@pytest.fixture
def settings(tmp_path) -> Settings:
    return load({"model": "echo", "job_store": str(tmp_path / "jobs")}, KEYS, tmp_path).settings


@pytest.fixture
def app(settings) -> App:
    """The application as it is served, over a service that has not been started."""
    app, _, _ = make_app(assemble(settings, find_host(""), Console(None)))
    return app


@pytest.mark.parametrize("setting", ORDERS)
def test_everything_starts_and_stops_in_its_order(setting, tmp_path):
    command = [sys.executable, "-m", "tests.service.recorded_service", str(tmp_path), setting]
    run = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
    found = json.loads(run.stdout)
    assert " ".join(found["events"]) == ORDERS[setting]
    assert found["code"] == 0


def test_decoders_count_among_the_processes_that_need_descriptors(tmp_path):
    model = "INFERPOOL_MODELS__ECHO__"
    environ = {f"{model}REPLICAS": "2", f"{model}DECODERS": "3"}
    cli = {"model": "echo", "devices": "cpu", "job_store": "none"}
    settings = load(cli, environ, tmp_path).settings
    service = assemble(settings, find_host(""), Console(None)).service
    assert service.num_processes == 2 * (1 + 3)


def test_a_second_service_with_the_same_store_of_jobs_does_not_start(settings):
    first = assemble(settings, find_host(""), Console(None))
    with pytest.raises(StartError, match="another service keeps its jobs in"):
        assemble(settings, find_host(""), Console(None))
    assert first.jobs is not None


def test_settings_of_batches_become_policies_of_the_queue(tmp_path):
    flags = {"model": "minilm_l6", "max_batch_tokens": "64", "objective_p99_ms": "50"}
    settings = load(flags, {"INFERPOOL_JOB_STORE": "none"}, tmp_path).settings
    catalog = assemble(settings, find_host(""), Console(None)).service.catalog
    scheduler = SimpleNamespace(policies=[], limit=SizeLimit(None))
    pool = SimpleNamespace(dispatcher=SimpleNamespace(scheduler=scheduler))
    model = settings.models["minilm_l6"]
    for on_load in catalog.on_load:
        on_load(SimpleNamespace(name="minilm_l6", settings=model, pool=pool))
    assert [type(policy) for policy in scheduler.policies] == [Objective, TokenBound]


def paths_of(routes: Iterable[BaseRoute]) -> Iterator[str]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from paths_of(included.routes)
        else:
            assert isinstance(route, Route | Mount), f"how is {route} guarded?"
            yield route.path


SCOPES = {
    "open": """
        / /docs /docs/assets /health/live /health/ready /openapi.json /page/{name}
        /v2/health/live /v2/health/ready
    """,
    "metrics": "/events /health /metrics",
    "predict": """
        /jobs /jobs/{id} /jobs/{id}/events /jobs/{id}/result
        /predict /predict/{model:path} /predict/{model} /predict/{model}/versions/{version}
        /v1/classify /v1/embeddings /v1/models /v1/models/{model} /v1/models/{model}:predict
        /v1/models/{model}/versions/{version} /v1/models/{model}/versions/{version}:predict
        /v1/rerank /v2/rerank
        /v2 /v2/models /v2/models/stats /v2/repository/index
        /v2/models/{model} /v2/models/{model}/ready /v2/models/{model}/config
        /v2/models/{model}/stats /v2/models/{model}/infer
        /v2/models/{model}/versions/{version} /v2/models/{model}/versions/{version}/ready
        /v2/models/{model}/versions/{version}/config /v2/models/{model}/versions/{version}/stats
        /v2/models/{model}/versions/{version}/infer
        /v2/logging /v2/trace/setting /v2/models/{model}/trace/setting
        /v2/systemsharedmemory/status /v2/systemsharedmemory/unregister
        /v2/systemsharedmemory/region/{name}/status /v2/systemsharedmemory/region/{name}/register
        /v2/systemsharedmemory/region/{name}/unregister
        /v2/cudasharedmemory/status /v2/cudasharedmemory/unregister
        /v2/cudasharedmemory/region/{name}/status /v2/cudasharedmemory/region/{name}/register
        /v2/cudasharedmemory/region/{name}/unregister
    """,
    "admin": """
        /admin/drain /admin/hosts/{host}/measure /admin/log-level /admin/log-level/{level}
        /admin/models /admin/models/{model} /admin/models/{model}/restart
        /admin/models/{model}/rollback /admin/models/{model}/versions
        /admin/models/{model}/workers/{number}/restart /admin/resume /admin/settings
        /v2/repository/models/{model}/load /v2/repository/models/{model}/unload
    """,
}
"""All paths of a service with everything, by the key that they need."""
REFUSED = ("sharedmemory", "/trace/setting", "/logging")
"""Parts of paths that are there to be refused in their protocol's words, and described nowhere."""


def test_each_route_needs_the_key_that_this_table_says(app):
    expected = {path: scope for scope, paths in SCOPES.items() for path in paths.split()}
    described = app.openapi()["paths"]  # this adds the routes that wait for their first call
    paths = {*paths_of(app.routes), *described}
    assert {path: policy_of(path) for path in paths} == expected
    assert app.scopes == {path: expected[path] for path in paths_of(app.routes)}


@pytest.mark.parametrize("path", ["/nothing", "/health/live/all", "/docs/{name}/keys", "/{any}"])
def test_a_service_whose_route_states_no_scope_does_not_start(path):
    router = APIRouter()
    router.add_route(path, lambda _: None)
    with pytest.raises(StartError, match=re.escape(f"{path} cannot be served")):
        App(version="0", routers=[router], guard=Guard())


@pytest.mark.parametrize(
    ("path", "members"),
    {
        "/v1/models": {"error": ("message", "type", "param", "code")},
        "/v1/chat/completions": {"error": ("message", "type", "param", "code")},
        "/v2/models": {"error": ()},
        "/v2/nothing": {"error": ()},
        "/info": {"error": (), "error_type": ()},
        "/tei/echo/nothing": {"error": (), "error_type": ()},
        "/jobs/nothing": {"detail": (), "title": ()},
    }.items(),
)
@pytest.mark.parametrize("key", ["wrong", KEYS["INFERPOOL_PREDICT_KEYS"]])
def test_refusals_have_the_form_of_the_protocol_whose_paths_they_are_below(
    tmp_path, path, members, key
):
    given = {"model": "echo", "job_store": str(tmp_path / "jobs"), "tei": True}
    settings = load(given, KEYS, tmp_path).settings
    app, _, _ = make_app(assemble(settings, find_host(""), Console(None)))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            method = "GET" if key == "wrong" else "DELETE"
            return await client.request(method, path, headers={"x-api-key": key})

    answer = asyncio.run(ask())
    found = answer.json()
    assert answer.status_code == 401 if key == "wrong" else answer.status_code >= 404
    assert all(set(names) <= set(found[name]) for name, names in members.items())
    assert answer.headers["x-request-id"]
    is_problem = answer.headers["content-type"] == "application/problem+json"
    assert is_problem == path.startswith("/jobs")


def test_a_service_does_not_start_with_a_route_that_no_key_would_guard():
    router = APIRouter()
    router.add_websocket_route("/predict/stream", lambda _: None)
    with pytest.raises(StartError, match="no key is asked for"):
        App(version="0", routers=[router], guard=Guard())


def test_openapi_lists_exactly_the_routes_that_are_no_pages(app):
    described = set(app.openapi()["paths"])
    routes = {path for path in paths_of(app.routes) if not path.startswith("/docs")}
    predict = {"/predict", "/predict/{model}", "/predict/{model}/versions/{version}"}
    undocumented = {"/", "/page/{name}", "/openapi.json", "/predict/{model:path}"}
    undocumented |= {path for path in routes if any(part in path for part in REFUSED)}
    assert described == routes - undocumented | predict


def test_a_flood_of_failures_is_a_few_warnings_and_a_count(caplog):
    async def go() -> None:
        log = failure_log()
        call = begin_call("POST", "/predict", b"", ())
        for status in [503] * 100 + [500, 429]:
            log(call, status, 0.1)
        await asyncio.sleep(2)

    run_in_virtual_time(go())
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.count("POST /predict: 503 after 0.100 s") == 3
    assert said.count("POST /predict: 500 after 0.100 s") == 1
    assert said[-1] == "97 more answers of 503 in the last second"
    assert len(said) == 5


@pytest.mark.parametrize(
    ("host", "is_warned"), [("127.0.0.1", False), ("0.0.0.0", True), ("::", True), ("::1", False)]
)
def test_listening_to_other_hosts_without_a_key_is_warned_of(tmp_path, caplog, host, is_warned):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for environ, expected in (({}, is_warned), (KEYS, False)):
        caplog.clear()
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            warn_if_open(load({}, environ, tmp_path).settings, listener)
        assert ("no API key is set" in caplog.text) == expected
