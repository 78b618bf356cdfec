"""Models that are not ready, and workers that count as degraded, for what their example shows."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.e2e.running import running, until
from tests.e2e.swapping import ADMIN, KEYS

MODELS = """
import pathlib
import time
import torch
from inferpool import Model, TensorSpec

class Scaled(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 2))]
    example = [1.0, 2.0]

    def load(self, placement):
        self.scale = float(pathlib.Path("scale.txt").read_text())

    def forward(self, batch):
        y = batch["x"] * self.scale
        if not pathlib.Path("ill").exists():
            return {"y": y}
        time.sleep(1.5)  # it is degraded while it computes its sample again
        return {"y": y * torch.nan}

class OfList(Scaled):
    def forward(self, batch):
        return [batch["x"]]

class Random(Scaled):
    repeatable = False

    def forward(self, batch):
        return {"y": torch.rand(batch["x"].shape)}
"""
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN}"}


def test_model_that_cannot_answer_its_example_is_not_ready(tmp_path: Path):
    (tmp_path / "own.py").write_text(MODELS)
    (tmp_path / "scale.txt").write_text("2.0")
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    torch.export.save(torch.export.export(network, (torch.rand(1, 2),)), tmp_path / "trained.pt2")
    models = {"list": "own:OfList", "trained": "trained.pt2", "random": "own:Random"}
    told = {
        "list": "OfList fails on its own example beside itself",
        "trained": "trained.pt2 was exported in training mode: dropout (1)",
    }
    settings = {"models": {name: {"source": source} for name, source in models.items()}}
    with running("--replicas", "2", settings=settings, cwd=tmp_path, ready=False) as service:
        service.wait_until_listening()

        def of(name: str) -> Any:
            health = service.get("/health").json()["models"]
            return next(each for each in health if each["name"] == name)

        for name, text in told.items():
            until(lambda name=name: "failed" in of(name)["reason"])
            found = of(name)
            assert not found["ready"]
            assert all(text in worker["reason"] for worker in found["workers"]), found
            assert service.post(f"/predict/{name}", json={"instances": [[1, 2]]}).status_code == 503
        until(lambda: of("random")["ready"])
        assert of("random")["check"] == {
            "state": "passed",
            "warnings": [],
            "not_checked": [],
            "declared": ["repeatable = False"],
        }


def test_service_of_a_refused_model_alone_is_not_ready(tmp_path: Path):
    (tmp_path / "own.py").write_text(MODELS)
    (tmp_path / "scale.txt").write_text("nan")
    settings = {"models": {"m": {"source": "own:Scaled", "replicas": 1}}}
    with running(settings=settings, cwd=tmp_path, ready=False) as service:
        service.wait_until_listening()
        until(lambda: "failed" in service.model()["reason"])
        answer = service.get("/health/ready")
        assert answer.status_code == 503
        assert "gives NaN or an infinity in 'y' for its own example" in answer.json()["detail"]


def test_weights_that_give_nan_never_replace_good_ones_and_a_canary_of_nan_degrades(tmp_path: Path):
    (tmp_path / "own.py").write_text(MODELS)
    (tmp_path / "scale.txt").write_text("2.0")
    settings = {"models": {"m": {"source": "own:Scaled", "replicas": 2}}}
    with running("--front-ends", "1", settings=settings, env=KEYS, cwd=tmp_path) as service:
        (tmp_path / "scale.txt").write_text("nan")
        restarted = service.post("/admin/models/m/restart", headers=ADMIN_HEADERS)
        assert restarted.json()["code"] == "restart_failed", restarted.text
        assert "gives NaN or an infinity in 'y' for its own example" in restarted.json()["detail"]
        assert service.predict([1, 2]) == [[2.0, 4.0]]
        (tmp_path / "scale.txt").write_text("2.0")
        assert service.get("/health").json()["status"] == "ready"
        for _ in range(3):  # inputs of a client alone say nothing about the worker
            assert service.ask([3e38, 1.0]).json()["code"] == "non_finite_output"
        assert service.get("/health").json()["status"] == "ready"
        (tmp_path / "ill").touch()

        def is_degraded() -> bool:
            health = service.get("/health").json()
            workers = health["models"][0]["workers"]
            reasons = [each["reason"] for each in workers if each["state"] == "degraded"]
            found = [reason for reason in reasons if "failed on a sample of its own" in reason]
            return health["status"] == "degraded" and bool(found)

        until(is_degraded)
