"""Services as they are deployed: two on a host behind a proxy, restarted in turn, and killed."""

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from inferpool.models.speed.verdicts import checked_content
from tests.e2e.load import Tally, ask_until
from tests.e2e.nginx import needs_nginx, nginx
from tests.e2e.running import ROOT, Running, faulty, left_over, running, until
from tests.ports import free_port

pytestmark = [pytest.mark.measures, pytest.mark.slow]

DELAY_S = 3
"""Longer than the two seconds for which nginx sends nothing to a service that has come back."""
NGINX_CONFIG = ROOT / "docker" / "nginx.conf"
ANSWERED = 'requests_total{code="200",model="m"}'


class Pair:
    """Two services of the same settings on one host, with all that they share, behind a proxy."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self._settings = {
            "shutdown_delay_s": DELAY_S,
            "cache_dir": self.cache,
            "speed_search": False,
            "arena_bytes": 64 << 20,
            "default_model": "m",
            **faulty(options={"forward_s": 0.04}),
        }
        small = {"source": "tests.small_classifier:SmallClassifier", "replicas": 1}
        self._settings["models"] |= {"small": small}
        *self.ports, self.proxy_port = (free_port() for _ in range(3))
        self._stacks = [ExitStack(), ExitStack()]
        self.services = [self._begin(number) for number in range(2)]
        for service in self.services:
            service.wait_until_ready()

    def _begin(self, number: int) -> Running:
        flags = ("--speed", "auto", "--front-ends", str(number + 1))
        port = self.ports[number]
        service = running(*flags, settings=self._settings, port=port, ready=False)
        return self._stacks[number].enter_context(service)

    def start(self, number: int) -> None:
        """Start a service again that has ended."""
        self._stacks[number].close()
        self.services[number] = self._begin(number)
        self.services[number].wait_until_ready()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@contextmanager
def proxy(folder: Path, port: int, upstream_ports: Sequence[int]) -> Iterator[str]:
    """Run nginx with other ports than the file has; yields its URL."""
    text = NGINX_CONFIG.read_text()
    changes = {"listen 8000;": f"listen 127.0.0.1:{port};"}
    for number, upstream_port in enumerate(upstream_ports, 8001):
        changes[f"127.0.0.1:{number}"] = f"127.0.0.1:{upstream_port}"
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with nginx(folder, text, f"http://127.0.0.1:{port}") as url:
        yield url


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module")
def url(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with proxy(tmp_path_factory.mktemp("nginx"), pair.proxy_port, pair.ports) as url:
        yield url


@contextmanager
def under_load(url: str) -> Iterator[Tally]:
    """Have clients ask all the time; at the end each call must have had its right answer."""
    is_over = threading.Event()
    tallies: list[Tally] = []

    def note(tally: Tally) -> bool:
        tallies[:] = [tally]
        return is_over.is_set()

    thread = threading.Thread(target=lambda: asyncio.run(ask_until(url, note, num_clients=6)))
    thread.start()
    try:
        until(lambda: tallies and tallies[0].right > 20)
        yield tallies[0]
        reached = tallies[0].right + 50
        until(lambda: tallies[0].right > reached or not thread.is_alive())
    finally:
        is_over.set()
        thread.join(60)
    (tally,) = tallies
    assert (tally.wrong, tally.unanswered, tally.unconnected) == ([], [], 0)


@needs_nginx
def test_nginx_accepts_the_example_of_a_proxy(tmp_path: Path):
    own = f"pid {tmp_path}/pid; error_log stderr;"
    done = subprocess.run(
        ["nginx", "-t", "-q", "-p", str(tmp_path), "-c", str(NGINX_CONFIG), "-g", own],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_services_on_one_host_share_verdicts_on_speed_and_nothing_else(pair: Pair):
    found = [each.get("/health").json() for each in pair.services]
    presets = {m["workers"][0]["speed"] for each in found for m in each["models"][1:]}
    (verdict,) = [p for p in pair.cache.glob("*.json") if "-decode" not in p.name]
    assert presets == {json.loads(checked_content(verdict.read_bytes()))["preset"]}
    assert [len(each["fronts"]) for each in found] == [1, 2]
    families = [{process.pid for process in each.family()} for each in pair.services]
    assert not families[0] & families[1]


@needs_nginx
def test_no_call_fails_while_services_are_restarted_in_turn(pair: Pair, url: str):
    with under_load(url):
        for number, service in enumerate(pair.services):
            family = service.family()
            service.signal(signal.SIGTERM)
            until(lambda service=service: service.get("/health/ready").status_code == 503)
            service.predict({"n": 4})  # still served, if asked directly
            assert service.wait() == 0
            assert left_over(family) == []
            pair.start(number)


@needs_nginx
def test_no_call_fails_when_a_service_is_killed_and_the_other_is_left_alone(pair: Pair, url: str):
    """Run as the last test of this pair, since it ends one of the two."""
    victim, other = pair.services
    pids, num_lines = other.worker_pids(), len(other.log)
    answered = other.metric(ANSWERED)
    with under_load(url):  # which nginx leaves alone for a while after its restart
        until(lambda: other.metric(ANSWERED) > answered)
        family = victim.family()
        victim.signal(signal.SIGKILL)
        assert left_over(family) == []
    assert other.worker_pids() == pids
    assert [line for line in other.log[num_lines:] if line["level"] != "info"] == []
