"""A closed loop of clients at next to no cost: they share the machine with what they measure.

Answers are read by their heads alone, which takes a tenth of the time that a parser would.
"""

import asyncio
import re
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from inferpool.service.tools.trial.connection import Address, TrialError

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_STATUS = slice(9, 12)
"""Of the first line of an answer: HTTP/1.1 200 OK."""
_PATIENCE_S = 60.0
"""A round in which nothing has come for so long is over."""


@dataclass(slots=True, kw_only=True)
class LoadSample:
    """What some seconds of load have shown."""

    seconds: float = 0.0
    num_answers: int = 0
    num_errors: int = 0
    """Answers that are no success, and connections that broke."""
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    generator_s: float = 0.0
    """CPU time that the clients took."""
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.num_answers / self.seconds if self.seconds else 0.0

    @property
    def generator_cores(self) -> float:
        """Cores that the clients kept busy: near 1, and they are what was measured."""
        return self.generator_s / self.seconds if self.seconds else 0.0

    def percentile_s(self, percent: float) -> float:
        """Within which so many of 100 answers came."""
        if not self.latencies_s:
            return 0.0
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def add(self, other: "LoadSample") -> None:
        """Take another one's figures to these."""
        self.seconds += other.seconds
        self.num_answers += other.num_answers
        self.num_errors += other.num_errors
        self.latencies_s.extend(other.latencies_s)
        self.generator_s += other.generator_s
        self.errors.update(other.errors)


class LoadClients:
    """Clients of one service, who keep their connections between rounds. Lives in the loop."""

    def __init__(self, address: Address, requests: Sequence[bytes]) -> None:
        """Ask nothing yet.

        Args:
            address: Of the service.
            requests: Whole HTTP requests, asked in turn.
        """
        self._address = address
        self._requests = requests
        self._clients: list[_Client] = []

    async def run(self, num_clients: int, least_s: float) -> LoadSample:
        """Ask for so long at least, and until each client has had two answers.

        The first answers, while the queue fills, do not count.

        Raises:
            TrialError: Nobody listens, or nothing comes back.
        """
        await self._connect(num_clients)
        clients = self._clients[:num_clients]
        course = _Course(self._requests, num_clients, least_s)
        for client in clients:
            client.begin(course)
        heard = -1
        while not course.is_settled:
            if course.num_settled == heard:
                raise TrialError(f"no answer has come for {_PATIENCE_S:g} s")
            heard = course.num_settled
            await asyncio.wait([course.settled], timeout=_PATIENCE_S)
        sample = course.sample
        if not sample.num_answers:
            ((error, _),) = sample.errors.most_common(1) or [("nothing came back", 0)]
            raise TrialError(f"no request was answered well: {error}")
        return sample

    def close(self) -> None:
        """Hang up."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    async def _connect(self, num_clients: int) -> None:
        loop = asyncio.get_running_loop()
        self._clients = [client for client in self._clients if client.is_open]
        try:
            while len(self._clients) < num_clients:
                _, client = await loop.create_connection(_Client, *self._address)
                self._clients.append(client)
        except OSError as error:
            raise TrialError(f"the service takes no connection: {error}") from error


class _Course:
    """One round: what is asked next, and what has come of it."""

    def __init__(self, requests: Sequence[bytes], num_clients: int, least_s: float) -> None:
        self.sample = LoadSample()
        self.is_over = False
        """Nothing more is asked."""
        self.num_settled = 0
        self.num_open = num_clients
        """Clients that are still in it."""
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._numbers = count()
        self._num_skipped = max(1, num_clients // 2)
        self._least_answers = 2 * num_clients
        self._least_s = least_s
        self._began = 0.0
        self._cpu_began = 0.0

    @property
    def is_settled(self) -> bool:
        """Nothing is under way any more."""
        return self.settled.done()

    def next_request(self) -> bytes:
        """What to ask."""
        return self._requests[next(self._numbers) % len(self._requests)]

    def note(self, status: bytes, began: float, now: float) -> None:
        """An answer has come."""
        self.num_settled += 1
        if self.is_over:
            return
        if self.num_settled <= self._num_skipped:
            self._began, self._cpu_began = now, time.process_time()
            return
        sample = self.sample
        if status == b"200":
            sample.num_answers += 1
            sample.latencies_s.append(now - began)
        else:
            sample.num_errors += 1
            sample.errors[f"status {status.decode('latin-1')}"] += 1
        sample.seconds = now - self._began
        num_counted = self.num_settled - self._num_skipped
        if sample.seconds >= self._least_s and num_counted >= self._least_answers:
            self._end()

    def leave(self, error: str = "") -> None:
        """A client is done, or broke."""
        if error:
            self.sample.num_errors += 1
            self.sample.errors[error] += 1
        self.num_open -= 1
        if not self.num_open:
            self._end()
            if not self.settled.done():
                self.settled.set_result(None)

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.sample.generator_s = time.process_time() - self._cpu_began


class _Client(asyncio.Protocol):
    """One connection: asks, awaits the answer, asks again."""

    __slots__ = ("_began", "_course", "_left", "_pieces", "_status", "_transport", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._course: _Course | None = None
        self._transport: asyncio.Transport | None = None
        self._began = 0.0
        self._left = 0
        """Bytes of the answer's body that are yet to come."""
        self._pieces = b""
        """A head that is not complete."""
        self._status = b""

    def begin(self, course: _Course) -> None:
        """Take part in a round."""
        self._course = course
        self._ask()

    def close(self) -> None:
        """Hang up."""
        self._course = None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_open = False
        self._leave("the connection was closed" + (f": {error}" if error else ""))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._left:
            self._left -= len(data)
        else:
            data = self._pieces + data
            head_end = data.find(_HEAD_END)
            if head_end < 0:
                self._pieces = data
                return
            self._pieces = b""
            length = _LENGTH.search(data, 0, head_end)
            if length is None:
                self._leave("an answer has no Content-Length")
                self.close()
                return
            self._status = data[_STATUS]
            self._left = int(length[1]) - (len(data) - head_end - len(_HEAD_END))
        if self._left <= 0:
            self._left = 0
            self._settle()

    def _settle(self) -> None:
        course = self._course
        if course is None:
            return
        course.note(self._status, self._began, time.perf_counter())
        if course.is_over:
            self._leave()
        else:
            self._ask()

    def _ask(self) -> None:
        assert self._course is not None
        assert self._transport is not None
        if not self.is_open:
            self._leave("the connection was closed")
            return
        self._began = time.perf_counter()
        self._transport.write(self._course.next_request())

    def _leave(self, error: str = "") -> None:
        if self._course is not None:
            course, self._course = self._course, None
            course.leave(error)
