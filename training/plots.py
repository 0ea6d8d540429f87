"""Small SVG plots without a plotting library: a line over steps, and rates with their intervals. Pure functions of numbers to text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 460
HEIGHT: Final = 220
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 34
INK, FAINT, LINE = "#1f2430", "#d5d9e0", "#2563a8"


@dataclass(frozen=True, slots=True)
class Bar:
    """A rate between 0 and 1 with its interval; a rate of None is drawn as a gap."""

    name: str
    rate: float | None
    low: float | None
    high: float | None


def line(title: str, points: Sequence[tuple[float, float]], *, x: str = "step", y: str = "") -> str:
    """A line through `(x, y)` points. Points that are not finite are left out; of one point a dot remains."""
    points = [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)]
    if not points:
        return _frame(title, [_text(WIDTH / 2, HEIGHT / 2, "no figures", "middle")])
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    ticks = ticks_of(min(ys), max(ys))
    x0, x1, y0, y1 = min(xs), max(xs), ticks[0], ticks[-1]
    place = [(_scale(a, x0, x1, LEFT, WIDTH - RIGHT), _scale(b, y0, y1, HEIGHT - BOTTOM, TOP)) for a, b in points]
    parts = _grid(ticks, y0, y1)
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in place)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    parts += (
        [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{LINE}"/>' for a, b in place] if len(place) <= 60 else []
    )
    parts += [
        _text(LEFT, HEIGHT - BOTTOM + 16, f"{x0:g}"),
        _text(WIDTH - RIGHT, HEIGHT - BOTTOM + 16, f"{x1:g}", "end"),
    ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x, "middle"))
    return _frame(title + (f" ({y})" if y else ""), parts)


def rates(title: str, bars: Sequence[Bar]) -> str:
    """Rates as bars from 0 to 1, each with its interval as a whisker."""
    parts = _grid([0.0, 0.25, 0.5, 0.75, 1.0], 0.0, 1.0, percent=True)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    for number, bar in enumerate(bars):
        middle = LEFT + slot * (number + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, bar.name, "middle"))
        if bar.rate is None:
            parts.append(_text(middle, HEIGHT - BOTTOM - 6, "not scored", "middle"))
            continue
        top, wide = _scale(bar.rate, 0, 1, HEIGHT - BOTTOM, TOP), min(56.0, slot * 0.6)
        parts.append(
            f'<rect x="{middle - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" fill="{LINE}" opacity="0.8"/>'
        )
        if bar.low is not None and bar.high is not None:
            a, b = (_scale(v, 0, 1, HEIGHT - BOTTOM, TOP) for v in (bar.low, bar.high))
            ends = "".join(f"M{middle - 5:.1f},{v:.1f}h10" for v in (a, b))
            parts.append(f'<path d="M{middle:.1f},{a:.1f}V{b:.1f}{ends}" stroke="{INK}" fill="none"/>')
    return _frame(title, parts)


def ticks_of(low: float, high: float) -> list[float]:
    """Three to eight round values that enclose `low` to `high`, which are finite."""
    if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
        low, high = low - 0.5 * max(abs(low), 1.0), high + 0.5 * max(abs(high), 1.0)
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next((m for m in (1, 2, 5) if raw <= m * unit), 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [n * step for n in range(first, last + 1)]


def _grid(ticks: Sequence[float], y0: float, y1: float, *, percent: bool = False) -> list[str]:
    parts = []
    for value in ticks:
        at = _scale(value, y0, y1, HEIGHT - BOTTOM, TOP)
        parts.append(f'<path d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{value:.0%}" if percent else f"{value:.6g}", "end"))
    return parts


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    return (start + end) / 2 if high == low else start + (value - low) / (high - low) * (end - start)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _frame(title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
    head += f'aria-label="{escape(title, quote=True)}" font-family="system-ui, sans-serif" font-size="11" fill="{INK}">'
    return (
        head
        + f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{escape(title)}</text>'
        + "".join(parts)
        + "</svg>"
    )
