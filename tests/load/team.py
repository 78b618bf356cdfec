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
from multiprocessing.connection import Connection, wait
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
_MIN_BIN_S = 0.5
_NUM_BINS = 120


@dataclass(slots=True)
class Outcome:
    """What one phase of load has shown so far."""

    plan: Plan
    series: Series
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
    """The processes of one phase. A context manager: leaving it ends them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processes: list[SpawnProcess] = []
        self._links: list[Connection] = []
        self._last: dict[Connection, Tick] = {}
        width_s = max(_MIN_BIN_S, (plan.duration_s or 60) / _NUM_BINS)
        self.outcome = Outcome(plan=plan, series=Series(width_s))

    def __enter__(self) -> "Team":
        context = SpawnContext()
        # Ctrl-C reaches the whole group; the generators are stopped by this process alone.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for index in range(self._plan.processes):
                link, far = context.Pipe()
                process = context.Process(
                    target=_generate, args=(self._plan.share(index), far), daemon=True
                )
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
            process.join(0.5 if kind is None else 0.1)
            process.kill()
            process.join()

    def run(self, watch: Callable[[Outcome], bool]) -> Outcome:
        """Load until the plan is done, or until `watch`, which sees every step, says False.

        Ctrl-C stops the generators and is raised once they have told what they know: it is in
        `outcome` then.

        Raises:
            LoadError: A generator could not begin, or ended.
        """
        try:
            self._begin()
            for _ in self._ticks(None):
                if not watch(self.outcome):
                    self._stop()
                    return self.outcome
        except KeyboardInterrupt:
            self._stop()
            raise
        self.outcome.is_complete = True
        return self.outcome

    def _begin(self) -> None:
        for link in self._links:
            if not link.poll(_START_TIMEOUT_S):
                raise LoadError(f"a generator did not start in {_START_TIMEOUT_S:g} s")
            if complaint := _received(link):
                raise LoadError(str(complaint))
        start_at = time.monotonic() + _LEAD_S
        for link in self._links:
            link.send(start_at)

    def _stop(self) -> None:
        """Have the generators end now, and take in what they know."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(None)
        for _ in self._ticks(time.monotonic() + _STOP_TIMEOUT_S):
            pass

    def _ticks(self, until: float | None) -> Iterator[None]:
        """Take in what the generators tell until each has said its last."""
        open_links = [link for link in self._links if not self._is_done(link)]
        while open_links and (until is None or time.monotonic() < until):
            for link in wait(open_links, TICK_S):
                assert isinstance(link, Connection)
                tick = _received(link)
                assert isinstance(tick, Tick)
                self._take_in(link, tick)
                if tick.is_last:
                    open_links.remove(link)
            yield

    def _is_done(self, link: Connection) -> bool:
        return link in self._last and self._last[link].is_last

    def _take_in(self, link: Connection, tick: Tick) -> None:
        outcome = self.outcome
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


def _generate(plan: Plan, link: Connection) -> None:
    """All that a generator process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    # httpcore asks four times per request for a package that it can do without; where it is not
    # installed, each time is a search of the whole path: 28 % of all that a request costs.
    if importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]  # "not there", says import
    try:
        bodies = plan.source.bodies()
    except LoadError as error:
        link.send(str(error))
        return
    generator = Generator(plan, bodies, link.send)
    with (
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
        asyncio.Runner(loop_factory=precise_loop) as runner,
    ):
        runner.run(generator.prepare())
        gc.freeze()
        link.send("")
        start_at = link.recv()
        if start_at is not None:
            # A message, or the end of the other process: both mean that it is over.
            runner.run(generator.run(start_at, link.poll))


def _raise_file_limit() -> None:
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
