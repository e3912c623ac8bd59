"""A page of HTML that shows a run: requests by second, every fault as a bar, memory of every process.

Law: one file, no script, nothing fetched; every text in it is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from kvbaton_proof.chaos.outcome import Row
from kvbaton_proof.chaos.seen import Seen

WIDTH, LEFT = 1000, 60
LOAD_HEIGHT, LANE_HEIGHT, MEMORY_HEIGHT = 160, 18, 160
SHORTEST_S = 0.5
_COLOURS = {"right": "#4a9c6d", "errors": "#d9a441", "bad": "#c0392b"}
_LINES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def page(seen: Seen) -> str:
    outcome = seen.outcome
    total_s = max(float(len(seen.seconds)), outcome.seconds, 1.0)
    scale = (WIDTH - LEFT) / total_s
    verdict = "every promise held" if outcome.ok else "a promise broke"
    figures = (
        f"{outcome.requests} requests, {outcome.right} right, {outcome.errors} errors, {outcome.wrong} wrong, "
        f"{outcome.late} late, {outcome.dead} dead, {outcome.left_over} left over; seed {outcome.seed}"
    )
    parts = [
        "<!doctype html><meta charset=utf-8><title>kvbaton chaos</title>",
        "<style>body{font:14px sans-serif;margin:24px;max-width:1060px}svg text{font:11px sans-serif}</style>",
        f"<h1>kvbaton chaos: {verdict}</h1><p>{html.escape(figures)}</p>",
        *(f"<p><b>{html.escape(problem)}</b></p>" for problem in outcome.problems),
        "<h2>Requests that ended, by second</h2>",
        _svg(LOAD_HEIGHT + 20, [*_load(seen, scale), *_axis(total_s, scale, LOAD_HEIGHT)]),
        "<h2>Faults, until well again</h2>",
        _svg(LANE_HEIGHT * (len(outcome.rows) + 1) + 4, _lanes(outcome.rows, total_s, scale)),
        "<h2>MiB resident</h2>",
        _svg(MEMORY_HEIGHT + 40, [*_memory(seen, scale), *_axis(total_s, scale, MEMORY_HEIGHT)]),
        f"<p>Again: <code>{html.escape(outcome.replay)}</code></p>",
    ]
    return "\n".join(parts) + "\n"


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg width="{WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    told = f"<title>{html.escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}">{told}</rect>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(text)}</text>'


def _load(seen: Seen, scale: float) -> list[str]:
    most = max((each.right + each.errors + each.bad for each in seen.seconds), default=1) or 1
    parts = [_text(0, 12, f"{most}/s")]
    for at, each in enumerate(seen.seconds):
        top = float(LOAD_HEIGHT)
        for name, colour in _COLOURS.items():
            height = getattr(each, name) * LOAD_HEIGHT / most
            top -= height
            if height:
                parts.append(_rect(LEFT + at * scale, top, scale * 0.9, height, colour, f"{at} s: {name} {each}"))
    return parts


def _lanes(rows: Sequence[Row], total_s: float, scale: float) -> list[str]:
    parts = []
    for number, row in enumerate(rows):
        y = number * LANE_HEIGHT
        lasted_s = max(SHORTEST_S, row.seconds or 0.0)
        colour = "#5b7db1" if row.ok else _COLOURS["bad"]
        x = LEFT + row.at_s * scale
        parts.append(_rect(x, y + 3, lasted_s * scale, LANE_HEIGHT - 6, colour, f"{row.title}: {row.note}"))
        if row.at_s < total_s / 2:
            parts.append(_text(x + lasted_s * scale + 4, y + 13, row.title))
        else:
            parts.append(_text(x - 4, y + 13, row.title, 'text-anchor="end"'))
    return [*parts, *_axis(total_s, scale, LANE_HEIGHT * len(rows))]


def _memory(seen: Seen, scale: float) -> list[str]:
    most = max((sample.rss_mib for samples in seen.samples.values() for sample in samples), default=1.0) or 1.0
    parts = [_text(0, 12, f"{most:.0f} MiB")]
    for number, (name, samples) in enumerate(seen.samples.items()):
        colour = _LINES[number % len(_LINES)]
        for life in sorted({sample.life for sample in samples}):
            points = " ".join(
                f"{LEFT + sample.at_s * scale:.1f},{MEMORY_HEIGHT * (1 - sample.rss_mib / most):.1f}"
                for sample in samples
                if sample.life == life
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(_text(LEFT + number * 70, MEMORY_HEIGHT + 34, name, f'fill="{colour}"'))
    return parts


def _axis(total_s: float, scale: float, y: float) -> list[str]:
    every = next(step for step in (5, 10, 30, 60, 300, 600, 3600, 36000) if total_s / step <= 20)
    marks = [_text(LEFT + at * scale, y + 14, f"{at} s") for at in range(0, int(total_s) + 1, every)]
    return [_rect(LEFT, y, WIDTH - LEFT, 0.5, "#888"), *marks]
