"""Load from processes of its own: it keeps nothing else waiting, and may have several cores.

`run_load` starts them, adds up what they tell, and ends them.
"""

import asyncio
import contextlib
import gc
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnContext, SpawnProcess

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.load import LoadGenerator, LoadPlan
from inferpool.service.tools.trial.tally import LoadSeries, LoadTally

_TICK_S = 0.25
"""How often a process tells what has become known."""
_POLL_S = 0.05
_LEAD_S = 0.05
_START_S = 60.0
_STOP_S = 10.0
_LEAVE_S = 2.0
_MIN_BIN_S = 0.5
_NUM_BINS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tick:
    """News from one process."""

    at_s: float
    """From the start of measuring; negative while it warms up."""
    tally: LoadTally
    """What has become known since the last one."""
    num_in_flight: int
    num_waiting: int
    cpu_s: float
    finished_s: float
    is_last: bool


@dataclass(slots=True)
class LoadRun:
    """Result of a run of load so far."""

    plan: LoadPlan
    series: LoadSeries = field(init=False)
    tally: LoadTally = field(default_factory=LoadTally)
    at_s: float = 0.0
    """From the start of measuring; negative while it warms up."""
    num_in_flight: int = 0
    num_waiting: int = 0
    """Requests that are due and not sent, since all connections are busy."""
    finished_s: float = 0.0
    """When the last measured request ended, from the start of measuring."""
    busiest_core: float = 0.0
    """Share of a core that the busiest process took: near 1, and it is what was measured."""
    generator_cores: float = 0.0
    """Cores that all of the processes took."""
    is_complete: bool = False
    """The plan was carried out to its end."""

    def __post_init__(self) -> None:
        """Begin with bins that are fine enough for the plan."""
        self.series = LoadSeries(max(_MIN_BIN_S, (self.plan.duration_s or 60) / _NUM_BINS))

    @property
    def wall_s(self) -> float:
        """Seconds that were measured: until the end of the plan, or of its last answer."""
        if not self.is_complete:
            return max(self.at_s, 1e-3)
        return max(self.plan.duration_s or 1e-3, self.finished_s)

    @property
    def rate(self) -> float:
        """Requests answered well, per second."""
        return self.tally.num_good / self.wall_s


def share_of(plan: LoadPlan, index: int, num_processes: int) -> LoadPlan:
    """Return what one of several processes does of a plan."""

    def part(total: int) -> int:
        return total // num_processes + (index < total % num_processes)

    return replace(
        plan,
        connections=part(plan.connections),
        rate=plan.rate / num_processes if plan.rate else None,
        num_requests=part(plan.num_requests) if plan.num_requests else None,
        seed=plan.seed + index,
    )


def run_load(
    run: LoadRun, num_processes: int = 1, watch: Callable[[], bool] = lambda: True
) -> LoadRun:
    """Load a service from processes that end with this call; returns `run`.

    Ctrl-C stops them, and is raised once they have told what they know.

    Args:
        run: Names the plan, whose parts must be picklable; gets what becomes known.
        num_processes: How many, at most as many as connections and requests.
        watch: Called four times a second; the load stops when it returns False.

    Raises:
        TrialError: A process could not begin, or ended by itself.
    """
    links: list[Connection] = []
    processes: list[SpawnProcess] = []
    # Ctrl-C reaches the whole group; the processes are stopped by this one alone.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for index in range(num_processes):
            link, far = Pipe()
            arguments = (share_of(run.plan, index, num_processes), far)
            process = SpawnContext().Process(target=_generate, args=arguments, daemon=True)
            process.start()
            far.close()
            processes.append(process)
            links.append(link)
        signal.signal(signal.SIGINT, before)
        _Team(run, links).run(watch)
    finally:
        signal.signal(signal.SIGINT, before)
        for link in links:
            link.close()
        for process in processes:
            process.join(_LEAVE_S)
            process.kill()
            process.join()
    return run


