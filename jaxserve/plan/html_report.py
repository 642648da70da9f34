"""An estimate as a page of HTML: memory of a device as a bar, and each step on the roofline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from jaxserve.plan.charts import charts
from jaxserve.plan.estimate import Estimate
from jaxserve.plan.plot import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, STYLE, TOP, rule, text
from jaxserve.plan.report import GIB, introduction, memory_rows, verdict
from jaxserve.plan.roofline import Work
from jaxserve.plan.topology import Limits

PAGE = "page.html"
WHOLE = "programs may use"  # row of the table of memory that has all others in it
FREE = "free"
FREE_COLOUR = "#f4f4f4"
MISSING_COLOUR = "#d00000"
WIDTH = 900  # pixels of the roofline


@dataclass(frozen=True)
class Part:
    """A part of a device's memory."""

    name: str
    gib: str
    note: str
    share: str  # of the bar, in percent
    colour: str


@dataclass(frozen=True)
class Step:
    """A step in the table."""

    name: str
    megabytes: str
    gigaflops: str
    intensity: str
    floor: str
    bound: str  # memory or products, whichever takes longer


@dataclass(frozen=True)
class Point:
    """A step on the roofline."""

    name: str
    series: str  # points of one series have one colour
    work: Work
    rate: float


def page(estimate: Estimate) -> str:
    """Return the page, which needs no other file. The topology has published speeds."""
    limits = estimate.limits
    assert limits, "the topology has no published speed"
    points = list(_points(estimate, limits))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("jaxserve.plan").joinpath(PAGE).read_text())
    deployment = estimate.deployment
    return template.render(
        title=f"{deployment.target.model} on {deployment.topology.name}",
        lines=list(introduction(deployment)),
        verdict=verdict(estimate),
        memory=list(_parts(estimate)),
        speed=f"{limits.bandwidth / 1e9:,.0f} GB/s and {limits.flops / 1e12:,.0f} TFLOP/s, context "
        f"{estimate.context}.",
        roofline=roofline(points, limits),
        steps=[_step(point, limits) for point in points],
        charts=charts(estimate),
    )


def _parts(estimate: Estimate) -> Iterator[Part]:
    rows = [row for row in memory_rows(estimate) if not row[0].startswith(" ")]
    whole = dict((name, size) for name, size, _ in rows)[WHOLE]
    taken = sum(size for name, size, _ in rows if name not in (WHOLE, FREE))
    full = max(whole, taken)
    colours = iter(COLOURS * len(rows))
    for name, size, note in rows:
        if name == WHOLE:
            continue
        colour = next(colours)
        if name == FREE:
            colour = FREE_COLOUR if size >= 0 else MISSING_COLOUR
        share = f"{100 * max(size, 0) / full:.3f}"
        yield Part(name, f"{size / GIB:,.3f}", note, share, colour)


def _points(estimate: Estimate, limits: Limits) -> Iterator[Point]:
    for bucket in estimate.deployment.buckets:
        if bucket.steps > 1:  # the same step, several times in one launch
            continue
        work = estimate.work(bucket)
        yield Point(str(bucket), bucket.kind, work, work.flops / work.floor(limits))


def _step(point: Point, limits: Limits) -> Step:
    work = point.work
    reads = work.bytes / limits.bandwidth >= work.multiplying(limits)
    return Step(
        point.name,
        f"{work.bytes / 1e6:,.1f}",
        f"{work.flops / 1e9:,.1f}",
        f"{work.intensity:,.1f}",
        f"{work.floor(limits) * 1e3:,.3f}",
        "memory" if reads else "products",
    )


def roofline(points: Sequence[Point], limits: Limits) -> str:
    """Return steps and roof as SVG, both axes logarithmic: FLOP per byte, and FLOP/s."""
    intensities = [point.work.intensity for point in points] + [limits.ridge]
    rates = [point.rate for point in points] + [limits.flops, max(limits.int8, limits.fp8)]
    across = _Scale.around(intensities, LEFT, WIDTH - RIGHT)
    up = _Scale.around([rate for rate in rates if rate], HEIGHT - BOTTOM, TOP)
    series = list(dict.fromkeys(point.series for point in points))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">']
    parts += _grid(across, up)
    parts += _roof(across, up, limits)
    parts += [_dot(point, across, up, colours[point.series]) for point in points]
    for number, (name, colour) in enumerate(colours.items(), 1):
        y = TOP + 16 * number
        parts.append(f'<circle cx="{LEFT + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(text(LEFT + 24, y, name, "start"))
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis from 10**low to 10**high, and its pixels."""

    low: int
    high: int
    first: float
    last: float

    @staticmethod
    def around(values: Sequence[float], first: float, last: float) -> "_Scale":
        low = math.floor(math.log10(min(values)))
        return _Scale(low, max(math.ceil(math.log10(max(values))), low + 1), first, last)

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.first + (self.last - self.first) * share

    @property
    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for value in across.ticks:
        yield rule(across.at(value), TOP, across.at(value), bottom)
        yield text(across.at(value), bottom + 16, f"{value:g}", "middle")
    for value in up.ticks:
        yield rule(LEFT, up.at(value), WIDTH - RIGHT, up.at(value))
        yield text(LEFT - 6, up.at(value) + 4, f"{value / 1e12:g}", "end")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "FLOP per byte moved", "middle")
    yield text(LEFT, TOP - 12, "TFLOP/s", "end")


def _roof(across: _Scale, up: _Scale, limits: Limits) -> Iterator[str]:
    """Draw the bandwidth's slope and the flat top; above it those of narrower numbers."""
    left = max(10.0**across.low, 10.0**up.low / limits.bandwidth)
    right = 10.0**across.high
    for peak, dash in ((limits.flops, ""), (limits.int8, "6 4"), (limits.fp8, "2 3")):
        if not peak:
            continue
        corner = min(peak / limits.bandwidth, right)
        corners = [(left, left * limits.bandwidth), (corner, corner * limits.bandwidth)]
        corners.append((right, min(peak, right * limits.bandwidth)))
        joined = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in corners)
        style = f'stroke="#555" stroke-width="1.5" stroke-dasharray="{dash}"'
        yield f'<polyline points="{joined}" fill="none" {style}/>'


def _dot(point: Point, across: _Scale, up: _Scale, colour: str) -> str:
    x = across.at(point.work.intensity)
    y = up.at(point.rate)
    title = (
        f"{point.name}: {point.work.bytes / 1e6:,.1f} MB, {point.work.intensity:,.1f} FLOP/byte, "
        f"{point.rate / 1e12:,.2f} TFLOP/s"
    )
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.75">'
    return f"{circle}<title>{title}</title></circle>"
