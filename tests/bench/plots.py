"""Plots of what was measured, beside its JSON: a PNG, and a page that asks nothing of a network."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.load import Cell
from tests.bench.report import console, spread
from tests.load.charts import Bars, Chart, Line, to_png
from tests.load.page import write_page


def write(saved: Path, title: str, charts: Sequence[Chart], subtitle: str) -> None:
    """Write both, with the name of the JSON file."""
    picture, page = saved.with_suffix(".png"), saved.with_suffix(".html")
    to_png(charts, picture)
    write_page(page, title, subtitle, charts)
    console.print(f"Plots in {picture} and {page}", markup=False, highlight=False)


def of_cells(cells: Sequence[Cell]) -> list[Chart]:
    """Requests per second and p99 of each contender, by connections: two plots per workload."""
    charts = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        those = [cell for cell in cells if cell.workload == workload]
        names = list(dict.fromkeys(cell.contender for cell in those))
        counts = sorted({cell.connections for cell in those})
        bars = [
            Bars(
                name=name,
                values=[
                    _range(those, name, count, lambda cell: cell.requests_per_s) for count in counts
                ],
            )
            for name in names
        ]
        lines = [
            Line(
                name=name,
                points=[
                    (count, value[0])
                    for count in counts
                    if (value := _range(those, name, count, lambda cell: cell.p99_ms))
                ],
                marks=True,
            )
            for name in names
        ]
        charts += [
            Chart(
                title=f"{workload}: requests per second",
                x_label="connections",
                y_label="median, range over rounds",
                bars=bars,
                groups=[str(count) for count in counts],
            ),
            Chart(
                title=f"{workload}: p99 of the latency",
                x_label="connections",
                y_label="ms, median over rounds",
                lines=lines,
                log_x=True,
                log_y=True,
                x_ticks=[(count, str(count)) for count in counts],
            ),
        ]
    return charts


def _range(
    cells: Sequence[Cell], contender: str, connections: int, figure: Callable[[Cell], float]
) -> tuple[float, float, float] | None:
    those = [
        figure(cell)
        for cell in cells
        if (cell.contender, cell.connections) == (contender, connections)
    ]
    if not those:
        return None
    over = spread(those)
    return over.median, over.low, over.high
