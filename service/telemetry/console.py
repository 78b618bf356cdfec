"""Shows a person how the service starts, serves and stops. Runs in the front end.

On a terminal it prints lines for people; elsewhere the same facts are log records.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from inferpool.service.client.texts import escape
from inferpool.service.telemetry.logs import Logs

logger = logging.getLogger(__name__)


class Console:
    """Shows what happens to the person at the terminal, or logs it."""

    def __init__(
        self, logs: Logs | None, stream: TextIO | None = None, *, is_colored: bool = True
    ) -> None:
        """Choose between lines for people and log records.

        Args:
            logs: Writes both, in its own thread, so that a stopped terminal (Ctrl-S) stops nothing
                else. None: log records only, for the program that handles them.
            stream: The stream that `logs` writes to; by default stderr.
            is_colored: Use colours on a terminal.
        """
        stream = sys.stderr if stream is None else stream
        self._logs = logs
        self._is_terminal = logs is not None and logs.is_human and stream.isatty()
        self._rich = RichConsole(
            force_terminal=True, no_color=not is_colored or None, highlight=False, soft_wrap=True
        )
        self._stages: dict[str, str] = {}
        self._placements: dict[str, str] = {}
        self._known: set[str] = set()
        """Workers that were ready before. A restart of one shows only its end and its outcome."""
        self._failures: dict[str, str] = {}
        """Reasons already shown in full, by the workers that failed for them and are still down."""

    def started(
        self,
        settings: Mapping[str, str],
        devices: Sequence[str],
        plan: Sequence[tuple[str, str]],
    ) -> None:
        """Show what is about to run.

        Args:
            settings: Settings worth knowing, with a short text each.
            devices: The devices found, a line each.
            plan: Each worker ("resnet/0") and its placement ("cuda:0").
        """
        self._placements = dict(plan)
        if not self._is_terminal:
            about = ", ".join(f"{name}: {value}" for name, value in settings.items())
            logger.info("starting%s", f" ({about})" if about else "")
            logger.info("devices: %s", "; ".join(devices))
            for worker, placement in plan:
                logger.info("worker %s on %s", worker, placement)
            return
        workers = [f"{worker} on {placement}" for worker, placement in plan]
        facts = {
            **{name: [value] for name, value in settings.items()},
            "devices": devices,
            "workers": workers,
        }
        self._print(Text("inferpool", style="bold"), *_aligned(facts), Text(""))

    def planned(self, plan: Sequence[tuple[str, str]]) -> None:
        """Record where workers that come later run; see `started`."""
        self._placements.update(plan)

    def left(self, workers: Sequence[str]) -> None:
        """Remove workers that will not come back."""
        for worker in workers:
            self._placements.pop(worker, None)
            self._stages.pop(worker, None)
            self._failures.pop(worker, None)
            self._known.discard(worker)

    def progress(self, worker: str, stage: str) -> None:
        """Show what a worker that loads is doing now."""
        if self._stages.get(worker) == stage:
            return
        self._stages[worker] = stage
        self._failures.pop(worker, None)
        if worker not in self._known:
            self._say(logging.INFO, worker, stage, "dim")
        elif not self._is_terminal:
            self._say(logging.DEBUG, worker, stage, "dim")

    def ready(self, worker: str, seconds: float) -> None:
        """Show that a worker is ready, `seconds` after it first showed progress."""
        self._stages.pop(worker, None)
        self._known.add(worker)
        self._say(logging.INFO, worker, f"ready in {seconds:.1f} s", "green")

    def failed(self, worker: str, reason: str) -> None:
        """Show that a worker ended or did not start, and is given up."""
        self._stages.pop(worker, None)
        like = next((name for name, told in self._failures.items() if told == reason), worker)
        said = f"failed: {reason}" if like == worker else f"failed, as {like} did"
        if like == worker:
            self._failures[worker] = reason
        self._say(logging.ERROR, worker, said, "red")

    def serving(
        self,
        url: str,
        models: Sequence[str],
        to_try: Sequence[tuple[str, str]] = (),
        still_loading: Sequence[str] = (),
        *,
        is_closed: bool = False,
    ) -> None:
        """Show that the address accepts calls.

        Args:
            url: Scheme, host and port.
            models: Names of the models served, the default one first.
            to_try: For each model "try" and a command, or "ask" and a sentence (`service.example`).
            still_loading: Names of the models that are not ready yet.
            is_closed: It serves nothing besides predictions and probes.
        """
        names = ", ".join(models)
        facts = {
            "page": f"{url}/",
            "docs": f"{url}/docs",
            "health": f"{url}/health",
            "metrics": f"{url}/metrics",
        }
        if is_closed:
            facts = {"health": f"{url}/health/ready"}
        if not self._is_terminal:
            logger.info("serving %s at %s", names, url, extra={"url": url})
            if still_loading:
                logger.info("not ready yet: %s", ", ".join(still_loading))
            for each in to_try:
                logger.info("%s: %s", *each)
            logger.info("%s", ", ".join(f"{name}: {link}" for name, link in facts.items()))
            return
        lines = {"not yet": [", ".join(still_loading)]} if still_loading else {}
        for kind, text in to_try:
            lines[kind] = [*lines.get(kind, ()), text]
        lines |= {name: [link] for name, link in facts.items()}
        head = Text.assemble("Serving ", (names, "bold"), " at ", (url, "bold cyan"))
        hint = Text("  Ctrl-C stops it", style="dim")
        self._print(Text(""), head, *_aligned(lines), hint, Text(""))

    def joined(self, model: str, to_try: tuple[str, str], still_loading: Sequence[str]) -> None:
        """Show that another model is ready after `serving`; the arguments are as there."""
        rest = f" (not yet: {', '.join(still_loading)})" if still_loading else ""
        if not self._is_terminal:
            logger.info("serving %s too%s", model, rest)
            logger.info("%s: %s", *to_try)
            return
        head = Text.assemble("Serving ", (model, "bold"), " too", rest)
        self._print(head, *_aligned({to_try[0]: [to_try[1]]}), Text(""))

    def stopping(self, reason: str) -> None:
        """Show that no new work is taken, and accepted work is finished."""
        if self._is_terminal:
            self._print(Text(f"Stopping ({escape(reason)}): finishing what was accepted"))
        else:
            logger.info("stopping: %s", reason)

    def stopped(self) -> None:
        """Show that everything has ended."""
        if self._is_terminal:
            self._print(Text("Stopped", style="bold"))
        else:
            logger.info("stopped")

    def _say(self, level: int, worker: str, text: str, style: str) -> None:
        placement = self._placements.get(worker, "")
        if not self._is_terminal:
            logger.log(level, "%s%s: %s", worker, f" on {placement}" if placement else "", text)
            return
        name_width = max(map(len, self._placements), default=0)
        place_width = max(map(len, self._placements.values()), default=0)
        self._print(
            Text.assemble(
                f"  {escape(worker):{name_width}}  ",
                (f"{escape(placement):{place_width}}  ", "cyan"),
                (escape(text), style),
            )
        )

    def _print(self, *lines: Text) -> None:
        with self._rich.capture() as capture:
            self._rich.print(*lines, sep="\n")
        assert self._logs is not None, "only a terminal gets lines"
        self._logs.write(capture.get())


def _aligned(facts: Mapping[str, Sequence[str]]) -> list[Text]:
    """Return a line per value, with the names in a column of their own."""
    width = max(map(len, facts))
    return [
        Text.assemble((f"  {'' if number else name:{width}}  ", "dim"), escape(value))
        for name, values in facts.items()
        for number, value in enumerate(values)
    ]
