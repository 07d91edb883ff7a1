"""Charts as inline SVG, drawn here, so that a page shows them without a script; hovering is added by `page/report.js`.

A chart has one x axis of steps. Long series are drawn as means over buckets of steps, with the range behind them.
"""

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ebbtide.units import GIB, KIB, MIB, TIB

__all__ = ["Chart", "Series", "draw", "is_constant"]

WIDTH, HEIGHT = 480, 232
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
_MAX_POINTS = 400
_NUM_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps.

    Attributes:
        name: as the legend shows it.
        steps: ascending.
        values: one a step; NaN leaves a gap.
        low: lower edge of a band, one a step; empty where there is none.
        high: its upper edge.
        style: a line; single points; or a faint line that another one smooths.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Literal["line", "points", "faint"] = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing.

    Attributes:
        title: a word or two.
        unit: "", "ratio", "s", "bytes", "tokens", "tokens/s" or "nats".
        sentence: what it shows.
        series: the curves, the first drawn in the first colour; a faint one has the colour of the next.
        is_stacked: areas on top of each other.
        bounds: the least range of the y axis; None leaves an edge to the values.
    """

    title: str
    unit: str
    sentence: str
    series: Sequence[Series] = field(default_factory=tuple)
    is_stacked: bool = False
    bounds: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps steps and values to the drawing's coordinates."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at_x(self, step: float) -> float:
        return _LEFT + (step - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - _TOP - _BOTTOM)


def draw(chart: Chart) -> str:
    """The chart as a `<figure>`; empty where no series has a finite value."""
    series = [_bucketed(item) for item in chart.series if any(map(math.isfinite, item.values))]
    if not series:
        return ""
    if chart.is_stacked:
        series = _stacked(series)
    frame, ticks = _frame(series, chart.bounds, chart.unit)
    colours = _colours(series)
    parts = [*_axes(frame, ticks, chart.unit)]
    for item, colour in zip(series, colours, strict=True):
        parts += _curve(item, colour, frame, is_area=chart.is_stacked)
    entries = [
        f'<li class="c{colour}"><i></i>{html.escape(item.name)}</li>'
        for item, colour in zip(series, colours, strict=True)
        if item.style != "faint"
    ]
    legend = f"<ul>{''.join(entries)}</ul>" if len(entries) > 1 else ""
    return (
        f'<figure class="chart"><figcaption><h3>{html.escape(chart.title)}</h3>'
        f"<p>{html.escape(chart.sentence)}</p></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}" '
        f'data-chart="{html.escape(_hover_data(chart, series, colours, frame))}">{"".join(parts)}</svg>'
        f"{legend}</figure>"
    )


def is_constant(chart: Chart) -> bool:
    """Whether no curve of it ever moves by more than rounding, so that a number says as much."""
    if chart.is_stacked:
        return False
    rounding = 1e-9 if chart.unit in ("nats", "ratio") else 0.0
    spans = ((min(found), max(found)) for item in chart.series if (found := _finite(item.values)))
    return all(high - low <= rounding for low, high in spans)


def _bucketed(series: Series) -> Series:
    """At most `_MAX_POINTS` points: means over buckets of equally many steps, with the range as a band."""
    n = len(series.steps)
    if n <= _MAX_POINTS or series.style == "points":
        return series
    size = math.ceil(n / _MAX_POINTS)
    cuts = [slice(start, start + size) for start in range(0, n, size)]
    low, high = (series.low or series.values), (series.high or series.values)
    return replace(
        series,
        steps=[series.steps[cut][-1] for cut in cuts],
        values=[_mean(series.values[cut]) for cut in cuts],
        low=[min(_finite(low[cut]), default=math.nan) for cut in cuts],
        high=[max(_finite(high[cut]), default=math.nan) for cut in cuts],
    )


def _stacked(series: Sequence[Series]) -> list[Series]:
    """Each series with the sum of those before it as the lower edge of its area."""
    steps = sorted({step for item in series for step in item.steps})
    below, found = [0.0] * len(steps), []
    for item in series:
        known = dict(zip(item.steps, item.values, strict=True))
        values = [value if math.isfinite(value := known.get(step, 0.0)) else 0.0 for step in steps]
        above = [base + value for base, value in zip(below, values, strict=True)]
        found.append(replace(item, steps=steps, values=values, low=below, high=above))
        below = above
    return found


def _frame(
    series: Sequence[Series], bounds: tuple[float | None, float | None], unit: str
) -> tuple[_Frame, Sequence[float]]:
    steps = [step for item in series for step in item.steps]
    edges = [value for item in series for edge in (item.low, item.high) for value in _finite(edge)]
    inner = [value for item in series for value in _finite(item.values)]
    # A band may have spikes that would flatten the line: it widens the axis by no more than the line's own range.
    values = [*inner, *edges] if len(edges) < 2 or any(item.low and item.high for item in series) else inner
    low, high = min(values), max(values)
    low, high = min(low, bounds[0] if bounds[0] is not None else low), max(high, bounds[1] or high)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
        low = max(low, bounds[0]) if bounds[0] is not None else low
    ticks = _ticks(low, high, unit)
    y = (min(low, ticks[0]), max(high, ticks[-1]))
    x = (min(steps), max(steps))
    return _Frame(x if x[1] > x[0] else (x[0] - 1, x[1] + 1), y), ticks


def _ticks(low: float, high: float, unit: str, count: int = 4) -> list[float]:
    """Round values around a range; of bytes in their binary unit."""
    size = _scale(max(abs(low), abs(high)), unit)[0]
    low, high = low / size, high / size
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step * size for number in range(first, last + 1)]


def _scale(magnitude: float, unit: str) -> tuple[float, str]:
    """What axis labels of this magnitude are divided by, and what is written after them."""
    if unit == "bytes":
        sizes: tuple[tuple[float, str], ...] = ((TIB, " TiB"), (GIB, " GiB"), (MIB, " MiB"), (KIB, " KiB"))
    elif unit == "s":
        sizes = ((1.0, " s"), (1e-3, " ms"))
        return next(((size, name) for size, name in sizes if magnitude >= size), sizes[-1])
    elif unit == "ratio":
        return 0.01, " %"
    elif 0 < magnitude < 1e-3:
        exponent = math.floor(math.log10(magnitude))
        return 10.0**exponent, f"e{exponent}"
    else:
        sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k")) if magnitude >= 10_000 else ()
    return next(((size, name) for size, name in sizes if magnitude >= size), (1.0, " B" if unit == "bytes" else ""))


def _axes(frame: _Frame, ticks: Sequence[float], unit: str) -> Iterator[str]:
    size, suffix = _scale(max(map(abs, frame.y)), unit)
    decimals = _decimals([tick / size for tick in ticks])
    for tick in ticks:
        y = frame.at_y(tick)
        text = f"{round(tick / size, decimals) + 0.0:.{decimals}f}"  # adding 0.0 takes the sign from a zero
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        unit_text = "" if tick == 0 and suffix.startswith("e") else suffix
        label = "0" if tick == 0 and not unit_text else f"{text}{unit_text}"
        yield f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
    for tick in _ticks(*frame.x, "", count=5):
        if not (frame.x[0] <= tick <= frame.x[1]) or tick != round(tick):
            continue
        x = frame.at_x(tick)
        yield f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{tick:.0f}</text>'


def _decimals(values: Sequence[float]) -> int:
    """The fewest decimals that tell the values apart without rounding them."""
    return next((n for n in range(5) if all(abs(value - round(value, n)) < 1e-6 for value in values)), 5)


def _colours(series: Sequence[Series]) -> list[int]:
    """A colour a series; a faint one shares that of the series after it."""
    found, colour = [], 0
    for item in series:
        found.append(colour % _NUM_COLOURS)
        colour += item.style != "faint"
    return found


def _curve(series: Series, colour: int, frame: _Frame, *, is_area: bool) -> Iterator[str]:
    if is_area:
        yield f'<path class="area c{colour}" d="{_area(series, frame)}"/>'
        return
    if series.style == "points":
        for number, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
            if not math.isfinite(value):
                continue
            x = frame.at_x(step)
            if series.low:
                low, high = frame.at_y(series.low[number]), frame.at_y(series.high[number])
                yield f'<line class="whisker c{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            yield f'<circle class="c{colour}" cx="{x:.1f}" cy="{frame.at_y(value):.1f}" r="3.2"/>'
        return
    if series.low:
        yield f'<path class="band c{colour}" d="{_area(series, frame)}"/>'
    for run in _runs(series.steps, series.values):
        if len(run) == 1:
            x, y = frame.at_x(run[0][0]), frame.at_y(run[0][1])
            yield f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="1.6"/>'
        else:
            points = " ".join(f"{frame.at_x(step):.1f},{frame.at_y(value):.1f}" for step, value in run)
            yield f'<polyline class="{series.style} c{colour}" points="{points}"/>'


def _area(series: Series, frame: _Frame) -> str:
    parts = []
    for upper, lower in zip(_runs(series.steps, series.high), _runs(series.steps, series.low), strict=False):
        points = [f"{frame.at_x(step):.1f} {frame.at_y(value):.1f}" for step, value in (*upper, *reversed(lower))]
        parts.append("M" + "L".join(points) + "Z")
    return "".join(parts)


def _runs(steps: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Stretches of finite values."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _hover_data(chart: Chart, series: Sequence[Series], colours: Sequence[int], frame: _Frame) -> str:
    """What the page's script shows under the pointer: `x` and `plot` place it, `series` has the numbers."""
    rows = [
        {
            "name": item.name,
            "colour": colour,
            "steps": [_short(step) for step in item.steps],
            "values": [_short(value) for value in item.values],
        }
        for item, colour in zip(series, colours, strict=True)
        if item.style != "faint"
    ]
    data = {"unit": chart.unit, "x": frame.x, "plot": [_LEFT, WIDTH - _RIGHT], "series": rows}
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _short(value: float) -> float | None:
    """Six significant digits, and nothing where there is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float:
    finite = _finite(values)
    return sum(finite) / len(finite) if finite else math.nan


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
