"""The generator of `bodies`: one process with plain sockets, one write and one read for a call.

It imports little, since it starts for each cell.
"""

import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

import psutil

_HOST = "127.0.0.1"
_ANSWER_BYTES = 64 * 1024
"""More than an answer has."""
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLoad:
    """A closed loop: each connection sends its next call when it has its answer."""

    port: int
    request: bytes
    connections: int
    warm_s: float
    secs: float
    ending: bytes = b"]}"
    """Last bytes of each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The measurements of the generator."""

    num: int
    latencies_s: list[float]
    cpu_s: float
    server_cpu_s: Mapping[int, float]
    """By process."""


def send_bodies(begin: Barrier, argument: tuple[BodyLoad, list[int]]) -> Sent:
    """Load a server from this process."""
    load, pids = argument
    generator = _Generator(load)
    begin.wait()
    generator.run(load.warm_s)
    processes = [psutil.Process(pid) for pid in pids]
    before = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    own_s = time.process_time()
    latencies_s = generator.run(load.secs)
    own_s = time.process_time() - own_s
    after = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    generator.close()
    return Sent(
        num=len(latencies_s),
        latencies_s=latencies_s,
        cpu_s=own_s,
        server_cpu_s={pid: after[pid] - before[pid] for pid in pids},
    )


class _Generator:
    """Connections that each have one call under way."""

    def __init__(self, load: BodyLoad) -> None:
        self._request = load.request
        self._ending = load.ending
        self._selector = selectors.DefaultSelector()
        self._unsent: dict[socket.socket, memoryview] = {}
        self._began: dict[socket.socket, float] = {}
        for _ in range(load.connections):
            connection = socket.create_connection((_HOST, load.port))
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def run(self, secs: float) -> list[float]:
        """Send calls for some seconds, wait for the last answers; return seconds of those in time.

        Raises:
            ConnectionError: A call was not answered with 200.
        """
        latencies_s: list[float] = []
        for key in list(self._selector.get_map().values()):
            self._begin(key.data)
        until = time.perf_counter() + secs
        while self._began:
            ready = self._selector.select(_ANSWER_S)
            if not ready:
                raise ConnectionError(f"a call has had no answer for {_ANSWER_S:g} s")
            for key, events in ready:
                if events & selectors.EVENT_WRITE:
                    self._write(key.data, self._unsent.pop(key.data))
                if events & selectors.EVENT_READ:
                    now = self._finish(key.data, latencies_s, until)
                    if now < until:
                        self._begin(key.data)
        return latencies_s

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _begin(self, connection: socket.socket) -> None:
        self._began[connection] = time.perf_counter()
        self._write(connection, memoryview(self._request))

    def _write(self, connection: socket.socket, rest: memoryview) -> None:
        was_unsent = len(rest) < len(self._request)
        num_sent = connection.send(rest)
        if num_sent < len(rest):
            self._unsent[connection] = rest[num_sent:]
            if not was_unsent:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(connection, both, connection)
        elif was_unsent:
            self._selector.modify(connection, selectors.EVENT_READ, connection)

    def _finish(self, connection: socket.socket, latencies_s: list[float], until: float) -> float:
        answer = connection.recv(_ANSWER_BYTES)
        if not (answer.startswith(b"HTTP/1.1 200") and answer.endswith(self._ending)):
            raise ConnectionError(f"a call was answered with {answer[:300]!r}")
        now = time.perf_counter()
        began = self._began.pop(connection)
        if now < until:
            latencies_s.append(now - began)
        return now
