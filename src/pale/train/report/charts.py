"""Curves as SVG with axes, units and smoothing, written by hand.

The package does not depend on matplotlib, and a report must exist in a plain installation. Besides, these charts take
a few kB each, follow the colours of the page (light or dark) and show values in native tooltips, without scripts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.escaping import escape_html
from ...core.numbers import format_number
from .record import Point

# Of a page with charts; it needs the colours --ink, --soft, --card and --line of the page.
STYLE = (Path(__file__).parent / "charts.css").read_text()
WIDTH, HEIGHT = 480, 270  # in units of the drawing; the page scales it
RIGHT, TOP, BOTTOM = 14, 14, 42
CHARACTER = 6.6  # width of a digit
COLOURS = 8  # of the style sheet; further curves are dashed
DRAWN = 300  # buckets of a curve, each with its smallest and largest value
MARKED = 150  # points that are marked with a dot and a tooltip
MIN_SMOOTHED = 20  # points of a curve that is smoothed
WINDOW = 40  # the mean is over 1 / 40 of the points on either side
MAX_NAME = 60  # characters of a name in a legend


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: name in the legend.
        points: steps and values, in the order of the run.
        marked: show each point as a dot; for the few points of evaluations.
        exact: the values have no noise to smooth, such as a learning rate.
    """

    name: str
    points: Sequence[Point]
    marked: bool = False
    exact: bool = False

    @property
    def smoothed(self) -> bool:
        """Whether the curve is drawn as a moving mean."""
        return len(self.points) >= MIN_SMOOTHED and not (self.marked or self.exact)


