"""`ramp`: the highest rate that keeps the thresholds, by doubling and then bisection."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from inferpool.service.tools.trial.generators import LoadRun, run_load
from inferpool.service.tools.trial.load import LoadPlan
from tests.load.thresholds import Thresholds

_LOWEST_RATE = 0.5
_MAX_WAITING_S = 2.0
"""A step is given up when more requests than arrive in this time have no answer."""
BUSY_CORE = 0.9


@dataclass(slots=True)
class CapacitySearch:
    """Chooses the rate to try next. It runs nothing: `tell` says what a rate did."""

    start: float
    max_rate: float = math.inf
    precision: float = 0.05
    """By which share the rate that fails may exceed the one that holds at the end."""
    low: float = 0.0
    high: float = math.inf

    def next_rate(self) -> float | None:
        """Return the rate to try; None when the search is over."""
        if self.low == 0.0 and math.isinf(self.high):
            return min(self.start, self.max_rate)
        if self.low == 0.0:
            return self.high / 2 if self.high / 2 >= _LOWEST_RATE else None
        if math.isinf(self.high):
            return min(self.low * 2, self.max_rate) if self.low < self.max_rate else None
        if self.high / self.low <= 1 + self.precision:
            return None
        return math.sqrt(self.low * self.high)

    def tell(self, rate: float, *, holds: bool) -> None:
        """Learn whether a rate held."""
        if holds:
            self.low = max(self.low, rate)
        else:
            self.high = min(self.high, rate)


@dataclass(slots=True)
class RampStep:
    """One rate that was tried."""

    rate: float
    run: LoadRun
    missed: list[str]

    @property
    def holds(self) -> bool:
        """The rate kept the thresholds."""
        return not self.missed


@dataclass(slots=True)
class Ramp:
    """All steps so far, and what they say."""

    thresholds: Thresholds
    steps: list[RampStep] = field(default_factory=list)
    is_complete: bool = False

    @property
    def capacity(self) -> RampStep | None:
        """The step with the highest rate that held."""
        holding = [step for step in self.steps if step.holds]
        return max(holding, key=lambda step: step.rate, default=None)


def climb(
    plan: LoadPlan,
    search: CapacitySearch,
    ramp: Ramp,
    num_processes: int,
    begin: Callable[[LoadRun, str], Callable[[], None]],
) -> None:
    """Try rates until the search is over; a rate that fails gets a second chance.

    `plan` is one step, whose rate is replaced. `ramp` gets the steps as they are done, so that an
    interruption loses none. `begin` announces a step, and returns what shows how far it has come.
    """

    def attempt(rate: float, title: str) -> RampStep:
        run = LoadRun(replace(plan, rate=rate))
        return _try(run, ramp.thresholds, num_processes, begin(run, title))

    while (rate := search.next_rate()) is not None:
        step = attempt(rate, f"{rate:,.1f}/s")
        if not step.holds:
            again = attempt(rate, f"{rate:,.1f}/s once more")
            step = again if again.holds else step
        ramp.steps.append(step)
        search.tell(rate, holds=step.holds)
    ramp.is_complete = True


def _try(
    run: LoadRun, thresholds: Thresholds, num_processes: int, show: Callable[[], None]
) -> RampStep:
    rate, duration_s = run.plan.rate, run.plan.duration_s
    assert rate is not None
    assert duration_s is not None
    flood: list[str] = []

    def watch() -> bool:
        show()
        num_open = run.num_in_flight + run.num_waiting
        if num_open > max(50.0, rate * _MAX_WAITING_S):
            flood.append(f"{num_open:,} requests without an answer")
        return not flood and not thresholds.are_lost(run, rate * duration_s)

    run_load(run, num_processes, watch)
    missed = thresholds.misses_in(duration_s, run)
    return RampStep(rate=rate, run=run, missed=missed or flood)
