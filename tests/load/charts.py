"""Plots without a plotting library: laid out once, drawn as SVG (light and dark) or as PNG."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 56, 48
_COLOURS = ("#1f6feb", "#d9730d", "#1a7f5a", "#8250df", "#cf222e", "#6e7781", "#bf3989", "#0a7ea4")
"""Of the series, in their order: told apart on white and on black."""
_ROLES = {"text": "#24292f", "faint": "#6e7781", "grid": "#d8dee4", "paper": "#ffffff"}
_SCALE = 2
"""PNGs have twice the pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points joined by a line; `marks` draws the points too."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False
    joined: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar in each group, with its range."""

    name: str
    values: Sequence[tuple[float, float, float] | None]
    """Middle, low and high, by group; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One plot: lines over a number, or bars in groups."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    groups: Sequence[str] = ()
    """The names of the groups of bars."""
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()
    """Where the numbers of x are better said in words."""
    limit: tuple[float, str] | None = None
    """A level of y that matters, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stroke:
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    hint: str = ""
    is_round: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = "text"
    size: int = 12


_Shape = _Stroke | _Box | _Text


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to places on the page."""

    low: float
    high: float
    is_log: bool
    start: float
    end: float

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        share = (value - low) / (high - low)
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            return _log_ticks(self.low, self.high)
        step = _nice_step((self.high - self.low) / 7)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def to_svg(chart: Chart) -> str:
    """The plot as an SVG element; its colours are CSS classes that `STYLE` defines."""
    drawn = "".join(_svg(shape) for shape in _layout(chart))
    label = escape(chart.title, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'
    )


def to_png(charts: Sequence[Chart], path: Path) -> None:
    """Draw plots one below the other into a PNG file, on white."""
    image = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * len(charts) * _SCALE), _ROLES["paper"])
    draw = ImageDraw.Draw(image)
    for number, chart in enumerate(charts):
        for shape in _layout(chart):
            _paint(draw, shape, number * HEIGHT)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def _layout(chart: Chart) -> list[_Shape]:
    shapes: list[_Shape] = [_Text(x=8, y=20, text=chart.title, size=15)]
    names = [line.name for line in chart.lines] + [bars.name for bars in chart.bars]
    shapes += _legend(names)
    y = _y_axis(chart)
    for value in y.ticks():
        at = y.place(value)
        shapes.append(_Stroke(points=[(_LEFT, at), (WIDTH - _RIGHT, at)], colour="grid"))
        shapes.append(_Text(x=_LEFT - 8, y=at + 4, text=say(value), anchor="end", colour="faint"))
    bottom = HEIGHT - _BOTTOM
    shapes += _bar_shapes(chart, y) if chart.groups else _line_shapes(chart, y)
    if chart.limit:
        level, name = chart.limit
        at = y.place(level)
        shapes.append(
            _Stroke(points=[(_LEFT, at), (WIDTH - _RIGHT, at)], colour="faint", is_dashed=True)
        )
        shapes.append(
            _Text(x=WIDTH - _RIGHT, y=at - 5, text=name, anchor="end", colour="faint", size=11)
        )
    shapes.append(_Stroke(points=[(_LEFT, bottom), (WIDTH - _RIGHT, bottom)], colour="faint"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    shapes.append(
        _Text(x=middle, y=HEIGHT - 8, text=chart.x_label, anchor="middle", colour="faint")
    )
    shapes.append(_Text(x=WIDTH - 8, y=20, text=chart.y_label, anchor="end", colour="faint"))
    return shapes


def _y_axis(chart: Chart) -> _Axis:
    values = [y for line in chart.lines for _, y in line.points]
    values += [each for bars in chart.bars for value in bars.values if value for each in value]
    if chart.limit:
        values.append(chart.limit[0])
    low, high = _bounds(values, is_log=chart.log_y)
    return _Axis(low, high, chart.log_y, HEIGHT - _BOTTOM, _TOP)


def _line_shapes(chart: Chart, y: _Axis) -> list[_Shape]:
    xs = [x for line in chart.lines for x, _ in line.points] + [x for x, _ in chart.x_ticks]
    low, high = (min(xs, default=0.0), max(xs, default=1.0))
    if not chart.log_x:
        low = min(low, 0.0)
    if low == high:
        low, high = (low / 2, high * 2) if low > 0 else (0.0, 1.0)
    x = _Axis(low, high, chart.log_x, _LEFT, WIDTH - _RIGHT)
    shapes: list[_Shape] = [
        _Text(x=x.place(value), y=HEIGHT - _BOTTOM + 18, text=text, anchor="middle", colour="faint")
        for value, text in chart.x_ticks or [(value, say(value)) for value in x.ticks()]
    ]
    for number, line in enumerate(chart.lines):
        colour = _colour(number)
        placed = [(x.place(at), y.place(value)) for at, value in line.points]
        if line.joined and len(placed) > 1:
            shapes.append(_Stroke(points=placed, colour=colour, width=2))
        if line.marks or len(placed) == 1:
            shapes += [
                _Box(
                    x=left - 4, y=top - 4, width=8, height=8, colour=colour, is_round=True,
                    hint=f"{line.name}: {say(value)} at {say(at)}",
                )
                for (left, top), (at, value) in zip(placed, line.points, strict=True)
            ]  # fmt: skip
    return shapes


def _bar_shapes(chart: Chart, y: _Axis) -> list[_Shape]:
    shapes: list[_Shape] = []
    slot = (WIDTH - _LEFT - _RIGHT) / len(chart.groups)
    width = min(48.0, slot * 0.8 / max(1, len(chart.bars)))
    bottom = HEIGHT - _BOTTOM
    for group, name in enumerate(chart.groups):
        middle = _LEFT + (group + 0.5) * slot
        shapes.append(_Text(x=middle, y=bottom + 18, text=name, anchor="middle", colour="faint"))
        for number, bars in enumerate(chart.bars):
            if (value := bars.values[group]) is None:
                continue
            left = middle + (number - len(chart.bars) / 2) * width
            top = y.place(value[0])
            shapes.append(
                _Box(
                    x=left + 1, y=top, width=width - 2, height=bottom - top,
                    colour=_colour(number), hint=f"{bars.name}, {name}: {say(value[0])}",
                )
            )  # fmt: skip
            shapes.append(
                _Text(x=left + width / 2, y=top - 6, text=say(value[0]), anchor="middle", size=10)
            )
            if value[1] != value[2]:
                at = left + width / 2
                ends = [(at, y.place(value[1])), (at, y.place(value[2]))]
                shapes.append(_Stroke(points=ends, colour="text", width=1.5))
    return shapes


def _legend(names: Sequence[str]) -> list[_Shape]:
    shapes: list[_Shape] = []
    if len(names) < 2:
        return shapes
    left = float(_LEFT)
    for number, name in enumerate(names):
        shapes.append(_Box(x=left, y=31, width=12, height=12, colour=_colour(number)))
        shapes.append(_Text(x=left + 17, y=41, text=name, size=12))
        left += 17 + 7.0 * len(name) + 18
    return shapes


def _bounds(values: Sequence[float], *, is_log: bool) -> tuple[float, float]:
    if not is_log:
        return 0.0, (max(values, default=0.0) or 1.0) * 1.08
    known = [value for value in values if value > 0]
    low, high = min(known, default=1.0), max(known, default=10.0)
    low, high = low / 1.3, high * 1.3
    return (low, high) if high / low > 5 else (low / 2, high * 2)


def _log_ticks(low: float, high: float) -> list[float]:
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        found = [
            step * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in steps
            if low <= step * 10.0**power <= high
        ]
        if len(found) >= 3:
            break
    return found


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough), 10 * power)


