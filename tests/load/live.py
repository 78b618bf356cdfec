"""What is shown while the load runs: a bar on a terminal, plain lines elsewhere (on stderr)."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tests.load.plan import Plan
from tests.load.tally import Tally
from tests.load.team import Outcome

_WINDOW_TICKS = 8
"""The figures are those of the last two seconds or so."""


class Live:
    """A context manager; `begin` starts a phase and returns what shows its course."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.fields[title]}"),
            BarColumn(24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)

    def __enter__(self) -> "Live":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, plan: Plan, title: str) -> Callable[[Outcome], None]:
        """Show a phase; what is returned is called with all that is known, again and again."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        total_s = plan.warmup_s + (plan.duration_s or 0.0)
        total = float(plan.num_requests or total_s)
        task = self._progress.add_task("connecting", title=title, total=total)
        line_every_s = min(60.0, max(1.0, total_s / 20))
        recent: list[tuple[float, int, int]] = []
        line_at = time.monotonic() + line_every_s

        def show(outcome: Outcome) -> None:
            nonlocal line_at
            tally = outcome.tally
            recent.append((time.monotonic(), tally.num_good, tally.num_requests))
            del recent[:-_WINDOW_TICKS]
            num_done = tally.num_requests if plan.num_requests else outcome.at_s + plan.warmup_s
            text = _figures(outcome, recent)
            self._progress.update(task, completed=min(total, num_done), description=text)
            if not self._console.is_terminal and time.monotonic() >= line_at:
                line_at += line_every_s
                self.say(f"{title} {100 * min(1.0, num_done / total):3.0f}%  {text}")

        return show


def _figures(outcome: Outcome, recent: list[tuple[float, int, int]]) -> str:
    if outcome.at_s < 0:
        return f"warming up  in flight {outcome.num_in_flight}"
    (began, good_before, _), (ended, good_now, _) = recent[0], recent[-1]
    rate = (good_now - good_before) / (ended - began) if ended > began else 0.0
    p50_ms, p99_ms = _latest_ms(outcome)
    waiting = f" + {outcome.num_waiting} waiting" if outcome.num_waiting else ""
    return (
        f"{rate:,.0f}/s  p50 {p50_ms:.2f}  p99 {p99_ms:.2f} ms  "
        f"errors {outcome.tally.num_errors:,}  in flight {outcome.num_in_flight}{waiting}"
    )


def _latest_ms(outcome: Outcome) -> tuple[float, float]:
    """p50 and p99 of the last moments."""
    latest = Tally()
    for tally in outcome.series.bins[-3:]:
        latest.add(tally)
    return latest.latency.percentile_s(50) * 1e3, latest.latency.percentile_s(99) * 1e3
