"""The generator processes of a run: started, listened to and ended by the process that shows it."""

import asyncio
import contextlib
import gc
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType

from tests.load.clock import precise_loop
from tests.load.errors import LoadError
from tests.load.generator import TICK_S, Generator, Tick
from tests.load.plan import Plan
from tests.load.tally import Series, Tally

_START_TIMEOUT_S = 60.0
_LEAD_S = 0.05
_STOP_TIMEOUT_S = 10.0
_LEAVE_S = 2.0
_MIN_BIN_S = 0.5
_NUM_BINS = 120


@dataclass(slots=True)
class Outcome:
    """What one phase of load has shown so far."""

    plan: Plan
    series: Series = field(init=False)
    tally: Tally = field(default_factory=Tally)
    at_s: float = 0.0
    """From the start of measuring; negative while it warms up."""
    num_in_flight: int = 0
    num_waiting: int = 0
    finished_s: float = 0.0
    busiest_core: float = 0.0
    """The share of a core that the busiest generator process took."""
    generator_cores: float = 0.0
    """Of all of them."""
    is_complete: bool = False
    """The plan was carried out to its end."""

    def __post_init__(self) -> None:
        width_s = max(_MIN_BIN_S, (self.plan.duration_s or 60) / _NUM_BINS)
        self.series = Series(width_s)

    @property
    def wall_s(self) -> float:
        """The time that was measured: until the end of the plan, or of its last answer."""
        if not self.is_complete:
            return max(self.at_s, 1e-3)
        return max(self.plan.duration_s or 1e-3, self.finished_s)

    @property
    def rate(self) -> float:
        """Requests answered well, per second."""
        return self.tally.num_good / self.wall_s


class Team:
    """The generator processes, for phase after phase. A context manager: leaving it ends them."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._processes: list[SpawnProcess] = []
        self._links: list[Connection] = []
        self._last: dict[Connection, Tick] = {}
        self._is_idle = True

    def __enter__(self) -> "Team":
        # Ctrl-C reaches the whole group; the generators are stopped by this process alone.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(self._num_processes):
                link, far = Pipe()
                process = SpawnContext().Process(target=_generate, args=(far,), daemon=True)
                process.start()
                far.close()
                self._processes.append(process)
                self._links.append(link)
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(_LEAVE_S if self._is_idle else 0)
            process.kill()
            process.join()

    def run(self, outcome: Outcome, watch: Callable[[], bool]) -> None:
        """Load until the plan is done, or until `watch`, which is called at every step, says False.

        Ctrl-C stops the generators, and is raised once they have told what they know.

        Args:
            outcome: Names the plan, and gets all that becomes known.
            watch: Looks at it.

        Raises:
            LoadError: A generator could not begin, or ended.
        """
        self._is_idle = False
        self._last.clear()
        try:
            self._begin(outcome.plan)
            for _ in self._ticks(outcome, None):
                if not watch():
                    self._stop(outcome)
                    return
        except KeyboardInterrupt:
            self._stop(outcome)
            raise
        outcome.is_complete = True
        self._is_idle = True

    def _begin(self, plan: Plan) -> None:
        for index, link in enumerate(self._links):
            link.send(plan.share(index))
        for link in self._links:
            if not link.poll(_START_TIMEOUT_S + plan.timeout_s):
                raise LoadError(f"a generator did not start in {_START_TIMEOUT_S:g} s")
            if complaint := _received(link):
                raise LoadError(str(complaint))
        start_at = time.monotonic() + _LEAD_S
        for link in self._links:
            link.send(start_at)

    def _stop(self, outcome: Outcome) -> None:
        """Have the generators end this now, and take in what they know."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(None)
        for _ in self._ticks(outcome, time.monotonic() + _STOP_TIMEOUT_S):
            pass
        self._is_idle = all(self._is_done(link) for link in self._links)

    def _ticks(self, outcome: Outcome, until: float | None) -> Iterator[None]:
        """Take in what the generators tell until each has said its last."""
        open_links = [link for link in self._links if not self._is_done(link)]
        while open_links and (until is None or time.monotonic() < until):
            for link in wait(open_links, TICK_S):
                assert isinstance(link, Connection)
                tick = _received(link)
                if not isinstance(tick, Tick):
                    continue  # it was stopped before it began
                self._take_in(outcome, link, tick)
                if tick.is_last:
                    open_links.remove(link)
            yield

    def _is_done(self, link: Connection) -> bool:
        return link in self._last and self._last[link].is_last

    def _take_in(self, outcome: Outcome, link: Connection, tick: Tick) -> None:
        self._last[link] = tick
        outcome.tally.add(tick.tally)
        if tick.tally.num_requests:
            outcome.series.add(tick.at_s - TICK_S / 2, tick.tally)
        ticks = self._last.values()
        outcome.at_s = max(each.at_s for each in ticks)
        outcome.num_in_flight = sum(each.num_in_flight for each in ticks)
        outcome.num_waiting = sum(each.num_waiting for each in ticks)
        outcome.finished_s = max(each.finished_s for each in ticks)
        cores = [each.cpu_s / each.at_s for each in ticks if each.at_s > 0]
        outcome.busiest_core = max(cores, default=0.0)
        outcome.generator_cores = sum(cores)


def _received(link: Connection) -> object:
    try:
        return link.recv()
    except (EOFError, OSError) as error:
        raise LoadError("a generator process ended by itself; see above") from error


def _generate(link: Connection) -> None:
    """All that a generator process runs: one plan after another, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    # httpcore asks four times per request for a package that it can do without; where it is not
    # installed, each time is a search of the whole path: 28 % of all that a request costs.
    if importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]  # "not there", says import
    with (
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
        asyncio.Runner(loop_factory=precise_loop) as runner,
    ):
        while True:
            plan = link.recv()
            if plan is not None:  # else it was told to stop when it had nothing to do
                _carry_out(plan, link, runner)


def _carry_out(plan: Plan, link: Connection, runner: asyncio.Runner) -> None:
    try:
        generator = Generator(plan, plan.source.bodies(), link.send)
    except (LoadError, OSError) as error:
        link.send(str(error))
        return
    runner.run(generator.prepare())
    gc.freeze()
    link.send("")
    start_at = link.recv()
    if start_at is None:
        start_at = time.monotonic()
        runner.run(generator.run(start_at, lambda: True))
        return

    def is_stopped() -> bool:
        # A message, or the end of the other process: both mean that it is over.
        return link.poll()

    runner.run(generator.run(start_at, is_stopped))
    gc.unfreeze()


def _raise_file_limit() -> None:
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
