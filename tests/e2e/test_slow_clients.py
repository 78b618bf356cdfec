"""Clients that cost a server more than themselves: slow ones, and too many. Real sockets."""

import contextlib
import io
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy
import psutil
import pytest

from tests.certificates import make_certificate
from tests.e2e.running import Running, running, status_of, until

pytestmark = [pytest.mark.measures, pytest.mark.slow]

HEAD = b"POST /predict HTTP/1.1\r\nhost: h\r\n"
BYTES = {"content-type": "application/octet-stream"}
MIB = 1 << 20
HEAD_TIMEOUT_S = 60
LIMITED = ("sh", "-c", 'ulimit -n 128; exec "$0" -m inferpool "$@"', sys.executable)


@contextlib.contextmanager
def connections(
    service: Running, count: int, data: bytes, rcvbuf_bytes: int | None = None
) -> Iterator[list[socket.socket]]:
    """Open so many connections, and send something over each."""
    opened = []
    try:
        for _ in range(count):
            opened.append(socket.socket())
            opened[-1].settimeout(20)
            if rcvbuf_bytes is not None:
                opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf_bytes)
            opened[-1].connect(service.address)
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


def wait_until_answered(service: Running) -> None:
    """Wait until a new client is answered, well before slow ones would have left by themselves."""

    until(lambda: status_of(f"{service.url}/health/live", 5) == 200, HEAD_TIMEOUT_S / 2)


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


def test_what_all_clients_make_the_service_keep_is_bounded() -> None:
    env = {
        "INFERPOOL_MAX_BODY_BYTES": str(4 * MIB),
        "INFERPOOL_MAX_UNFINISHED_BYTES": str(16 * MIB),
        "INFERPOOL_MAX_UNREAD_BYTES": str(20 * MIB),
    }
    npy = io.BytesIO()
    numpy.save(npy, numpy.zeros((1, 4 * MIB - 1000), dtype=numpy.uint8))
    accept = b"accept: application/octet-stream\r\ncontent-type: application/x-npy\r\n"
    length = b"content-length: %d\r\n\r\n" % len(npy.getvalue())
    half = HEAD + length + bytes(3 * MIB)
    whole = HEAD + accept + length + npy.getvalue()
    flags = ("--replicas", "1", "--front-ends", "2")
    with running("echo", *flags, env=env) as service, httpx.Client(base_url=service.url) as client:
        assert service.metric("max_unfinished_bytes") == 16 * MIB
        assert service.metric("max_unread_bytes") == 20 * MIB
        with connections(service, 12, half):
            until(lambda: service.metric("unfinished_refused_total") >= 6)
            assert 3 * MIB <= service.metric("unfinished_bytes") <= 16 * MIB
            ask(client)
        until(lambda: not service.metric("unfinished_bytes"))
        with connections(service, 24, whole, rcvbuf_bytes=4096):  # the kernel takes little
            until(lambda: service.metric("readers_cut_total"))
            assert service.metric("unread_bytes") <= 20 * MIB
            ask(client)
        until(lambda: not service.metric("unread_bytes"))


def test_a_client_that_reads_nothing_costs_others_no_answer_behind_two_front_ends() -> None:
    most = 64 * MIB
    env = {"INFERPOOL_MAX_UNREAD_BYTES": str(most), "INFERPOOL_WRITE_TIMEOUT_S": "600"}
    npy = io.BytesIO()
    numpy.save(npy, numpy.zeros((1, 4 * MIB), dtype=numpy.uint8))
    length = b"content-length: %d\r\n\r\n" % len(npy.getvalue())
    accept = b"accept: application/octet-stream\r\ncontent-type: application/x-npy\r\n"
    whole = HEAD + accept + length + npy.getvalue()
    highest = 0.0
    with running("echo", "--replicas", "1", "--front-ends", "2", env=env) as service:

        def unread() -> float:
            nonlocal highest
            num_bytes = service.metric("unread_bytes")
            highest = max(highest, num_bytes)
            return num_bytes

        assert service.metric("max_unread_bytes") == most
        with connections(service, 40, whole, rcvbuf_bytes=4096):
            until(lambda: service.metric("readers_cut_total") >= 20)
            until(lambda: unread() <= 0.75 * most)
            # For both front ends, from another address, and read late.
            with contextlib.ExitStack() as stack:
                others = [stack.enter_context(slow_reader(service, whole)) for _ in range(4)]
                until(lambda: unread() and all(has_answer(each) for each in others))
                with connections(service, 20, whole, rcvbuf_bytes=4096):
                    until(lambda: service.metric("readers_cut_total") >= 40)
                    unread()
                    for each in others:
                        assert len(read_answer(each)) == 4 * MIB
                    assert unread() > most // 4
        until(lambda: not unread())
        assert highest <= most


def slow_reader(service: Running, data: bytes) -> socket.socket:
    """Ask from another address, and read nothing yet."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.bind(("127.0.0.2", 0))
    client.connect(service.address)
    client.sendall(data)
    return client


def has_answer(client: socket.socket) -> bool:
    return client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"


def read_answer(client: socket.socket) -> bytes:
    """Return the body of the answer, or as much of it as comes."""
    with client.makefile("rb") as file:
        assert file.readline().startswith(b"HTTP/1.1 200")
        head = b"".join(iter(file.readline, b"\r\n")).lower()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return file.read(int(length))


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
            wait_until_answered(service)
            time.sleep(max(0.0, began + 1 - time.monotonic()))
            spent = sum(front_end.cpu_times()[:2]) - time_before
            assert spent < 0.5 * (time.monotonic() - began)
            assert front_end.num_fds() <= 128
        wait_until_answered(service)
        assert service.worker_pids() != [worker]
        assert not [line for line in service.log if line["level"] in ("error", "critical")]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_connections_that_never_begin_tls_keep_nobody_out(front_ends: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    flags = ("--replicas", "1", "--front-ends", front_ends)
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    env = {"INFERPOOL_HEAD_TIMEOUT_S": str(HEAD_TIMEOUT_S)}
    with running("echo", *flags, *tls, env=env, command=LIMITED) as service:
        family = service.family()
        before = sum(each.num_fds() for each in family)
        with connections(service, 300, b""):
            wait_until_answered(service)
            assert max(each.num_fds() for each in family) <= 128
        until(lambda: sum(each.num_fds() for each in family) <= before + 2)
        wait_until_answered(service)
        assert not [line for line in service.log if line["level"] in ("error", "critical")]
