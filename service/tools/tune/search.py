"""The search: coordinate descent over the knobs. Each candidate takes turns with the best so far.

A `ServiceStarter` starts the candidates. Machines drift, so only figures of
rounds that took turns are compared, as ratios.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.tune.candidates import LoadSample, ServiceCandidate, ServiceStarter
from inferpool.service.tools.tune.knobs import Changes, Knob
from inferpool.service.tools.tune.plan import Goal

LEAST_GAIN = 1.03
"""Least factor by which a candidate must be better: otherwise the present setting is simpler."""
_HOPELESS = 0.9
"""A candidate with a lower ratio in its first pair of rounds gets no more rounds."""
_NUM_PAIRS = 3
_MAX_PAIRS = 5
_NUM_FINAL_PAIRS = 7
"""At most one of these may speak against the best: without any gain, that is 1 in 16."""
_SPARE = 1.1
"""The load meets the objective with this factor to spare, since rounds vary."""
_MAX_LOADS = 5

Verdict = Literal["default", "better", "no better", "worse", "late", "fails"]


@dataclass(slots=True, kw_only=True)
class Tried:
    """One candidate, and its result."""

    changes: Changes
    """Changes of the user's settings; empty for those settings themselves."""
    connections: int
    sample: LoadSample = field(default_factory=LoadSample)
    memory_bytes: int = 0
    ratio: float = 1.0
    """Ratio to the best at that time: of requests per second, or where the objective is out of
    reach, of latencies."""
    gain: float = 1.0
    """Ratio to the user's settings: the product of the ratios on the way. For the best, it is
    measured at the end."""
    verdict: Verdict = "default"
    reason: str = ""

    @property
    def p99_s(self) -> float:
        """Time within which 99 of 100 good answers came."""
        return self.sample.percentile_s(99)


