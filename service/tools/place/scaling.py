"""Decides how many hosts there should be, from the load that the front end reports.

Pure: time is an argument. `inferpool place` asks it every few seconds.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil

BUSY_AFTER_GROWTH = 0.65
"""Hosts are requested until their workers would compute for this share of their time."""
_BUSY_AFTER_RETURN = 0.55
"""A host is given back only if the others would then compute for no more than this. Without the gap
to `_BUSY_HIGH`, hosts would be given back and requested in turns."""
_BUSY_HIGH = 0.85
_QUEUE_HIGH = 0.25
_PRESSED_S = 10.0
"""Least time of pressure before a request: a host comes minutes later, too late for a burst."""
_START_S = 300.0
"""How long a requested host may take before others are requested in its place."""
QUIET_S = 900.0
"""A host is given back if the load would have fitted without it for this long."""
_RETURN_PAUSE_S = 300.0
"""Between one return and the next, and after growth."""
_RETURN_SHARE = 0.1
"""Largest share of all hosts that is given back at once; at least one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Load of a front end between two readings."""

    num_hosts: int
    """Hosts with a running agent."""
    offered_per_s: float
    """Instances that came, admitted or not."""
    refused_per_s: float
    """Instances among them that were refused for lack of room or time."""
    busy: float
    """Share of their time in which the workers computed."""
    queue_share: float
    """Waiting instances, as a share of the queue's length; the largest of all models."""
    p99_ratio: float = 0.0
    """99th percentile of the latency over the objective; 0 where none is set."""


class Scaling:
    """Decides how many hosts there should be, from the load of the last quarter of an hour."""

    def __init__(self, num_hosts: int, *, min_hosts: int, max_hosts: int) -> None:
        """Store the number of present hosts, and the bounds."""
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self.wanted = min(max(num_hosts, min_hosts), max_hosts)
        """Wanted hosts."""
        self.reason = ""
        """Why `wanted` last changed, for a log line."""
        self._needs: deque[tuple[float, float]] = deque()
        """Needed hosts, in falling order: the first is the largest of the quiet time."""
        self._seen_since: float | None = None
        self._pressed_since: float | None = None
        self._grown_at = self._returned_at = float("-inf")

    def decide(self, now: float, demand: Demand) -> int:
        """Return the number of wanted hosts now."""
        if self._seen_since is None:
            self._seen_since = now
        if demand.num_hosts == 0:
            self._forget(now)  # without hosts the load is unknown
            return self.wanted
        self._note(now, demand.num_hosts * demand.busy)
        pressure = self._pressure(demand)
        if not pressure:
            self._pressed_since = None
            self._give_back(now)
        elif self._pressed_since is None:
            self._pressed_since = now
        elif now - self._pressed_since >= _PRESSED_S:
            self._grow(now, demand, pressure)
        return self.wanted

    def _pressure(self, demand: Demand) -> str:
        if demand.refused_per_s > 0:
            return f"{demand.refused_per_s:.3g} instances are refused each second"
        if demand.p99_ratio > 1:
            return f"the 99th percentile is {demand.p99_ratio:.1f} times the objective"
        if demand.queue_share > _QUEUE_HIGH:
            return f"the queue is full to {demand.queue_share:.0%}"
        if demand.busy > _BUSY_HIGH:
            return f"workers compute for {demand.busy:.0%} of their time"
        return ""

    def _grow(self, now: float, demand: Demand, pressure: str) -> None:
        """Request the hosts that the load needs, at most twice the present ones."""
        awaited = demand.num_hosts < self.wanted and now - self._grown_at < _START_S
        served_per_s = demand.offered_per_s - demand.refused_per_s
        excess = demand.offered_per_s / served_per_s if served_per_s > 0 else 2.0
        need = demand.num_hosts * demand.busy * min(excess, 2.0) / BUSY_AFTER_GROWTH
        least = self.wanted if awaited else demand.num_hosts + 1
        most = min(2 * demand.num_hosts, self._max_hosts)
        grown = min(max(ceil(need - 1e-6), least), most)
        if grown > self.wanted:
            self.reason, self.wanted, self._grown_at = pressure, grown, now

    def _give_back(self, now: float) -> None:
        """Lower `wanted` by hosts that the quiet time did not need, a part of them at a time."""
        began = max(self._grown_at, self._returned_at) + _RETURN_PAUSE_S
        if self._seen_since is None or now < max(began, self._seen_since + QUIET_S):
            return
        needed = max(ceil(self._needs[0][1] / _BUSY_AFTER_RETURN - 1e-6), self._min_hosts)
        num = min(self.wanted - needed, max(1, int(self.wanted * _RETURN_SHARE)))
        if num > 0:
            self.wanted -= num
            self._returned_at = now
            self.reason = f"{needed} are enough for all of the last {QUIET_S / 60:.0f} minutes"

    def _note(self, now: float, need: float) -> None:
        """Store the largest needs of the quiet time, without those that are older and smaller."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now, need))
        while self._needs[0][0] < now - QUIET_S:
            self._needs.popleft()

    def _forget(self, now: float) -> None:
        self._needs.clear()
        self._pressed_since = None
        self._seen_since = now
