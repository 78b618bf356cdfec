"""Jobs of real services, which are killed while they take and compute them."""

import base64
import contextlib
import hmac
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import FAULTY, Running, running, until
from tests.groups import with_mounts
from tests.ports import free_port
from tests.postgres import find_programs, postgres

JSONL = {"content-type": "application/jsonl"}
_PATIENCE_S = 600.0
_MOST_IN_FLIGHT = 512
"""Instances that a service may compute again after it was killed, and some more."""


class KilledService:
    """A service that is started again each time that it was killed."""

    def __init__(
        self, name: str, place: str, calls: Path, *, lives_s: float, fronts: int, forward_s: float
    ) -> None:
        self.port = free_port()
        self.num_kills = 0
        self._lives_s = lives_s
        self._is_over = threading.Event()
        self._arguments = ("--job-store", place, "--front-ends", str(fronts))
        options = {"forward_s": forward_s, "calls": str(calls)}
        self._model = {"source": FAULTY, "replicas": 2, "max_batch_size": 8, "options": options}
        self._seed = random.Random(name)
        self._thread = threading.Thread(target=self._live, name=name)
        self._now: Running | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def kill_worker(self) -> None:
        """Kill one of its workers, if it has one."""
        with contextlib.suppress(httpx.HTTPError, ProcessLookupError, KeyError, ValueError):
            service = self._now
            pids = service.worker_pids() if service is not None else []
            if pids:
                os.kill(self._seed.choice(pids), signal.SIGKILL)
                self.num_kills += 1

    @contextlib.contextmanager
    def alive(self) -> Iterator[Running]:
        """Run it once, without kills."""
        settings = {"models": {"m": self._model}}
        with running(*self._arguments, settings=settings, port=self.port, ready=False) as service:
            yield service

    def _live(self) -> None:
        for number in itertools.count():
            if self._is_over.is_set():
                return
            with self.alive() as service:
                try:
                    service.wait_until_listening()
                except AssertionError as error:  # one that it has forked may not have ended yet
                    if "Address already in use" in str(error):
                        continue
                    raise
                if number % 2:  # or a busy machine might compute nothing in any life
                    service.wait_until_started()
                self._now = service
                self._is_over.wait(self._lives_s * self._seed.uniform(0.7, 1.3))
                self._now = None
                service.signal(signal.SIGKILL)
                service.wait()
                self.num_kills += 1


def submit(client: httpx.Client, urls: Sequence[str], id: str, numbers: Sequence[int]) -> None:
    """Make a job, and ask again until a service has said that it keeps it."""
    lines = "".join(json.dumps({"n": number}) + "\n" for number in numbers)
    deadline = time.monotonic() + _PATIENCE_S
    for url in itertools.cycle(urls):
        assert time.monotonic() < deadline
        with contextlib.suppress(httpx.TransportError):
            made = client.put(f"{url}/jobs/{id}", content=lines, headers=JSONL)
            if made.status_code == 202:
                return
            assert made.status_code in (404, 503), made.text  # the model may not be there yet
        time.sleep(0.05)


def num_done(client: httpx.Client, urls: Sequence[str], ids: Sequence[str]) -> int:
    """Return how many jobs are over, as the first service says that answers."""
    for url in urls:
        with contextlib.suppress(httpx.HTTPError):
            listed = client.get(f"{url}/jobs", params={"limit": 1000}).raise_for_status().json()
            over = {job["id"] for job in listed["jobs"] if job["ended_at"] is not None}
            return len(over & set(ids))
    return 0


def check_all(service: Running, ids: Sequence[str], numbers: Sequence[Sequence[int]]) -> None:
    """Check that each instance is in its job's result exactly once, and right."""
    for id, wanted in zip(ids, numbers, strict=True):
        job = service.get(f"/jobs/{id}", params={"wait": 60}).json()
        assert (job["state"], job["num_failed"]) == ("succeeded", 0), job
        result = service.get(f"/jobs/{id}/result", headers={"accept": "application/jsonl"})
        lines = [json.loads(line) for line in result.text.splitlines()]
        assert [line["index"] for line in lines] == list(range(len(wanted)))
        assert [line["prediction"]["twice"] for line in lines] == [2 * n for n in wanted]


def kill_and_check(
    place: str,
    tmp_path: Path,
    *,
    num_services: int,
    num: int,
    fronts: int,
    lives_s: float,
    forward_s: float,
) -> tuple[int, Counter[int]]:
    """Compute jobs while services and their workers are killed, and check all results.

    Returns:
        The number of kills, and how often each instance was computed.
    """
    calls = tmp_path / "calls"
    services = [
        KilledService(
            f"service {i}", place, calls, lives_s=lives_s, fronts=fronts, forward_s=forward_s
        )
        for i in range(num_services)
    ]
    per_job = num // 10
    numbers = [range(i * per_job + 1, (i + 1) * per_job + 1) for i in range(10)]
    ids = [f"job-{i}" for i in range(10)]
    urls = [service.url for service in services]
    for service in services:
        service.start()
    try:
        with httpx.Client(timeout=60) as client:
            for id, each in zip(ids, numbers, strict=True):
                submit(client, urls, id, each)
            deadline = time.monotonic() + _PATIENCE_S
            while num_done(client, urls, ids) < len(ids):
                assert time.monotonic() < deadline
                time.sleep(2)
                for service in services:
                    service.kill_worker()
    finally:
        for service in services:
            service.stop()
    with services[0].alive() as last:
        last.wait_until_ready()
        check_all(last, ids, numbers)
    computed = Counter(map(int, calls.read_text().split()))
    del computed[0]  # workers warm up with it
    assert set(computed) == set(range(1, num + 1))
    num_kills = sum(service.num_kills for service in services)
    assert sum(computed.values()) <= num + num_kills * _MOST_IN_FLIGHT
    assert max(computed.values()) <= 1 + num_kills
    return num_kills, computed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_job_is_lost_while_the_service_is_killed(tmp_path: Path) -> None:
    place = str(tmp_path / "jobs")
    kill_and_check(place, tmp_path, num_services=1, num=5000, fronts=2, lives_s=5, forward_s=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_programs() is None, reason="PostgreSQL is not installed")
