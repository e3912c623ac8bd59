"""Two ledgers in conversation, and somebody who says what he likes: the state machines of handshake, lease and handoff.

An input is a script, a list of steps: P grants, D wants, time passes, frames are lost or come again, and messages are
spoken that no ledger would send. `stranger`: by a third worker that was let in, and the other two must not notice.
`liar`: by P and by D themselves; the bytes may be wrong then, but none moves in memory that is not held for it.

Law, in both: no exception, one end for all that began, everything given back, and nothing remembered at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec
from guided import Target
from mutators import Shape
from targets_protocol import MESSAGES

sys.path.append(str(Path(__file__).parents[1] / "protocol"))
from pair import Frame, Pair
from party import Moving, Party, transfer

from kvbaton.protocol.effects import Direction
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import SourceEnded
from kvbaton.protocol.ids import LeaseId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.messages import NEWEST

QUICK = Settings(
    transfer_timeout=6.0, defer_timeout=12.0, claim_timeout=4.0, lease_s=3.0, max_hold_s=40.0, revoke_timeout=2.0,
    tombstones_max=4, parked_max=4, revoked_max=4, sessions_max=4, intakes_max=8, leases_max=8, puts_max=4,
    quarantine_blocks_max=8,
)  # fmt: skip
STEPS_MAX = 24
HANDOFFS_MAX = 4
WAITS_S = (0.0, 0.1, 0.6, 2.5, 7.0, 45.0)
PACK = msgspec.msgpack.encode
Step = list[Any]


class Play:
    """One script, played."""

    def __init__(self, *names: str) -> None:
        self.pair = Pair(*names, settings=QUICK)
        self.liars: tuple[str, ...] = ("m",)
        self._wants = 0
        self._sources = 0

    def step(self, step: Step) -> None:
        kind, *rest = step or [0]
        numbers = [each if type(each) is int else 0 for each in (*rest, 0, 0, 0)]
        if isinstance(kind, str):
            self._say(kind, numbers, rest[-1] if rest else None)
        elif type(kind) is int:
            self._do(kind % 10, numbers[0], numbers[1])
        self.bounded()

    def _do(self, kind: int, first: int, second: int) -> None:
        pair, number = self.pair, 1 + abs(first) % HANDOFFS_MAX
        match kind:
            case 0:
                pair.run(WAITS_S[abs(first) % len(WAITS_S)])
            case 1 if self._room(pair.p):
                self._want(number, pair.p.grant(number, content=number), push=False)
            case 2 if self._room(pair.p):
                source = pair.p.begin(number, content=number)
                for _ in range(3):
                    pair.p.chunk(source, 1)
                    pair.run(0.2)
                pair.p.complete(source)
            case 3:
                self._want(number, pair.router_ticket(number), push=bool(second & 1))
            case 4:
                for request in list(pair.d.loads)[-1:]:
                    if pair.d.loads[request].end is None and pair.d.loads[request].failed is None:
                        pair.d.give_up(request)
                        pair.settle()
            case 5:
                for lease in list(pair.p.sources)[-1:]:
                    if not pair.p.sources[lease].unpins:
                        pair.p.tell(SourceEnded(lease, Reason.SOURCE_ABORTED))
                        pair.settle()
            case 6:
                self._again(first)
            case 7:
                kinds = [type(message) for message in MESSAGES]
                pair.lose(kinds[abs(first) % len(kinds)], 1 + abs(second) % 3)
            case 8:
                pair.heal()
            case 9 if "m" in pair.parties and self._room(pair.p):
                self._wants += 1
                pair.m.want(f"m{self._wants}", pair.router_ticket(5), 5, content=5)
                pair.settle()

    def _room(self, party: Party) -> bool:
        return self._live(party) < HANDOFFS_MAX and len(party.free) >= 6

    def _live(self, party: Party) -> int:
        self._sources += 1
        return sum(not source.unpins for source in party.sources.values())

    def _want(self, number: int, ticket: str, push: bool) -> None:
        waiting = sum(load.end is None and load.failed is None for load in self.pair.d.loads.values())
        if waiting < HANDOFFS_MAX and len(self.pair.d.free) >= 6:
            self._wants += 1
            self.pair.d.want(f"r{self._wants}", ticket, number, content=number, push=push)
            self.pair.settle()

    def _again(self, number: int) -> None:
        """A frame that was on the wire comes once more."""
        frames = [entry for entry in self.pair.log if isinstance(entry, Frame) and entry.target in self.pair.parties]
        if frames:
            self.pair.wire.append(frames[number % len(frames)])
            self.pair.settle()

    def _say(self, way: str, numbers: list[int], body: Any) -> None:
        """`body` as somebody's message: in the session that the two have, or in another."""
        pair = self.pair
        source = pair.parties[WorkerId(self.liars[numbers[0] % len(self.liars)])]
        others = [party for party in pair.parties.values() if party is not source]
        target = others[numbers[1] % len(others)]
        session = numbers[2] if way == "other" else _session(source, target)
        version = 1 if way == "old" else NEWEST
        to = source.me.incarnation if way == "past" else target.me.incarnation
        try:
            raw = PACK([version, source.name, source.me.incarnation, to, session, body])
        except (OverflowError, ValueError, TypeError):
            return
        target.receive(source.name, raw)
        pair.settle()

    def bounded(self) -> None:
        for party in self.pair.parties.values():
            ledger = party.ledger
            assert len(ledger.sessions.by_number) <= QUICK.sessions_max
            assert len(ledger.producer.parked) <= QUICK.parked_max
            assert len(ledger.consumer.by_handoff) <= QUICK.intakes_max
            assert len(ledger.producer.leases) <= QUICK.leases_max + QUICK.tombstones_max
            assert len(ledger.desk.timers) < 200 and len(ledger.desk.counts) < 300


