"""The load of `soak`: right, bad, late and abandoned requests, and samples of memory meanwhile."""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from inferpool.service.tools.chaos.questions import EchoQuestion
from inferpool.service.tools.chaos.resources import (
    Holdings,
    LedgerReading,
    holdings_of,
    read_ledger,
)
from inferpool.service.tools.trial.connection import (
    NoAnswerError,
    TrialConnection,
    connect,
    request_head,
)
from inferpool.service.tools.trial.processes import pss_of
from inferpool.service.tools.trial.screen import Screen
from tests.bench.processes import HOST, Server

PATH = "/predict/echo"
_MIB = 2**20
_TIMEOUT_S = 35.0
_SETTLE_S = 5.0
_BAD: Sequence[tuple[str, str, bytes, int]] = (
    (PATH, "application/json", b'{"instances":[', 400),
    (PATH, "application/json", b'{"instances":[]}', 422),
    (PATH, "text/plain", b"hello", 415),
    ("/predict/nobody", "application/json", b'{"instances":[1]}', 404),
    (PATH, "application/x-npy", b"\x93NUMPY no array", 400),
)
"""Path, content type, body, and the status that it must have."""


@dataclass(slots=True)
class Counts:
    """What became of the requests."""

    num_sent: int = 0
    right: int = 0
    bad: int = 0
    """Errors of ours that were answered as such."""
    hung_up: int = 0
    """Requests whose answer was not waited for."""
    late: Counter[int] = field(default_factory=Counter)
    """Requests with a deadline of a millisecond, by the status of their answer."""
    unexpected: Counter[str] = field(default_factory=Counter)
    """Everything else, by what was wrong."""


@dataclass(slots=True)
class Series:
    """Samples of one process."""

    seconds: list[float] = field(default_factory=list)
    """Since the load began."""
    pss_mib: list[float] = field(default_factory=list)
    own_mib: list[float] = field(default_factory=list)
    """Of that, memory of no file."""


