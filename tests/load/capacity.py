"""`ramp`: the highest rate that keeps the thresholds, by doubling and then bisection."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from inferpool.service.tools.trial.generators import LoadRun, run_load
from inferpool.service.tools.trial.load import LoadPlan
from tests.load.judging import Thresholds

_LOWEST_RATE = 0.5
_MAX_WAITING_S = 2.0
"""A step is given up when more requests than arrive in this time have no answer."""


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
        search: CapacitySearch,
        num_processes: int,
        begin: Callable[[LoadRun, str], Callable[[], None]],
    ) -> None:
        """Try rates until the search is over; a rate that fails gets a second chance.

        `plan` is one step, whose rate is replaced. Steps are kept as they are done, so that an
        interruption loses none. `begin` announces a step, and returns what shows its progress.
        """
        while (rate := search.next_rate()) is not None:
            step = self._attempt(plan, rate, num_processes, begin, f"{rate:,.1f}/s")
            if step.missed:
                again = self._attempt(plan, rate, num_processes, begin, f"{rate:,.1f}/s once more")
                step = step if again.missed else again
            self.steps.append(step)
            search.tell(rate, holds=not step.missed)
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
