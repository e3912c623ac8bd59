"""A ledger alone with an interviewer that knows every answer: each message, event and time, and all its consequences.

Laws: what is expected is written down beside the question; what follows beyond that is wrong as well. Only the words of
a refusal, and which bytes a copy is of, are left open here (`exam_moves.py` asks for these).
"""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec

from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.ids import HandoffId, Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import encode, pack_blocks
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.questions.exam import same
from kvbaton_proof.sim.world.life import BoundedTimers
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import KINDS

KEY = b"the key of a cluster in which all is known"
TIMES = {
    "transfer_timeout": 5.0, "defer_timeout": 7.0, "claim_timeout": 4.0, "lease_s": 3.0, "max_hold_s": 20.0,
    "retry_s": 0.5, "probe_timeout": 1.0, "shun_s": 2.0, "revoke_timeout": 1.5,
}  # fmt: skip
TOKENS = 5
DIGEST = b"the prompt's own"


@functools.cache
def _settings(of: tuple[tuple[str, Any], ...]) -> Settings:
    return Settings(**dict(of))


@functools.cache
def _layout(shape: Shape) -> EngineLayout:
    return shape.layout()


class Booth:
    """One ledger, and the clock; whoever speaks to it is `other`, in `session`."""

    def __init__(self, rng: random.Random, name: str, other: str, planes: tuple[str, ...], **settings: Any) -> None:
        self.rng = rng
        self.now = rng.uniform(10, 99)
        self.settings = _settings(tuple(sorted({**TIMES, **settings}.items())))
        self.shape = Shape(ranks=rng.choice((1, 2)), group_layers=rng.choice(((2,), (1, 2))))
        self.me = PeerId(WorkerId(name), Incarnation(rng.getrandbits(40)))
        self.other = PeerId(WorkerId(other), Incarnation(rng.getrandbits(40)))
        self.session, self.version = 0, 2
        self.features = 7  # of the other
        self.epochs: dict[int, int] = {}
        self.planes = planes
        self.identity = Identity(
            self.me, "host", {"model": "m"}, _layout(self.shape), tuple(KINDS[each] for each in planes), (KEY,),
            wall_offset_s=1000.0,
        )  # fmt: skip
        self.ledger = Ledger(self.identity, self.settings, lambda ids: [self.epochs.get(each, 0) for each in ids])
        self.ledger.desk.timers = BoundedTimers()
        self.blocks = tuple(tuple(range(10 * n + 1, 10 * n + 4)) for n in range(len(self.shape.group_layers)))
        self.packed = tuple(pack_blocks(ids) for ids in self.blocks)

    # --- asking

    def tell(self, *events: Any) -> list[Any]:
        for event in events:
            self.ledger.on_event(event, self.now)
        return self._told()

    def hear(self, message: Any, **how: Any) -> list[Any]:
        """A frame of the other's, or of somebody else's (`who`, `to`, `session`, `version`, `by`: who brings it)."""
        who = how.get("who", self.other)
        to, session = how.get("to", self.me.incarnation), how.get("session", self.session)
        frame = encode(who, to, session, message, how.get("version", self.version))
        self.ledger.on_frame(how.get("by", who.worker), frame, self.now)
        return self._told()

    def later(self, seconds: float) -> list[Any]:
        self.now += seconds
        self.ledger.on_time(self.now)
        return self._told()

    def _told(self) -> list[Any]:
        return [plain(effect) for effect in self.ledger.take_effects()]

    # --- expecting

    def say(self, message: Any, invitation: Any = None, **how: Any) -> tuple[Any, ...]:
        """What it should say, to the other unless somebody else is named."""
        who, session = how.get("who", self.other), how.get("session", self.session)
        return "say", who.worker, who.incarnation, session, how.get("version", self.version), bare(message), invitation

    def expect(self, what: str, found: list[Any], *expected: Any) -> None:
        """These, in any order, and nothing else."""
        same(f"{self.me.worker}: {what}", sorted(map(repr, found)), sorted(map(repr, expected)))

    def over(self) -> None:
        """Nothing moves, waits, or is remembered that could."""
        ledger = self.ledger
        writer, consumer = ledger.producer.writer, ledger.consumer
        left = (
            ledger.producer.leases, ledger.producer.by_handoff, ledger.producer.parked, writer.outlets,
            writer.by_reader, ledger.desk.owners, consumer.by_handoff, consumer.by_attempt, consumer.by_reservation,
            ledger.puts.states, consumer.links.fencing, ledger.desk.timers._at, ledger.producer.held._seats,
        )  # fmt: skip
        same(f"{self.me.worker}: what is left", [list(each) for each in left if each], [])
        same(f"{self.me.worker}: is idle", ledger.is_idle(), True)

    def ticket(self, number: int = 1, **fields: Any) -> str:
        default = {"source": self.me.worker, "expires_unix_s": self.wall + 60.0, "lease": 1, "digest": DIGEST}
        return seal(Ticket(**{"handoff": handoff(number), **default, **fields}), fields.pop("key", KEY))

    @property
    def wall(self) -> float:
        return self.now + 1000.0

    def card(self, who: str = "", **fields: Any) -> m.Card:
        card = m.Card(0, self.features | 1 << 47, "host", {"model": "m"}, _layout(self.shape), self.planes)
        return msgspec.structs.replace(card, **fields)


def handoff(number: int) -> HandoffId:
    return HandoffId(f"{number:032x}.0")


def bare(message: Any) -> Any:
    """Without its words, and to the millionth of a second."""
    if hasattr(message, "ttl_s"):
        return msgspec.structs.replace(message, ttl_s=round(message.ttl_s, 6))
    return msgspec.structs.replace(message, detail="") if hasattr(message, "detail") else message


def plain(effect: Any) -> Any:
    """What of an effect is asked for."""
    match effect:
        case fx.Send():
            return (
                "say", effect.worker, effect.to, effect.session, effect.version, bare(effect.message), effect.invitation
            )  # fmt: skip
        case fx.StartCopy():
            return "copy", effect.rank, effect.transport, effect.copy.peer, effect.copy.direction
        case fx.Lend():
            return "lend", effect.rank, effect.transport, effect.loan.peer, effect.loan.direction, effect.loan.blocks
        case fx.CancelCopy():
            return "stop", effect.rank, effect.transport
        case fx.MatchFailed() | fx.Report():
            return type(effect).__name__, effect.request, effect.end.reason, effect.end.good_tokens
        case fx.GivenUp():
            return "given up", effect.worker, effect.transport
    return effect


__all__ = ["DIGEST", "KEY", "TIMES", "TOKENS", "Booth", "bare", "ev", "fx", "handoff", "m", "plain"]