class Soak:
    """The load and the samples of one run. Lives in the event loop."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.counts = Counts()
        self.series: dict[int, Series] = {}
        self.seconds = 0.0
        self._server = server
        self._args = args
        self._question = EchoQuestion(PATH, args.seed)
        self._kinds = kinds(args.seed, bad=args.bad, hang_up=args.hang_ups, late=args.late)
        self._address = (HOST, server.port)
        self._began = 0.0

    async def run(self) -> tuple[Holdings, Holdings, LedgerReading]:
        """Load and sample; what the service held before and after, and its counters."""
        await self._ask_for(2.0)
        before = await self._settled(None)
        self.counts, self.series = Counts(), {}
        with Screen(sys.stderr) as screen:
            screen.begin("soaking")
            sampling = asyncio.create_task(self._sample(screen))
            try:
                await self._ask_for(None)
            finally:
                sampling.cancel()
        self.seconds = time.monotonic() - self._began
        after = await self._settled(before)
        connection = await connect(self._address, self._on_stray)
        try:
            return before, after, await read_ledger(connection)
        finally:
            connection.close()

    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        if self._args.minutes:
            return (time.monotonic() - self._began) / (60 * float(self._args.minutes))
        return self.counts.num_sent / int(self._args.requests)

    async def _ask_for(self, seconds: float | None) -> None:
        self._began = time.monotonic()

        def is_over() -> bool:
            if seconds is not None:
                return time.monotonic() - self._began > seconds
            return self.share() >= 1

        async def ask() -> None:
            connection = await connect(self._address, self._on_stray)
            try:
                while not is_over():
                    number = self.counts.num_sent
                    self.counts.num_sent += 1
                    if not connection.is_open:
                        connection = await connect(self._address, self._on_stray)
                    await self._ask(number, connection)
            finally:
                connection.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._args.clients):
                group.create_task(ask())

    async def _ask(self, number: int, connection: TrialConnection) -> None:
        counts = self.counts
        kind = self._kinds[number % len(self._kinds)]
        try:
            if kind == "hang_up":
                await self._hang_up(number)
            elif kind == "bad":
                await self._ask_badly(number, connection)
            elif kind == "late":
                await self._ask_late(number, connection)
            else:
                answer = await connection.ask(
                    self._question.request(number), _TIMEOUT_S, b"%d" % number
                )
                if answer.status != 200:
                    counts.unexpected[f"status {answer.status}"] += 1
                elif self._question.complaint(number, answer.body):
                    counts.unexpected["a wrong answer"] += 1
                else:
                    counts.right += 1
        except NoAnswerError as error:
            counts.unexpected[f"no answer: {error}"] += 1
            connection.close()

    async def _hang_up(self, number: int) -> None:
        """Leave at once, or while the request waits, or is being computed."""
        connection = await connect(self._address, lambda: None)
        connection.send(self._question.request(number))
        if number % 3:
            await asyncio.sleep(0.001 * (number % 5))
        connection.close()
        self.counts.hung_up += 1

    async def _ask_badly(self, number: int, connection: TrialConnection) -> None:
        path, content_type, body, status = _BAD[number % len(_BAD)]
        head = request_head("POST", path, content_type=content_type, num_bytes=len(body))
        request = b"%sX-Request-ID: %d\r\n\r\n%s" % (head, number, body)
        answer = await connection.ask(request, _TIMEOUT_S, b"%d" % number)
        if answer.status == status:
            self.counts.bad += 1
        else:
            self.counts.unexpected[f"status {answer.status} instead of {status}"] += 1

    async def _ask_late(self, number: int, connection: TrialConnection) -> None:
        request = self._question.request(number).replace(
            b"X-Request-ID", b"X-Timeout-Ms: 1\r\nX-Request-ID", 1
        )
        answer = await connection.ask(request, _TIMEOUT_S, b"%d" % number)
        if answer.status in (200, 429, 504):
            self.counts.late[answer.status] += 1
        else:
            self.counts.unexpected[f"status {answer.status} to a late one"] += 1

    async def _sample(self, screen: Screen) -> None:
        while True:
            now = time.monotonic() - self._began
            sizes = await asyncio.to_thread(
                lambda: {pid: pss_of(pid) for pid in self._server.pids()}
            )
            for pid, pss in sizes.items():
                series = self.series.setdefault(pid, Series())
                series.seconds.append(now)
                series.pss_mib.append(pss.total / _MIB)
                series.own_mib.append(pss.own / _MIB)
            num_unexpected = self.counts.unexpected.total()
            front_mib = self.series[self._server.pid].own_mib[-1]
            screen.show(
                self.share(),
                f"{self.counts.num_sent:,} sent, {num_unexpected} not as they should be; "
                f"front end {front_mib:.1f} MiB",
            )
            await asyncio.sleep(self._args.every)

    async def _settled(self, before: Holdings | None) -> Holdings:
        """What the service holds once our connections are gone from its descriptors."""
        until = time.monotonic() + _SETTLE_S
        last = -1
        while True:
            family = [psutil.Process(pid) for pid in self._server.pids()]
            now = holdings_of(self._server.pid, family)
            is_back = before is None or now.descriptors <= before.descriptors
            if (is_back and now.descriptors == last) or time.monotonic() > until:
                return now
            last = now.descriptors
            await asyncio.sleep(0.3)

    def _on_stray(self) -> None:
        self.counts.unexpected["an answer that nobody had asked for"] += 1


def kinds(seed: int, *, bad: int, hang_up: int, late: int) -> list[str]:
    """A hundred kinds of requests in a random order, by their percentages."""
    found = ["bad"] * bad + ["hang_up"] * hang_up + ["late"] * late
    found += ["right"] * (100 - len(found))
    random.Random(seed).shuffle(found)
    return found


def asdict_of(counts: Counts) -> dict[str, object]:
    """The counts as JSON has them."""
    return {
        "sent": counts.num_sent,
        "right": counts.right,
        "bad": counts.bad,
        "hung_up": counts.hung_up,
        "late": {str(status): count for status, count in counts.late.items()},
        "unexpected": dict(counts.unexpected),
    }
