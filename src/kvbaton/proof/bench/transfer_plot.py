"""The figures of `kvbaton bench transfer` as a picture: SVG, drawn by hand, no library needed.

Law: pure, and the same figures give the same bytes. Every bar is labelled with its figure, all have one scale from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvbaton.proof.bench.transfer import Result

WIDTH, LEFT, RIGHT = 860, 160, 70
BAR, GAP, HEAD = 14, 5, 34
OWN, DRIVEN, DIRECT, OTHER = "#1f618d", "#7fb3d5", "#ca6f1e", "#909497"
COLOURS = {"kvbaton_": DRIVEN, "shm": OWN, "tcp": OWN, "nixl": DIRECT, "mooncake": DIRECT}
LEGEND = {
    "kvbaton's own": OWN, "a library driven by kvbaton": DRIVEN, "a library driven directly": DIRECT,
    "the machine": OTHER,
}  # fmt: skip


def plot(results: Sequence[Result]) -> str:
    """A panel for each segment size, a bar for each way."""
    most = max(speed for result in results for speed in result.gb_s.values())
    panel = HEAD + len(results[0].gb_s) * (BAR + GAP) + 10
    height = 40 + panel * len(results)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, (words, colour) in enumerate(LEGEND.items()):
        x = 20 + 205 * index
        drawn.append(f'<rect x="{x}" y="12" width="11" height="11" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 16}" y="22">{words}</text>')
    for index, result in enumerate(results):
        drawn += _panel(result, 40 + index * panel, most)
    return "\n".join([*drawn, "</svg>", ""])


def _panel(result: Result, top: int, most: float) -> list[str]:
    drawn = [
        f'<text x="20" y="{top + 16}" font-weight="bold">segments of {result.segment_bytes >> 10} KiB, GB/s</text>'
    ]
    for index, (name, speed) in enumerate(result.gb_s.items()):
        y = top + HEAD - 8 + index * (BAR + GAP)
        width = (WIDTH - LEFT - RIGHT) * speed / most
        drawn += [
            f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{_colour(name)}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 11}">{speed:.2f}</text>',
        ]
    return drawn


def _colour(name: str) -> str:
    return next((colour for start, colour in COLOURS.items() if name.startswith(start)), OTHER)