def test_no_job_is_lost_by_two_services_that_share_a_store(tmp_path: Path) -> None:
    with postgres() as url:
        kill_and_check(url, tmp_path, num_services=2, num=5000, fronts=1, lives_s=5, forward_s=0.05)


def test_a_job_survives_a_restart_and_keeps_its_place(tmp_path: Path) -> None:
    settings = {"models": {"m": {"source": FAULTY, "replicas": 1}}}
    place = ("--job-store", str(tmp_path / "jobs"))
    with running(*place, settings=settings, ready=False) as service:
        service.wait_until_ready()
        made = service.post("/jobs", content='{"n": 1}\n' * 3, headers=JSONL)
        assert made.status_code == 202
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    with running(*place, settings=settings) as service:
        job = service.get(made.headers["location"], params={"wait": 60}).json()
        assert (job["state"], job["num_done"]) == ("succeeded", 3)
        until(lambda: 'inferpool_jobs{state="queued"} 0' in service.metrics())


def test_the_job_store_lies_in_the_users_state_folder(tmp_path: Path) -> None:
    settings = tmp_path / "a" / "inferpool.toml"
    settings.parent.mkdir()
    settings.write_text(f'[models.m]\nsource = "{FAULTY}"\nreplicas = 1\n')
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with running("--config", str(settings), env=env) as service:
        assert service.post("/jobs", content='{"n": 1}\n', headers=JSONL).status_code == 202
        (place,) = (tmp_path / "state" / "inferpool" / "jobs").iterdir()
        assert place.stat().st_mode & 0o777 == 0o700
        assert (place / "jobs.sqlite3").stat().st_mode & 0o777 == 0o600
        assert not list(settings.parent.glob("*jobs*"))


def test_a_service_without_a_place_for_jobs_says_so(tmp_path: Path) -> None:
    settings = {"models": {"m": {"source": FAULTY, "replicas": 1}}}
    with running("--job-store", "none", settings=settings) as service:
        assert service.post("/jobs", json={"instances": [{"n": 1}]}).status_code == 404
        answer = service.ask({"n": 1}, headers={"prefer": "respond-async"})
        assert (answer.status_code, answer.json()["predictions"][0]["twice"]) == (200, 2)


@pytest.mark.slow
def test_a_full_disk_refuses_jobs_and_loses_none(tmp_path: Path) -> None:
    options = {"forward_s": 0.1}
    settings = {"models": {"m": {"source": FAULTY, "replicas": 1, "options": options}}}
    command = [*with_mounts("-t tmpfs -o size=40m none /mnt"), sys.executable, "-m", "inferpool"]
    lines = "".join(json.dumps({"n": n}) + "\n" for n in range(1, 2001))
    with running("--job-store", "/mnt/jobs", settings=settings, command=command) as service:
        disk = Path(f"/proc/{service.process.pid}/root/mnt")
        made = service.post("/jobs", content=lines, headers=JSONL)
        assert made.status_code == 202
        with contextlib.suppress(OSError), open(disk / "ballast", "wb") as ballast:
            while True:
                ballast.write(bytes(2**16))
        refused = service.post("/jobs", content=lines, headers=JSONL)
        assert (refused.status_code, refused.json()["code"]) == (507, "store_full")
        assert "delete jobs that are over" in refused.json()["detail"]
        service.wait_for_log(" wait")  # for room: their results, or they themselves
        assert service.predict({"n": 1})[0]["twice"] == 2  # calls need no disk
        (disk / "ballast").unlink()
        location = made.headers["location"]
        until(lambda: service.get(location, params={"wait": 60}).json()["state"] == "succeeded")
        answers = service.get(f"{location}/result").json()["predictions"]
        assert [answer["twice"] for answer in answers] == [2 * n for n in range(1, 2001)]
        assert service.post("/jobs", content=lines, headers=JSONL).status_code == 202


def test_a_webhook_is_told_of_the_end_of_a_job(tmp_path: Path) -> None:
    told: list[tuple[Mapping[str, str], bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append((dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    key = b"a key of more than 24 bytes"
    secret = tmp_path / "secret"
    secret.write_text(f"whsec_{base64.b64encode(key).decode()}\n")
    settings = {
        "webhook_hosts": ["127.0.0.1"],
        "webhook_secret_file": str(secret),
        "models": {"m": {"source": FAULTY, "replicas": 1}},
    }
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server,
        running("--job-store", str(tmp_path / "jobs"), settings=settings) as service,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/done"
        made = service.post("/jobs", params={"webhook": url}, content='{"n": 1}\n', headers=JSONL)
        assert made.status_code == 202, made.text
        until(lambda: told)
        server.shutdown()
    ((headers, body),) = told
    event = json.loads(body)
    assert (event["type"], event["specversion"]) == ("inferpool.job.succeeded", "1.0")
    assert event["data"]["id"] == made.json()["id"]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(key, signed, "sha256").digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
