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
from importlib import metadata
from typing import Any, Literal

from inferpool.service.tools.trial.report import (
    Note,
    Part,
    ReportTable,
    console_for,
    line_chart,
    show,
    write_json,
    write_page,
)
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

NOISY_CORES = 0.15
"""A row is marked if others took more than this in one of its rounds."""
_LOOP = "sum(number & 3 for number in range(200_000))"
"""A fixed loop, whose time tells a slow machine from a slow service."""
_PACKAGES = ("torch", "torchvision", "uvicorn", "uvloop", "fastapi", "pillow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Figures of one contender at one load in one round."""

    workload: str
    contender: str
    load: float = 0
    """Connections, requests per second, a batch size...: the table's heading says which."""
    round: int
    figures: Mapping[str, float]

    @property
    def key(self) -> tuple[str, float, str]:
        """Workload, load and contender: a row of the tables."""
        return self.workload, self.load, self.contender


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the tables: one figure over the rounds."""

    figure: str
    title: str
    digits: int = 0
    form: Literal["median", "range", "max", "sum"] = "median"


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
        self.parts: list[Part] = []
        """Tables, notes and charts of the report."""

    def take_turns(self, turns: Mapping[str, Turn], rounds: int | None = None) -> None:
        """Let all take their turn in each round. A turn that fails is noted."""
        rounds = rounds or self.args.rounds
        total = rounds * len(turns)
        with Screen(sys.stderr) as screen:
            for number in range(total):
                round_, which = divmod(number, len(turns))
                name, take = list(turns.items())[which]
                what = f"round {round_ + 1}: {name}"
                screen.begin(f"[{number + 1}/{total}] {what}")
                screen.show(number / total, "")
                try:
                    for cell in take(round_):
                        self.cells.append(cell)
                except BenchError as error:
                    self.failures.append(f"{what}: {error}")

    def closed_turn(
        self,
        workload: str,
        bodies: Bodies,
        command: ServerCommand,
        await_ready: Callable[[BenchServer], None] = lambda _: None,
    ) -> Turn:
        """Return a turn that loads a server in a closed loop at each number of connections.

        `await_ready` waits for more than a first answer.

        Raises:
            BenchError: wrk is not installed.
        """
        require_wrk()

        def take(round_: int) -> Iterator[Cell]:
            with self.warm_server(workload, bodies, command, await_ready) as (server, asked):
                for connections in self.args.connections:
                    yield Cell(
                        workload=workload,
                        contender=command.name,
                        load=connections,
                        round=round_,
                        figures=load_closed(server, asked, connections, self.args.secs),
                    )

        return take

    @contextmanager
    def warm_server(
        self,
        workload: str,
        bodies: Bodies,
        command: ServerCommand,
        await_ready: Callable[[BenchServer], None] = lambda _: None,
    ) -> Iterator[tuple[BenchServer, Bodies]]:
        """Start a server, load it for `--warm` seconds; yield it, and the bodies at its path."""
        asked = replace(bodies, path=command.path or bodies.path)
        with BenchServer(command, self.args.port) as server:
            answer = server.wait_ready(asked.probe())
            key = f"{workload}, {command.name}"
            self.answers.setdefault(key, answer[:300].decode(errors="replace"))
            await_ready(server)
            if self.args.warm:
                run_wrk(server, asked, 16, self.args.warm)
            yield server, asked

    def add_cells(
        self, title: str, load: str, columns: Sequence[Column], caption: str = ""
    ) -> None:
        """Report a row for each contender at each load, of the cells that have the first figure.

        `load` is the heading of the loads; "" leaves their column out.
        """
        cells = [cell for cell in self.cells if columns[0].figure in cell.figures]
        has_noise = any("noise" in cell.figures for cell in cells)
        rows = []
        for key in _keys(cells):
            those = [cell.figures for cell in cells if cell.key == key]
            texts = [_text(column, [each[column.figure] for each in those]) for column in columns]
            if has_noise:
                noise = [each["noise"] for each in those]
                mark = "!" if max(noise) > NOISY_CORES else " "
                texts.append(f"{statistics.median(noise):.2f}{mark}")
            loads = [f"{key[1]:g}"] if load else []
            rows.append([key[0], key[2], *loads, *texts, str(len(those))])
        heads = ["workload", "contender", *([load] if load else [])]
        heads += [column.title for column in columns]
        heads += [*(["noise"] if has_noise else []), "rounds"]
        if has_noise:
            caption += f" noise: cores taken by others, marked if above {NOISY_CORES} in a round."
        if rows:
            self.add_table(title, heads, rows, f"{caption} Medians over the rounds.".strip())

    def add_ratios(
        self, load: str, columns: Sequence[Column], is_reference: Callable[[str], bool]
    ) -> None:
        """Report the figures of each contender divided by those of each reference, by its name."""
        rows = []
        kept = self.content["ratios"] = []
        keys = _keys(self.cells)
        for ours in keys:
            for theirs in keys:
                is_pair = is_reference(theirs[2]) and not is_reference(ours[2])
                if ours[:2] != theirs[:2] or not is_pair:
                    continue
                found = {
                    each.figure: ratios(self.cells, ours, theirs, each.figure) for each in columns
                }
                if not any(found.values()):
                    continue
                name = f"{ours[2]} / {theirs[2]}"
                texts = [range_text(values, 2) if values else "-" for values in found.values()]
                rows.append([ours[0], name, f"{ours[1]:g}", *texts])
                kept.append({"workload": ours[0], "load": ours[1], "ratio": name, **found})
        titles = [f"{column.title.removesuffix(' (range)')} x" for column in columns]
        heads = ["workload", "ratio", load, *titles]
        if rows:
            self.add_table("Ratios", heads, rows, "Median (range) of the ratios within a round.")

    def add_charts(
        self, column: Column, load: str, *, is_log: bool = False, limit: float = 0
    ) -> None:
        """Draw a figure against the load: a chart for each workload, a line for each contender.

        `limit` is an objective to draw; 0: none.
        """
        for workload in dict.fromkeys(cell.workload for cell in self.cells):
            lines: dict[str, list[tuple[float, float]]] = {}
            for key in _keys(self.cells):
                if key[0] == workload:
                    values = over_rounds(self.cells, key, column.figure).values()
                    lines.setdefault(key[2], []).append((key[1], statistics.median(values)))
            chart = line_chart(
                f"{workload}: {column.title}",
                load,
                "median over rounds",
                lines,
                mode="lines+markers",
                log_x=is_log,
                log_y=is_log,
                limit=(limit, "objective") if limit else None,
            )
            self.parts.append(chart)

    def add_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""
    ) -> None:
        """Report a table."""
        texts = (0, 1) if columns[0] == "workload" else (0,)
        self.parts.append(
            ReportTable(title=title, columns=columns, rows=rows, caption=caption, texts=texts)
        )

    def add_note(self, text: str) -> None:
        """Report a line of text."""
        self.parts.append(Note(text=text))

    def publish(self) -> None:
        """Print what was reported; write it as a page, and all that was measured as JSON."""
        show(self.parts, console_for(sys.stdout))
        target = self.args.out or OUT / f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        page = target.with_suffix(".html")
        content = {
            "benchmark": self.name,
            "environment": _environment(),
            "arguments": vars(self.args),
            "cells": [asdict(cell) for cell in self.cells],
            "answers": self.answers,
            "failures": self.failures,
        }
        write_json(target, content | self.content)
        write_page(page, f"Benchmark: {self.name}", shlex.join(sys.argv[1:]), self.parts)
        say(f"Written to {target} and {page}")

    def conclude(self) -> int:
        """Say what went wrong; return the exit status."""
        for failure in self.failures:
            say(f"Failed: {failure}")
        if not self.is_complete:
            say("Interrupted: the rounds are not complete.")
            return 130
        return 1 if self.failures else 0


def say(text: str) -> None:
    """Print a line."""
    show([Note(text=text)], console_for(sys.stdout))


def ratios(
    cells: Iterable[Cell],
    ours: tuple[str, float, str],
    theirs: tuple[str, float, str],
    figure: str,
) -> list[float]:
    """Return ours / theirs in each round that has both: drift of the machine cancels out."""
    mine, other = over_rounds(cells, ours, figure), over_rounds(cells, theirs, figure)
    return [mine[key] / other[key] for key in mine if other.get(key)]


def over_rounds(
    cells: Iterable[Cell], key: tuple[str, float, str], figure: str
) -> dict[int, float]:
    """Return one figure of one row, by round."""
    return {
        cell.round: cell.figures[figure]
        for cell in cells
        if cell.key == key and figure in cell.figures
    }


def range_text(values: Sequence[float], digits: int = 0) -> str:
    """Return median and range of some values, as "1,204 (1,100-1,290)"."""
    middle, low, high = (
        f"{each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return middle if low == high else f"{middle} ({low}-{high})"


def _keys(cells: Iterable[Cell]) -> Sequence[tuple[str, float, str]]:
    """Return the keys of all rows: in the order of measuring, but by load."""
    found = dict.fromkeys(cell.key for cell in cells)
    workloads = list(dict.fromkeys(workload for workload, _, _ in found))
    return sorted(found, key=lambda key: (workloads.index(key[0]), key[1]))


def _text(column: Column, values: Sequence[float]) -> str:
    if column.form == "range":
        return range_text(values, column.digits)
    combined = {"median": statistics.median(values), "max": max(values), "sum": sum(values)}
    return f"{combined[column.form]:,.{column.digits}f}"


def _environment() -> Mapping[str, object]:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return {
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "loop_ms": statistics.median(timeit.repeat(_LOOP, number=1, repeat=5)) * 1000,
        "load_average": os.getloadavg(),
    }