class _Team:
    """The processes of a run, as the one that has started them sees them."""

    def __init__(self, run: LoadRun, links: list[Connection]) -> None:
        self._run = run
        self._links = links
        self._last: dict[Connection, _Tick] = {}

    def run(self, watch: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_S
        try:
            for link in self._links:
                if not link.poll(max(0.0, until - time.monotonic())):
                    raise TrialError(f"a load generator did not start in {_START_S:g} s")
                if complaint := _received(link):
                    raise TrialError(str(complaint))
            self._tell(time.monotonic() + _LEAD_S)
            if self._listen(watch):
                self._run.is_complete = True
                return
        except KeyboardInterrupt:
            self._stop()
            raise
        self._stop()

    def _stop(self) -> None:
        """Have the processes end now, and take in what they know."""
        self._tell(None)
        until = time.monotonic() + _STOP_S
        self._listen(lambda: time.monotonic() < until)

    def _tell(self, start_at: float | None) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(start_at)

    def _listen(self, watch: Callable[[], bool]) -> bool:
        """Take in what the processes tell; whether each has said its last before `watch` ended."""
        while open_links := [link for link in self._links if not self._is_done(link)]:
            for link in wait(open_links, _TICK_S):
                assert isinstance(link, Connection)
                tick = _received(link)
                if isinstance(tick, _Tick):
                    self._take_in(link, tick)
            if not watch():
                return False
        return True

    def _is_done(self, link: Connection) -> bool:
        return link in self._last and self._last[link].is_last

    def _take_in(self, link: Connection, tick: _Tick) -> None:
        run = self._run
        self._last[link] = tick
        run.tally.add(tick.tally)
        if tick.tally.num_requests:
            run.series.add(tick.at_s - _TICK_S / 2, tick.tally)
        ticks = self._last.values()
        run.at_s = max(each.at_s for each in ticks)
        run.num_in_flight = sum(each.num_in_flight for each in ticks)
        run.num_waiting = sum(each.num_waiting for each in ticks)
        run.finished_s = max(each.finished_s for each in ticks)
        cores = [each.cpu_s / each.at_s for each in ticks if each.at_s > 0]
        run.busiest_core = max(cores, default=0.0)
        run.generator_cores = sum(cores)


def _received(link: Connection) -> object:
    try:
        return link.recv()
    except (EOFError, OSError) as error:
        raise TrialError("a load generator ended by itself; see above") from error


def _generate(plan: LoadPlan, link: Connection) -> None:
    """Carry out a plan: all that a process of the load runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    try:
        generator = LoadGenerator(plan)
    except OSError as error:
        link.send(f"TLS: {error}")
        return
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        gc.freeze()
        link.send("")
        start_at = link.recv()
        if start_at is not None:
            with asyncio.Runner(loop_factory=precise_loop) as runner:
                runner.run(_carry_out(generator, link, start_at))


async def _carry_out(generator: LoadGenerator, link: Connection, start_at: float) -> None:
    load = asyncio.create_task(generator.run(start_at))

    def tell(*, is_last: bool = False) -> None:
        link.send(
            _Tick(
                at_s=max(time.monotonic() - generator.measured_from, -generator.warmup_s),
                tally=generator.take_tally(),
                num_in_flight=generator.num_in_flight,
                num_waiting=generator.num_waiting,
                cpu_s=generator.cpu_s,
                finished_s=generator.finished_s,
                is_last=is_last,
            )
        )

    tell_at = time.monotonic()
    while not load.done():
        if link.poll():  # a message, or the end of the other process: both mean that it is over
            generator.stop()
        if time.monotonic() >= tell_at:
            tell()
            tell_at += _TICK_S
        await asyncio.wait([load], timeout=_POLL_S)
    await load
    tell(is_last=True)


if sys.platform == "linux":

    class _PreciseSelector(selectors.EpollSelector):
        """Waits to the microsecond, where epoll_wait rounds up to a millisecond.

        A latency counted from the intended moment would otherwise have up to 1 ms of our own in it.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            # An epoll is itself a file that select(2) can wait for, if its number is below 1024.
            if timeout is not None and 0 < timeout < 0.05 and self.fileno() < 1024:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

else:  # kqueue waits to the nanosecond
    _PreciseSelector = selectors.DefaultSelector


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop that wakes in time: an open loop is as good as its timers."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


def _raise_file_limit() -> None:
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
