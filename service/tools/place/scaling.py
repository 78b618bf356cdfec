"""Decides how many hosts there should be, from what the front end tells of its load.

Pure: time is an argument. `inferpool place` asks it every few seconds.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Load of a front end between two looks at it."""

    num_hosts: int
    """Hosts whose agents run."""
    offered_per_s: float
    """Instances that came, whether they were admitted or not."""
    refused_per_s: float
    """Those among them that were refused because there was no room or no time for them."""
    busy: float
    """Share of their time in which the workers computed."""
    queue_share: float
    """Instances that wait, as a share of those that may wait; of the model that is worst off."""
    p99_ratio: float = 0.0
    """99th percentile of the latency over the objective; 0 where none is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Bounds and thresholds of the decisions. Times are in seconds."""

    min_hosts: int
    max_hosts: int
    busy_after_growth: float = 0.65
    """Hosts are asked for until their workers would compute for this share of their time."""
    busy_after_return: float = 0.55
    """A host is given back only if the others would then compute for no more than this. The gap to
    `busy_high` keeps a host from being given back and asked for in turns."""
    busy_high: float = 0.85
    queue_high: float = 0.25
    pressed_s: float = 10.0
    """Pressure must last so long: a host takes minutes to come, so it helps no shorter burst."""
    start_s: float = 300.0
    """A host that was asked for may take so long before others are asked for in its place."""
    quiet_s: float = 900.0
    """A host is given back if the load of all this time would have fitted without it."""
    return_pause_s: float = 300.0
    """Between one return and the next, and after growth."""
    return_share: float = 0.1
    """The most hosts, of all, that are given back at once; one at least."""


class Scaling:
    """Decides how many hosts there should be. It keeps a quarter of an hour of what it has seen."""

    def __init__(self, rules: ScalingRules, num_hosts: int) -> None:
        """Start from the hosts that there are."""
        self._rules = rules
        self.wanted = min(max(num_hosts, rules.min_hosts), rules.max_hosts)
        """Hosts that there should be."""
        self.reason = ""
        """Why `wanted` has changed last, for a log line."""
        self._needs: deque[tuple[float, float]] = deque()
        """Hosts' worth of work, in falling order: the first is the largest of the quiet time."""
        self._seen_since: float | None = None
        self._pressed_since: float | None = None
        self._grown_at = self._returned_at = float("-inf")

    def decide(self, now: float, demand: Demand) -> int:
        """Return how many hosts there should be now."""
        if self._seen_since is None:
            self._seen_since = now
        if demand.num_hosts == 0:
            self._forget(now)  # nothing can be said of a load that no host takes
            return self.wanted
        self._note(now, demand.num_hosts * demand.busy)
        pressure = self._pressure(demand)
        if not pressure:
            self._pressed_since = None
            self._give_back(now)
        elif self._pressed_since is None:
            self._pressed_since = now
        elif now - self._pressed_since >= self._rules.pressed_s:
            self._grow(now, demand, pressure)
        return self.wanted

    def _pressure(self, demand: Demand) -> str:
        if demand.refused_per_s > 0:
            return f"{demand.refused_per_s:.3g} instances are refused each second"
        if demand.p99_ratio > 1:
            return f"the 99th percentile is {demand.p99_ratio:.1f} times the objective"
        if demand.queue_share > self._rules.queue_high:
            return f"the queue is full to {demand.queue_share:.0%}"
        if demand.busy > self._rules.busy_high:
            return f"workers compute for {demand.busy:.0%} of their time"
        return ""

    def _grow(self, now: float, demand: Demand, pressure: str) -> None:
        """Ask for what the load needs, twice the hosts of now at most."""
        awaited = demand.num_hosts < self.wanted and now - self._grown_at < self._rules.start_s
        served_per_s = demand.offered_per_s - demand.refused_per_s
        excess = demand.offered_per_s / served_per_s if served_per_s > 0 else 2.0
        need = demand.num_hosts * demand.busy * min(excess, 2.0) / self._rules.busy_after_growth
        least = self.wanted if awaited else demand.num_hosts + 1
        most = min(2 * demand.num_hosts, self._rules.max_hosts)
        grown = min(max(ceil(need - 1e-6), least), most)
        if grown > self.wanted:
            self.reason, self.wanted, self._grown_at = pressure, grown, now

    def _give_back(self, now: float) -> None:
        """Give back what the load of the quiet time did not need, a part of it at a time."""
        rules = self._rules
        began = max(self._grown_at, self._returned_at) + rules.return_pause_s
        if self._seen_since is None or now < max(began, self._seen_since + rules.quiet_s):
            return
        needed = max(ceil(self._needs[0][1] / rules.busy_after_return - 1e-6), rules.min_hosts)
        num = min(self.wanted - needed, max(1, int(self.wanted * rules.return_share)))
        if num > 0:
            self.wanted -= num
            self._returned_at = now
            self.reason = (
                f"{needed} are enough for all of the last {rules.quiet_s / 60:.0f} minutes"
            )

    def _note(self, now: float, need: float) -> None:
        """Keep the largest needs of the quiet time: what is older and smaller says nothing more."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now, need))
        while self._needs[0][0] < now - self._rules.quiet_s:
            self._needs.popleft()

    def _forget(self, now: float) -> None:
        self._needs.clear()
        self._pressed_since = None
        self._seen_since = now
