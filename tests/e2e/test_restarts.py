"""Restarts that an operator asks for, while clients go on asking."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.e2e.running import Running, asking, running, until

pytestmark = [pytest.mark.measures, pytest.mark.slow]

ADMIN = "an-admin-key-of-enough-characters"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
CODE = """
import time
import torch
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

class Net(Model):
    outputs = (TensorSpec(name="x", dtype="float32", shape=(-1,)),)
    SPLIT
    def load(self, placement: Placement) -> None:
        self.network = self.load_network(
            lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), None, placement,
            example=[torch.zeros(1)],
        )
        self.answer = ANSWER
    def preprocess(self, item: Item) -> Features:
        return {"x": torch.tensor(0.0)}
    def forward(self, batch: Features) -> Features:
        time.sleep(0.02)  # so that calls go to all workers
        return {"x": self.network(batch["x"]) + self.answer}
"""


def write(folder: Path, answer: str, *, split: bool = False) -> None:
    """Replace the model's file, which may be in use."""
    text = CODE.replace("SPLIT", 'split_points = ("1",)' if split else "")
    (folder / "draft").write_text(text.replace("ANSWER", answer))
    (folder / "draft").replace(folder / "net.py")


def put(folder: Path, answer: float) -> None:
    """Replace the model's weights, which may be in use."""
    torch.save(torch.tensor(answer), folder / "draft")
    (folder / "draft").replace(folder / "answer.pt")


@contextlib.contextmanager
def serving(folder: Path, **model: object) -> Iterator[Running]:
    settings = {"arena_bytes": 1 << 26, "models": {"net": {"source": "net:Net", **model}}}
    env = {"INFERPOOL_ADMIN_KEYS": ADMIN}
    with running(settings=settings, env=env, cwd=folder) as service:
        yield service


def kill(service: Running, number: int) -> None:
    os.kill(service.workers()[number]["pid"], signal.SIGKILL)


def answers(service: Running) -> set[float]:
    """Return what all workers that are ready answer now."""
    with ThreadPoolExecutor(6) as threads:
        return set(threads.map(lambda _: service.predict(0)[0], range(24)))


def restart(service: Running, **query: object) -> httpx.Response:
    return service.post("/admin/models/net/restart", headers=HEADERS, params=query)


def held_back(service: Running, number: int) -> bool:
    """Return whether a worker may not serve because its files differ from the others'."""
    worker = service.workers()[number]
    has_reason = "changed on disk after net was loaded" in worker["reason"]
    return worker["state"] == "backoff" and has_reason


def are_ready(service: Running) -> bool:
    return all(worker["state"] == "ready" for worker in service.workers())


def test_restart_that_fails_leaves_the_old_group_of_ranks_serving(tmp_path: Path):
    write(tmp_path, "1", split=True)
    ranks = {"placement": "pipeline", "devices_per_replica": 2}
    with serving(tmp_path, replicas=1, **ranks) as service:
        with asking(lambda: service.ask(0)) as found:
            good = (tmp_path / "net.py").read_text()
            (tmp_path / "net.py").write_text(good.replace("import torch\n", "import torch (\n"))
            answer = restart(service)
            assert answer.status_code == 500, answer.text
            assert answer.json()["code"] == "restart_failed"
            assert "SyntaxError" in answer.json()["detail"]
            assert "net.py:3" in answer.json()["detail"]
            model = service.model()
            assert model["restart"]["state"] == "failed"
            assert "SyntaxError" in model["restart"]["text"]
            assert (model["ready"], model["workers"][0]["incarnation"]) == (True, 0)
            write(tmp_path, "2", split=True)
            assert restart(service).json() == {"workers": ["net/0"]}
            assert service.model()["restart"] == {"state": "done", "text": ""}
            num = len(found)
            until(lambda: len(found) > num + 4)
        assert {answer.status_code for answer in found} == {200}
        assert "1.0" in found[0].text
        assert "2.0" in found[-1].text


def test_old_worker_may_leave_first_and_recovers_from_what_breaks_then(tmp_path: Path):
    write(tmp_path, "1")
    with serving(tmp_path, replicas=1) as service:
        (tmp_path / "net.py").write_text("import nothing_of_this_name")
        answer = restart(service, old_first=True)
        assert answer.json()["code"] == "restart_failed"
        assert "nothing_of_this_name" in answer.json()["detail"]
        assert not service.model()["ready"]
        assert service.process.poll() is None
        write(tmp_path, "3")
        until(lambda: service.model()["ready"])
        assert service.predict(0) == [3.0]


def test_replicas_never_differ_though_files_change_between_their_starts(tmp_path: Path):
    write(tmp_path, 'torch.load("answer.pt")')
    put(tmp_path, 1.0)
    with serving(tmp_path, replicas=2, max_batch_size=1) as service:
        put(tmp_path, 2.0)
        kill(service, 0)
        until(lambda: held_back(service, 0))
        assert answers(service) == {1.0}
        put(tmp_path, 1.0)
        until(lambda: are_ready(service))
        (tmp_path / "answer.pt").write_bytes(b"broken")
        kill(service, 1)
        until(lambda: held_back(service, 1))
        assert answers(service) == {1.0}
        alone = service.post("/admin/models/net/workers/0/restart", headers=HEADERS)
        assert "restart all workers of net" in alone.json()["detail"]
        assert "serves on as it was: loading failed" in restart(service).json()["detail"]
        assert answers(service) == {1.0}
        put(tmp_path, 3.0)
        kill(service, 0)
        service.wait_for_log("no worker with the old ones is left")
        until(lambda: are_ready(service))
        assert answers(service) == {3.0}
        write(tmp_path, '-torch.load("answer.pt")')
        kill(service, 0)
        until(lambda: held_back(service, 0))
        assert answers(service) == {3.0}
        assert restart(service).status_code == 200
        assert are_ready(service)
        assert answers(service) == {-3.0}
        assert all(worker["num_batches"] for worker in service.workers())


def test_a_model_that_was_given_up_is_tried_again_by_a_signal(tmp_path: Path):
    write(tmp_path, "torch.load('answer.pt')")
    net = {"source": "net:Net", "replicas": 1, "max_restarts": 0}
    models = {"echo": {"source": "echo", "replicas": 1}, "net": net}
    settings = {"models": models, "default_model": "echo"}
    with running(settings=settings, cwd=tmp_path, ready=False) as service:
        service.wait_until_listening()

        def models_shown() -> dict[str, bool]:
            return {each["name"]: each["ready"] for each in service.get("/health").json()["models"]}

        until(lambda: sorted(each["state"] for each in service.workers()) == ["failed", "ready"])
        put(tmp_path, 2.0)
        service.signal(signal.SIGUSR2)
        until(lambda: models_shown() == {"echo": True, "net": True})
        assert service.post("/predict/net", json={"instances": [1]}).json()["predictions"] == [2.0]
        pids = service.worker_pids()
        family = service.family()
        for process in family:  # `systemctl kill` sends it to all processes
            if process.pid != service.process.pid:
                process.send_signal(signal.SIGUSR2)
        service.signal(signal.SIGUSR2)  # nothing is left to do
        service.wait_for_log("no model to try again")
        assert service.worker_pids() == pids
        assert all(process.is_running() for process in family)
        assert "zombie" not in {process.status() for process in family}
