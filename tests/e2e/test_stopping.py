"""SIGTERM loses no call of a connected client, and cuts no answer off too soon."""

import json
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence

import psutil
import pytest

from tests.e2e.running import Running, running, until

pytestmark = [pytest.mark.measures, pytest.mark.slow]

HEAD = b"POST /predict HTTP/1.1\r\nhost: h\r\n"
CALL = HEAD + b"content-type: application/octet-stream\r\ncontent-length: 1\r\n\r\nx"
NUM_BYTES = 8_000_000
"""More than the kernel keeps of an answer for a client that does not read it."""
FRONTS = pytest.mark.parametrize("fronts", ["1", "2"])


def connect(service: Running, num: int) -> list[socket.socket]:
    return [socket.create_connection(service.address, timeout=30) for _ in range(num)]


def ask_for_much(service: Running) -> socket.socket:
    """Return a client that does not read the long answer that is being sent to it."""
    (client,) = connect(service, 1)
    tensor = {"dtype": "U8", "shape": [1, NUM_BYTES], "data_offsets": [0, NUM_BYTES]}
    header = json.dumps({"x": tensor}).encode()
    body = len(header).to_bytes(8, "little") + header + bytes(NUM_BYTES)
    kinds = b"content-type: application/safetensors\r\naccept: application/octet-stream\r\n"
    client.sendall(HEAD + kinds + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert client.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200"
    return client


def read_all(client: socket.socket) -> bytes:
    """Return all that comes until the end of a connection, however that ends."""
    data = bytearray()
    try:
        while piece := client.recv(1 << 20):
            data += piece
    except ConnectionError:
        pass
    client.close()
    return bytes(data)


def stop_with_a_full_backlog(service: Running, calls: Sequence[bytes]) -> list[socket.socket]:
    """Return clients that asked while the front end stood still, right before it was stopped."""
    service.signal(signal.SIGSTOP)
    until(lambda: psutil.Process(service.process.pid).status() == psutil.STATUS_STOPPED)
    clients = connect(service, len(calls))
    for client, call in zip(clients, calls, strict=True):
        client.sendall(call)
    service.signal(signal.SIGTERM)
    service.signal(signal.SIGCONT)
    return clients


@FRONTS
def test_all_who_have_connected_are_answered_and_slow_readers_have_time(fronts: str):
    flags = ("--replicas", "1", "--front-ends", fronts)
    with running("echo", *flags, env={"INFERPOOL_BODY_GAP_S": "60"}) as service:
        (half,) = connect(service, 1)
        half.sendall(CALL.replace(b"length: 1", b"length: 99"))  # does not hold up the end
        slow = ask_for_much(service)
        clients = stop_with_a_full_backlog(service, [CALL] * 300)
        stopped_at = time.monotonic()
        answers = [read_all(client) for client in clients]
        assert Counter(each[9:12] for each in answers) == {b"200": 300}
        assert all(b"\r\nconnection: close\r\n" in each for each in answers)
        with pytest.raises(ConnectionRefusedError):
            connect(service, 1)
        time.sleep(max(0.0, stopped_at + 3.5 - time.monotonic()))
        head, _, body = read_all(slow).partition(b"\r\n\r\n")
        assert (head[9:12], len(body)) == (b"200", NUM_BYTES)
        assert service.wait(30) == 0
        half.close()
    (refused,) = [line for line in service.log if line["level"] not in ("info", "raw")]
    assert str(refused["message"]).startswith("POST /predict: 503")  # the half-sent call


@FRONTS
def test_answers_that_nobody_reads_are_cut_off_in_the_end_and_the_log_says_so(fronts: str):
    env = {"INFERPOOL_DRAIN_TIMEOUT_S": "0"}
    with running("echo", "--replicas", "1", "--front-ends", fronts, env=env) as service:
        clients = [ask_for_much(service) for _ in range(2)]
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
        warnings = [str(line["message"]) for line in service.log if line["level"] == "warning"]
        assert sum(int(each.partition(" clients have not read")[0]) for each in warnings) == 2
        num_cut = sum(int(each.rpartition(": ")[2].split()[0]) for each in warnings)
        num_read = sum(len(read_all(each).partition(b"\r\n\r\n")[2]) for each in clients)
        assert num_read + num_cut == 2 * NUM_BYTES


def test_a_second_signal_does_not_wait_for_the_readers_of_several_fronts():
    with running("echo", "--replicas", "1", "--front-ends", "2") as service:
        slow = ask_for_much(service)
        service.signal(signal.SIGTERM)
        service.wait_for_log("stopping")
        time.sleep(2.5)  # it waits for nothing but the reader by then
        assert service.process.poll() is None
        service.signal(signal.SIGTERM)
        assert service.wait(10) == 0
        slow.close()
