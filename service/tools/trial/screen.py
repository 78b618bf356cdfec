"""Progress of a command, on a terminal or line by line, and its interruption."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

_ECHO_S = 0.5
"""A second SIGINT within this time counts as the first: a command that started us may pass on the
terminal's signal, which we have already. A later one ends the run at once."""


class Screen:
    """Shows progress. A context manager that clears the bar at its end."""

    def __init__(self, stream: TextIO, text: str = "") -> None:
        self._console = Console(file=stream, highlight=False)
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            BarColumn(20, table_column=Column(width=20)),
            TimeElapsedColumn(table_column=Column(width=7)),
            TextColumn("{task.description}  {task.fields[figures]}", table_column=rest),
            console=self._console,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task(text, total=None, figures="")
        self._shown_at = time.monotonic()
        self._line_every_s = 5.0

    def __enter__(self) -> "Screen":
        """Show the bar, where there is a terminal."""
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the bar."""
        if self._console.is_terminal:  # elsewhere it would leave an empty line
            self._progress.stop()

    def begin(self, text: str, line_every_s: float = 5.0) -> None:
        """Show the present step; without a terminal, figures follow line by line."""
        self._line_every_s = line_every_s
        self._progress.update(self._task, description=text, total=None, figures="")
        if not self._console.is_terminal:
            self._console.print(text, markup=False)
        self._shown_at = time.monotonic()

    def show(self, share: float, figures: str) -> None:
        """Show the done share, from 0 to 1, and the figures so far."""
        self._progress.update(self._task, total=1.0, completed=min(share, 1.0), figures=figures)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._shown_at > self._line_every_s:
            self._console.print(f"{min(share, 1.0):4.0%}  {figures}", markup=False, soft_wrap=True)
            self._shown_at = now


class Interruption:
    """A signal that asks for the end of a run. Lives in the event loop."""

    def __init__(self, *numbers: int, on_first: Callable[[], object] = lambda: None) -> None:
        """Handle these signals from now on, SIGINT among them."""
        self.has_come = False
        self._on_first = on_first
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        if not self.has_come:
            self.has_come = True
            loop = asyncio.get_running_loop()
            loop.call_later(_ECHO_S, loop.remove_signal_handler, signal.SIGINT)
            self._on_first()
