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
HEAD_TIMEOUT_S = 60
LIMITED = ("sh", "-c", 'ulimit -n 128; exec "$0" -m service "$@"', sys.executable)


@contextlib.contextmanager
def connections(service: Running, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections, each of which has sent something."""
    address = (urlsplit(service.url).hostname, urlsplit(service.url).port)
    opened = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection(address, timeout=20))
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


def wait_until_answered(url: str) -> None:
    """Wait until a new client is, well before slow ones would have gone by themselves."""
    until = time.monotonic() + HEAD_TIMEOUT_S / 2
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health/live", timeout=5).status_code == 200:
                return
        assert time.monotonic() < until
        time.sleep(0.05)


def test_two_hundred_slow_clients_delay_nobody_and_are_closed():
    env = {"INFERPOOL_HEAD_TIMEOUT_S": "1", "INFERPOOL_BODY_GAP_S": "1"}
    body = b"content-type: application/octet-stream\r\ncontent-length: 9000\r\n\r\nabc"
    with running("echo", env=env) as service, httpx.Client(base_url=service.url) as client:
        for tries_left in reversed(range(3)):
            alone = sorted(ask(client) for _ in range(100))
            with (
                connections(service, 100, HEAD) as heads,
                connections(service, 100, HEAD + body) as bodies,
            ):
                among_slow = sorted(ask(client) for _ in range(100))
                for each in heads + bodies:
                    assert is_closed(each)
            ask(client)
            if among_slow[50] < 5 * alone[50] + 0.01:
                break
            assert tries_left, (alone[50], among_slow[50])  # others took the cores meanwhile


def test_more_connections_than_descriptors_neither_spin_nor_stop_the_service():
    env = {"INFERPOOL_HEAD_TIMEOUT_S": str(HEAD_TIMEOUT_S)}
    with running("echo", "--replicas", "1", env=env, command=LIMITED) as service:
        front_end = psutil.Process(service.process.pid)
        (worker,) = service.worker_pids()
        with connections(service, 300, HEAD):
            time_before = sum(front_end.cpu_times()[:2])
            began = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            service.wait_for_log("ended")
            service.wait_for_log("ready")
            wait_until_answered(service.url)
            time.sleep(max(0.0, began + 1 - time.monotonic()))
            spent = sum(front_end.cpu_times()[:2]) - time_before
            assert spent < 0.5 * (time.monotonic() - began)
            assert front_end.num_fds() <= 128
        wait_until_answered(service.url)
        assert service.worker_pids() != [worker]
        assert not [line for line in service.log if line["level"] in ("error", "critical")]
