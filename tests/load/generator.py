"""The load itself: what one generator process does, with httpx, in its event loop."""

import asyncio
import contextlib
import json
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from tests.load.bodies import Body
from tests.load.plan import Plan
from tests.load.tally import Tally

TICK_S = 0.25
"""How often a process tells what has become known."""
_POLL_S = 0.05
_GRACE_S = 1.0
"""For requests under way when the run is stopped early."""
_PAUSE_S = 0.1
"""After a connection was refused in a closed loop, which would otherwise spin."""
_KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: it must not do so as we send."""
_MAX_TIMINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What one process tells every now and then."""

    at_s: float
    """From the start of measuring; negative while it warms up."""
    tally: Tally
    """What has become known since the last one."""
    num_in_flight: int
    num_waiting: int
    """Due, and not sent, since all connections are busy."""
    cpu_s: float
    """That the process has taken since measuring began."""
    finished_s: float
    """When the last measured request ended, from the start of measuring."""
    is_last: bool = False


def tls_of(verify: bool | str) -> ssl.SSLContext:
    """How certificates are checked: a plan's `verify` as httpx takes it; shared, as it is slow.

    Raises:
        OSError: The file of the authority cannot be read.
    """
    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    return httpx.create_ssl_context(verify=verify)


class Connection:
    """One connection: a client of its own, since a shared pool is searched at each request."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._client = self._new_client()

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read all of the answer."""
        return await self._client.send(request)

    async def renew(self) -> None:
        """Leave nothing behind of a request that was given up."""
        await self.close()
        self._client = self._new_client()

    async def close(self) -> None:
        await self._client.aclose()

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S
        )
        # The timeout of the whole request is ours: httpx has one for each read.
        return httpx.AsyncClient(verify=self._tls, limits=limits, timeout=None)


class Arrivals:
    """Moments at which requests are due, handed to connections; the last that was free is first."""

    def __init__(self) -> None:
        self.waiting: deque[float] = deque()
        self._free: list[asyncio.Future[float | None]] = []
        self._is_closed = False

    def hand_over(self, due: float) -> bool:
        """Give it to a connection that is free, if there is one."""
        while self._free:
            free = self._free.pop()
            if not free.done():
                free.set_result(due)
                return True
        return False

    async def next(self) -> float | None:
        """Wait for one; None when there will be no more."""
        if self.waiting:
            return self.waiting.popleft()
        if self._is_closed:
            return None
        free: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._free.append(free)
        return await free

    def close(self) -> None:
        """There will be no more."""
        self._is_closed = True
        for free in self._free:
            if not free.done():
                free.set_result(None)


