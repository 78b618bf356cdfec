"""Thresholds: the objective of `ramp`, and what decides the exit status of the others."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from inferpool.service.tools.trial.generators import LoadRun

_MAX_BEHIND = 0.05
"""Share of a step by which its last answer may come after its end."""
_SLACK = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLimit:
    """A number of errors, or a share of all requests."""

    num: int = 0
    share: float | None = None

    def allowed(self, num_requests: int) -> int:
        """Return how many errors there may be among so many requests."""
        return self.num if self.share is None else int(self.share * num_requests)

    def __str__(self) -> str:
        return f"{self.num}" if self.share is None else f"{self.share:.4g} of all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Bounds of a run; None for no bound. Latencies are those of good answers."""

    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    errors: ErrorLimit | None = None
    min_rate: float | None = None
    """Good answers per second."""
    max_drift: float | None = None
    """How much p99 may grow from the first to the last quarter of a soak, in percent."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) is not None for each in fields(self))

    def percentiles(self) -> Iterator[tuple[str, float, float]]:
        """Yield the bounds of latencies: name, percentile and milliseconds."""
        limits = (self.p50_ms, self.p90_ms, self.p99_ms, self.p999_ms)
        for percent, limit_ms in zip((50.0, 90.0, 99.0, 99.9), limits, strict=True):
            if limit_ms is not None:
                yield f"p{percent:g}", percent, limit_ms

    def misses(self, run: LoadRun) -> list[str]:
        """Say in sentences which thresholds were missed."""
        tally = run.tally
        missed = []
        for name, percent, limit_ms in self.percentiles():
            found_ms = tally.latency.percentile_s(percent) * 1e3
            if found_ms > limit_ms:
                missed.append(f"{name} {found_ms:,.2f} ms is above {limit_ms:g} ms")
        if tally.num_good == 0:
            missed.append("no request was answered well")
        if self.errors is not None and tally.num_errors > self.errors.allowed(tally.num_requests):
            missed.append(f"{tally.num_errors:,} errors are more than {self.errors}")
        if self.min_rate is not None and run.rate < self.min_rate:
            missed.append(f"{run.rate:,.1f} requests/s are fewer than {self.min_rate:g}")
        return missed

    def misses_in(self, planned_s: float, run: LoadRun) -> list[str]:
        """Say what a step of `ramp` missed; falling behind the rate counts, too."""
        missed = replace(self, min_rate=None).misses(run)
        behind_s = run.finished_s - planned_s - run.tally.latency.percentile_s(50)
        if run.is_complete and behind_s > _MAX_BEHIND * planned_s and not missed:
            missed.append(f"a queue grew: the last answer came {behind_s:,.1f} s late")
        return missed

    def are_lost(self, run: LoadRun, num_planned: float) -> bool:
        """Return whether a step cannot keep them any more, whatever comes."""
        tally = run.tally
        if self.errors is not None and tally.num_errors > self.errors.allowed(int(num_planned)):
            return True
        return any(
            tally.latency.num_above(limit_ms / 1e3)
            > max(1.0, (1 - percent / 100) * num_planned * _SLACK)
            for _, percent, limit_ms in self.percentiles()
        )
