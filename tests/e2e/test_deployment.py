"""Services as they are deployed: two on a host behind a proxy, restarted in turn, and killed."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from inferpool.models.speed.sealed import unsealed
from tests.e2e.load import Tally, ask_until
from tests.e2e.proxy import CONFIG, needs_nginx, proxy
from tests.e2e.running import Running, left_over, running, until

pytestmark = [pytest.mark.measures, pytest.mark.slow]

DELAY_S = 3
"""Longer than nginx leaves a service alone that has just come back: two seconds, since it counts
them whole."""


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        return [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(num)
        ]


def ready(service: Running) -> int:
    return httpx.get(f"{service.url}/health/ready").status_code


def num_answered(service: Running) -> float:
    text = httpx.get(f"{service.url}/metrics").text
    return sum(map(float, re.findall(r'requests_total\{code="200",model="m"\} (\S+)', text)))


class Pair:
    """Two services of the same settings on one host, with all that they share, behind a proxy."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        config = folder / "inferpool.toml"
        config.write_text(
            f"""
            shutdown_delay_s = {DELAY_S}
            cache_dir = "{self.cache}"
            speed_search = false
            arena_bytes = {64 << 20}
            default_model = "m"
            [models.m]
            source = "tests.fault_model:FaultModel"
            replicas = 1
            options = {{ forward_s = 0.04 }}
            [models.small]
            source = "tests.small_classifier:SmallClassifier"
            replicas = 1
            """
        )
        self._arguments = ("--config", str(config), "--speed", "auto")
        *self.ports, self.proxy_port = free_ports(3)
        self._stacks = [ExitStack(), ExitStack()]
        self.services = [self._begin(number) for number in range(2)]
        for service in self.services:
            service.wait_until_ready()

    def _begin(self, number: int) -> Running:
        fronts = ("--front-ends", str(number + 1))
        service = running(*self._arguments, *fronts, port=self.ports[number], ready=False)
        return self._stacks[number].enter_context(service)

    def start(self, number: int) -> None:
        """Start one again that has ended."""
        self._stacks[number].close()
        self.services[number] = self._begin(number)
        self.services[number].wait_until_ready()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


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
    """Have clients ask all the time; afterwards none may have had anything but its answer."""
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
def test_the_example_of_a_proxy_is_one_that_nginx_accepts(tmp_path: Path):
    own = f"pid {tmp_path}/pid; error_log stderr;"
    done = subprocess.run(
        ["nginx", "-t", "-q", "-p", str(tmp_path), "-c", str(CONFIG), "-g", own],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_services_on_one_host_share_what_they_know_and_nothing_else(pair: Pair):
    found = [httpx.get(f"{each.url}/health").json() for each in pair.services]
    presets = {m["workers"][0]["speed"] for each in found for m in each["models"][1:]}
    (verdict,) = [p for p in pair.cache.glob("*.json") if "-decode" not in p.name]
    assert presets == {json.loads(unsealed(verdict.read_bytes()))["preset"]}
    assert [len(each["fronts"]) for each in found] == [1, 2]
    families = [{process.pid for process in each.family()} for each in pair.services]
    assert not families[0] & families[1]


@needs_nginx
def test_no_call_fails_while_services_are_restarted_in_turn(pair: Pair, url: str):
    with under_load(url):
        for number, service in enumerate(pair.services):
            family = service.family()
            service.signal(signal.SIGTERM)
            until(lambda service=service: ready(service) == 503)
            body = {"instances": [{"n": 4}]}  # asked directly: it goes on with its readiness red
            assert httpx.post(f"{service.url}/predict", json=body).status_code == 200
            assert service.wait() == 0
            assert left_over(family) == []
            pair.start(number)


@needs_nginx
def test_no_call_fails_when_a_service_is_killed_and_the_other_is_left_alone(pair: Pair, url: str):
    """The last of those with this pair, since it ends one."""
    victim, other = pair.services
    pids, num_lines = other.worker_pids(), len(other.log)
    answered = num_answered(other)
    with under_load(url):  # which nginx leaves alone for a while after its restart
        until(lambda: num_answered(other) > answered)
        family = victim.family()
        victim.signal(signal.SIGKILL)
        assert left_over(family) == []
    assert other.worker_pids() == pids
    assert [line for line in other.log[num_lines:] if line["level"] != "info"] == []
