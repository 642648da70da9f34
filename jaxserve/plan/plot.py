"""Line charts as SVG, side by side: x from 0, y logarithmic."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

# Pixels: size of a chart, margins around its axes, and height of a row of the legend.
WIDTH = 460
HEIGHT = 340
LEFT = 62
RIGHT = 14
TOP = 34
BOTTOM = 44
LEGEND = 22
COLOURS = ("#1f6fb4", "#d1601f", "#2f8f4e", "#8a4fb0", "#b02a3c", "#6b6b6b")
STYLE = "font-family:sans-serif;font-size:12px"


@dataclass(frozen=True)
class Line:
    """A line in a chart."""

    name: str
    series: str  # lines of one series have one colour
    points: Sequence[tuple[float, float]]  # (x, y) in the order that joins them; y is above 0
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart with linear x and logarithmic y."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Axes:
    """Ranges of a chart, and the pixels of a value.

    x goes from 0 to `right`, a multiple of `step`; y from `low` to `high`, which are powers of ten.
    """

    step: float
    right: float
    low: float
    high: float

    @staticmethod
    def around(points: Sequence[tuple[float, float]]) -> "Axes":
        """Return axes that have room for all points."""
        ys = [y for _, y in points] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(ys)))
        high = 10.0 ** math.ceil(math.log10(max(ys)))
        max_x = max((x for x, _ in points), default=1.0) or 1.0
        step = _round_number(max_x / 5)
        return Axes(step, step * math.ceil(max_x / step), low, high if high > low else 10 * low)

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.right

    def y(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def x_ticks(self) -> list[float]:
        return [self.step * i for i in range(round(self.right / self.step) + 1)]

    def y_ticks(self) -> list[float]:
        powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(powers) <= 4 else (1,)
        ticks = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in ticks if tick <= self.high * 1.0001]


def _round_number(value: float) -> float:
    """Return the least number from `value` up that is 1, 2 or 5 with zeros behind it."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 5) if step * power >= value * 0.9999), 10 * power)


def picture(charts: Sequence[Chart]) -> str:
    """Return charts side by side as SVG.

    Each series has one colour in all charts; one legend is below.
    """
    lines = {line.name: line for chart in charts for line in chart.lines}
    series = list(dict.fromkeys(line.series for line in lines.values()))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    width = WIDTH * len(charts)
    height = HEIGHT + LEGEND * -(-len(lines) // 2) + 8
    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for i, chart in enumerate(charts):
        parts += [f'<g transform="translate({WIDTH * i} 0)">', *_chart(chart, colours), "</g>"]
    parts += _legend(list(lines.values()), colours)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">'
    return "\n".join([head, *parts, "</svg>\n"])


def _chart(chart: Chart, colours: dict[str, str]) -> Iterator[str]:
    axes = Axes.around([point for line in chart.lines for point in line.points])
    bottom = HEIGHT - BOTTOM
    middle = (LEFT + WIDTH - RIGHT) / 2
    for value in axes.x_ticks():
        yield rule(axes.x(value), TOP, axes.x(value), bottom)
        yield text(axes.x(value), bottom + 16, f"{value:g}", "middle")
    for value in axes.y_ticks():
        yield rule(LEFT, axes.y(value), WIDTH - RIGHT, axes.y(value))
        yield text(LEFT - 6, axes.y(value) + 4, f"{value:g}", "end")
    yield text(middle, 20, chart.title, "middle", ' font-weight="bold"')
    yield text(middle, HEIGHT - 8, chart.x_label, "middle")
    turned = f' transform="rotate(-90 14 {(TOP + bottom) / 2:.0f})"'
    yield text(14, (TOP + bottom) / 2, chart.y_label, "middle", turned)
    for line in chart.lines:
        yield from _line(line, axes, colours[line.series])


def _line(line: Line, axes: Axes, colour: str) -> Iterator[str]:
    pixels = [(axes.x(x), axes.y(y)) for x, y in line.points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    stroke = f'stroke="{colour}" stroke-width="1.8"{_dash(line)}'
    yield f'<polyline points="{joined}" fill="none" {stroke}/>'
    for (x, y), (px, py) in zip(line.points, pixels, strict=True):
        title = escape(f"{line.name}: {x:.4g}, {y:.4g}")
        circle = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}">'
        yield f"{circle}<title>{title}</title></circle>"


def _legend(lines: Sequence[Line], colours: dict[str, str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        x = LEFT + WIDTH // 2 * (i % 2)
        y = HEIGHT + LEGEND * (i // 2) + 12
        colour = colours[line.series]
        stroke = f'stroke="{colour}" stroke-width="1.8"{_dash(line)}'
        yield f'<line x1="{x}" y1="{y}" x2="{x + 30}" y2="{y}" {stroke}/>'
        yield text(x + 38, y + 4, line.name, "start")


def _dash(line: Line) -> str:
    return ' stroke-dasharray="6 4"' if line.dashed else ""


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a grey line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    """Return a text; `anchor` is start, middle or end, and `more` has further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'
