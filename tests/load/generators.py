"""Load from separate processes: it delays nothing else, and may use several cores.

`run_load` starts them, adds up their counts, and ends them.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import queue
import resource
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier, Event

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.load import LoadGenerator, LoadPlan
from inferpool.service.tools.trial.tally import LoadTally
from inferpool.workers.shared.guard import die_with_parent

_TICK_S = 0.25
"""How often a process sends new counts."""
_POLL_S = 0.05
_START_S = 60.0
_STOP_S = 10.0
_LEAVE_S = 2.0
_MIN_BIN_S = 0.5
_NUM_BINS = 120
_MAX_BINS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tick:
    index: int
    at_s: float
    """From the start of measuring; negative while it warms up."""
    tally: LoadTally
    num_in_flight: int
    num_waiting: int
    cpu_s: float
    finished_s: float
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    news: "multiprocessing.Queue[_Tick | str]"
    """Ticks, or why a process cannot begin."""
    stop: Event
    ready: Barrier
    """All generators begin together."""


class LoadSeries:
    """Tallies over time in bins of equal width; neighbours are merged if there are too many."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self.bins: list[LoadTally] = []

    def add(self, at_s: float, tally: LoadTally) -> None:
        """Add the tally of a moment, in seconds from the start of measuring."""
        while at_s / self.width_s >= _MAX_BINS:
            for left, right in zip(self.bins[::2], self.bins[1::2], strict=False):
                left.add(right)
            self.bins = self.bins[::2]
            self.width_s *= 2
        number = max(0, int(at_s / self.width_s))
        while len(self.bins) <= number:
            self.bins.append(LoadTally())
        self.bins[number].add(tally)


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
    """Requests that are due but not sent because all connections are busy."""
    finished_s: float = 0.0
    """When the last measured request ended, from the start of measuring."""
    busiest_core: float = 0.0
    """Share of a core that the busiest process used; near 1, it limits the figures."""
    generator_cores: float = 0.0
    is_complete: bool = False

    def __post_init__(self) -> None:
        """Set bins that are fine enough for the plan."""
        self.series = LoadSeries(max(_MIN_BIN_S, (self.plan.duration_s or 60) / _NUM_BINS))

    @property
    def wall_s(self) -> float:
        """Seconds that were measured: until the end of the plan, or its last answer."""
        if not self.is_complete:
            return max(self.at_s, 1e-3)
        return max(self.plan.duration_s or 1e-3, self.finished_s)

    @property
    def rate(self) -> float:
        """Requests answered well, per second."""
        return self.tally.num_good / self.wall_s


def share_of(plan: LoadPlan, index: int, num_processes: int) -> LoadPlan:
    """Return the part of a plan for one of several processes."""

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
    """Put load on a service from processes that end with this call; return `run`.

    `run` receives the counts; the parts of its plan must be picklable. Ctrl-C stops the processes,
    and is raised once they have sent their counts. `watch` is called at least four times a second;
    the load stops when it returns False.

    Raises:
        TrialError: A process could not begin, or ended by itself.
    """
    context = get_context("spawn")
    shared = _Shared(
        news=context.Queue(), stop=context.Event(), ready=context.Barrier(num_processes)
    )
    processes = [
        context.Process(
            target=_generate,
            args=(share_of(run.plan, index, num_processes), index, shared, os.getpid()),
            daemon=True,
        )
        for index in range(num_processes)
    ]
    # Ctrl-C reaches the whole group; only this process stops the others.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, before)
        last: dict[int, _Tick] = {}
        try:
            run.is_complete = _listen(run, processes, shared, last, watch)
        except KeyboardInterrupt:
            _stop(run, processes, shared, last)
            raise
        if not run.is_complete:
            _stop(run, processes, shared, last)
    finally:
        signal.signal(signal.SIGINT, before)
        shared.ready.abort()
        for process in processes:
            process.join(_LEAVE_S)
            process.kill()
            process.join()
    return run


def _stop(
    run: LoadRun, processes: Sequence[SpawnProcess], shared: _Shared, last: dict[int, _Tick]
) -> None:
    shared.stop.set()
    until = time.monotonic() + _STOP_S
    _listen(run, processes, shared, last, lambda: time.monotonic() < until)


def _listen(
    run: LoadRun,
    processes: Sequence[SpawnProcess],
    shared: _Shared,
    last: dict[int, _Tick],
    watch: Callable[[], bool],
) -> bool:
    """Add up the counts; return whether each process sent its last before `watch` ended it."""
    until = time.monotonic() + _START_S
    while sum(each.is_last for each in last.values()) < len(processes):
        try:
            tick = shared.news.get(timeout=_TICK_S)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise TrialError("a load generator ended by itself; see above") from None
            if len(last) < len(processes) and time.monotonic() > until:
                raise TrialError(f"a load generator did not start in {_START_S:g} s") from None
        else:
            if isinstance(tick, str):
                raise TrialError(tick)
            last[tick.index] = tick
            _take_in(run, tick, last.values())
        if not watch():
            return False
    return True


def _take_in(run: LoadRun, tick: _Tick, last: Collection[_Tick]) -> None:
    run.tally.add(tick.tally)
    if tick.tally.num_requests:
        run.series.add(tick.at_s - _TICK_S / 2, tick.tally)
    run.at_s = max(each.at_s for each in last)
    run.num_in_flight = sum(each.num_in_flight for each in last)
    run.num_waiting = sum(each.num_waiting for each in last)
    run.finished_s = max(each.finished_s for each in last)
    cores = [each.cpu_s / each.at_s for each in last if each.at_s > 0]
    run.busiest_core = max(cores, default=0.0)
    run.generator_cores = sum(cores)


def _generate(plan: LoadPlan, index: int, shared: _Shared, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    try:
        generator = LoadGenerator(plan)
    except OSError as error:
        shared.news.put(f"TLS: {error}")
        return
    gc.freeze()
    with contextlib.suppress(threading.BrokenBarrierError):
        shared.ready.wait(_START_S)
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(_carry_out(generator, index, shared))


async def _carry_out(generator: LoadGenerator, index: int, shared: _Shared) -> None:
    load = asyncio.create_task(generator.run())

    def tell(*, is_last: bool = False) -> None:
        shared.news.put(
            _Tick(
                index=index,
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
        if shared.stop.is_set():
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

        A latency counted from the intended moment would otherwise include up to 1 ms of our own.
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
    """Return a new event loop with precise timers: an open loop is as good as those."""
    return asyncio.SelectorEventLoop(_PreciseSelector())
