"""The trade-off between requests per second and p99, as a chart for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

_COLUMNS, _LINES = 60, 14
_MARGIN = 0.08
"""Share of the range that is left free on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """Requests per second and p99 of one candidate."""

    mark: str
    """A letter or digit that the table has, too."""
    p99_ms: float
    rate: float


def front(points: Sequence[TradeOff]) -> list[TradeOff]:
    """Return the Pareto front: no other point has both a higher rate and a lower p99."""
    found: list[TradeOff] = []
    for point in sorted(points, key=lambda point: (point.p99_ms, -point.rate)):
        if not found or point.rate > found[-1].rate:
            found.append(point)
    return found


def text_chart(points: Sequence[TradeOff], p99_ms: float | None) -> list[str]:
    """Draw each candidate by its mark, with a star before it if it is of the front.

    Args:
        points: The candidates.
        p99_ms: The objective, drawn as a line.
    """
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
    """Return a number with as many digits as matter: 12,345, 68.1, 0.7."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value with a margin; they always differ."""
    low, high = min(values), max(values)
    margin = (high - low) * _MARGIN or high * _MARGIN or 1.0
    return max(0.0, low - margin), high + margin


def _step(value: float, low: float, high: float, num_steps: int) -> int:
    return min(num_steps - 1, int((value - low) / (high - low) * num_steps))
