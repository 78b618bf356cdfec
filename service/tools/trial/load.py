"""The load generator: many connections to one service, in a closed or an open loop.

Closed: each connection sends its next request when it has its answer. Open: requests become due at
a rate, independent of earlier answers, and latencies count from the moment they were due. It costs
some 30 us of CPU a request, and runs in any event loop.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf

from inferpool.service.client.cli.access import tls_context
from inferpool.service.tools.trial.connection import (
    Address,
    TrialAnswer,
    TrialConnection,
    TrialError,
    connect,
)
from inferpool.service.tools.trial.tally import LoadTally

TIMEOUT = "timeout"
NOT_CONNECTED = "cannot connect"
BROKEN = "connection broken"
"""Kinds of errors of requests without an answer."""
_LOOK_S = 0.02
"""Between checks for requests that have timed out, which cost less than a timer for each."""
_GRACE_S = 1.0
"""How long requests under way may take when the run is stopped early."""
_PAUSE_S = 0.1
"""After a refused connection in a closed loop, which would otherwise spin."""
_KEEPALIVE_S = 4.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that it never does as we
send."""
_BEHIND_S = 0.001


@dataclass(slots=True)
class LoadExchange:
    """One request, and its result. Moments are of `time.monotonic`."""

    number: int
    """Requests are numbered from 0, in the order of sending."""
    due: float
    """When it was to be sent: its latency counts from here."""
    sent: float
    ended: float = 0.0
    answer: TrialAnswer | None = None
    failure: str = ""
    """Why there is no answer: `TIMEOUT`, `NOT_CONNECTED` or `BROKEN`."""


Judge = Callable[[LoadExchange, LoadTally], str]
"""Returns the kind of error of a request that has ended; empty for a good answer. It may also add
to `LoadTally.sums`."""


def judge_status(exchange: LoadExchange, _: LoadTally) -> str:
    """Return no error for a status of 200 to 299, else its kind."""
    if exchange.answer is None:
        return exchange.failure
    status = exchange.answer.status
    return "" if 200 <= status < 300 else f"status {status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The requests of a run of load, their address, rate and duration."""

    address: Address
    requests: Sequence[bytes] | Callable[[int], bytes]
    """Whole HTTP requests (see `connection.post_request`); or the one for each number."""
    is_shuffled: bool = False
    connections: int
    """Closed loop: always busy. Open loop: the most that are opened, one whenever none is free."""
    rate: float | None = None
    """Requests due per second; None is the closed loop."""
    is_even: bool = False
    """Requests become due at even intervals, instead of random ones (Poisson)."""
    duration_s: float | None = None
    """Seconds of measuring. Without it and `num_requests` the run goes on until it is stopped."""
    num_requests: int | None = None
    least_answers: int = 0
    """Closed loop: measuring goes on until this number of requests has ended, too."""
    warmup_s: float = 0.0
    """Seconds of the same load before, which are not counted."""
    warmup_answers: int = 0
    """Measuring begins when this number of requests has ended, instead of after `warmup_s`."""
    timeout_s: float = 30.0
    """Longest time of a request, from the moment it was due."""
    tls: bool | str | None = None
    """None is plain HTTP; else whether certificates are checked, or the file of their authority."""
    seed: int = 0
    judge: Judge = judge_status