def say(value: float) -> str:
    """A number for people: three digits that matter, thousands as k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:,.3g}k" if abs(value) < 1e6 else f"{value / 1e6:,.3g}M"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _colour(number: int) -> str:
    return f"c{number % len(_COLOURS)}"


STYLE = "".join(
    [
        *(f".s-{name}{{stroke:{code}}}.f-{name}{{fill:{code}}}" for name, code in _ROLES.items()),
        *(f".s-c{n}{{stroke:{code}}}.f-c{n}{{fill:{code}}}" for n, code in enumerate(_COLOURS)),
        "svg text{font-family:system-ui,sans-serif}",
        "@media(prefers-color-scheme:dark){.f-text{fill:#e6edf3}.s-text{stroke:#e6edf3}",
        ".f-faint{fill:#9198a1}.s-faint{stroke:#9198a1}.s-grid{stroke:#30363d}",
        ".s-c0{stroke:#58a6ff}.f-c0{fill:#58a6ff}.s-c3{stroke:#b392f0}.f-c3{fill:#b392f0}}",
    ]
)
"""The colours of SVG plots, for a style element of the page that they are in."""


def _svg(shape: _Shape) -> str:
    match shape:
        case _Stroke():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            dash = ' stroke-dasharray="5 4"' if shape.is_dashed else ""
            return (
                f'<polyline points="{points}" class="s-{shape.colour}" fill="none" '
                f'stroke-width="{shape.width:g}" stroke-linejoin="round"{dash}/>'
            )
        case _Box():
            radius = shape.width / 2 if shape.is_round else 1.5
            hint = f"<title>{escape(shape.hint)}</title>" if shape.hint else ""
            return (
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
                f'height="{max(0.0, shape.height):.1f}" rx="{radius:g}" '
                f'class="f-{shape.colour}">{hint}</rect>'
            )
        case _Text():
            return (
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" '
                f'text-anchor="{shape.anchor}" class="f-{shape.colour}">{escape(shape.text)}</text>'
            )


_ANCHORS: Mapping[str, str] = {"start": "ls", "middle": "ms", "end": "rs"}
_CODES: Mapping[str, str] = _ROLES | {f"c{n}": code for n, code in enumerate(_COLOURS)}


def _paint(draw: ImageDraw.ImageDraw, shape: _Shape, top: float) -> None:
    colour = _CODES[shape.colour]
    match shape:
        case _Stroke():
            points = [(x * _SCALE, (y + top) * _SCALE) for x, y in shape.points]
            pieces = _dashes(points) if shape.is_dashed else [points]
            for piece in pieces:
                draw.line(piece, fill=colour, width=round(shape.width * _SCALE), joint="curve")
        case _Box():
            left, upper = shape.x * _SCALE, (shape.y + top) * _SCALE
            box = (left, upper, left + shape.width * _SCALE, upper + shape.height * _SCALE)
            paint: Callable[..., None] = draw.ellipse if shape.is_round else draw.rectangle
            if shape.height > 0:
                paint(box, fill=colour)
        case _Text():
            font = ImageFont.load_default(shape.size * _SCALE)
            place = (shape.x * _SCALE, (shape.y + top) * _SCALE)
            draw.text(place, shape.text, fill=colour, font=font, anchor=_ANCHORS[shape.anchor])


def _dashes(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """A level line as dashes."""
    (left, y), (right, _) = points[0], points[-1]
    step = 9.0 * _SCALE
    starts = [left + number * step for number in range(int((right - left) / step))]
    return [[(start, y), (start + step * 0.55, y)] for start in starts]
