import asyncio
from collections.abc import Callable

import httpx
import pytest

from inferpool.service.api.auth import Guard, key_of
from inferpool.service.api.errors import ForbiddenError, UnauthorizedError
from inferpool.service.api.routes.health import HealthReport, ModelHealth, health_router
from inferpool.service.api.routes.metrics import metrics_router
from inferpool.service.api.web import App
from inferpool.service.settings.keys import Keys, read_keys
from tests.service.api.fakes import FakeModel, call, endpoint, post

PREDICT, METRICS, ADMIN = "p" * 20, "m" * 20, "a" * 20


class Source:
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
        routers=[health_router(Source(), guard), metrics_router(Source())],
        guard=guard,
    )
    app.predict = endpoint(FakeModel(), guard=guard)
    return app


def status(app: App, path: str, key: str | None = None, method: str = "GET") -> int:
    headers = {} if key is None else {"x-api-key": key}
    return call(app, method, path, headers=headers).status_code


def all_keys() -> App:
    return make_app(predict=PREDICT, metrics=METRICS, admin=ADMIN)


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


def test_a_key_for_something_else_is_403() -> None:
    app = all_keys()
    assert status(app, "/predict", METRICS, "POST") == 403
    assert status(app, "/metrics", PREDICT) == 403
    assert status(app, "/health", ADMIN) == 403
    assert status(app, "/admin/settings", PREDICT) == 403


def test_several_keys_are_valid_while_one_replaces_the_other() -> None:
    app = make_app(predict=f"{PREDICT},{METRICS}")
    for key in (PREDICT, METRICS):
        assert status(app, "/predict", key, "POST") == 415


def test_one_key_may_be_for_several_things() -> None:
    app = make_app(predict=PREDICT, metrics=PREDICT)
    assert status(app, "/metrics", PREDICT) == 200
    assert status(app, "/predict", PREDICT, "POST") == 415


def test_without_keys_all_is_open_but_admin_is_not_there() -> None:
    app = make_app()
    for path in ("/metrics", "/health", "/docs", "/openapi.json"):
        assert status(app, path) == 200
    assert status(app, "/predict", None, "POST") == 415
    assert status(app, "/admin/settings") == 404


def test_without_metrics_keys_the_predict_keys_are_for_metrics_too() -> None:
    app = make_app(predict=PREDICT)
    for path in ("/metrics", "/health"):
        assert status(app, path) == 401
        assert status(app, path, PREDICT) == 200


def test_an_admin_key_alone_restricts_nothing_else() -> None:
    app = make_app(admin=ADMIN)
    assert status(app, "/metrics") == 200
    assert status(app, "/admin/settings") == 401


def test_probes_need_no_key_and_tell_strangers_no_reasons() -> None:
    app = all_keys()
    assert status(app, "/health/live") == 200
    stranger = call(app, "GET", "/health/ready")
    assert stranger.status_code == 503
    assert "secret" not in stranger.text
    operator = call(app, "GET", "/health/ready", headers={"x-api-key": METRICS})
    assert "secret-model: no /secret/file" in operator.text
    assert "secret" in call(make_app(), "GET", "/health/ready").text


def test_a_refusal_comes_before_the_model_is_looked_up() -> None:
    assert status(all_keys(), "/predict/none", None, "POST") == 401
    assert status(all_keys(), "/predict/none", PREDICT, "POST") == 404


def test_refused_calls_of_administration_are_logged_with_their_caller_and_not_by_the_thousand(
    caplog,
) -> None:
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
            await wait_until(lambda: "more calls" in caplog.text)

    asyncio.run(flood())
    num_refused = sum("refused POST" in record.getMessage() for record in caplog.records)
    left_out = [r for r in caplog.records if "more calls" in r.getMessage()]
    assert num_refused + sum(int(str(r.args[0])) for r in left_out if r.args) >= 50
    assert num_refused < 50
    caplog.clear()
    assert status(make_app(), "/admin/drain") == 404  # where there is no administration at all
    assert status(app, "/metrics", ADMIN) == 403
    assert not caplog.records


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


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


def test_a_guard_without_keys_for_predict_costs_the_endpoint_nothing() -> None:
    assert not Guard(admin=read_keys(ADMIN)).restricts_predict
    assert Guard(predict=read_keys(PREDICT)).restricts_predict


def test_checks_say_what_is_missing() -> None:
    guard = Guard(predict=read_keys(PREDICT), admin=read_keys(ADMIN), metrics=Keys())
    with pytest.raises(UnauthorizedError, match="Authorization: Bearer KEY"):
        guard.check("predict", {})
    with pytest.raises(ForbiddenError, match="admin_keys"):
        guard.check("admin", {b"x-api-key": PREDICT.encode()})
    assert guard.allows("metrics", {b"x-api-key": PREDICT.encode()})
    assert key_of({b"authorization": b"Basic x"}) is None
