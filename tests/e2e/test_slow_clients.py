"""Clients that cost a server more than themselves: slow ones, and too many. Real sockets."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil

from tests.e2e.running import Running, running

HEAD = b"POST /predict HTTP/1.1\r\nhost: h\r\n"
BYTES = {"content-type": "application/octet-stream"}
LIMITED = ("sh", "-c", 'ulimit -n 128; exec "$0" -m service "$@"', sys.executable)


@contextlib.contextmanager
def connections(service: Running, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections, each of which has sent something."""
    address = (urlsplit(service.url).hostname, urlsplit(service.url).port)
    opened = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection(address, timeout=10))
            with contextlib.suppress(ConnectionError):
                opened[-1].sendall(data)
        yield opened
    finally:
        for each in opened:
            each.close()


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def ask(client: httpx.Client) -> float:
    """Ask for a prediction, and return the seconds that it took."""
    began = time.perf_counter()
    answer = client.post("/predict", content=b"x", headers=BYTES)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


def until_answered(url: str, timeout_s: float = 10.0) -> float:
    """How long it takes until a new client is answered."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health/live", timeout=5).status_code == 200:
                return time.monotonic() - began
        assert time.monotonic() - began < timeout_s
        time.sleep(0.05)


def test_two_hundred_slow_clients_delay_nobody_and_are_closed():
    env = {"INFERPOOL_HEAD_TIMEOUT_S": "1", "INFERPOOL_BODY_GAP_S": "1"}
    with running("echo", env=env) as service, httpx.Client(base_url=service.url) as client:
        alone = sorted(ask(client) for _ in range(100))
        body = b"content-type: application/octet-stream\r\ncontent-length: 9000\r\n\r\nabc"
        with (
            connections(service, 100, HEAD) as heads,
            connections(service, 100, HEAD + body) as bodies,
        ):
            among_slow = sorted(ask(client) for _ in range(100))
            assert among_slow[50] < 5 * alone[50] + 0.01
            for each in heads + bodies:
                assert is_closed(each)
        assert ask(client) < 5


def test_more_connections_than_descriptors_neither_spin_nor_stop_the_service():
    with running("echo", "--replicas", "1", command=LIMITED) as service:
        front_end = psutil.Process(service.process.pid)
        (worker,) = service.worker_pids()
        with connections(service, 300, HEAD):
            time_before = sum(front_end.cpu_times()[:2])
            began = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            service.wait_for_log("ended")
            service.wait_for_log("ready")
            assert until_answered(service.url) < 5
            time.sleep(max(0.0, began + 1 - time.monotonic()))
            spent = sum(front_end.cpu_times()[:2]) - time_before
            assert spent < 0.5 * (time.monotonic() - began)
            assert front_end.num_fds() <= 128
        assert until_answered(service.url) < 5
        assert service.worker_pids() != [worker]
        assert not [line for line in service.log if line["level"] in ("error", "critical")]
