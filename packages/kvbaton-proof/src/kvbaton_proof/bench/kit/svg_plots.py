"""Plots of figures as SVG, drawn by hand, no library needed: bars in panels, and curves of quantiles.

Laws: pure, and the same figures give the same bytes. Every bar is labelled with its figure and all have one scale; of
curves both axes are labelled, and colours differ by their dashes too, for readers who cannot tell colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, TOP = 860, 40
LEGEND_STEP, LEGEND_COLUMNS = 205, 4
BAR, BAR_GAP, BAR_HEAD, BAR_LEFT, BAR_RIGHT = 14, 5, 34, 160, 70
PANEL, PANEL_GAP, LEFT, RIGHT, CURVES_TOP = 190, 44, 60, 20, 62
COLOURS = ("#1f618d", "#ca6f1e", "#1e8449", "#7d3c98", "#b03a2e", "#566573", "#b7950b", "#17a589")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
DECADES_MAX = 3  # of a curve's scale; smaller values lie on its left edge
_FLOOR = 0.001

Bars = Mapping[str, Mapping[str, float]]
"""By panel and name of a bar, its figure."""
Quantiles = Mapping[str, Mapping[str, Sequence[float]]]
"""By target and time, the values of 0, 1 … 100 %."""


def bars(
    panels: Bars,
    colour: Callable[[str], str],
    legend: Mapping[str, str] = {},
    scale: Callable[[float], float] = lambda value: value,
) -> str:
    """A panel under the other; `scale` gives a bar's length in any unit, `legend` a colour by its words."""
    most = max(scale(value) for panel in panels.values() for value in panel.values())
    drawn = []
    for index, (words, fill) in enumerate(legend.items()):
        x = 20 + LEGEND_STEP * index
        drawn += [_rect(x, 12, 11, 11, fill), _text(x + 16, 22, words)]
    top = TOP
    for title, panel in panels.items():
        drawn.append(_text(20, top + 16, title, ' font-weight="bold"'))
        for index, (name, value) in enumerate(panel.items()):
            y, width = (
                top + BAR_HEAD - 8 + index * (BAR + BAR_GAP),
                (WIDTH - BAR_LEFT - BAR_RIGHT) * scale(value) / most,
            )
            drawn.append(_text(BAR_LEFT - 8, y + 11, name, ' text-anchor="end"'))
            drawn.append(_rect(BAR_LEFT, y, f"{width:.1f}", BAR, colour(name)))
            drawn.append(_text(f"{BAR_LEFT + width + 6:.1f}", y + 11, f"{value:,.2f}"))
        top += BAR_HEAD + len(panel) * (BAR + BAR_GAP) + 10
    return _picture(top, drawn)


def curves(quantiles: Quantiles, titles: Mapping[str, str], about: str) -> str:
    """A panel for each time that was measured, from the fastest request (below) to the slowest, in milliseconds on a
    scale of powers of ten.
    """
    names = [name for name in titles if any(each.get(name) for each in quantiles.values())]
    top = CURVES_TOP + 16 * (-(-len(quantiles) // LEGEND_COLUMNS) - 1)
    drawn = []
    for index, target in enumerate(quantiles):
        x, y = 20 + LEGEND_STEP * (index % LEGEND_COLUMNS), 18 + 16 * (index // LEGEND_COLUMNS)
        drawn += [_line(x, y, x + 24, y, _stroke(index)), _text(x + 30, y + 4, target)]
    for number, name in enumerate(names):
        found = [each.get(name, ()) for each in quantiles.values()]
        drawn += _curves(titles[name], found, top + number * (PANEL + PANEL_GAP))
    return _picture(top + len(names) * (PANEL + PANEL_GAP), drawn, about)


def _curves(title: str, found: Sequence[Sequence[float]], top: int) -> list[str]:
    values = [max(value, _FLOOR) for curve in found for value in curve]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    low = max(low, high - DECADES_MAX)

    def x(value: float) -> float:
        share = max(0.0, math.log10(max(value, _FLOOR)) - low) / (high - low)
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(percent: float) -> float:
        return top + PANEL * (1 - percent / 100)

    grey = 'stroke="#ddd"'
    drawn = [_text(LEFT, top - 8, f"{title}, ms", ' font-weight="bold"')]
    for percent in (0, 50, 90, 100):
        at = f"{y(percent):.1f}"
        drawn.append(_line(LEFT, at, WIDTH - RIGHT, at, grey))
        drawn.append(_text(LEFT - 6, f"{y(percent) + 4:.1f}", f"{percent} %", ' text-anchor="end"'))
    for power in range(low, high + 1):
        at = f"{x(10.0**power):.1f}"
        drawn.append(_line(at, top, at, top + PANEL, grey))
        drawn.append(_text(at, top + PANEL + 14, f"{10.0**power:g}", ' text-anchor="middle"'))
    for index, curve in enumerate(found):
        if curve:
            points = " ".join(f"{x(value):.1f},{y(100 * at / (len(curve) - 1)):.1f}" for at, value in enumerate(curve))
            drawn.append(f'<polyline points="{points}" fill="none" {_stroke(index)}/>')
    return drawn


def _picture(height: int, drawn: Sequence[str], about: str = "") -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" role="img">'
    )
    title = [f"<title>{escape(about)}</title>"] if about else []
    return "\n".join([head, *title, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *drawn, "</svg>", ""])


def _text(x: float | str, y: float | str, words: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(words)}</text>'


def _rect(x: float | str, y: float, width: float | str, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def _line(x1: float | str, y1: float | str, x2: float | str, y2: float | str, stroke: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {stroke}/>'


def _stroke(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.8"{dashes}'
