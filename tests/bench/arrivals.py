"""An open loop that costs little: requests leave at random moments, whatever becomes of the others.

A process of its own, one epoll and no framework: 40 us of CPU for a request of 1 KiB on a machine
on which httpx took 600 to 1,500.
python -m tests.bench.arrivals '{"port": ..., "rate": ..., ...}': writes one line of JSON.
"""

import json
import random
import resource
import select
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is to be done."""

    port: int
    path: str
    content_type: str
    files: list[str]
    rate: float
    """Requests per second; their distances are exponential."""
    warm_s: float
    secs: float
    wait_s: float
    """How long answers are waited for at the end."""
    max_connections: int
    seed: int


@dataclass(slots=True)
class Connection:
    """One connection, one request at a time."""

    socket: socket.socket
    due: float = 0.0
    """Of the request that it carries; 0 while it is free."""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytearray = field(default_factory=bytearray)


class Arrivals:
    """Sends what is due, on the connection that was free last; more are opened as needed."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._requests = [_request(told, Path(file).read_bytes()) for file in told.files]
        self._random = random.Random(told.seed)
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._free: list[Connection] = []
        self._waiting: deque[float] = deque()
        self._num_sent = 0
        self._began = self._begin = self._end = 0.0
        self._latencies_s: list[float] = []
        self._refusals_s: list[float] = []
        self._lateness_s: list[float] = []
        self._statuses: Counter[int] = Counter()
        self._num_broken = 0
        self._num_in_time = 0
        """Good answers that came while requests became due."""

    def run(self) -> dict[str, object]:
        """Carry it out."""
        told = self._told
        due = self._began = time.monotonic()
        self._begin = due + told.warm_s
        self._end = self._begin + told.secs
        num_due = 0
        distance = self._random.expovariate
        while (due := due + distance(told.rate)) < self._end:
            while (now := time.monotonic()) < due:
                self._wait(due - now)
            self._send_due(due)
            num_due += due >= self._begin
            if now - due > 0.0005:  # behind: look at answers all the same
                self._wait(0)
        give_up = time.monotonic() + told.wait_s
        while self._is_open() and (now := time.monotonic()) < give_up:
            self._wait(min(0.05, give_up - now))
        return self._summary(num_due, time.monotonic())

    def _is_open(self) -> bool:
        return bool(self._waiting) or any(each.due for each in self._connections.values())

    def _send_due(self, due: float) -> None:
        if self._free:
            self._send(self._free.pop(), due)
        elif len(self._connections) < self._told.max_connections:
            self._send(self._connect(), due)
        else:
            self._waiting.append(due)

    def _connect(self) -> Connection:
        opened = socket.create_connection((_HOST, self._told.port), timeout=5)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setblocking(False)
        connection = Connection(opened)
        self._connections[opened.fileno()] = connection
        self._epoll.register(opened.fileno(), select.EPOLLIN)
        return connection

    def _send(self, connection: Connection, due: float) -> None:
        connection.due = due
        connection.unsent = memoryview(self._requests[self._num_sent % len(self._requests)])
        self._num_sent += 1
        if due >= self._begin:
            self._lateness_s.append(time.monotonic() - due)
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        try:
            num = connection.socket.send(connection.unsent)
        except BlockingIOError:
            num = 0
        except OSError:
            self._drop(connection)
            return
        had_rest = num < len(connection.unsent)
        connection.unsent = connection.unsent[num:]
        if had_rest:
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _wait(self, timeout_s: float) -> None:
        """Take in what has happened. epoll itself rounds up to milliseconds, select does not."""
        if timeout_s > 0:
            select.select([self._epoll.fileno()], [], [], timeout_s)
        for number, event in self._epoll.poll(0):
            connection = self._connections.get(number)
            if connection is None:
                continue
            if event & select.EPOLLOUT:
                self._epoll.modify(number, select.EPOLLIN)
                self._write(connection)
            if event & ~select.EPOLLOUT and number in self._connections:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.received += data
        if not _is_whole(connection.received):
            return
        now = time.monotonic()
        status = int(connection.received[9:12])
        is_good = 200 <= status < 300
        self._num_in_time += is_good and self._begin <= now < self._end
        if connection.due >= self._begin:
            self._statuses[status] += 1
            kept = self._latencies_s if is_good else self._refusals_s
            kept.append(now - connection.due)
        connection.received.clear()
        connection.due = 0.0
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._free.append(connection)

    def _drop(self, connection: Connection) -> None:
        """It was closed by the server: an error only if it carried a request."""
        self._num_broken += connection.due >= self._begin
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
        if connection in self._free:
            self._free.remove(connection)

    def _summary(self, num_due: int, now: float) -> dict[str, object]:
        num_good, num_refused = len(self._latencies_s), len(self._refusals_s)
        num_unanswered = num_due - num_good - num_refused - self._num_broken
        # What has no answer yet took as long as this at least. Left out, it would make an
        # overloaded server look better the more it leaves unanswered.
        open_s = [now - each.due for each in self._connections.values() if each.due >= self._begin]
        open_s += [now - due for due in self._waiting if due >= self._begin]
        latencies_s = sorted(self._latencies_s + open_s)
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "num_due": num_due,
            "num_good": num_good,
            "num_refused": num_refused,
            "num_unanswered": num_unanswered,
            "num_broken": self._num_broken,
            "statuses": {str(status): num for status, num in self._statuses.items()},
            "good_per_s": self._num_in_time / self._told.secs,
            "p50_ms": _quantile(latencies_s, 0.5) * 1e3,
            "p90_ms": _quantile(latencies_s, 0.9) * 1e3,
            "p99_ms": _quantile(latencies_s, 0.99) * 1e3,
            "max_ms": (latencies_s[-1] if latencies_s else 0.0) * 1e3,
            "refusal_p99_ms": _quantile(sorted(self._refusals_s), 0.99) * 1e3,
            "lateness_p99_ms": _quantile(sorted(self._lateness_s), 0.99) * 1e3,
            "span_s": now - self._began,
            "cpu_s": used.ru_utime + used.ru_stime,
        }


def _request(told: Told, body: bytes) -> bytes:
    head = (
        f"POST {told.path} HTTP/1.1\r\nHost: {_HOST}:{told.port}\r\n"
        f"Content-Type: {told.content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _is_whole(received: bytearray) -> bool:
    """Whether an answer is complete: by its Content-Length, or by its last chunk."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = received[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return received.endswith(b"\r\n0\r\n\r\n")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0])
    return len(received) >= end + 4 + length


def _quantile(ordered: list[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.stdout.write(json.dumps(Arrivals(Told(**json.loads(sys.argv[1]))).run()) + "\n")
