"""Keys, TLS, administration and what reaches the log, on a service as a user starts it."""

import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.certificates import make_certificate
from tests.e2e.running import Running, running

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

PREDICT, METRICS, ADMIN = "predict-0123456789", "metrics-0123456789", "admin-0123456789"
BYTES = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def service(pair, tmp_path_factory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("secrets") / "metrics"
    keys.write_text(f"{METRICS}\n")
    flags = {
        "--tls-certificate": str(pair[0]),
        "--tls-key": str(pair[1]),
        "--metrics-keys-file": str(keys),
        "--replicas": "2",
        "--log-level": "debug",
    }
    env = {"INFERPOOL_PREDICT_KEYS": PREDICT, "INFERPOOL_ADMIN_KEYS": ADMIN}
    arguments = [part for flag in flags.items() for part in flag]
    with running("echo", *arguments, env=env) as service:
        yield service


@pytest.fixture
def client(service: Running, pair) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(pair[0]))
    with httpx.Client(base_url=service.url, verify=context, timeout=60) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def incarnations(client: httpx.Client) -> list[tuple[int, str]]:
    models = client.get("/health", headers=bearer(METRICS)).json()["models"]
    return [(each["incarnation"], each["state"]) for each in models[0]["workers"]]


def test_predictions_come_over_https_and_only_for_a_key(client):
    for headers in (bearer(PREDICT), {"x-api-key": PREDICT}):
        answer = client.post("/predict", content=b"x", headers=headers | BYTES)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/predict", "/predict/none"):
        assert client.post(path, content=b"x", headers=BYTES).status_code == 401
    assert client.post("/predict", content=b"x", headers=bearer(ADMIN)).status_code == 403
    large = client.post("/predict", content=b"x" * 10_000_000, headers=bearer(PREDICT) | BYTES)
    assert large.status_code == 200


def test_old_tls_and_plain_http_get_no_answer(service):
    with socket.create_connection(service.address, timeout=60) as plain:
        plain.sendall(b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(service.address, timeout=60) as old, pytest.raises(ssl.SSLError):
        context.wrap_socket(old)


def test_pages_bring_their_own_policy_and_name_no_server(client):
    page = client.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "'sha256-" in policy
    assert "frame-ancestors 'none'" in policy
    assert "http" not in policy
    pages = ("/", "/page/main.js", "/docs", "/docs/assets/swagger-ui.css")
    for path in (*pages, "/openapi.json", "/nowhere", "/health"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers


def test_an_operator_drains_and_resumes(client):
    assert client.post("/admin/drain").status_code == 401
    assert client.post("/admin/drain", headers=bearer(PREDICT)).status_code == 403
    assert client.post("/admin/drain", headers=bearer(ADMIN)).json() == {"draining": True}
    assert client.get("/health/ready").status_code == 503
    answer = client.post("/predict", content=b"x", headers=bearer(PREDICT) | BYTES)
    assert answer.status_code == 200
    assert client.post("/admin/resume", headers=bearer(ADMIN)).json() == {"draining": False}
    assert client.get("/health/ready").status_code == 200


def test_workers_are_replaced_one_after_another_and_no_call_is_lost(client):
    first, second = (number for number, _ in incarnations(client))
    answer = client.post("/admin/models/echo/restart", headers=bearer(ADMIN))
    assert answer.status_code == 200
    assert answer.json() == {"workers": ["echo/0", "echo/1"]}
    assert incarnations(client) == [(first + 1, "ready"), (second + 1, "ready")]
    again = client.post("/admin/models/echo/workers/0/restart", headers=bearer(ADMIN))
    assert again.json() == {"workers": ["echo/0"]}
    assert incarnations(client) == [(first + 2, "ready"), (second + 1, "ready")]
    for path, status in {
        "/admin/models/none/restart": 404,
        "/admin/models/echo/workers/7/restart": 404,
        "/admin/models/echo/workers/x/restart": 422,
    }.items():
        assert client.post(path, headers=bearer(ADMIN)).status_code == status


def test_an_operator_sees_the_settings_without_keys_and_changes_the_log_level(client):
    settings = client.get("/admin/settings", headers=bearer(ADMIN)).json()
    assert settings["predict_keys"]["value"] == "1 hidden"
    assert settings["predict_keys"]["origin"] == "environment INFERPOOL_PREDICT_KEYS"
    assert settings["tls_key"]["origin"] == "flag --tls-key"
    for level in ("error", "debug"):
        answer = client.put(f"/admin/log-level/{level}", headers=bearer(ADMIN))
        assert answer.json() == client.get("/admin/log-level", headers=bearer(ADMIN)).json()
        assert answer.json() == {"level": level}
    assert client.put("/admin/log-level/loud", headers=bearer(ADMIN)).status_code == 422


def test_hostile_text_of_clients_cannot_break_the_log_or_the_metrics(client, service):
    evil = "red\u2028\u202e"
    hostile = [
        {"x-request-id": "a" * 60_000},
        {"x-request-id": evil.encode()},
        {"user-agent": evil.encode(), "traceparent": evil.encode()},
    ]
    for number, headers in enumerate(hostile):
        path = f"/predict/none-{number}-%1b%5b31m%0d%0aevil{'x' * 3000}"
        answer = client.post(path, content=b"x", headers=headers | bearer(PREDICT))
        assert answer.status_code == 404
        assert len(answer.headers["x-request-id"]) == 32
        assert client.get(path.replace("/predict", ""), headers=headers).status_code == 404
    metrics = client.get("/metrics", headers=bearer(METRICS)).text
    assert "none-" not in metrics
    assert len(metrics.splitlines()) < 500
    service.wait_for_log("/predict/none-2")
    for line in service.log:
        assert line["level"] != "raw", line
        text = json.dumps(line, ensure_ascii=False)
        assert len(text) < 2000
        assert "\x1b" not in text


def test_no_key_is_shown_anywhere(client, service):
    client.post("/admin/drain", headers=bearer(ADMIN) | {"x-request-id": "audited"})
    client.post("/admin/resume", headers=bearer(ADMIN))
    while (line := service.wait_for_log("admin: drain")).get("request_id") != "audited":
        pass
    assert len(str(line["key"])) == 8
    shown = [json.dumps(service.log)]
    for path, key in {"/health": METRICS, "/metrics": METRICS, "/admin/settings": ADMIN}.items():
        shown.append(client.get(path, headers=bearer(key)).text)
    front_end, *workers = service.family()
    shown += [" ".join(process.cmdline()) for process in (front_end, *workers)]
    shown += [str(process.environ()) for process in workers if "python" in process.name()]
    for key in (PREDICT, METRICS, ADMIN):
        assert not [text[:300] for text in shown if key in text]
