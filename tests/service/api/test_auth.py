import asyncio

import httpx
import pytest

from inferpool.service.api.auth import Guard, key_of
from inferpool.service.api.errors import ForbiddenError, NotFoundError, UnauthorizedError
from inferpool.service.api.routes.health import HealthReport, ModelHealth, health_router
from inferpool.service.api.routes.metrics import metrics_router
from inferpool.service.api.web import App
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.keys import Keys
from tests.service.api.fakes import FakeModel, as_app, call, endpoint, post
from tests.virtual_time import run_in_virtual_time

PREDICT, METRICS, ADMIN = "p" * 20, "m" * 20, "a" * 20


class SecretiveSource:
    def report(self) -> HealthReport:
        model = ModelHealth(name="secret-model", ready=False, reason="no /secret/file")
        return HealthReport(status="starting", ready=False, draining=False, models=[model])

    async def refresh(self) -> None:
        pass

    def render(self, accept: str) -> tuple[bytes, str]:
        return b"up 1\n", "text/plain"


def make_app(**keys: str) -> App:
    guard = Guard(**{name: read_keys(text) for name, text in keys.items()})  # type: ignore[arg-type]
    app = App(
        version="0",
        routers=[health_router(SecretiveSource().report, guard), metrics_router(SecretiveSource())],
        guard=guard,
    )
    app.predict = endpoint(FakeModel(), guard=guard)
    return app


def status(app: App, path: str, key: str | None = None, method: str = "GET") -> int:
    headers = {} if key is None else {"x-api-key": key}
    return call(app, method, path, headers=headers).status_code