class Generator:
    """Sends what a plan says, and tells what became of it."""

    def __init__(self, plan: Plan, bodies: Sequence[Body], tell: Callable[[Tick], None]) -> None:
        self._plan = plan
        self._tell = tell
        self._random = random.Random(plan.seed)
        self._requests = self._cycle([self._request(body) for body in bodies])
        self._tls = tls_of(plan.verify)
        self._arrivals = Arrivals()
        self._tally = Tally()
        self._num_in_flight = 0
        self._num_left = plan.num_requests
        self._measure_from = 0.0
        self._until = float("inf")
        self._finished_s = 0.0
        self._cpu_from = 0.0
        self._is_stopped = False

    async def prepare(self) -> None:
        """Send one request that is not counted: the first has half a second of imports in it."""
        connection = Connection(self._tls)
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(self._plan.timeout_s):
                await connection.send(next(self._requests))
        await connection.close()

    async def run(self, start_at: float, is_stopped: Callable[[], bool]) -> None:
        """Load from a moment on (of `time.monotonic`) until the plan is done or stopped."""
        self._measure_from = start_at + self._plan.warmup_s
        if self._plan.duration_s is not None:
            self._until = self._measure_from + self._plan.duration_s
        await asyncio.sleep(start_at - time.monotonic())
        load = asyncio.create_task(self._load())
        watch = asyncio.create_task(self._watch(is_stopped))
        await asyncio.wait([load, watch], return_when=asyncio.FIRST_COMPLETED)
        self._is_stopped = True
        if not load.done():
            await asyncio.wait([load], timeout=_GRACE_S)
        for task in (load, watch):
            task.cancel()
        results = await asyncio.gather(load, watch, return_exceptions=True)
        self._flush(is_last=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch(self, is_stopped: Callable[[], bool]) -> None:
        """Tell what is known, and look whether to stop."""
        flush_at = time.monotonic()
        while not is_stopped():
            if not self._cpu_from and time.monotonic() >= self._measure_from:
                self._cpu_from = time.process_time()
            if time.monotonic() >= flush_at:
                self._flush()
                flush_at += TICK_S
            await asyncio.sleep(_POLL_S)

    def _flush(self, *, is_last: bool = False) -> None:
        tally, self._tally = self._tally, Tally()
        self._tell(
            Tick(
                at_s=time.monotonic() - self._measure_from,
                tally=tally,
                num_in_flight=self._num_in_flight,
                num_waiting=len(self._arrivals.waiting),
                cpu_s=time.process_time() - self._cpu_from if self._cpu_from else 0.0,
                finished_s=self._finished_s,
                is_last=is_last,
            )
        )

    async def _load(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._plan.rate is None:
                for _ in range(self._plan.connections):
                    tasks.create_task(self._ask_again_and_again())
            else:
                await self._arrive(tasks, self._plan.rate)

    async def _ask_again_and_again(self) -> None:
        """The closed loop of one connection: the next request when it has its answer."""
        connection = Connection(self._tls)
        try:
            while self._take(now := time.monotonic()):
                if not await self._ask(connection, now):
                    await asyncio.sleep(_PAUSE_S)
        finally:
            await connection.close()

    async def _arrive(self, tasks: asyncio.TaskGroup, rate: float) -> None:
        """The open loop: requests become due whether or not others have been answered."""
        num_connections = 0
        due = time.monotonic()
        slept_at = due
        while True:
            due += self._random.expovariate(rate)
            if due > (now := time.monotonic()):
                await asyncio.sleep(due - now)
                slept_at = due
            elif now - slept_at > 0.001:  # behind: let the connections go on as well
                await asyncio.sleep(0)
                slept_at = now
            if not self._take(due):
                break
            if self._arrivals.hand_over(due):
                continue
            self._arrivals.waiting.append(due)
            if num_connections < self._plan.connections:
                num_connections += 1
                tasks.create_task(self._ask_when_due())
        self._arrivals.close()

    async def _ask_when_due(self) -> None:
        """One connection of the open loop."""
        connection = Connection(self._tls)
        try:
            while (due := await self._arrivals.next()) is not None:
                await self._ask(connection, due)
        finally:
            await connection.close()

    def _take(self, moment: float) -> bool:
        """Whether a request at this moment is part of the plan."""
        if self._is_stopped or moment >= self._until:
            return False
        if self._num_left is not None and moment >= self._measure_from:
            self._num_left -= 1
            return self._num_left >= 0
        return True

    async def _ask(self, connection: Connection, due: float) -> bool:
        """Send one request and count what becomes of it; False if nobody accepted it."""
        request = next(self._requests)
        answer: httpx.Response | None = None
        kind = ""
        sent = time.monotonic()
        self._num_in_flight += 1
        try:
            # The loop's clock is time.monotonic.
            async with asyncio.timeout_at(due + self._plan.timeout_s):
                answer = await connection.send(request)
        except TimeoutError:
            kind = "timeout"
            await connection.renew()
        except httpx.ConnectError:
            kind = "cannot connect"
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            kind = "connection broken"
        except httpx.HTTPError as error:
            kind = type(error).__name__
        except asyncio.CancelledError:
            self._tally.num_unfinished += 1
            raise
        finally:
            self._num_in_flight -= 1
        if due >= self._measure_from:
            self._count(answer, kind, due, sent, request)
        return kind != "cannot connect"

    def _count(
        self,
        answer: httpx.Response | None,
        kind: str,
        due: float,
        sent: float,
        request: httpx.Request,
    ) -> None:
        now = time.monotonic()
        tally = self._tally
        self._finished_s = now - self._measure_from
        tally.lateness.record(sent - due)
        tally.sent_bytes += len(request.content)
        if answer is None:
            tally.fail(kind)
            return
        content = answer.content
        tally.received_bytes += len(content)
        tally.statuses[str(answer.status_code)] += 1
        if timing := answer.headers.get("server-timing"):
            _add_timing(tally, timing)
        if not answer.is_success:
            tally.refusal.record(now - due)
            tally.fail(_problem(answer))
            _add_retry_after(tally, answer)
        elif self._plan.expect and not _has_field(content, self._plan.expect):
            tally.fail(f"no {self._plan.expect!r} in the answer")
        else:
            tally.latency.record(now - due)

    def _request(self, body: Body) -> httpx.Request:
        headers = {"Content-Type": body.content_type, **self._plan.headers}
        return httpx.Request("POST", self._plan.url, content=body.content, headers=headers)

    def _cycle(self, requests: list[httpx.Request]) -> Iterator[httpx.Request]:
        """All of them, in an order of chance, over and over."""
        while True:
            self._random.shuffle(requests)
            yield from requests


def _problem(answer: httpx.Response) -> str:
    """The status, and the code of an RFC 9457 problem where there is one."""
    if "json" in answer.headers.get("content-type", ""):
        try:
            code = json.loads(answer.content).get("code", "")
        except (ValueError, AttributeError):
            code = ""
        return f"{answer.status_code} {code}"[:60].strip()
    return str(answer.status_code)


def _has_field(content: bytes, name: str) -> bool:
    try:
        document = json.loads(content)
    except ValueError:
        return False
    return isinstance(document, dict) and name in document


def _add_timing(tally: Tally, header: str) -> None:
    """Count the durations of a Server-Timing header (W3C): `queue;dur=0.1, inference;dur=2`."""
    for metric in header.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        if name not in tally.num_timed and len(tally.num_timed) >= _MAX_TIMINGS:
            continue
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur":
                try:
                    tally.timing_ms[name] += float(value)
                except ValueError:
                    continue
                tally.num_timed[name] += 1


def _add_retry_after(tally: Tally, answer: httpx.Response) -> None:
    value = answer.headers.get("retry-after")
    if value is None:
        return
    tally.num_retry_after += 1
    if value.isdigit():  # else a date
        tally.retry_after_s += int(value)
