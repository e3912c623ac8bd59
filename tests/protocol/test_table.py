"""Legality is a table: every (state, event) pair of every machine is decided (style 2 and 3)."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections import deque
from typing import Any

import pytest

import kvbaton.protocol
from kvbaton.protocol.legality import Table, Verdict, pairs
from kvbaton.protocol.machines.inbound import INTAKE
from kvbaton.protocol.machines.lease import LEASE, READER
from kvbaton.protocol.machines.pairing_state import LINK
from kvbaton.protocol.machines.push_writer import OUTLET
from kvbaton.protocol.machines.puts import PUT

TABLES: list[Table[Any, Any]] = [LEASE, READER, OUTLET, INTAKE, LINK, PUT]
EVERY_PAIR = [
    pytest.param(table, state, event, id=f"{table.name}-{state.value}-{event.value}")
    for table in TABLES
    for state in table.states
    for event in table.events
]

GOLDEN = {
    "lease": """
growing: extended -> growing, completed -> complete, closed -> closing
  late: rested
complete: closed -> closing
  late: rested
  illegal: extended, completed
closing: rested -> released
  late: extended, completed, closed
released: nothing
  late: extended, completed, closed, rested
""",
    "reader": """
live: proven -> committed, disproven -> stale, left -> gone
committed: nothing
  late: proven, disproven, left
stale: nothing
  late: proven, disproven, left
gone: proven -> committed, disproven -> stale
  late: left
""",
    "outlet": """
writing: flushed -> flushed, stopped -> stopping
  late: rested
  illegal: acked
stopping: rested -> closed
  late: flushed, stopped, acked
flushed: stopped -> closed, acked -> closed
  late: rested
  illegal: flushed
closed: nothing
  late: flushed, stopped, rested, acked
""",
    "intake": """
greeting: linked -> claiming, failed -> settling
  late: unlinked, granted, rested
  illegal: pull_begun, push_begun, copied, committed, written, judged, quiesced
claiming: unlinked -> greeting, granted -> granted, failed -> settling
  late: linked, rested
  illegal: pull_begun, push_begun, copied, committed, written, judged, quiesced
granted: pull_begun -> copying, push_begun -> offered, failed -> settling
  late: linked, unlinked, granted, rested
  illegal: copied, committed, written, judged, quiesced
copying: copied -> committing, failed -> settling
  late: linked, unlinked, granted, rested
  illegal: pull_begun, push_begun, committed, written, judged, quiesced
committing: committed -> settling, failed -> settling
  late: linked, unlinked, granted, rested
  illegal: pull_begun, push_begun, copied, written, judged, quiesced
offered: written -> judging, failed -> revoking
  late: linked, unlinked, granted, rested
  illegal: pull_begun, push_begun, copied, committed, judged, quiesced
judging: judged -> settling, failed -> settling
  late: linked, unlinked, granted, written, quiesced, rested
  illegal: pull_begun, push_begun, copied, committed
revoking: written -> settling, quiesced -> settling
  late: linked, unlinked, granted, pull_begun, push_begun, copied, committed, judged, failed, rested
settling: rested -> done
  late: linked, unlinked, granted, pull_begun, push_begun, copied, committed, written, judged, failed, quiesced
done: nothing
  late: linked, unlinked, granted, pull_begun, push_begun, copied, committed, written, judged, failed, quiesced, rested
""",
    "link": """
greeting: welcomed -> joining, refused -> down, lost -> down
  late: linked
joining: linked -> up, lost -> down
  late: welcomed, refused
up: lost -> down
  late: welcomed, linked, refused
down: nothing
  late: welcomed, linked, refused, lost
""",
    "put": """
putting: ended -> released, timed_out -> cancelling
cancelling: ended -> released
  late: timed_out
released: nothing
  late: ended, timed_out
""",
}
"""What each machine allows. A difference here is a change of the protocol: review it, then change this text."""


class State(enum.Enum):
    ON = "on"
    OFF = "off"


class Event(enum.Enum):
    PRESSED = "pressed"
    PULLED = "pulled"


def text_of(table: Table[Any, Any]) -> str:
    lines = []
    for state in table.states:
        verdicts = {event: table.step(state, event) for event in table.events}
        moves = [f"{event.value} -> {to.value}" for event, to in verdicts.items() if not isinstance(to, Verdict)]
        lines.append(f"{state.value}: {', '.join(moves) or 'nothing'}")
        for verdict in Verdict:
            found = [event.value for event, to in verdicts.items() if to is verdict]
            lines += [f"  {verdict.value}: {', '.join(found)}"] if found else []
    return "\n".join(lines) + "\n"


def every_table() -> set[str]:
    modules = (
        importlib.import_module(m.name) for m in pkgutil.walk_packages(kvbaton.protocol.__path__, "kvbaton.protocol.")
    )
    return {value.name for module in modules for value in vars(module).values() if isinstance(value, Table)}


def test_no_machine_is_forgotten_here() -> None:
    assert every_table() == {table.name for table in TABLES} == set(GOLDEN)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_machine_is_what_its_golden_text_says(table: Table[Any, Any]) -> None:
    assert text_of(table) == GOLDEN[table.name].lstrip("\n")


@pytest.mark.parametrize(("table", "state", "event"), EVERY_PAIR)
def test_every_pair_is_decided(table: Table[Any, Any], state: enum.Enum, event: enum.Enum) -> None:
    verdict = table.step(state, event)
    assert isinstance(verdict, Verdict | table.states)
    assert isinstance(verdict, Verdict) == ((state, event) not in table.next)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_can_be_reached_and_every_machine_can_end(table: Table[Any, Any]) -> None:
    """Promise 2: from everywhere some path leads to a state that nothing leaves."""
    seen, waiting = set(), deque([next(iter(table.states))])
    while waiting:
        state = waiting.popleft()
        seen.add(state)
        waiting.extend(to for (at, _), to in table.next.items() if at is state and to not in seen)
    assert seen == set(table.states)
    final = {state for state in table.states if not any(at is state for at, _ in table.next)}
    assert final
    ending = set(final)
    while grown := {at for (at, _), to in table.next.items() if to in ending} - ending:
        ending |= grown
    assert ending == set(table.states)


def test_a_pair_that_nobody_decided_cannot_be_built() -> None:
    with pytest.raises(ValueError, match=r"lamp: \(ON, PULLED\) is decided 0 times"):
        Table("lamp", State, Event, {(State.ON, Event.PRESSED): State.OFF}, late=pairs({State.OFF}, Event))


def test_a_pair_that_was_decided_twice_cannot_be_built() -> None:
    with pytest.raises(ValueError, match=r"lamp: \(ON, PRESSED\) is decided 2 times"):
        Table("lamp", State, Event, {(State.ON, Event.PRESSED): State.OFF}, late=pairs(State, Event))


def test_a_step_is_a_state_or_the_reason_why_there_is_none() -> None:
    lamp = Table(
        "lamp",
        State,
        Event,
        {(State.ON, Event.PRESSED): State.OFF},
        late={(State.OFF, Event.PRESSED)},
        illegal=pairs(State, {Event.PULLED}),
    )
    assert lamp.step(State.ON, Event.PRESSED) is State.OFF
    assert lamp.step(State.OFF, Event.PRESSED) is Verdict.LATE
    assert lamp.step(State.OFF, Event.PULLED) is Verdict.ILLEGAL