def all_keys() -> App:
    return make_app(**ALL)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {PREDICT}"},
        {"authorization": f"bearer  {PREDICT} "},
        {"authorization": f"Bearer\t{PREDICT}"},
        {"x-api-key": PREDICT},
        {"x-api-key": f" {PREDICT}\t "},
        {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": PREDICT},
    ],
)
def test_a_key_opens_in_either_header(headers: dict[str, str]) -> None:
    headers |= {"content-type": "image/png"}
    assert post(all_keys(), content=b"x", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": PREDICT},
        {"authorization": f"Basic {PREDICT}"},
        {"authorization": f"Bearer{PREDICT}"},
        {"authorization": f"Bearer {PREDICT}x"},
        {"authorization": f"Bearer {PREDICT[:-1]}"},
        {"authorization": b"Bearer \xe9\xff\xfe"},
        {"x-api-key": b"\xc3\xa9" * 20},
        {"x-api-key": ""},
        {"x-api-key": "x" * 1_000_000},
    ],
)
def test_no_key_or_an_unknown_one_is_401_and_says_how_to_send_one(headers: dict[str, str]) -> None:
    for method, path in (("POST", "/predict"), ("POST", "/predict/none"), ("GET", "/metrics")):
        answer = call(all_keys(), method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["code"] == "unauthorized"
        assert PREDICT not in answer.text


ALL = {"predict": PREDICT, "metrics": METRICS, "admin": ADMIN}


@pytest.mark.parametrize(
    ("keys", "path", "key", "expected"),
    [
        pytest.param(ALL, "/predict", METRICS, 403, id="a key for something else"),
        (ALL, "/metrics", PREDICT, 403),
        (ALL, "/health", ADMIN, 403),
        (ALL, "/admin/settings", PREDICT, 403),
        pytest.param(ALL, "/predict/none", None, 401, id="a key is checked before the model"),
        (ALL, "/predict/none", PREDICT, 404),
        pytest.param({"predict": f"{PREDICT},{METRICS}"}, "/predict", PREDICT, 415, id="two keys"),
        ({"predict": f"{PREDICT},{METRICS}"}, "/predict", METRICS, 415),
        pytest.param({"predict": PREDICT, "metrics": PREDICT}, "/metrics", PREDICT, 200, id="both"),
        ({"predict": PREDICT, "metrics": PREDICT}, "/predict", PREDICT, 415),
        pytest.param({}, "/metrics", None, 200, id="without keys all is open but admin"),
        ({}, "/health", None, 200),
        ({}, "/docs", None, 200),
        ({}, "/openapi.json", None, 200),
        ({}, "/predict", None, 415),
        ({}, "/admin/settings", None, 404),
        pytest.param(
            {"predict": PREDICT}, "/metrics", None, 401, id="predict keys are for metrics"
        ),
        ({"predict": PREDICT}, "/health", None, 401),
        ({"predict": PREDICT}, "/metrics", PREDICT, 200),
        ({"predict": PREDICT}, "/health", PREDICT, 200),
        pytest.param({"admin": ADMIN}, "/metrics", None, 200, id="an admin key restricts no more"),
        ({"admin": ADMIN}, "/admin/settings", None, 401),
    ],
)
def test_each_key_opens_its_own_paths(
    keys: dict[str, str], path: str, key: str | None, expected: int
) -> None:
    method = "POST" if path.startswith("/predict") else "GET"
    assert status(make_app(**keys), path, key, method) == expected


def test_probes_need_no_key_and_tell_strangers_no_reasons() -> None:
    app = all_keys()
    assert status(app, "/health/live") == 200
    stranger = call(app, "GET", "/health/ready")
    assert stranger.status_code == 503
    assert "secret" not in stranger.text
    operator = call(app, "GET", "/health/ready", headers={"x-api-key": METRICS})
    assert "secret-model: no /secret/file" in operator.text
    assert "secret" in call(make_app(), "GET", "/health/ready").text


def test_refused_admin_calls_are_logged_with_their_caller_up_to_a_rate(caplog) -> None:
    app = all_keys()
    wrong = call(app, "POST", "/admin/drain", headers={"x-api-key": "x" * 20})
    (line,) = caplog.records
    assert line.getMessage() == "admin: refused POST /admin/drain: this key is not known here"
    assert line.levelname == "WARNING"
    assert line.__dict__["request_id"] == wrong.headers["x-request-id"]
    assert line.__dict__["client"] == "127.0.0.1"
    caplog.clear()
    app = all_keys()

    async def flood() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            for _ in range(50):
                assert (await client.post("/admin/drain")).status_code == 401
        await asyncio.sleep(1)

    run_in_virtual_time(flood())
    said = [record.getMessage() for record in caplog.records]
    assert said[:-1] == [said[0]] * 5
    assert said[-1] == "admin: refused 45 more calls in the last second"
    caplog.clear()
    assert status(make_app(), "/admin/drain") == 404  # where there is no administration at all
    assert status(app, "/metrics", ADMIN) == 403
    assert not caplog.records


@pytest.mark.parametrize("path", ["/health", "/health/live", "/metrics", "/docs"])
def test_balancers_may_ask_for_the_head_alone(path: str) -> None:
    app = all_keys()
    assert status(app, path, METRICS, "HEAD") == status(app, path, METRICS) == 200
    if path in ("/health", "/metrics"):
        assert status(app, path, None, "HEAD") == 401
    assert status(app, "/predict", PREDICT, "HEAD") == 405


def test_a_route_without_a_policy_is_not_served() -> None:
    app = all_keys()
    app.add_api_route("/forgotten", lambda: "secret")
    assert status(app, "/forgotten") == status(app, "/forgotten", ADMIN) == 404


@pytest.mark.parametrize(
    "path",
    [
        "http://host//metrics", "/./metrics", "/docs/../metrics", "/METRICS", "/metrics//",
        "/metrics;x",
        "/%6detrics", "/docs/%2e%2e/metrics", "/docs/assets/../../metrics", "/health/live/../",
        "/admin", "/admin/", "/admin/settings/", "/%61dmin/settings", "/metrics/", "/health/",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_leads_around_its_policy(path: str) -> None:
    answer = call(all_keys(), "GET", path)
    assert answer.status_code in (401, 404, 307)
    assert "up 1" not in answer.text
    assert "secret" not in answer.text


def test_predict_keys_have_numbers_where_they_are_told_apart() -> None:
    keys = read_keys(f"{PREDICT},{METRICS}")
    first, second = (Guard(predict=keys, admin=read_keys(ADMIN), tells_apart=True) for _ in "ab")
    numbers = [first.check("predict", {b"x-api-key": key.encode()}) for key in (PREDICT, METRICS)]
    assert sorted(numbers) == [1, 2]
    assert numbers == [
        second.check("predict", {b"x-api-key": key.encode()}) for key in (PREDICT, METRICS)
    ]
    assert first.check("admin", {b"x-api-key": ADMIN.encode()}) == 0
    assert Guard(predict=keys).check("predict", {b"x-api-key": PREDICT.encode()}) == 0


@pytest.mark.parametrize("tells_apart", [True, False])
def test_each_instance_carries_the_number_of_its_key(tells_apart: bool) -> None:
    model = FakeModel()
    guard = Guard(predict=read_keys(f"{PREDICT},{METRICS}"), tells_apart=tells_apart)
    app = as_app(endpoint(model, guard=guard))
    for key in (PREDICT, METRICS, PREDICT):
        body = {"instances": [1, 2]}
        assert post(app, json=body, headers={"x-api-key": key}).status_code == 200
    callers = [ref.caller for ref in model.refs]
    assert callers[:2] == callers[4:]
    assert set(callers) == ({1, 2} if tells_apart else {0})


def test_checks_say_what_is_missing() -> None:
    assert not Guard(admin=read_keys(ADMIN)).restricts_predict
    guard = Guard(predict=read_keys(PREDICT), admin=read_keys(ADMIN), metrics=Keys())
    assert guard.restricts_predict
    with pytest.raises(UnauthorizedError, match="Authorization: Bearer KEY"):
        guard.check("predict", {})
    with pytest.raises(ForbiddenError, match="admin_keys"):
        guard.check("admin", {b"x-api-key": PREDICT.encode()})
    assert guard.allows("metrics", {b"x-api-key": PREDICT.encode()})
    assert key_of({b"authorization": b"Basic x"}) is None


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/metrics", "/events", "/admin/a", "/a"])
def test_only_predictions_and_probes_are_there_if_all_else_is_closed(path: str) -> None:
    admin = {b"x-api-key": ADMIN.encode()}
    guard = Guard(admin=read_keys(ADMIN), only_predictions=True)
    with pytest.raises(NotFoundError) as caught:
        guard.check_path(path, admin)
    assert "/docs lists" not in caught.value.message
    for open_path in ("/health/live", "/health/ready", "/ping", "/predict", "/v1/models"):
        guard.check_path(open_path, {})


def test_who_may_predict_may_have_models_loaded_only_where_that_is_asked_for() -> None:
    closed = Guard(predict=read_keys(PREDICT), only_predictions=True)
    loading = Guard(predict=read_keys(PREDICT), only_predictions=True, loads_models=True)
    for path in ("/models", "/models/a"):
        with pytest.raises(NotFoundError):
            closed.check_path(path, {b"x-api-key": PREDICT.encode()})
        with pytest.raises(UnauthorizedError):
            loading.check_path(path, {})
        loading.check_path(path, {b"x-api-key": PREDICT.encode()})