class LoadGenerator:
    """One run of a plan, in one event loop. `tally` may be read or replaced at any time."""

    def __init__(self, plan: LoadPlan) -> None:
        self.tally = LoadTally()
        self.measured_from = inf
        """When measuring began or will begin; infinite until it is known."""
        self.measured_until = inf
        """After this nothing more is sent; infinite until it is known."""
        self.finished_s = 0.0
        """When the last measured request ended, from the start of measuring."""
        self.warmup_s = plan.warmup_s
        self._plan = plan
        self._tls = None if plan.tls is None else tls_context(plan.tls)
        self._random = random.Random(plan.seed)
        requests = plan.requests
        if callable(requests):
            self._request_of = requests
        else:
            turns = self._shuffled(list(requests)) if plan.is_shuffled else cycle(requests)
            self._request_of = lambda _: next(turns)
        self._num_sent = 0
        self._num_ended = 0
        self._num_left = plan.num_requests
        self._num_connections = 0
        self._num_opening = 0
        self._busy: dict[TrialConnection, LoadExchange] = {}
        self._idle: list[tuple[TrialConnection, float]] = []
        """Free connections of the open loop, since when; the last one is used first."""
        self._waiting: deque[float] = deque()
        """Moments of requests that are due but not sent because all connections are busy."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._is_stopped = False
        self._finished = asyncio.Event()
        self._error: Exception | None = None
        self._cpu_from = 0.0
        self._cpu_until = 0.0

    @property
    def num_in_flight(self) -> int:
        """Requests that are sent and have no answer."""
        return len(self._busy)

    @property
    def num_waiting(self) -> int:
        """Requests that are due and not sent."""
        return len(self._waiting)

    @property
    def cpu_s(self) -> float:
        """CPU time that this process has taken since measuring began."""
        return (self._cpu_until or time.process_time()) - self._cpu_from if self._cpu_from else 0.0

    @property
    def measured_s(self) -> float:
        """Seconds of measuring in which requests were sent."""
        return max(0.0, min(self.measured_until, time.monotonic()) - self.measured_from)

    def take_tally(self) -> LoadTally:
        """Return the counts since the last call, and begin another tally."""
        tally, self.tally = self.tally, LoadTally()
        return tally

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Send nothing more; requests under way have some time to end."""
        if not self._is_stopped:
            self._is_stopped = self._is_over = True
            self.measured_until = min(self.measured_until, time.monotonic())
            self._waiting.clear()
            asyncio.get_running_loop().call_later(grace_s, self._finished.set)
            self._look_for_end()

    async def run(self) -> LoadTally:
        """Send requests until the plan is done or stopped; return `tally`."""
        if not self._plan.warmup_answers:
            self._measure_from(time.monotonic() + self._plan.warmup_s)
        self._begin(self._watch())
        if self._plan.rate is not None:
            self._begin(self._arrive(self._plan.rate))
        for _ in range(self._plan.connections if self._plan.rate is None else 0):
            self._open_connection()
        try:
            await self._finished.wait()
        finally:
            self._cpu_until = time.process_time()
            for task in self._tasks:
                task.cancel()
            from_ = self.measured_from
            self.tally.num_unfinished += sum(each.due >= from_ for each in self._busy.values())
            connections = [*self._busy, *(each for each, _ in self._idle)]
            self._busy.clear()
            for connection in connections:
                connection.close()
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in (self._error, *results):
            if isinstance(result, Exception):
                raise result
        return self.tally

    def _begin(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)
        else:
            self._finished.set()

    def _measure_from(self, moment: float) -> None:
        self.measured_from = moment
        if self._plan.duration_s is not None and not self._plan.least_answers:
            self.measured_until = moment + self._plan.duration_s

    async def _watch(self) -> None:
        """End late requests, and close idle connections before the service does."""
        while True:
            now = time.monotonic()
            if not self._cpu_from and now >= self.measured_from:
                self._cpu_from = time.process_time()
            too_late = now - self._plan.timeout_s
            for connection, exchange in list(self._busy.items()):
                if exchange.due > too_late:
                    break  # those that follow were sent later
                connection.give_up(TIMEOUT)
            while self._waiting and self._waiting[0] <= too_late:
                self._settle(self._exchange(self._waiting.popleft()), TIMEOUT)
            while self._idle and self._idle[0][1] < now - _KEEPALIVE_S:
                self._idle.pop(0)[0].close()
                self._num_connections -= 1
            self._look_for_end()
            await asyncio.sleep(_LOOK_S)

    async def _arrive(self, rate: float) -> None:
        """Add requests when they are due, and open connections for them up to the limit."""
        due = slept_at = time.monotonic()
        while True:
            due += 1 / rate if self._plan.is_even else self._random.expovariate(rate)
            if due > (now := time.monotonic()):
                await asyncio.sleep(due - now)
                slept_at = due
            elif now - slept_at > _BEHIND_S:  # allow the connections to go on as well
                await asyncio.sleep(0)
                slept_at = now
            if not self._may_send(due):
                break
            self._waiting.append(due)
            if self._idle:
                self._go_on(self._idle.pop()[0])
            elif self._num_connections < self._plan.connections:
                self._open_connection()
        self._is_over = True
        self._look_for_end()

    def _may_send(self, due: float) -> bool:
        if self._is_stopped or due >= self.measured_until:
            return False
        if self._num_left is not None and due >= self.measured_from:
            self._num_left -= 1
            return self._num_left >= 0
        return True

    def _open_connection(self) -> None:
        self._num_connections += 1
        self._num_opening += 1
        self._begin(self._connect())

    async def _connect(self) -> None:
        is_closed_loop = self._plan.rate is None
        try:
            while is_closed_loop or self._waiting:
                began = time.monotonic()
                if is_closed_loop and not self._may_send(began):
                    self._is_over = True
                    break
                try:
                    async with asyncio.timeout(self._plan.timeout_s):
                        connection = await connect(self._plan.address, tls=self._tls)
                except OSError:  # a TimeoutError is one, too
                    if is_closed_loop:
                        self._settle(self._exchange(began), NOT_CONNECTED)
                        await asyncio.sleep(_PAUSE_S)
                    elif self._waiting:
                        self._settle(self._exchange(self._waiting.popleft()), NOT_CONNECTED)
                    continue
                if is_closed_loop:
                    self._send(connection, began)
                else:
                    self._go_on(connection)
                return
            self._num_connections -= 1
        finally:
            self._num_opening -= 1
        self._look_for_end()

    def _exchange(self, due: float) -> LoadExchange:
        number = self._num_sent
        self._num_sent += 1
        return LoadExchange(number, due, time.monotonic())

    def _send(self, connection: TrialConnection, due: float) -> None:
        exchange = self._busy[connection] = self._exchange(due)
        request = self._request_of(exchange.number)
        if due >= self.measured_from:
            self.tally.sent_bytes += len(request)
        connection.send(request, self._on_end)

    def _on_end(self, connection: TrialConnection, result: TrialAnswer | str) -> None:
        exchange = self._busy.pop(connection, None)
        if exchange is None:  # the run is over
            return
        if isinstance(result, str):
            self._settle(exchange, TIMEOUT if result == TIMEOUT else BROKEN)
        else:
            exchange.answer = result
            self._settle(exchange, "")
        self._go_on(connection)

    def _go_on(self, connection: TrialConnection) -> None:
        is_closed_loop = self._plan.rate is None
        if not connection.is_open:
            self._num_connections -= 1
            if is_closed_loop or self._waiting:
                self._open_connection()
        elif is_closed_loop:
            now = time.monotonic()
            if self._may_send(now):
                self._send(connection, now)
                return
            self._is_over = True
            self._num_connections -= 1
            connection.close()
        elif self._waiting:
            self._send(connection, self._waiting.popleft())
            return
        else:
            self._idle.append((connection, time.monotonic()))
        self._look_for_end()

    def _settle(self, exchange: LoadExchange, failure: str) -> None:
        now = exchange.ended = time.monotonic()
        exchange.failure = failure
        plan, tally, answer = self._plan, self.tally, exchange.answer
        if self.measured_from == inf:
            self._num_ended += 1
            if self._num_ended >= plan.warmup_answers:
                self._num_ended = 0
                self._measure_from(now)
            return
        if now < self.measured_from:
            return
        is_measured = exchange.due >= self.measured_from
        try:
            kind = plan.judge(exchange, tally if is_measured else LoadTally())
        except Exception as error:  # asyncio would only log it
            self._error = error
            self._finished.set()
            return
        if not kind and now < self.measured_until:
            tally.num_in_time += 1
        if is_measured:
            self.finished_s = now - self.measured_from
            if plan.rate is not None:
                tally.lateness.record(exchange.sent - exchange.due)
            latency_s = now - exchange.due
            if answer is not None:
                tally.statuses[str(answer.status)] += 1
                tally.received_bytes += len(answer.body)
            if not kind:
                tally.latency.record(latency_s)
            else:
                tally.fail(kind)
                (tally.given_up if answer is None else tally.refusal).record(latency_s)
        self._num_ended += 1
        if self.measured_until == inf and plan.duration_s is not None:
            is_long_enough = now >= self.measured_from + plan.duration_s
            if is_long_enough and self._num_ended >= plan.least_answers:
                self.measured_until = now

    def _look_for_end(self) -> None:
        if self._is_over and not (self._busy or self._waiting or self._num_opening):
            self._finished.set()

    def _shuffled(self, requests: list[bytes]) -> Iterator[bytes]:
        while True:
            self._random.shuffle(requests)
            yield from requests


def require_answers(tally: LoadTally) -> None:
    """Check that a request was answered well.

    Raises:
        TrialError: None was; the message names the most frequent error.
    """
    if not tally.num_in_time:
        ((error, _),) = tally.errors.most_common(1) or [("nothing came back", 0)]
        raise TrialError(f"no request was answered well: {error}")
