"""The times of `kvbaton bench serve` as a picture: SVG, drawn by hand, no library needed.

Law: pure, and the same figures give the same bytes. A panel for each time has one curve for each target, from the
fastest request (below) to the slowest (above); both axes are labelled, the times on a scale of powers of ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 860, 190, 60, 20, 62, 44
COLOURS = ("#1f618d", "#ca6f1e", "#1e8449", "#7d3c98", "#b03a2e", "#566573", "#b7950b", "#17a589")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "gap between tokens",
    "e2e": "whole answer",
}
LEGEND_COLUMNS = 4
DECADES_MAX = 3  # of the scale; what is faster lies on its left edge
_FLOOR_MS = 0.001

Quantiles = Mapping[str, Mapping[str, Sequence[float]]]


def plot(quantiles: Quantiles) -> str:
    """`quantiles`: by target and time, the values of 0, 1 … 100 %."""
    names = [name for name in TITLES if any(each.get(name) for each in quantiles.values())]
    rows = -(-len(quantiles) // LEGEND_COLUMNS)
    top = TOP + 16 * (rows - 1)
    height = top + len(names) * (PANEL + GAP)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        "<title>Times of requests by target: share of requests against milliseconds</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, target in enumerate(quantiles):
        x, y = 20 + 205 * (index % LEGEND_COLUMNS), 18 + 16 * (index // LEGEND_COLUMNS)
        drawn.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" {_stroke(index)}/>')
        drawn.append(f'<text x="{x + 30}" y="{y + 4}">{escape(target)}</text>')
    for number, name in enumerate(names):
        curves = {target: each.get(name, ()) for target, each in quantiles.items()}
        drawn += _panel(TITLES[name], curves, top + number * (PANEL + GAP))
    return "\n".join([*drawn, "</svg>", ""])


def _panel(title: str, curves: Mapping[str, Sequence[float]], top: int) -> list[str]:
    values = [max(value, _FLOOR_MS) for curve in curves.values() for value in curve]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    low = max(low, high - DECADES_MAX)
    wide = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + wide * max(0.0, math.log10(max(value, _FLOOR_MS)) - low) / (high - low)

    def y(percent: float) -> float:
        return top + PANEL * (1 - percent / 100)

    drawn = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}, ms</text>']
    for percent in (0, 50, 90, 100):
        drawn.append(
            f'<line x1="{LEFT}" y1="{y(percent):.1f}" x2="{WIDTH - RIGHT}" y2="{y(percent):.1f}" stroke="#ddd"/>'
        )
        drawn.append(f'<text x="{LEFT - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent} %</text>')
    for power in range(low, high + 1):
        at = x(10.0**power)
        drawn.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + PANEL}" stroke="#ddd"/>')
        drawn.append(f'<text x="{at:.1f}" y="{top + PANEL + 14}" text-anchor="middle">{10.0**power:g}</text>')
    for index, curve in enumerate(curves.values()):
        if curve:
            points = " ".join(f"{x(value):.1f},{y(100 * at / (len(curve) - 1)):.1f}" for at, value in enumerate(curve))
            drawn.append(f'<polyline points="{points}" fill="none" {_stroke(index)}/>')
    return drawn


def _stroke(index: int) -> str:
    """Colours, and dashes besides, for whoever cannot tell the colours apart."""
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.8"{dashes}'