@dataclass(slots=True, kw_only=True)
class SearchOutcome:
    """Result of the search so far."""

    tried: list[Tried] = field(default_factory=list)
    best: Tried | None = None
    """Candidate to use; the first of those tried is the user's settings."""
    is_confirmed: bool = False
    connections: int = 0
    is_out_of_reach: bool = False
    """The objective is not met even for one client at a time, so latencies are compared."""
    untried: list[str] = field(default_factory=list)
    needed_s: float = 0.0
    """Budget that would have sufficed for one more candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    ratio: float
    is_better: bool
    best: LoadSample
    challenger: LoadSample


class BestLostError(Exception):
    """The best service has stopped answering: nothing can be compared with it."""


class Search:
    """One search. `outcome` is always valid, so the search can be ended at any moment."""

    def __init__(
        self,
        starter: ServiceStarter,
        goal: Goal,
        budget_s: float,
        on_trial: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Store the goal and the budget; `on_trial` is called with each step's name.

        No candidate starts that could not end within the budget. If it is too short for any, one is
        tried anyway.
        """
        self.outcome = SearchOutcome(connections=goal.connections)
        self._starter = starter
        self._goal = goal
        self._began = starter.now()
        self._budget_s = budget_s
        self._on_trial = on_trial
        self._starts_s: list[float] = []
        self._round_s = 0.0
        self._best: ServiceCandidate | None = None

    async def begin(self) -> None:
        """Start a service with the user's settings, and find the load for comparisons."""
        self._on_trial("the settings as they are")
        self._best = await self._start({})
        base = Tried(changes={}, connections=self._goal.connections)
        base.sample = await self._find_load(self._best, self._goal.connections)
        base.connections = self.outcome.connections
        base.memory_bytes = self._best.memory_bytes
        self.outcome.tried.append(base)
        self.outcome.best = base

    async def run(self, knobs: Sequence[Knob]) -> None:
        """Vary the knobs in turn, repeat while that gains, and confirm the result."""
        try:
            has_gained = True
            while has_gained and not self.outcome.untried:
                has_gained = False
                for knob in knobs:
                    has_gained |= await self._vary(knob)
            await self._confirm()
        finally:
            await self.close()

    async def close(self) -> None:
        """End the best service so far."""
        if self._best is not None:
            best, self._best = self._best, None
            await best.close()

    async def _vary(self, knob: Knob) -> bool:
        for way in knob.ways:
            has_gained = False
            for step in way:
                assert self.outcome.best is not None
                changes = {**self.outcome.best.changes, **step}
                if any(each.changes == changes for each in self.outcome.tried):
                    break  # it led here, or gained nothing
                has_tried = len(self.outcome.tried) > 1  # more than the user's settings
                if has_tried and self._needed_s() > self._budget_s:
                    self.outcome.needed_s = self._needed_s()
                    if knob.name not in self.outcome.untried:
                        self.outcome.untried.append(knob.name)
                    return has_gained
                if not await self._try(changes):
                    break
                has_gained = True
            if has_gained:
                return True
        return False

    def _needed_s(self) -> float:
        """Estimate the time to the end of one more trial, with the confirmation after it."""
        start_s = max(self._starts_s[1:] or self._starts_s)  # the first may have done more
        num_rounds = 2 * (_MAX_PAIRS + _NUM_FINAL_PAIRS)
        return self._starter.now() - self._began + 2 * start_s + num_rounds * self._round_s

    async def _start(self, changes: Changes) -> ServiceCandidate:
        began = self._starter.now()
        candidate = await self._starter.start(changes)
        self._starts_s.append(self._starter.now() - began)
        return candidate

    async def _try(self, changes: Changes) -> bool:
        """Compare a candidate with the best; return whether it is the best from now on."""
        assert self._best is not None
        assert self.outcome.best is not None
        self._on_trial(text_of(changes))
        tried = Tried(changes=changes, connections=self.outcome.connections)
        self.outcome.tried.append(tried)
        challenger: ServiceCandidate | None = None
        is_better = False
        try:
            challenger = await self._start(changes)
            tried.memory_bytes = challenger.memory_bytes
            found = await self._compare(self._best, challenger)
            tried.sample, tried.ratio = found.challenger, found.ratio
            tried.gain = self.outcome.best.gain * found.ratio
            tried.verdict = self._verdict(found)
            is_better = found.is_better
        except TrialError as error:
            tried.verdict, tried.reason = "fails", str(error).splitlines()[0]
            return False
        except BaseException:
            self.outcome.tried.remove(tried)  # nothing is known of it
            raise
        finally:
            if challenger is not None and not is_better:
                await challenger.close()
        if not is_better:
            return False
        former, self._best = self._best, challenger
        self.outcome.best = tried
        await former.close()
        if self.outcome.connections < self._goal.connections:  # it may bear more
            tried.sample = await self._find_load(challenger, self._raised(found.challenger))
            tried.connections = self.outcome.connections
        return True

    async def _compare(
        self, best: ServiceCandidate, challenger: ServiceCandidate, *, is_final: bool = False
    ) -> _Comparison:
        """Measure rounds in turns, A B, B A, A B, so that a drifting machine favours neither."""
        least, most = (_NUM_FINAL_PAIRS,) * 2 if is_final else (_NUM_PAIRS, _MAX_PAIRS)
        ours, theirs = LoadSample(), LoadSample()
        ratios: list[float] = []
        while len(ratios) < most:
            order = (best, challenger) if len(ratios) % 2 == 0 else (challenger, best)
            pair = {id(each): await self._measure(each) for each in order}
            a, b = pair[id(best)], pair[id(challenger)]
            ours.add(a)
            theirs.add(b)
            ratios.append(self._ratio(a, b))
            if ratios[0] < _HOPELESS and not is_final:
                break
            is_open = abs(statistics.median(ratios) - LEAST_GAIN) < _error(ratios)
            if len(ratios) >= least and not is_open:
                break
        ratio = statistics.median(ratios)
        is_better = ratio >= LEAST_GAIN and ratio - _error(ratios) > 1
        if is_final:
            is_better = is_better and sorted(ratios)[1] > 1
        is_late, was_late = (
            not self._goal.is_met(each.percentile_s(99)) for each in (theirs, ours)
        )
        if (is_late and not was_late) or theirs.tally.num_errors > ours.tally.num_errors:
            is_better = False
        return _Comparison(ratio=ratio, is_better=is_better, best=ours, challenger=theirs)

    def _ratio(self, best: LoadSample, challenger: LoadSample) -> float:
        if self.outcome.is_out_of_reach:
            return best.percentile_s(99) / max(challenger.percentile_s(99), 1e-9)
        return challenger.rate / max(best.rate, 1e-9)

    async def _measure(self, candidate: ServiceCandidate) -> LoadSample:
        began = self._starter.now()
        try:
            sample = await candidate.measure(self.outcome.connections)
        except TrialError as error:
            if candidate is self._best:
                raise BestLostError(str(error)) from error
            raise
        self._round_s = max(self._round_s, self._starter.now() - began)
        return sample

    def _verdict(self, found: _Comparison) -> Verdict:
        if found.is_better:
            return "better"
        if found.challenger.tally.num_errors > found.best.tally.num_errors:
            return "fails"
        if not self.outcome.is_out_of_reach and not self._goal.is_met(
            found.challenger.percentile_s(99)
        ):
            return "late"
        return "worse" if found.ratio < 1 / LEAST_GAIN else "no better"

    async def _find_load(self, candidate: ServiceCandidate, connections: int) -> LoadSample:
        """Find the number of clients that meets the objective, at most the plan's."""
        self.outcome.connections = connections
        sample = await self._measure(candidate)
        for _ in range(_MAX_LOADS):
            p99_s = sample.percentile_s(99)
            if connections == 1 or self._goal.is_met(p99_s, _SPARE):
                break
            assert self._goal.p99_ms is not None
            # In a closed loop, latency grows with the number of clients (Little's law).
            fitting = int(connections * self._goal.p99_ms / (p99_s * 1e3 * _SPARE))
            self.outcome.connections = connections = max(1, min(fitting, connections - 1))
            sample = await self._measure(candidate)
        self.outcome.is_out_of_reach = connections == 1 and not self._goal.is_met(
            sample.percentile_s(99)
        )
        return sample

    def _raised(self, sample: LoadSample) -> int:
        """Return how many clients would meet the objective after this sample."""
        assert self._goal.p99_ms is not None
        room = self._goal.p99_ms / (sample.percentile_s(99) * 1e3 * _SPARE)
        return max(1, min(self._goal.connections, int(self.outcome.connections * max(1.0, room))))

    async def _confirm(self) -> None:
        """Compare the best again with the user's settings: chance favours the best of many."""
        outcome = self.outcome
        assert self._best is not None
        assert outcome.best is not None
        if not outcome.best.changes:
            outcome.is_confirmed = True
            return
        self._on_trial("the best once more, against the settings as they were")
        former = await self._start({})
        try:
            found = await self._compare(former, self._best, is_final=True)
        finally:
            await former.close()
        outcome.best.gain = found.ratio
        outcome.is_confirmed = True
        for tried, sample in ((outcome.tried[0], found.best), (outcome.best, found.challenger)):
            tried.sample, tried.connections = sample, outcome.connections
        if not found.is_better:
            outcome.best.verdict = "no better"
            outcome.best.reason = "not when it was measured again"
            outcome.best = outcome.tried[0]


def text_of(changes: Changes) -> str:
    """Return settings as text: `replicas 1, threads_per_replica 2`."""
    return ", ".join(f"{name} {value}" for name, value in changes.items())


def _error(ratios: Sequence[float]) -> float:
    """Estimate the standard error of the median from the median deviation, as values are few.

    For a normal distribution the standard deviation is 1.4826 times the median deviation, and the
    standard error of the median is 1.2533 times that of the mean.
    """
    if len(ratios) < 2:
        return 0.0
    middle = statistics.median(ratios)
    deviation = statistics.median([abs(ratio - middle) for ratio in ratios])
    return float(1.2533 * 1.4826 * deviation / len(ratios) ** 0.5)
