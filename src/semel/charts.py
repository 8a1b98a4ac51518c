"""Line charts as SVG, for reports that people read: no library, no script, readable in light and in dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

COLOURS: Final = ("#2f6fb0", "#c8553d", "#3b8f5a", "#8a5fb3", "#b8860b", "#4b9ea8", "#a0456f")
"""Far apart in hue and alike in lightness, so that they can be told apart on white and on black."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name in the legend and its points, in the order in which they are joined; one at nan is a gap."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows. A logarithmic one leaves out what is not above zero."""

    label: str
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the horizontal axis that is shaded: something went on there."""

    begin: float
    end: float
    title: str
    colour: str = COLOURS[1]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    spans: Sequence[Span] = (),
    width: int = 720,
    height: int = 300,
) -> str:
    """An `<svg>` element.

    >>> chart = line_chart("speed", [Series("a", [(1, 5), (10, 50)])], x=Axis("size", True), y=Axis("records/s"))
    >>> chart.startswith("<svg") and "polyline" in chart and "records/s" in chart
    True
    """
    lines = [Series(one.name, [at for at in one.points if _is_gap(at) or _is_shown(at, x, y)]) for one in series]
    known = [at for one in lines for at in one.points if not _is_gap(at)]
    across = _Scale.over([at[0] for one in lines for at in one.points], x, _LEFT, width - _RIGHT)
    up = _Scale.over([at[1] for at in known], y, height - _BOTTOM, _TOP, from_zero=True)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="14" font-size="13" font-weight="600">{escape(title)}</text>',
        *_spans(spans, across, height),
        *_grid(across, up, x, y, width, height),
    ]
    for number, one in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        parts += _line(one, across, up, colour)
    if len(lines) > 1:
        parts += _legend(lines, width)
    return "\n".join([*parts, "</svg>"])


def _is_gap(point: tuple[float, float]) -> bool:
    return math.isnan(point[1])


def _is_shown(point: tuple[float, float], x: Axis, y: Axis) -> bool:
    return (point[0] > 0 or not x.is_logarithmic) and (point[1] > 0 or not y.is_logarithmic)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    first_pixel: float
    last_pixel: float
    is_logarithmic: bool

    @classmethod
    def over(
        cls, values: Sequence[float], axis: Axis, first_pixel: float, last_pixel: float, *, from_zero: bool = False
    ) -> _Scale:
        low, high = min(values, default=0.0), max(values, default=1.0)
        if axis.is_logarithmic:
            low, high = (low, high) if values else (1.0, 10.0)
            if low == high:
                high = low * 10
        else:
            low = min(low, 0.0) if from_zero else low
            if low == high:
                high = low + 1
        return cls(low, high, first_pixel, last_pixel, axis.is_logarithmic)

    def at(self, value: float) -> float:
        if self.is_logarithmic:
            share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first_pixel + min(1.0, max(0.0, share)) * (self.last_pixel - self.first_pixel)

    def ticks(self) -> list[float]:
        if self.is_logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1)]
            return [tick for tick in powers if self.low <= tick * 1.000001 and tick <= self.high * 1.000001]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= step * 0.999999)


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis, width: int, height: int) -> list[str]:
    bottom, parts = height - _BOTTOM, list[str]()
    for tick in up.ticks():
        at = up.at(tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
            'stroke="currentColor" opacity=".15"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short_number(tick)}</text>')
    for tick in across.ticks():
        at = across.at(tick)
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{short_number(tick)}</text>')
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="currentColor"/>')
    parts.append(f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="currentColor"/>')
    middle = (_LEFT + width - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{height - 10}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 6}" opacity=".7">{escape(y.label)}</text>')
    return parts


def _line(series: Series, across: _Scale, up: _Scale, colour: str) -> list[str]:
    parts: list[str] = []
    for is_gap, run in itertools.groupby(series.points, _is_gap):
        if is_gap:
            continue
        points = [f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in run]
        # A line from a point to itself is seen as a dot, if it is broad.
        line, width = (" ".join(points), 1.6) if len(points) > 1 else (f"{points[0]} {points[0]}", 4)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linecap="round"/>'
        )
    if len(series.points) <= 40:
        parts += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(series.name)}: {short_number(y)} at {short_number(x)}</title></circle>"
            for x, y in series.points
            if not math.isnan(y)
        ]
    return parts


def _spans(spans: Sequence[Span], across: _Scale, height: int) -> list[str]:
    parts: list[str] = []
    for span in spans:
        begin, end = across.at(span.begin), across.at(span.end)
        parts.append(
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{max(1.0, end - begin):.1f}" height="{height - _BOTTOM - _TOP}" '
            f'fill="{span.colour}" opacity=".18"><title>{escape(span.title)}</title></rect>'
        )
    return parts


def _legend(series: Sequence[Series], width: int) -> list[str]:
    parts: list[str] = []
    at = float(width - _RIGHT)
    for number, one in reversed(list(enumerate(series))):
        at -= 7 * len(one.name) + 22
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{at:.0f}" y="6" width="10" height="10" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{at + 14:.0f}" y="15">{escape(one.name)}</text>')
    return parts


def short_number(value: float) -> str:
    """
    >>> [short_number(value) for value in (0, 0.25, 7, 1500, 20_000, 3_000_000)]
    ['0', '0.25', '7', '1.5k', '20k', '3M']
    """
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"
