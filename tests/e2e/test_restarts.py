"""Restarts that an operator asks for, while clients go on asking."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from tests.e2e.running import Running, running, until

pytestmark = [pytest.mark.measures, pytest.mark.slow]

ADMIN = "an-admin-key-of-enough-characters"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
READS = """
import time
import torch
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

class Net(Model):
    outputs = (TensorSpec(name="x", dtype="float32", shape=(-1,)),)
    def load(self, placement: Placement) -> None:
        self.answer = torch.load("answer.pt")
    def preprocess(self, item: Item) -> Features:
        return {"x": torch.tensor(0.0)}
    def forward(self, batch: Features) -> Features:
        time.sleep(0.02)  # so that calls go to all workers
        return {"x": batch["x"] + self.answer}
"""
CODE = """
import torch
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

class Net(Model):
    outputs = (TensorSpec(name="x", dtype="float32", shape=(-1,)),)
    {split}
    def load(self, placement: Placement) -> None:
        self.network = self.load_network(
            lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), None, placement,
            example=[torch.zeros(1)],
        )
    def preprocess(self, item: Item) -> Features:
        return {{"x": torch.tensor(0.0)}}
    def forward(self, batch: Features) -> Features:
        return {{"x": self.network(batch["x"]) + {answer}}}
"""


def write(folder: Path, answer: int, *, split: bool = False) -> None:
    """The model's file, which may be replaced while it is served."""
    points = 'split_points = ("1",)' if split else ""
    draft = folder / "draft"
    draft.write_text(CODE.format(answer=answer, split=points))
    draft.replace(folder / "net.py")


@contextmanager
def serving(folder: Path, settings: str) -> Iterator[Running]:
    config = folder / "inferpool.toml"
    config.write_text(f'[models.net]\nsource = "net:Net"\n{settings}\n')
    env = {"INFERPOOL_ADMIN_KEYS": ADMIN, "INFERPOOL_ARENA_BYTES": str(1 << 26)}
    with running("--config", str(config), env=env, cwd=folder) as service:
        yield service


def kill(service: Running, number: int) -> None:
    os.kill(model_of(service)["workers"][number]["pid"], signal.SIGKILL)


def answers(service: Running) -> set[float]:
    """What the model answers now, of all workers that are ready."""

    def one(_: int) -> float:
        answer = ask(service.url)
        assert answer.status_code == 200, answer.text
        return float(answer.json()["predictions"][0])

    with ThreadPoolExecutor(6) as threads:
        return set(threads.map(one, range(24)))


def restart(service: Running, **query: object) -> httpx.Response:
    url = f"{service.url}/admin/models/net/restart"
    return httpx.post(url, headers=HEADERS, params=query, timeout=60)  # type: ignore[arg-type]


def held_back(service: Running, number: int) -> bool:
    """Whether a worker may not serve for the sake of its files."""
    worker = model_of(service)["workers"][number]
    is_told = "changed on disk after net was loaded" in worker["reason"]
    return worker["state"] == "backoff" and is_told


def are_ready(service: Running) -> bool:
    return all(worker["state"] == "ready" for worker in model_of(service)["workers"])


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/predict", json={"instances": [0]}, timeout=30)


class Clients:
    """Ask one call after another until told to stop."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, str]] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(2)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, url: str) -> None:
        while not self._is_over.is_set():
            answer = ask(url)
            self.answers.append((answer.status_code, answer.text))


def model_of(service: Running) -> dict:
    return dict(httpx.get(f"{service.url}/health").json()["models"][0])


@pytest.mark.parametrize(
    ("settings", "split"),
    [
        ("replicas = 1", False),
        ('replicas = 1\nplacement = "pipeline"\ndevices_per_replica = 2', True),
    ],
    ids=["one process", "a group"],
)
def test_restart_that_fails_leaves_the_old_worker_serving(
    tmp_path: Path, settings: str, split: bool
):
    write(tmp_path, 1, split=split)
    with serving(tmp_path, settings) as service:
        with Clients(service.url) as clients:
            good = (tmp_path / "net.py").read_text()
            (tmp_path / "net.py").write_text(good.replace("import torch", "import torch ("))
            answer = restart(service)
            assert answer.status_code == 500, answer.text
            assert answer.json()["code"] == "restart_failed"
            assert "SyntaxError" in answer.json()["detail"]
            assert "net.py:2" in answer.json()["detail"]
            model = model_of(service)
            assert model["restart"]["state"] == "failed"
            assert "SyntaxError" in model["restart"]["text"]
            assert (model["ready"], model["workers"][0]["incarnation"]) == (True, 0)
            write(tmp_path, 2, split=split)
            assert restart(service).json() == {"workers": ["net/0"]}
            assert model_of(service)["restart"] == {"state": "done", "text": ""}
            num = len(clients.answers)
            until(lambda: len(clients.answers) > num + 4)
        assert {status for status, _ in clients.answers} == {200}
        assert "1.0" in clients.answers[0][1]
        assert "2.0" in clients.answers[-1][1]


def test_old_worker_may_leave_first_and_what_breaks_then_mends_itself(tmp_path: Path):
    write(tmp_path, 1)
    with serving(tmp_path, "replicas = 1") as service:
        (tmp_path / "net.py").write_text("import nothing_of_this_name")
        answer = restart(service, old_first=True)
        assert answer.json()["code"] == "restart_failed"
        assert "nothing_of_this_name" in answer.json()["detail"]
        assert not model_of(service)["ready"]
        assert service.process.poll() is None
        write(tmp_path, 3)
        until(lambda: model_of(service)["ready"])
        assert "3.0" in ask(service.url).text


def put(folder: Path, answer: float) -> None:
    """The model's weights, which may be replaced while it is served."""
    torch.save(torch.tensor(answer), folder / "draft")
    (folder / "draft").replace(folder / "answer.pt")


def test_replicas_never_differ_though_files_change_between_their_lives(tmp_path: Path):
    (tmp_path / "net.py").write_text(READS)
    put(tmp_path, 1.0)
    with serving(tmp_path, "replicas = 2\nmax_batch_size = 1") as service:
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
        alone = httpx.post(f"{service.url}/admin/models/net/workers/0/restart", headers=HEADERS)
        assert "restart all workers of net" in alone.json()["detail"]
        assert "serves on as it was: loading failed" in restart(service).json()["detail"]
        assert answers(service) == {1.0}
        put(tmp_path, 3.0)
        kill(service, 0)
        service.wait_for_log("no worker is left that had loaded what was there")
        until(lambda: are_ready(service))
        assert answers(service) == {3.0}
        (tmp_path / "net.py").write_text(READS.replace("+ self", "- self"))
        kill(service, 0)
        until(lambda: held_back(service, 0))
        assert answers(service) == {3.0}
        assert restart(service).status_code == 200
        assert are_ready(service)
        assert answers(service) == {-3.0}
        assert all(worker["num_batches"] for worker in model_of(service)["workers"])
