"""The result of tuning: a table, a recommendation, and the figures as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TextIO

from inferpool.service.telemetry.versions import version_of
from inferpool.service.tools.trial.report import (
    Note,
    Part,
    ReportTable,
    console_for,
    line_chart,
    machine,
    show,
)
from inferpool.service.tools.tune.plan import Goal
from inferpool.service.tools.tune.search import LEAST_GAIN, SearchOutcome, Tried, text_of

_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MIB = 2**20
_COLUMNS, _LINES = 60, 14
_MARGIN = 0.08
_BUSY_CORES = 0.5
"""Clients that use more cores than this distort the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """Requests per second and p99 of one candidate."""

    mark: str
    """A letter or digit that the table has, too."""
    p99_ms: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Results of a run of `inferpool tune`."""

    model: str
    source: str
    preset: str
    goal: Goal
    outcome: SearchOutcome
    seconds: float
    date: str
    is_interrupted: bool = False
    failure: str = ""

    @property
    def best(self) -> Tried:
        """The candidate to use."""
        assert self.outcome.best is not None
        return self.outcome.best

    @property
    def points(self) -> list[TradeOff]:
        """The candidates that were measured."""
        return [
            TradeOff(mark=mark, p99_ms=tried.p99_s * 1e3, rate=tried.sample.rate)
            for mark, tried in zip(_MARKS, self.outcome.tried, strict=False)
            if tried.sample.tally.num_in_time
        ]

    def table(self) -> ReportTable:
        """Return a row for each candidate."""
        columns = (
            "", "settings", "clients", "requests/s", "p50 ms", "p99 ms", "MiB", "gain", "verdict",
        )  # fmt: skip
        rows = [
            self._cells(mark, tried)
            for mark, tried in zip(_MARKS, self.outcome.tried, strict=False)
        ]
        return ReportTable(title="", columns=columns, rows=rows, texts=(0, 1, 8))

    def page(self, settings: str) -> list[Part]:
        """Return the parts of a page, with the text of the settings file."""
        parts: list[Part] = [Note(text=line) for line in self.conclusion()]
        if points := self.points:
            lines = {"no other is better in both": front(points)}
            for point in points:
                tried = self.outcome.tried[_MARKS.index(point.mark)]
                lines[f"{point.mark}: {self.label(tried)}"] = [point]
            limit_ms = self.goal.p99_ms
            parts.append(
                line_chart(
                    "p99 against requests per second", "requests/s", "p99, ms",
                    {name: [(each.rate, each.p99_ms) for each in those]
                     for name, those in lines.items()},
                    mode="lines+markers",
                    limit=(limit_ms, f"{limit_ms:g} ms") if limit_ms else None,
                )
            )  # fmt: skip
        return [*parts, self.table(), Note(text=settings, tone="code")]

    def label(self, tried: Tried) -> str:
        """Return a readable name of a candidate."""
        if tried.changes:
            return text_of(tried.changes)
        speed = "" if self.preset == "exact" else f" (speed: {self.preset})"
        return f"the settings as they are{speed}"

    def write(self, stream: TextIO) -> None:
        """Write the report as text."""
        show([self.table()], console_for(stream))
        if len(self.points) > 1:
            stream.write("\n")
            chart = text_chart(self.points, self.goal.p99_ms)
            stream.writelines(f"{line}\n" for line in chart)
            stream.write("Gains are of rounds in turns; other figures are of their own time.\n")
        stream.write("\n")
        stream.writelines(f"{line}\n" for line in self.conclusion())

    def conclusion(self) -> Iterator[str]:
        """Yield what to use, why, and reasons to doubt it."""
        outcome, best = self.outcome, self.best
        if not best.changes:
            are_better = f"nothing that was tried is {LEAST_GAIN - 1:.0%} better"
            others = [tried for tried in outcome.tried if tried.changes]
            yield (
                "Keep the settings as they are: "
                f"{are_better if others else 'nothing else was measured'}."
            )
        elif outcome.is_confirmed:
            yield f"Use {text_of(best.changes)}: {best.gain:.2f} x the settings as they were."
        else:
            yield (
                f"Use {text_of(best.changes)}: about {best.gain:.2f} x the settings as they were, "
                "not confirmed by measuring both once more."
            )
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        outcome, goal = self.outcome, self.goal
        if self.failure:
            yield f"Ended before its time: {self.failure}"
        elif self.is_interrupted:
            yield "Interrupted: this is what was found until then."
        if outcome.is_out_of_reach:
            yield (
                f"A p99 of {goal.p99_ms:g} ms is out of reach, even for one client at a time: "
                "this is about latency alone."
            )
        elif outcome.connections < goal.connections:
            yield (
                f"{goal.connections} clients at once are too many for a p99 of {goal.p99_ms:g} ms: "
                f"about {outcome.connections} keep it."
            )
        if outcome.untried:
            yield (
                f"The budget did not suffice for: {', '.join(outcome.untried)} "
                f"(one more takes about --budget {ceil(outcome.needed_s)})."
            )
        cores = max((tried.sample.generator_cores for tried in outcome.tried), default=0.0)
        warning = ", so that it is a part of what was measured" if cores > _BUSY_CORES else ""
        yield f"The clients kept {cores:.2f} cores busy{warning}."

    def comments(self) -> Iterator[str]:
        """Return the comments at the head of the settings file."""
        first, best = self.outcome.tried[0], self.best
        here = machine()
        yield f"{self.model} ({self.source}), tuned by inferpool {version_of()} on {self.date}"
        yield f"{here['cpu']}, {here['cores']}, torch {version_of('torch')}"
        limit = f", p99 within {self.goal.p99_ms:g} ms" if self.goal.p99_ms is not None else ""
        yield f"{self.outcome.connections} clients at once{limit}"
        told = {"as it was": first, "with this": best} if best.changes else {"as it is": first}
        for name, tried in told.items():
            yield (
                f"{name}: {figure(tried.sample.rate)} requests/s, "
                f"p50 {figure(tried.sample.percentile_s(50) * 1e3)} ms, "
                f"p99 {figure(tried.p99_s * 1e3)} ms"
            )
        if best.changes:
            kind = "in turns" if self.outcome.is_confirmed else "on the way, not confirmed"
            yield f"gain, measured {kind}: {best.gain:.2f} x"

    def as_dict(self) -> Mapping[str, object]:
        """Return everything for JSON."""
        outcome = self.outcome
        return {
            "version": version_of(),
            "torch": version_of("torch"),
            "machine": machine(),
            "date": self.date,
            "model": self.model,
            "source": self.source,
            "preset": self.preset,
            "goal": {"connections": self.goal.connections, "p99_ms": self.goal.p99_ms},
            "seconds": round(self.seconds, 3),
            "connections": outcome.connections,
            "recommended": dict(self.best.changes),
            "gain": self.best.gain,
            "is_confirmed": outcome.is_confirmed,
            "is_interrupted": self.is_interrupted,
            "failure": self.failure,
            "untried": list(outcome.untried),
            "tried": [self._tried_dict(tried) for tried in outcome.tried],
        }

    def _tried_dict(self, tried: Tried) -> Mapping[str, object]:
        sample = tried.sample
        return {
            "changes": dict(tried.changes),
            "connections": tried.connections,
            "requests_per_s": sample.rate,
            "p50_ms": sample.percentile_s(50) * 1e3,
            "p99_ms": tried.p99_s * 1e3,
            "answers": sample.tally.num_in_time,
            "errors": dict(sample.tally.errors),
            "generator_cores": sample.generator_cores,
            "memory_bytes": tried.memory_bytes,
            "ratio": tried.ratio,
            "gain": tried.gain,
            "verdict": tried.verdict,
            "reason": tried.reason,
        }

    def _cells(self, mark: str, tried: Tried) -> Sequence[str]:
        sample = tried.sample
        verdict = f"{tried.verdict}: {tried.reason}" if tried.reason else tried.verdict
        if sample.tally.num_errors:
            ((error, count),) = sample.tally.errors.most_common(1)
            verdict += f" ({count} x {error})"
        if tried is self.best:
            verdict += "  <- use this"
        if not sample.tally.num_in_time:
            return (mark, self.label(tried), "", "", "", "", "", "", verdict)
        return (
            mark,
            self.label(tried),
            str(tried.connections),
            figure(sample.rate),
            figure(sample.percentile_s(50) * 1e3),
            figure(tried.p99_s * 1e3),
            f"{tried.memory_bytes / _MIB:.0f}",
            f"{tried.gain:.2f} x",
            verdict,
        )


def front(points: Sequence[TradeOff]) -> list[TradeOff]:
    """Return the Pareto front: no other point has both a higher rate and a lower p99."""
    found: list[TradeOff] = []
    for point in sorted(points, key=lambda point: (point.p99_ms, -point.rate)):
        if not found or point.rate > found[-1].rate:
            found.append(point)
    return found


def text_chart(points: Sequence[TradeOff], p99_ms: float | None) -> list[str]:
    """Draw each candidate's mark, with a star before it if it is on the front."""
    x_low, x_high = _range([point.p99_ms for point in points])
    y_low, y_high = _range([point.rate for point in points])
    grid = [[" "] * (_COLUMNS + 2) for _ in range(_LINES)]
    if p99_ms is not None and x_low <= p99_ms <= x_high:
        column = _step(p99_ms, x_low, x_high, _COLUMNS)
        for line in grid:
            line[column] = ":"
    best = front(points)
    for point in sorted(points, key=lambda point: point in best):  # the front over the others
        column = _step(point.p99_ms, x_low, x_high, _COLUMNS)
        line = grid[_LINES - 1 - _step(point.rate, y_low, y_high, _LINES)]
        line[column + 1] = point.mark
        if point in best:
            line[column] = "*"
    width = max(len(figure(each)) for each in (y_low, y_high))
    labels = {0: figure(y_high), _LINES - 1: figure(y_low)}
    rows = [
        f"{labels.get(number, ''):>{width}} |{''.join(line).rstrip()}"
        for number, line in enumerate(grid)
    ]
    low, high = f"{figure(x_low)} ms", f"{figure(x_high)} ms"
    middle = "p99".center(_COLUMNS + 2 - len(low) - len(high))
    return [
        "requests/s against p99; * where no other is better in both",
        *rows,
        f"{'':{width}} +{'-' * (_COLUMNS + 2)}",
        f"{'':{width}}  {low}{middle}{high}",
    ]


def figure(value: float) -> str:
    """Return a number with its significant digits: 12,345, 68.1, 0.7."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value with a margin; they always differ."""
    low, high = min(values), max(values)
    margin = (high - low) * _MARGIN or high * _MARGIN or 1.0
    return max(0.0, low - margin), high + margin


def _step(value: float, low: float, high: float, num_steps: int) -> int:
    return min(num_steps - 1, int((value - low) / (high - low) * num_steps))
