"""The frame of every benchmark: contenders at several loads in alternating rounds, and a report.

Rounds go A B C A B C, and ratios are taken within a round: a machine that slows down for a while
slows all contenders of a round alike.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import httpx

from inferpool.service.tools.trial import report
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.screen import Screen
from tests.bench.server import (
    OUT,
    ROOT,
    BenchError,
    BenchServer,
    Bodies,
    ServerCommand,
    load_closed,
    require_wrk,
    run_wrk,
)

FAILURES = (BenchError, TrialError, OSError, httpx.HTTPError)
"""Errors that end a turn without figures."""
_LOOP = "sum(number & 3 for number in range(200_000))"
"""A fixed loop, whose time tells a slow machine from a slow service."""
T = TypeVar("T")
Key = tuple[str, float, str]
"""Workload, load and contender: a row of the tables."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one contender at one load in one round."""

    workload: str
    contender: str
    load: float
    """Connections, requests per second, a batch size...: the table's heading says which."""
    figures: Mapping[str, float]
    round: int = 0
    """Set by the frame."""


Turn = Callable[[int], Iterable[Cell]]
"""Measures one contender in one round, whose number it gets: starts it, loads it, ends it."""


class Benchmark:
    """One run of a benchmark: takes the turns, keeps what was measured, prints and saves it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.cells: list[Cell] = []
        self.failures: list[str] = []
        """Turns that gave nothing, and why."""
        self.answers: dict[str, str] = {}
        """First answer of each contender: shows whether all do the same work."""
        self.content: dict[str, Any] = {}
        """Further content of the JSON file."""
        self.is_complete = True
        self.parts: list[report.Part] = []
        """Tables, notes and charts of the report."""

    def take_turns(self, turns: Mapping[str, Turn], rounds: int = 0) -> None:
        """Let all take their turn in each round. A turn that fails is noted; Ctrl-C ends all."""
        total = (rounds or self.args.rounds) * len(turns)
        with Screen(sys.stderr) as screen:
            for number in range(total):
                round_, which = divmod(number, len(turns))
                name, take = list(turns.items())[which]
                what = f"round {round_ + 1}: {name}"
                screen.begin(f"[{number + 1}/{total}] {what}")
                screen.show(number / total, "")
                try:
                    for cell in take(round_):
                        self.cells.append(replace(cell, round=round_))
                except FAILURES as error:
                    self.failures.append(f"{what}: {error or repr(error)}")
                except KeyboardInterrupt:
                    self.is_complete = False
                    return

    def closed_turn(self, workload: str, bodies: Bodies, command: ServerCommand) -> Turn:
        """Return a turn that loads a server in a closed loop at each number of connections."""
        require_wrk()

        def take(_: int) -> Iterator[Cell]:
            with self.warm_server(workload, bodies, command) as server:
                for connections in self.args.connections:
                    figures = load_closed(server, bodies, connections, self.args.secs)
                    yield Cell(workload, command.name, connections, figures)

        return take

    @contextmanager
    def warm_server(
        self, workload: str, bodies: Bodies, command: ServerCommand
    ) -> Iterator[BenchServer]:
        """Start a server, load it for `--warm` seconds, and yield it."""
        with BenchServer(command, self.args.port) as server:
            answer = server.wait_ready(bodies)
            self.answers.setdefault(f"{workload}, {command.name}", answer[:300])
            if self.args.warm:
                run_wrk(server, bodies, 16, self.args.warm)
            yield server

    def report(self, load: str = "", caption: str = "") -> None:
        """Report all cells: a table for each set of figures, a row for a contender at a load.

        `load` is the heading of the loads; "" leaves their column out.
        """
        tables: dict[Sequence[str], list[Cell]] = {}
        for cell in self.cells:
            tables.setdefault(tuple(cell.figures), []).append(cell)
        for figures, cells in tables.items():
            heads = ["workload", "contender", *filter(None, [load]), *figures, "rounds"]
            rows = [
                [workload, contender, *([f"{at:g}"] if load else []),
                 *(range_text([cell.figures[each] for cell in row]) for each in figures),
                 f"{len(row)}"]
                for (workload, at, contender), row in rows_of(cells).items()
            ]  # fmt: skip
            self.add_table(self.name, heads, rows, f"{caption} Median (range) of the rounds.")

    def report_ratios(
        self, load: str, figures: Sequence[str], is_reference: Callable[[str], bool]
    ) -> None:
        """Report figures of each contender divided by those of each reference, by its name."""
        rows, known = [], rows_of(self.cells)
        for ours, theirs in ((ours, theirs) for ours in known for theirs in known):
            if ours[:2] != theirs[:2] or is_reference(ours[2]) or not is_reference(theirs[2]):
                continue
            found = [ratios(known[ours], known[theirs], figure) for figure in figures]
            if any(found):
                texts = [range_text(each) if each else "-" for each in found]
                rows.append([ours[0], f"{ours[2]} / {theirs[2]}", f"{ours[1]:g}", *texts])
        if rows:
            caption = "Median (range) of the ratios within a round."
            self.add_table("Ratios", ["workload", "ratio", load, *figures], rows, caption)

    def draw(self, figure: str, load: str, *, is_log: bool = False, limit: float = 0) -> None:
        """Draw a figure against the load: a chart for each workload, a line for each contender.

        `limit` is an objective to draw; 0: none.
        """
        charts: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for (workload, at, contender), row in rows_of(self.cells).items():
            middle = statistics.median(cell.figures[figure] for cell in row)
            charts.setdefault(workload, {}).setdefault(contender, []).append((at, middle))
        self.parts += (
            report.line_chart(
                f"{workload}: {figure}", load, "median over rounds", lines,
                mode="lines+markers", log_x=is_log, log_y=is_log,
                limit=(limit, "objective") if limit else None,
            )
            for workload, lines in charts.items()
        )  # fmt: skip

    def add_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""
    ) -> None:
        """Report a table."""
        texts = (0, 1) if columns[0] == "workload" else (0,)
        self.parts.append(
            report.ReportTable(
                title=title, columns=columns, rows=rows, caption=caption, texts=texts
            )
        )

    def publish(self) -> int:
        """Print what was reported; write it as a page, and all that was measured as JSON.

        Returns the exit status.
        """
        target = self.args.out or OUT / f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        page = target.with_suffix(".html")
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        content = {
            "benchmark": self.name,
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "loop_ms": statistics.median(timeit.repeat(_LOOP, number=1, repeat=5)) * 1000,
            "load_average": os.getloadavg(),
            "arguments": {key: each for key, each in vars(self.args).items() if key != "popen"},
            "cells": [asdict(cell) for cell in self.cells],
            "answers": self.answers,
            "failures": self.failures,
        }
        report.write_json(target, content | self.content)
        report.write_page(page, f"Benchmark: {self.name}", shlex.join(sys.argv[1:]), self.parts)
        report.show(self.parts, report.console_for(sys.stdout))
        say(f"Written to {target} and {page}")
        for failure in self.failures:
            say(f"Failed: {failure}")
        if not self.is_complete:
            say("Interrupted: the rounds are not complete.")
            return 130
        return 1 if self.failures else 0


def say(text: str) -> None:
    """Print a line."""
    report.show([report.Note(text=text)], report.console_for(sys.stdout))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkCommand:
    """One word of the command line: what it measures, and its options."""

    run: Callable[[Benchmark], None]
    help: str
    options: Mapping[str, Any]
    """The default of each option that several share, and default and help of each of its own."""


def benchmark(
    help: str, **options: object
) -> Callable[[Callable[[Benchmark], None]], BenchmarkCommand]:
    """Make a command of a function that measures and reports."""
    return lambda run: BenchmarkCommand(run=run, help=help, options=options)


def chosen(names: str, known: Mapping[str, T], kind: str) -> dict[str, T]:
    """Return the known ones of comma-separated names."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise BenchError(f"there is no {kind} {unknown[0]!r}: there are {', '.join(known)}")
    return {name: known[name] for name in wanted}


def rows_of(cells: Iterable[Cell]) -> dict[Key, list[Cell]]:
    """Group cells by row: workloads in the order of measuring, then by load."""
    rows: dict[Key, list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.workload, cell.load, cell.contender), []).append(cell)
    workloads = list(dict.fromkeys(workload for workload, _, _ in rows))
    return dict(sorted(rows.items(), key=lambda row: (workloads.index(row[0][0]), row[0][1])))


def ratios(ours: Sequence[Cell], theirs: Sequence[Cell], figure: str) -> list[float]:
    """Return ours / theirs in each round that has both: drift of the machine cancels out."""
    other = {cell.round: cell.figures.get(figure) for cell in theirs}
    mine = {cell.round: cell.figures[figure] for cell in ours if figure in cell.figures}
    return [value / divisor for key, value in mine.items() if (divisor := other.get(key))]


def range_text(values: Sequence[float]) -> str:
    """Return median and range of some values, as "1,204 (1,100-1,290)"."""
    middle, low, high = (
        f"{each:,.0f}" if each >= 100 else f"{each:.3g}"
        for each in (statistics.median(values), min(values), max(values))
    )
    return middle if low == high else f"{middle} ({low}-{high})"
