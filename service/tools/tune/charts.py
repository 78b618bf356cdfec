"""The trade-off as a plot: requests per second against p99, as text and as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLUMNS, _LINES = 60, 14
_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 24, 52
_MARGIN = 0.08
"""Of the range, on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate."""

    mark: str
    """A letter or digit that the table has, too."""
    p99_ms: float
    rate: float
    hint: str
    is_chosen: bool = False


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: those to which no other is both faster and sooner with its answers."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.p99_ms, -point.rate)):
        if not found or point.rate > found[-1].rate:
            found.append(point)
    return found


def text_chart(points: Sequence[Point], p99_ms: float | None) -> list[str]:
    """Lines for a terminal: each candidate by its mark, those of the front with a star before it.

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


def svg_chart(points: Sequence[Point], p99_ms: float | None) -> str:
    """The same for a page; colours are those of the page's classes."""
    x_low, x_high = _range([point.p99_ms for point in points])
    y_low, y_high = _range([point.rate for point in points])

    def x(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    shapes = []
    for value in _ticks(y_low, y_high):
        shapes.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{right}"/>')
        shapes.append(_text(_LEFT - 8, y(value) + 4, figure(value), "end"))
    for value in _ticks(x_low, x_high):
        shapes.append(f'<path class="grid" d="M{x(value):.1f} {_TOP}V{bottom}"/>')
        shapes.append(_text(x(value), bottom + 18, figure(value), "middle"))
    shapes.append(_text((_LEFT + right) / 2, _HEIGHT - 12, "p99, ms", "middle"))
    shapes.append(_text(_LEFT, 14, "requests/s", "end"))
    if p99_ms is not None and x_low <= p99_ms <= x_high:
        shapes.append(f'<path class="limit" d="M{x(p99_ms):.1f} {_TOP}V{bottom}"/>')
    best = front(points)
    way = " ".join(f"{x(point.p99_ms):.1f},{y(point.rate):.1f}" for point in best)
    shapes.append(f'<polyline class="front" points="{way}"/>')
    for point in points:
        kind = "chosen" if point.is_chosen else "front" if point in best else "other"
        at_x, at_y = x(point.p99_ms), y(point.rate)
        shapes.append(
            f'<g class="{kind}"><title>{escape(point.hint)}</title>'
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="9"/>'
            f'<text x="{at_x:.1f}" y="{at_y + 4:.1f}" text-anchor="middle">{point.mark}</text></g>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="requests per second against p99">{"".join(shapes)}</svg>'
    )


def figure(value: float) -> str:
    """A number with as many digits as it is worth: 12,345, 68.1, 0.7."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest, with a margin; never empty."""
    low, high = min(values), max(values)
    margin = (high - low) * _MARGIN or high * _MARGIN or 1.0
    return max(0.0, low - margin), high + margin


def _step(value: float, low: float, high: float, num_steps: int) -> int:
    return min(num_steps - 1, int((value - low) / (high - low) * num_steps))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range: some five of them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
