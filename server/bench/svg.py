"""Draws one chart as inline SVG that follows the page's colours; knows what a series is, not what it means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 30, 40
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
NUM_TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Attributes:
    colour: a class of the page's style sheet: `c0`, `c1`, … for servers, `bad` for failures.
    lows, highs: an interval for each point, drawn as a bar through it.
    """

    kind: Literal["line", "dashed", "points", "crosses", "bars"]
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str = "c0"
    label: str = ""
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """An `<svg>` with axes from 0, or an empty string if there is nothing to draw."""
    series = [one for one in series if len(one.xs)]
    if not series:
        return ""
    x_top = _nice_top(max(max(one.xs) + (_step(one.xs) if one.kind == "bars" else 0.0) for one in series))
    y_top = _nice_top(max(max((*one.ys, *one.highs)) for one in series))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="10" y="16">{escape(title)}<tspan class="tick" dx="6">{escape(y_label)}</tspan></text>',
        *_axes(x_top, y_top, x_label),
    ]
    for one in series:
        points = [(_x(x, x_top), _y(y, y_top)) for x, y in zip(one.xs, one.ys, strict=True)]
        parts.append(_draw(one, points))
        for (x, _), low, high in zip(points, one.lows, one.highs, strict=False):
            parts.append(
                f'<path class="interval {one.colour}" d="M{x:.1f} {_y(low, y_top):.1f}V{_y(high, y_top):.1f}"/>'
            )
    parts.append(_legend(series))
    parts.append("</svg>")
    return "".join(parts)


def _draw(series: Series, points: Sequence[tuple[float, float]]) -> str:
    floor = HEIGHT - _BOTTOM
    match series.kind:
        case "points":  # one path of dots, as ten thousand circles would be megabytes
            return _path("dots", series, "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points))
        case "crosses":
            shape = "".join(f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" for x, y in points)
            return _path("line", series, shape)
        case "bars":  # each from its own place to the next one's
            step = _step([x for x, _ in points])
            shape = "".join(f"M{x:.1f} {floor}V{y:.1f}h{max(step - 1, 0.5):.1f}V{floor}z" for x, y in points)
            return _path("bars", series, shape)
        case "line" | "dashed":
            shape = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            dots = _path("dots", series, "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)) if len(points) < 30 else ""
            return _path("line" if series.kind == "line" else "line dashed", series, shape) + dots


def _step(xs: Sequence[float]) -> float:
    """The width of a bar."""
    return xs[1] - xs[0] if len(xs) > 1 else 1.0


def _path(kind: str, series: Series, shape: str) -> str:
    return f'<path class="{kind} {series.colour}" d="{shape}"/>'


def _axes(x_top: float, y_top: float, x_label: str) -> list[str]:
    floor, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for number in range(NUM_TICKS + 1):
        share = number / NUM_TICKS
        x, y = _x(share * x_top, x_top), _y(share * y_top, y_top)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * y_top:g}</text>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{floor + 15}" text-anchor="middle">{share * x_top:g}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{floor}H{right}"/>')
    parts.append(f'<text class="tick" x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    return parts


def _legend(series: Sequence[Series]) -> str:
    named = [one for one in series if one.label]
    if len(named) < 2:
        return ""
    parts, x = [], WIDTH - _RIGHT
    for one in reversed(named):
        x -= 7 * len(one.label) + 26
        kind = {"points": "dots", "crosses": "line", "bars": "line", "dashed": "line dashed"}.get(one.kind, "line")
        parts.append(f'<path class="{kind} {one.colour}" d="M{x} 12h14"/>')
        parts.append(f'<text class="tick" x="{x + 18}" y="16">{escape(one.label)}</text>')
    return "".join(parts)


def _x(value: float, top: float) -> float:
    return _LEFT + value / top * _PLOT_WIDTH


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - value / top * _PLOT_HEIGHT


def _nice_top(largest: float) -> float:
    """The least of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 and 10 times a power of ten that `largest` does not exceed."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= largest * (1 - 1e-9))
