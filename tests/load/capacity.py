"""`ramp`: the highest rate that keeps the thresholds, by doubling and then bisection."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from inferpool.service.tools.trial.load import LoadPlan
from tests.load.generators import LoadRun, run_load
from tests.load.judging import Thresholds

_LOWEST_RATE = 0.5
_MAX_WAITING_S = 2.0
"""A step is given up when more requests than arrive in this time have no answer."""


def rates(
    start: float, precision: float, max_rate: float = math.inf
) -> Generator[float, bool, float]:
    """Choose the rate to try next, and be sent whether it held; return the highest that did.

    `precision` is the share by which the rate that fails may exceed it at the end.
    """
    low, high = 0.0, math.inf
    rate = min(start, max_rate)
    while True:
        if (yield rate):
            low = rate
        else:
            high = rate
        if low == 0.0:
            rate = high / 2
        else:
            rate = min(low * 2, max_rate) if math.isinf(high) else math.sqrt(low * high)
        if rate < _LOWEST_RATE or low == max_rate or high <= low * (1 + precision):
            return low


@dataclass(slots=True)
class RampStep:
    """One rate that was tried."""

    rate: float
    run: LoadRun
    missed: list[str]


@dataclass(slots=True)
class Ramp:
    """All steps so far, and what they say."""

    thresholds: Thresholds
    steps: list[RampStep] = field(default_factory=list)
    is_complete: bool = False

    @property
    def capacity(self) -> RampStep | None:
        """The step with the highest rate that held."""
        holding = [step for step in self.steps if not step.missed]
        return max(holding, key=lambda step: step.rate, default=None)

    def climb(
        self,
        plan: LoadPlan,
        search: Generator[float, bool, float],
        num_processes: int,
        begin: Callable[[LoadRun, str], Callable[[], None]],
    ) -> None:
        """Try rates until the search is over; a rate that fails gets a second chance.

        `plan` is one step, whose rate is replaced. Steps are kept as they are done, so that an
        interruption loses none. `begin` announces a step, and returns what shows its progress.
        """
        rate = next(search)
        while not self.is_complete:
            step = self._attempt(plan, rate, num_processes, begin, f"{rate:,.1f}/s")
            if step.missed:
                again = self._attempt(plan, rate, num_processes, begin, f"{rate:,.1f}/s once more")
                step = step if again.missed else again
            self.steps.append(step)
            try:
                rate = search.send(not step.missed)
            except StopIteration:
                self.is_complete = True

    def _attempt(
        self,
        plan: LoadPlan,
        rate: float,
        num_processes: int,
        begin: Callable[[LoadRun, str], Callable[[], None]],
        title: str,
    ) -> RampStep:
        run, flood = LoadRun(replace(plan, rate=rate)), []
        show, planned_s = begin(run, title), plan.duration_s or 0.0

        def watch() -> bool:
            show()
            num_open = run.num_in_flight + run.num_waiting
            if num_open > max(50.0, rate * _MAX_WAITING_S):
                flood.append(f"{num_open:,} requests without an answer")
            return not flood and not self.thresholds.are_lost(run, rate * planned_s)

        run_load(run, num_processes, watch)
        return RampStep(rate, run, self.thresholds.misses_in(planned_s, run) or flood)
