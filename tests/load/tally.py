"""What became of requests: in all, and over time. Bounded, so that a run may last for days."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.load.histogram import Histogram

_MAX_KINDS = 40
"""Kinds of errors that are told apart; what comes after that is counted as "other"."""
_MAX_BINS = 400


def _sums() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class Tally:
    """What became of some requests. Tallies of several processes or moments add up."""

    latency: Histogram = field(default_factory=Histogram)
    """Of requests that were answered well, from the moment they were meant to be sent."""
    refusal: Histogram = field(default_factory=Histogram)
    """Of all other answers: how long it took to say no."""
    lateness: Histogram = field(default_factory=Histogram)
    """From the moment a request was meant to be sent until it was: waits of the generator's own."""
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Everything that is no good answer, by kind."""
    sent_bytes: int = 0
    received_bytes: int = 0
    timing_ms: defaultdict[str, float] = field(default_factory=_sums)
    """Sums of what Server-Timing said, by name."""
    num_timed: Counter[str] = field(default_factory=Counter)
    num_retry_after: int = 0
    retry_after_s: float = 0.0
    """The sum of all that was asked for."""
    num_unfinished: int = 0
    """Still under way when the run was stopped early: neither good nor bad."""

    @property
    def num_good(self) -> int:
        """Requests that were answered well."""
        return self.latency.num

    @property
    def num_errors(self) -> int:
        """All other requests."""
        return self.errors.total()

    @property
    def num_requests(self) -> int:
        """All requests that have come to an end."""
        return self.num_good + self.num_errors

    def fail(self, kind: str) -> None:
        """Count a request that got no good answer."""
        if kind not in self.errors and len(self.errors) >= _MAX_KINDS:
            kind = "other"
        self.errors[kind] += 1

    def add(self, other: "Tally") -> None:
        """Count all that another one has."""
        self.latency.add(other.latency)
        self.refusal.add(other.refusal)
        self.lateness.add(other.lateness)
        self.statuses.update(other.statuses)
        for kind, num in other.errors.items():
            known = kind in self.errors or len(self.errors) < _MAX_KINDS
            self.errors[kind if known else "other"] += num
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        for name, sum_ms in other.timing_ms.items():
            self.timing_ms[name] += sum_ms
        self.num_timed.update(other.num_timed)
        self.num_retry_after += other.num_retry_after
        self.retry_after_s += other.retry_after_s
        self.num_unfinished += other.num_unfinished

    def timings_ms(self) -> dict[str, float]:
        """What Server-Timing said on average, by name, in the order that the server names them."""
        return {name: self.timing_ms[name] / num for name, num in self.num_timed.items()}


class Series:
    """Tallies over time, in bins of equal width; when there are too many, neighbours are merged."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self.bins: list[Tally] = []

    def add(self, at_s: float, tally: Tally) -> None:
        """Count what became known at a moment, in seconds from the start of measuring."""
        number = max(0, int(at_s / self.width_s))
        while number >= _MAX_BINS:
            self._merge()
            number = max(0, int(at_s / self.width_s))
        while len(self.bins) <= number:
            self.bins.append(Tally())
        self.bins[number].add(tally)

    def _merge(self) -> None:
        for left, right in zip(self.bins[::2], self.bins[1::2], strict=False):
            left.add(right)
        self.bins = self.bins[::2]
        self.width_s *= 2