def _session(source: Party, target: Party) -> int:
    link = source.ledger.consumer.links.by_worker.get(target.name)
    if link is not None and link.session:
        return link.session
    ledgers = source.ledger, target.ledger
    found = (s.number for ledger in ledgers for s in ledger.sessions.by_number.values() if s.joined)
    return next(found, 0)


def script(data: bytes) -> list[Step] | None:
    try:
        return msgspec.msgpack.decode(data, type=list[list[Any]])[:STEPS_MAX]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def stranger(data: bytes) -> None:
    steps = script(data)
    if steps is None:
        return
    play = Play("p", "d", "m")
    for step in steps:
        play.step(step)
    play.pair.finish()


def _honest_land(self: Party, moving: Moving, *, whole_way: bool) -> bool:
    """Only the side that moves is believed: into what it holds, or out of what it has pinned."""
    spans = moving.copy.spans
    for at in range(0, len(spans), 3):
        local, size = spans[at], spans[at + 2]
        assert local >= 0 and local + size <= self.shape.region_bytes, "a copy leaves its memory"
        if moving.copy.direction is Direction.READ:
            self.check_held(local, size)
        else:
            assert self.pins[self.shape.block_at(local)], f"{self.name}: writes from a block that is not pinned"
    return True


def liar(data: bytes) -> None:
    steps = script(data)
    if steps is None:
        return
    play = Play("p", "d")
    play.liars = ("p", "d")
    for party in play.pair.parties.values():
        party._land = MethodType(_honest_land, party)  # type: ignore[method-assign]
        party._check_content = lambda load: None  # type: ignore[method-assign,assignment]
    for step in steps:
        play.step(step)
    play.pair.finish()


def _spoken(message: m.Message) -> Any:
    return msgspec.msgpack.decode(PACK(message))


def seeds() -> list[bytes]:
    claims = [each for each in MESSAGES if not isinstance(each, m.Hello | m.Welcome)]
    lies = [["now", index % 2, 0, 1, _spoken(message)] for index, message in enumerate(claims)]
    pull, stream, push = [1, 0], [[3, 1, 0], [2, 1]], [[3, 2, 1], [2, 2]]
    calm = [
        PACK([pull, [0, 3]]),
        PACK([*stream, [0, 3]]),
        PACK([*push, [0, 3]]),
        PACK([pull, [4], [0, 2], pull, [6, 3]]),
    ]
    wild = [PACK([[9], pull, [7, number], lie, [0, 2], lie]) for number, lie in enumerate(lies)]
    hello = [["now", 0, 0, 1, _spoken(MESSAGES[0])], ["old", 0, 0, 1, _spoken(MESSAGES[1])]]
    named = _spoken(m.Abandon(transfer(1), 1)), _spoken(m.Renew(LeaseId(1), 1, (3,), True))
    return [*calm, *wild, PACK([*hello, *push, *[["other", 1, 1, 1, each] for each in named]])]


TARGETS = (
    Target("ledger_stranger", stranger, seeds, Shape.MSGPACK, 160),
    Target("ledger_liar", liar, seeds, Shape.MSGPACK, 250),
)
