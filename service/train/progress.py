"""Progress of a training run: a bar on a terminal, or a line for each epoch. Command's process.

The ranks are other processes, and the main thread waits for them. So a thread reads the file
`metrics.jsonl`, which rank 0 writes.
"""

import contextlib
import threading
from io import BytesIO
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inferpool.models.texts import on_one_line
from inferpool.models.training.events import (
    AnyEvent,
    Noted,
    Skipped,
    Started,
    Stepped,
    Validated,
    read_events,
)

_READ_S = 0.2
_MAX_SKIPPED = 5
"""Skipped images that are named."""
_LEAVE_S = 10.0
_WIDE = 110
"""Columns of a terminal that has room for all figures."""


class TrainProgress:
    """Shows the events of a run from `start` to `stop`, without earlier ones."""

    def __init__(self, stream: TextIO, metrics: Path, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._tail = MetricsTail(metrics)
        self._console = _PatientConsole(
            file=stream, highlight=False, markup=False, soft_wrap=True, quiet=is_quiet
        )
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
            disable=is_quiet or not stream.isatty(),
        )
        self._task = self._progress.add_task("the ranks start", total=None, figures="")
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._is_over = threading.Event()
        self._shown_until = float("-inf")
        """The moment of the last event that was shown, or present at the start."""
        self._started: Started | None = None
        self._has_started = False
        """True once ranks have started since `start`."""
        self._best = 0.0
        self._skipped: set[str] = set()

    def start(self) -> None:
        """Begin to show events. Start the ranks after this."""
        if self._is_quiet:
            return
        for event in self._tail.read():
            self._take(event)
        self._progress.start()
        self._thread.start()

    def stop(self) -> None:
        """Show the remaining events, and remove the bar."""
        if self._is_quiet or self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join(_LEAVE_S)
        with contextlib.suppress(OSError):  # the terminal is gone
            self._end()

    def _end(self) -> None:
        self._progress.stop()
        if (num_more := len(self._skipped) - _MAX_SKIPPED) > 0:
            self._say(f"{num_more:,} more images are skipped")

    def _run(self) -> None:
        is_over = False
        with contextlib.suppress(OSError):  # the terminal is gone: the run goes on
            while not is_over:
                is_over = self._is_over.wait(_READ_S)
                self._update()

    def _update(self) -> None:
        events = list(self._tail.read())
        shown_until = float("-inf")
        if self._tail.is_new:  # lines are gone: their events do not hold
            self._best = 0.0
            shown_until = self._shown_until
        for event in events:
            self._take(event)
            if event.at > shown_until:
                self._show(event)

    def _take(self, event: AnyEvent) -> None:
        """Store the facts that later events are shown with."""
        self._shown_until = max(self._shown_until, event.at)
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Validated):
            self._best = max(self._best, event.accuracy)

    def _show(self, event: AnyEvent) -> None:
        match event:
            case Started():
                if event.step or self._has_started:
                    self._say(f"starts again from step {event.step:,} of {event.num_steps:,}")
                self._has_started = True
                # A new bar: it estimates the time left from the work since its start.
                self._progress.remove_task(self._task)
                self._task = self._progress.add_task(
                    "", total=event.num_steps, completed=event.step, figures=""
                )
            case Stepped():
                self._progress.update(
                    self._task,
                    completed=event.step,
                    description=self._epoch(event.epoch),
                    figures=self._figures(event),
                )
            case Validated():
                self._progress.update(self._task, completed=event.step)
                best = " (best)" if event.is_best else ""
                self._say(
                    f"{self._epoch(event.epoch)}: loss {event.loss:.3g}, held-out accuracy "
                    f"{_percent(event.accuracy)}{best}"
                )
            case Noted():
                self._say(event.text)
            case Skipped():
                if event.path not in self._skipped:
                    self._skipped.add(event.path)
                    if len(self._skipped) <= _MAX_SKIPPED:
                        self._say(f"{event.path} is skipped: {event.reason}")

    def _epoch(self, epoch: int) -> str:
        return f"epoch {epoch}/{self._started.num_epochs}" if self._started else f"epoch {epoch}"

    def _figures(self, event: Stepped) -> str:
        loss, rate = f"loss {event.loss:.3g}", f"rate {event.learning_rate:.1e}"
        figures = [loss, rate, f"{event.images_per_s:,.0f} images/s"]
        if self._console.width < _WIDE:
            figures = [loss, f"{event.images_per_s:,.0f}/s"]
        if self._best:
            figures.append(f"best {_percent(self._best)}")
        return ", ".join(figures)

    def _say(self, text: str) -> None:
        self._console.print(on_one_line(text))


class MetricsTail:
    """Reads events as they are appended to a file, which may not exist yet.

    After a restart rank 0 removes the lines after the checkpoint. The file is then read from its
    start again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._last = b""
        """The line that ends at the position; if it differs, the file is another one."""
        self.is_new = False
        """True if the last `read` began at the start of the file."""

    def read(self) -> list[AnyEvent]:
        """Return the events of the new complete lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position - len(self._last))
                self.is_new = not self._position or file.read(len(self._last)) != self._last
                if self.is_new:
                    self._position, self._last = 0, b""
                    file.seek(0)
                data = file.read()
        except OSError:  # it does not exist yet, or its disk fails, as rank 0 reports
            self.is_new = False
            return []
        lines = data[: data.rfind(b"\n") + 1]
        if lines:
            self._position += len(lines)
            self._last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        return list(read_events(BytesIO(lines)))


class _PatientConsole(Console):
    """A console that stops writing if its reader is gone, so that the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
