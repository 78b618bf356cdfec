"""Real services as platforms run them: with their variables, and without arguments of ours."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.e2e.running import Running, running, until

CLOSED = (
    *("/", "/page/live.js", "/docs", "/docs/assets/favicon.png", "/openapi.json", "/health"),
    *(
        "/metrics",
        "/events",
        "/admin/models",
        "/admin/settings",
        "/v2/repository/models/a",
        "/nothing",
    ),
)
ADMIN = {"INFERPOOL_ADMIN_KEYS": "k" * 20}
JSON = {"content-type": "application/json"}


def check_closed(service: Running) -> None:
    """Check that nothing but predictions and probes is there, on each front end."""
    for path in CLOSED * 2:
        answer = service.get(path, headers={"authorization": f"Bearer {'k' * 20}"})
        assert answer.status_code == 404, path
        assert "docs" not in answer.text.replace(path, ""), answer.text
    assert service.get("/health/live").status_code == 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as SageMaker fills it, with two models."""
    base = tmp_path_factory.mktemp("opt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still in use
        network = torch.jit.trace(torch.nn.Identity(), torch.zeros(2))
    for name in ("a", "b"):
        place = base / "models" / name / "model"
        place.mkdir(parents=True)
        network.save(str(place / "identity.pt"))
    return base


def load(service: Running, name: str, url: Path | str) -> tuple[int, str]:
    answer = service.post("/models", json={"model_name": name, "url": str(url)})
    found = answer.json()
    return answer.status_code, found.get("type") or found["status"]


def test_sagemaker_has_several_models_loaded_from_its_folder_alone(folder: Path) -> None:
    env = {
        "SAGEMAKER_BIND_TO_PORT": "8080",
        "SAGEMAKER_MULTI_MODEL": "true",
        "SAGEMAKER_BASE_DIR": str(folder),
        **ADMIN,
    }
    models = folder / "models"
    (folder / "outside").mkdir()
    (models / "link").symlink_to(models / "b")
    (models / "linked").mkdir()
    (models / "linked" / "identity.pt").symlink_to(models / "a/model/identity.pt")
    (models / "empty").mkdir()
    arguments = ("--front-ends", "2", "--job-store", "none")
    with running(*arguments, env=env, ready=False) as service:
        service.wait_until_listening()
        until(lambda: service.get("/ping").status_code == 200)
        assert service.get("/models").json() == {"models": []}
        check_closed(service)
        for url, found in (
            (models / "a/../../outside", (400, "BadRequestException")),
            (models / "link/model", (400, "BadRequestException")),
            (models / "linked", (400, "BadRequestException")),
            (models / "empty", (400, "BadRequestException")),
            (models, (400, "BadRequestException")),
            (folder / "outside", (400, "BadRequestException")),
            ("https://example.com/a.tar.gz", (400, "BadRequestException")),
            ("echo", (400, "BadRequestException")),
            (models / "none", (404, "ModelNotFoundException")),
        ):
            assert load(service, "x", url) == found, url
        hashed = "0A" * 32  # SageMaker's own names are of any form
        assert load(service, hashed, models / "a/model") == (200, "Workers scaled")
        assert load(service, hashed, models / "a/model") == (409, "ConflictStatusException")
        for _ in range(4):
            answer = service.post(f"/models/{hashed}/invoke", content=b"[[1.5,2]]", headers=JSON)
            assert (answer.status_code, answer.json()) == (200, [[1.5, 2]])
        shown = {"modelName": hashed, "modelUrl": f"{models}/a/model"}
        assert service.get("/models").json() == {"models": [shown]}
        assert service.get(f"/models/{hashed}").json() == shown
        assert service.get("/ping").status_code == 200
        assert service.http.delete(f"{service.url}/models/{hashed}").status_code == 200
        assert service.get(f"/models/{hashed}").status_code == 404
        answer = service.post(f"/models/{hashed}/invoke", content=b"[[1.5,2]]", headers=JSON)
        assert (answer.status_code, answer.json()["type"]) == (404, "ModelNotFoundException")
        started = time.monotonic()
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
        assert time.monotonic() - started < 30


def test_vertex_ai_gets_its_own_paths_and_nothing_else() -> None:
    env = {
        "AIP_HTTP_PORT": "8080",
        "AIP_HEALTH_ROUTE": "/health",
        "AIP_PREDICT_ROUTE": "/predict",
        **ADMIN,
    }
    arguments = ("echo", "--front-ends", "2", "--job-store", "none")
    with running(*arguments, env=env, ready=False) as service:
        service.wait_until_listening()
        until(lambda: service.get("/health").status_code == 200)
        answer = service.get("/health")
        assert answer.json()["status"] in ("ready", "degraded")
        answer = service.post("/predict", json={"instances": [1, {"b64": "AAA="}]})
        assert (answer.status_code, answer.json()["predictions"][0]) == (200, 1)
        assert service.post("/predict", json={"x": 1}).json()["code"] == "invalid_input"
        for path in set(CLOSED) - {"/health"}:
            assert service.get(path).status_code == 404, path
        closed = [line for line in service.log if "AIP_HTTP_PORT" in str(line["message"])]
        assert [line["level"] for line in closed] == ["warning"]
        assert service.address[0] == "0.0.0.0"


def test_the_image_without_arguments_takes_its_port_from_the_platform(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inferpool", "config", "--format", "json"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "CONTAINER_IMAGE": "inferpool", "PORT": "9", "DYNO": "w"},
        capture_output=True,
        check=True,
    )
    found = {name: tuple(each.values()) for name, each in json.loads(done.stdout).items()}
    assert found["port"] == (9, "environment PORT")
    assert found["host"] == ("0.0.0.0", "environment DYNO")