@dataclass(frozen=True)
class Chart:
    """Curves over the same axes.

    Attributes:
        title: title above the chart.
        unit: unit of the vertical axis.
        series: the curves.
        levels: horizontal lines with their names, such as a reported figure.
        over: name of the horizontal axis.
    """

    title: str
    unit: str
    series: Sequence[Series]
    levels: Mapping[str, float] = field(default_factory=dict)
    over: str = "step"


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the centred moving mean of a curve, which has no lag; windows are cut off at both ends."""
    reach = max(1, len(points) // WINDOW)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    means = []
    for i, (x, _) in enumerate(points):
        first, last = max(0, i - reach), min(len(points), i + reach + 1)
        means.append((x, (sums[last] - sums[first]) / (last - first)))
    return means


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most two points of each bucket, its smallest and its largest, and the first and last of all."""
    if len(points) <= 2 * DRAWN:
        return list(points)
    kept = [points[0]]
    for i in range(DRAWN):
        part = points[i * len(points) // DRAWN : (i + 1) * len(points) // DRAWN]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return [*kept, points[-1]]


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Return about `count` round numbers from `low` to `high`; with `whole` only integers."""
    rough = max((high - low) / count, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [
        (first + i) * step for i in range(2 * count) if (first + i) * step <= high + step * 1e-9
    ]


def _span(values: Sequence[float], padding: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: room on both sides
        room = 0.05 * abs(low) or 1.0
        return low - room, high + room
    return low - padding * (high - low), high + padding * (high - low)


class _Frame:
    """The area of a chart: positions of values, axes and their labels."""

    def __init__(self, chart: Chart) -> None:
        points = [point for series in chart.series for point in series.points]
        self.x = _span([x for x, _ in points], 0.0)
        self.y = _span([*(y for _, y in points), *chart.levels.values()], 0.04)
        self.chart = chart
        self.marks = [(value, _tick(value, self.y)) for value in ticks(*self.y)]
        longest = max((len(label) for _, label in self.marks), default=1)
        self.left = round(30 + CHARACTER * max(longest, 3))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a value in the drawing."""
        right = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        width, height = WIDTH - self.left - RIGHT, HEIGHT - TOP - BOTTOM
        return self.left + width * right, HEIGHT - BOTTOM - height * up

    def axes(self) -> str:
        """Return grid lines, tick labels and the names of the axes."""
        left, bottom, right = self.left, HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for value, label in self.marks:
            y = self.place(self.x[0], value)[1]
            parts.append(
                f"<line class=grid x1={left} x2={right} y1={y:.1f} y2={y:.1f} />"
                f"<text class=end x={left - 6} y={y + 4:.1f}>{label}</text>"
            )
        for value in ticks(*self.x, whole=self.chart.over == "step"):
            x = self.place(value, self.y[0])[0]
            parts.append(
                f"<line class=grid x1={x:.1f} x2={x:.1f} y1={bottom} y2={bottom + 4} />"
                f"<text class=mid x={x:.1f} y={bottom + 17}>{_tick(value, self.x)}</text>"
            )
        middle = (TOP + bottom) / 2
        return (
            f"{''.join(parts)}<line class=axis x1={left} x2={right} y1={bottom} y2={bottom} />"
            f"<text class='mid name' x={(left + right) / 2} y={HEIGHT - 6}>{escape_html(self.chart.over)}</text>"
            f"<text class='mid name' transform='translate(13 {middle}) rotate(-90)'>"
            f"{escape_html(self.chart.unit[:MAX_NAME])}</text>"
        )

    def levels(self) -> str:
        """Return the horizontal lines."""
        parts = []
        for name, value in self.chart.levels.items():
            y, right = self.place(self.x[0], value)[1], WIDTH - RIGHT
            at = y - 5 if y > TOP + 16 else y + 14
            text = f"{name} {format_number(value)}"
            parts.append(
                f"<line class=level x1={self.left} x2={right} y1={y:.1f} y2={y:.1f} />"
                f"<text class=end x={right - 2} y={at:.1f}>{escape_html(text)}</text>"
            )
        return "".join(parts)

    def curve(self, series: Series, index: int, alone: bool) -> str:
        """Return one curve: its points in a faint colour under their mean, or only the points if there are few."""
        look = f"c{index % COLOURS}{' dashed' if index >= COLOURS else ''}"
        points = series.points
        if not series.smoothed:
            dots = "" if series.exact else self._marks(series, look)
            return self._line(points, look) + dots
        raw = self._line(points, f"{look} raw") if alone else ""
        return raw + self._line(smooth(points), look)

    def _line(self, points: Sequence[Point], look: str) -> str:
        if len(points) < 2:
            return ""
        path = " ".join("{:.1f},{:.1f}".format(*self.place(*point)) for point in thin(points))
        return f"<polyline class='{look}' points='{path}'/>"

    def _marks(self, series: Series, look: str) -> str:
        if len(series.points) > MARKED:
            return ""
        parts = []
        for x, y in series.points:
            cx, cy = self.place(x, y)
            shown = f"{self.chart.over} {format_number(x, 6)}: {format_number(y)}"
            parts.append(
                f"<circle class='{look}' cx={cx:.1f} cy={cy:.1f} r=3><title>{escape_html(shown)}</title></circle>"
            )
        return "".join(parts)


def _tick(value: float, span: tuple[float, float]) -> str:
    """Return the label of a tick, with enough digits to distinguish neighbouring ticks."""
    if abs(value) < 1e-9 * (span[1] - span[0]):
        return "0"
    digits = (
        math.floor(math.log10(abs(value))) - math.floor(math.log10((span[1] - span[0]) / 5)) + 2
    )
    return format_number(float(f"{value:.12g}"), min(max(digits, 2), 12))


def draw(chart: Chart) -> str:
    """Return a chart as a figure; its caption has the range and the last value of a single curve."""
    alone = len(chart.series) == 1
    frame = _Frame(chart)
    curves = "".join(frame.curve(each, i, alone) for i, each in enumerate(chart.series))
    label = escape_html(f"{chart.title}, {chart.unit} over {chart.over}")
    return (
        f"<figure class=chart><figcaption><b>{escape_html(chart.title)}</b> {_facts(chart) if alone else ''}"
        f"</figcaption><svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{label}'>"
        f"{frame.axes()}{frame.levels()}{curves}</svg>{'' if alone else _legend(chart)}</figure>"
    )


def _facts(chart: Chart) -> str:
    points = chart.series[0].points
    values = [value for _, value in points]
    facts = f"last {format_number(values[-1])}"
    if len(values) > 1:
        facts += f", {format_number(min(values))} to {format_number(max(values))}"
    if chart.series[0].smoothed:
        facts += f"; mean of {2 * max(1, len(points) // WINDOW) + 1} entries"
    return f"<small>{escape_html(facts)}</small>"


def _legend(chart: Chart) -> str:
    entries = "".join(
        f"<li><svg viewBox='0 0 20 8'><polyline class='c{i % COLOURS}{' dashed' if i >= COLOURS else ''}' "
        f"points='0,4 20,4'/></svg>{escape_html(each.name[:MAX_NAME])} "
        f"<small>last {escape_html(format_number(each.points[-1][1]))}</small>"
        for i, each in enumerate(chart.series)
    )
    return f"<ul class=legend>{entries}</ul>"


def draw_section(charts: Iterable[tuple[bool, Chart]], note: str = "") -> str:
    """Return charts under a heading, "" if there are none.

    Args:
        charts: the charts, and whether each is shown without expanding.
        note: HTML below the heading.
    """
    first: list[str] = []
    others: list[str] = []
    for prominent, chart in charts:
        (first if prominent else others).append(draw(chart))
    if not first and not others:
        return ""
    more = ""
    if others:
        more = (
            f"<details><summary>More curves ({len(others)})</summary>"
            f"<div class=charts>{''.join(others)}</div></details>"
        )
    return f"<h2>Curves</h2>{note}<div class=charts>{''.join(first)}</div>{more}"
