"""Draws the protocol's state machines as SVG, from the tables that the code runs.

    python tools/docs/docs_diagrams.py

Law: the pictures are a function of the tables alone. A test compares the files with what this draws, so that no picture
shows a state machine of yesterday. No library lays them out: each state is a column, each kind of step a row of its
own, so that nothing can overlap however a table grows.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from kvbaton.protocol.legality import Table
from kvbaton.protocol.machines.inbound import INTAKE
from kvbaton.protocol.machines.lease import LEASE, READER
from kvbaton.protocol.machines.pairing_state import LINK
from kvbaton.protocol.machines.push_writer import OUTLET
from kvbaton.protocol.machines.puts import PUT

FOLDER = Path(__file__).parents[2] / "docs" / "diagrams"
MACHINES: Mapping[str, Table[Any, Any]] = {
    machine.name: machine for machine in (LEASE, READER, OUTLET, INTAKE, LINK, PUT)
}

CHAR_PX = 7.3  # of a monospace letter at 12 px
COLUMN_GAP_PX, BOX_PX, ROW_PX, HEAD_PX, EDGE_PX = 34, 30, 34, 66, 20
STYLE = (
    "text{font:12px ui-monospace,monospace;fill:#1b1f24}.page{fill:#fff;stroke:#d7dce1}"
    ".state{fill:#e8f0fe;stroke:#3f51b5}.last{fill:#e6f4ea;stroke:#2e7d32}"
    ".line{stroke:#c3c9d0;stroke-dasharray:2 4}.step{stroke:#3f51b5;fill:none;stroke-width:1.4}"
)


def steps(machine: Table[Any, Any]) -> list[tuple[enum.Enum, enum.Enum, str]]:
    """From, to and the events that lead there, in the order of the states."""
    arrows: dict[tuple[enum.Enum, enum.Enum], list[str]] = defaultdict(list)
    for state in machine.states:
        for event in machine.events:
            if (state, event) in machine.next:
                arrows[state, machine.next[state, event]].append(str(event.value))
    return [(at, to, ", ".join(events)) for (at, to), events in arrows.items()]


def columns(machine: Table[Any, Any], found: list[tuple[enum.Enum, enum.Enum, str]]) -> dict[enum.Enum, float]:
    """Where each state stands: far enough apart for the longest label between two neighbours."""
    order = list(machine.states)
    middle, places = EDGE_PX + _half(order[0]), {}
    for index, state in enumerate(order):
        if index:
            near = {order[index - 1], state}
            labels = [len(events) * CHAR_PX + 26 for at, to, events in found if {at, to} == near]
            apart = _half(order[index - 1]) + _half(state) + COLUMN_GAP_PX
            loops = [len(events) * CHAR_PX + 44 for at, to, events in found if at == to == order[index - 1]]
            middle += max([apart, *labels, *loops])
        places[state] = middle
    return places


def draw(machine: Table[Any, Any]) -> str:
    found = steps(machine)
    at = columns(machine, found)
    leaving = {state for state, _ in machine.next}
    height = HEAD_PX + ROW_PX * len(found) + 16
    last = list(machine.states)[-1]
    width = at[last] + _half(last) + EDGE_PX + max([0, *(len(e) * CHAR_PX for a, b, e in found if a == b == last)])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="State machine {escape(machine.name)}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#3f51b5"/></marker></defs>',
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="6"/>',
    ]
    for state, x in at.items():
        final = state not in leaving
        half = _half(state)
        lines.append(f'<line class="line" x1="{x:.1f}" y1="{14 + BOX_PX}" x2="{x:.1f}" y2="{height - 10:.0f}"/>')
        kind, place = "last" if final else "state", f'x="{x - half:.1f}" y="14" width="{2 * half:.1f}"'
        lines.append(f'<rect class="{kind}" {place} height="{BOX_PX}" rx="{BOX_PX / 2}"/>')
        lines.append(f'<text x="{x:.1f}" y="33" text-anchor="middle">{escape(str(state.value))}</text>')
    for row, (source, target, events) in enumerate(found):
        lines += _step(at[source], at[target], HEAD_PX + ROW_PX * (row + 0.6), events)
    return "\n".join([*lines, "</svg>", ""])


def _step(x: float, to: float, y: float, events: str) -> list[str]:
    if x == to:
        path = f"M{x:.1f} {y - 8:.1f}h18v10h-16"
        label = f'<text x="{x + 24:.1f}" y="{y:.1f}">{escape(events)}</text>'
    else:
        path = f"M{x:.1f} {y:.1f}H{to - (2 if to > x else -2):.1f}"
        label = f'<text x="{(x + to) / 2:.1f}" y="{y - 5:.1f}" text-anchor="middle">{escape(events)}</text>'
    dot = f'<circle cx="{x:.1f}" cy="{y if x != to else y - 8:.1f}" r="2.5" fill="#3f51b5"/>'
    return [f'<path class="step" d="{path}" marker-end="url(#tip)"/>', dot, label]


def _half(state: enum.Enum) -> float:
    return len(str(state.value)) * CHAR_PX / 2 + 12


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, machine in MACHINES.items():
        (FOLDER / f"{name}.svg").write_text(draw(machine))


if __name__ == "__main__":
    main()
