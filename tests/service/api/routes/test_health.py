from dataclasses import asdict

import pytest
from fastapi import FastAPI

from inferpool.service.api.route_errors import install_error_handlers
from inferpool.service.api.routes.health import (
    DecoderHealth,
    HealthReport,
    HostStatus,
    InputDescription,
    LastEnding,
    ModelHealth,
    RankHealth,
    SplitHealth,
    TriedSpeedHealth,
    WorkerHealth,
    health_router,
)
from tests.service.api.fakes import call

WORKER = WorkerHealth(
    name="a/0",
    state="ready",
    device="cpu",
    incarnation=2,
    pid=123,
    num_batches=7,
    last_beat_age_s=0.5,
    last_answer_age_s=2.5,
    rss_bytes=1000,
    restarts=1,
    placement="pipeline",
    ranks=[
        RankHealth(
            rank=0,
            pid=123,
            device="cuda:GPU-1",
            device_name="NVIDIA H100",
            rss_bytes=600,
            part_bytes=400,
            part="layer1",
            last_beat_age_s=0.5,
        )
    ],
    decoders=[DecoderHealth(number=0, pid=124, rss_bytes=9, num_decoded=5, restarts=1)],
    split=SplitHealth(cuts=["layer2"], note="by bytes"),
    speed="folded",
    decode="exact",
    speed_gain=1.5,
    speed_deviation=1e-06,
    speed_tried=[TriedSpeedHealth(preset="bf16", gain=None, deviation=0.2, lost="refused")],
    last_ending=LastEnding(cause="memory", reason="SIGKILL, likely out of memory", age_s=60.0),
)
INPUT = InputDescription(name="x", dtype="float32", shape=(-1, 3))
READY = ModelHealth(
    name="a",
    ready=True,
    queue_depth=3,
    inputs=[INPUT],
    example="How do I get there?",
    workers=[WORKER],
)
LOADING = ModelHealth(name="b", ready=False, reason="loading weights")


class FixedSource:
    def __init__(self, status: HostStatus, *models: ModelHealth) -> None:
        self.status, self.models = status, models

    def report(self) -> HealthReport:
        return HealthReport(
            status=self.status,
            ready=self.status == "ready",
            draining=self.status == "draining",
            models=self.models,
        )


def make_app(status: HostStatus, *models: ModelHealth) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(health_router(FixedSource(status, *models).report))
    return app


def test_health_shows_the_workers_one_by_one() -> None:
    response = call(make_app("ready", READY), "GET", "/health")
    assert response.status_code == 200
    document = response.json()
    assert (document["status"], document["ready"], document["draining"]) == ("ready", True, False)
    (model,) = document["models"]
    assert (model["name"], model["ready"], model["queue_depth"]) == ("a", True, 3)
    assert model["example"] == "How do I get there?"
    assert model["inputs"] == [{"name": "x", "dtype": "float32", "shape": [-1, 3]}]
    assert model["workers"] == [asdict(WORKER)]


def test_live_is_200_whatever_the_models_do_and_ready_when_the_host_is() -> None:
    assert call(make_app("unavailable", LOADING), "GET", "/health/live").status_code == 200
    response = call(make_app("ready", READY), "GET", "/health/ready")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("status", "models", "detail"),
    [
        ("starting", [READY, LOADING], "b: loading weights"),
        ("draining", [READY], "draining"),
    ],
)
def test_unready_host_says_why(status: HostStatus, models: list[ModelHealth], detail: str) -> None:
    response = call(make_app(status, *models), "GET", "/health/ready")
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "1"
    assert response.json()["detail"] == detail
