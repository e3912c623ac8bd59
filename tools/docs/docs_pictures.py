"""Draws the pictures of the documentation that no table of the code holds: who there is, and who says what when.

    python tools/docs/docs_pictures.py

Laws: a picture is a function of the lists below; a test compares the files with what this draws, and holds every
message in the sequence to the classes of the protocol. Rows are laid out by their number, so that nothing overlaps when
one is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "docs" / "diagrams"
CHAR_PX = 6.7  # of a letter at 13 px
STYLE = (
    "text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#1b1f24}.small{font-size:11px;fill:#57606a}"
    ".page{fill:#fff;stroke:#d7dce1}.box{fill:#e8f0fe;stroke:#3f51b5}.part{fill:#fff;stroke:#9fa8da}"
    ".store{fill:#fff8e1;stroke:#c77700}.life{stroke:#c3c9d0;stroke-dasharray:2 4}"
    ".says{stroke:#3f51b5;fill:none;stroke-width:1.4}.moves{stroke:#2e7d32;fill:none;stroke-width:4}"
    ".bold{font-weight:600}"
)
TIPS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" markerHeight="{size}" '
    f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{color}"/></marker>'
    for name, size, color in (("tip", 8, "#3f51b5"), ("flow", 3.5, "#2e7d32"))
)


class Step(NamedTuple):
    """One arrow, from one column to another, or a note where both are the same."""

    at: str
    to: str
    text: str
    moves: bool = False  # KV, not words


ABOUT = {"client": "", "router": "policy, deadlines", "P": "prefill engine", "D": "decode engine"}
PULL = (
    Step("client", "router", "request"),
    Step("router", "P", "prompt, max_tokens=1"),
    Step("P", "P", "computes; pins blocks, notes epochs, grants a lease"),
    Step("P", "router", "signed ticket"),
    Step("router", "D", "request and ticket"),
    Step("D", "P", "Hello … Joined (once a pair)"),
    Step("D", "P", "Claim"),
    Step("P", "D", "Granted: block ids"),
    Step("P", "D", "KV, one-sided reads by D", moves=True),
    Step("D", "P", "Commit: every copy is at rest"),
    Step("P", "P", "compares epochs: was it this prompt's all along?"),
    Step("P", "D", "Committed, or Stale"),
    Step("P", "P", "unpins, once"),
    Step("D", "client", "tokens"),
)
OVER_TWO = {"client": "one stream", "router": "owns it", "D1": "dies", "P": "prefill engine", "D2": "goes on"}
CONTINUED = (
    Step("client", "router", "request, stream"),
    Step("router", "D1", "asks, and for the ids of its tokens"),
    Step("D1", "router", "Once upon a"),
    Step("router", "client", "Once upon a"),
    Step("D1", "D1", "kill -9 · silent · drains"),
    Step("router", "router", "closes its connection: what it says later is nobody's"),
    Step("router", "P", "prompt and history, for their KV"),
    Step("router", "D2", "request, ticket, signed history: Once upon a"),
    Step("P", "D2", "KV, as in each handoff", moves=True),
    Step("D2", "router", "Once upon a time there"),
    Step("router", "router", "cuts what the client has; must be the same"),
    Step("router", "client", "time there, by the same id"),
)
ROW_PX, HEAD_PX, COLUMN_PX, LEFT_PX = 34, 70, 230, 80


def sequence(steps: Sequence[Step], about: Mapping[str, str], label: str) -> str:
    x = {name: LEFT_PX + COLUMN_PX * index for index, name in enumerate(about)}
    height, width = HEAD_PX + ROW_PX * len(steps) + 20, LEFT_PX + COLUMN_PX * (len(about) - 1) + 130
    lines = []
    for name, at in x.items():
        lines.append(f'<line class="life" x1="{at}" y1="50" x2="{at}" y2="{height - 10}"/>')
        lines.append(f'<rect class="box" x="{at - 55}" y="12" width="110" height="38" rx="6"/>')
        lines += _text(at, 28 if about[name] else 36, name, "bold")
        lines += _text(at, 43, about[name], "small") if about[name] else []
    for row, step in enumerate(steps):
        y = HEAD_PX + ROW_PX * (row + 0.6)
        if step.at == step.to:
            half = len(step.text) * CHAR_PX / 2 + 10
            place = f'x="{x[step.at] - half:.0f}" y="{y - 14:.0f}" width="{2 * half:.0f}"'
            lines.append(f'<rect class="part" {place} height="22" rx="4"/>')
            lines += _text(x[step.at], y + 1, step.text)
            continue
        here, there = x[step.at], x[step.to]
        aside = 7 if there > here else -7
        kind, tip = ("moves", "flow") if step.moves else ("says", "tip")
        lines.append(f'<path class="{kind}" d="M{here} {y:.0f}H{there - aside}" marker-end="url(#{tip})"/>')
        lines += _text((here + there) / 2, y - 6, step.text)
    return _svg(width, height, label, lines)


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int
    title: str
    about: str = ""
    kind: str = "box"


BOXES = (
    Box(20, 185, 130, 60, "clients", "OpenAI, Anthropic"),
    Box(220, 150, 180, 140, "router", "pairs P and D; retries"),
    Box(240, 222, 140, 52, "registry", "who is here", "part"),
    Box(500, 20, 350, 130, "P: prefill engine", "vLLM, or the embedded one"),
    Box(515, 75, 155, 60, "node", "leases, epochs", "part"),
    Box(680, 75, 155, 60, "ranks", "KV cache blocks", "part"),
    Box(500, 290, 350, 130, "D: decode engine", "vLLM, or the embedded one"),
    Box(515, 345, 155, 60, "node", "claims, commits", "part"),
    Box(680, 345, 155, 60, "ranks", "KV cache blocks", "part"),
    Box(980, 180, 120, 70, "store", "KV by content", "store"),
)


class Line(NamedTuple):
    path: str
    labels: tuple[str, ...]
    x: int
    y: int
    kind: str = "says"
    both: bool = False


LINES = (
    Line("M150 215H213", ("HTTP",), 160, 207),
    Line("M400 175L493 85", ("prompt",), 400, 125),
    Line("M500 112L406 203", ("ticket",), 455, 182),
    Line("M400 250L493 345", ("request,", "ticket"), 390, 318),
    Line("M545 138V338", ("control, CurveZMQ:", "Claim, Granted,", "Commit, Committed"), 553, 207, both=True),
    Line("M800 138V336", ("KV, one-sided:", "cuda · shm · tcp", "nixl · mooncake"), 690, 207, "moves"),
    Line("M842 105L974 195", ("puts, loads",), 915, 135, both=True),
    Line("M842 375L974 240", ("puts, loads",), 915, 330, both=True),
)


def architecture() -> str:
    lines = []
    for box in BOXES:
        lines.append(
            f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
        )
        top = box.y + (24 if box.kind != "part" else 22)
        lines += _text(box.x + box.width / 2, top, box.title, "bold")
        lines += _text(box.x + box.width / 2, top + 17, box.about, "small") if box.about else []
    for line in LINES:
        tip = "flow" if line.kind == "moves" else "tip"
        start = f' marker-start="url(#{tip})"' if line.both else ""
        lines.append(f'<path class="{line.kind}" d="{line.path}" marker-end="url(#{tip})"{start}/>')
        for row, label in enumerate(line.labels):
            lines.append(f'<text class="small" x="{line.x}" y="{line.y + 15 * row}">{escape(label)}</text>')
    return _svg(1120, 440, "kvbaton: clients, router, prefill and decode engines, store", lines)


def _text(x: float, y: float, text: str, kind: str = "") -> Iterator[str]:
    styled = f' class="{kind}"' if kind else ""
    yield f'<text{styled} x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{escape(text)}</text>'


def _svg(width: float, height: float, label: str, lines: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(label)}">'
    )
    page = f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="6"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{TIPS}</defs>", page, *lines, "</svg>", ""])


PICTURES: Mapping[str, str] = {
    "architecture": architecture(),
    "sequence": sequence(PULL, ABOUT, "Sequence of a handoff by pull"),
    "continued": sequence(CONTINUED, OVER_TWO, "A stream over two Ds: D1 dies, D2 goes on"),
}


if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(drawn)
