"""A liar's means: the product's own control plane and data plane under one valid key, and no manners.

Laws: everything ends by the instant that it is given; no more than `PER_S_MAX` messages a second leave here, but for
the lie that is about that. What is said is put together by hand (`said`): a lie need not be a message that our own
types allow. Who asks the liar (`Asked`) is answered by `manner`, which a lie sets; without one, it is refused.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

import kvbaton
from kvbaton.control import keyring as keys
from kvbaton.control.registry import registry_messages as registry
from kvbaton.control.registry.statements import OwnStatements
from kvbaton.control.zmq import ZmqControl
from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.engines.embedded.memory.kv_layout import compat_key, engine_layout
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry
from kvbaton.protocol.content import compat_digest
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId, rank_peer
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Envelope, decode
from kvbaton.protocol.wire.messages import ALL_FEATURES, NEWEST, SPOKEN, Card
from kvbaton.store import tcp_backend
from kvbaton_proof.chaos.liars.liar_reach import ANSWER_S, BUFFER_BYTES, Reach
from kvbaton_proof.chaos.liars.lies import Count, Guise
from kvbaton_proof.lies.lie_fields import Fields, Seen

PING_S = 1.0
HEARD_MAX = 4096
_encode = msgspec.msgpack.Encoder().encode

ASKED = (m.Hello, m.Joined, m.Claim, m.Renew, m.Commit, m.Abandon, m.Offer, m.Ack, m.Revoke)
"""What a D says to whom it takes for its P."""


class Member(msgspec.Struct, frozen=True):
    """One that can be lied to. `control`: tcp://host:port of its control plane, registry or store."""

    role: str
    control: str
    http: str = ""  # host:port


class Errand(msgspec.Struct, frozen=True):
    """What one liar is sent out with."""

    keys: str
    name: str  # whose key it holds
    guise: Guise
    address: str  # of the host that it is
    members: Mapping[str, Member]
    lies: tuple[str, ...]
    seconds: float
    seed: int


class Asked(msgspec.Struct, frozen=True):
    """What somebody came to the liar with."""

    worker: WorkerId
    envelope: Envelope
    message: m.Message


class Greeted(msgspec.Struct, frozen=True):
    """A session that a member has opened for the liar."""

    peer: PeerId
    session: int
    welcome: m.Welcome


Heard = m.Message | registry.FromRegistry | registry.ToOperator | tcp_backend.Invited
Manner = Callable[[Asked], None]


class Post:
    """All that a liar says and hears. Of one thread."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.rng = random.Random(errand.seed)
        self.keyring = keys.load(errand.keys, errand.name)
        self.control = ZmqControl(self.keyring, f"tcp://{errand.address}:0")
        self.control.set_directory(
            {WorkerId(name): (each.control, "") for name, each in errand.members.items() if name != errand.name}
        )
        self.count = Count()  # of the lie that is being told
        self.manner: Manner = self.refuse
        self.registration: registry.Registration | None = None
        self.lives: dict[str, Incarnation] = {}  # of others, as they told it
        self.entitled: set[tuple[str, int]] = set()  # sessions in which it held a lease of its own, and may be answered
        self._heard: deque[tuple[WorkerId, int, Incarnation, Heard]] = deque(maxlen=HEARD_MAX)
        self._nonces = self.rng.getrandbits(40)
        self._ping_at = 0.0
        self.reach = Reach(self, bytearray(self.rng.randbytes(BUFFER_BYTES)))
        self._be_born()

    def _be_born(self) -> None:
        self.me = PeerId(WorkerId(self.errand.name), Incarnation(1 + self.rng.getrandbits(62)))
        self.reach.be_born(self.me, self.errand.address)

    def begin_life(self, http: str) -> None:
        """As if it had been started again: who has learned not to trust the life before comes to this one."""
        self.reach.close()
        self._be_born()
        self.entitled.clear()
        if self.errand.guise.is_worker:
            self.register(honest_registration(self.me, self.errand.guise, http, self.control.endpoint))

    def close(self) -> None:
        if self.registration is not None:
            self.tell_registry(registry.Deregister(self.me.incarnation))
            self.hear(registry.Deregistered, time.monotonic() + ANSWER_S)
        self.reach.close()
        self.control.close()

    # --- saying

    @property
    def fields(self) -> Fields:
        """What makes lies of messages."""
        return Fields(self.rng, Seen())

    def say(
        self, to: str, body: bytes, *, session: int = 0, life: int | None = None, name: str = "", paced: bool = True
    ) -> None:
        """One message to an engine: in that session, to that life of it, under that name."""
        if paced:
            self.reach.pace.wait(self.rest)
        life = self.lives.get(to, 0) if life is None else life
        frame = [NEWEST, name or self.me.worker, self.me.incarnation, life, session, msgspec.Raw(body)]
        self.send(to, _encode(frame))

    def send(self, to: str, frame: bytes) -> None:
        self.count.told += 1
        self.control.send(WorkerId(to), frame)

    def answer(self, asked: Asked, body: bytes) -> None:
        """To one who came, in its session."""
        self.count.told += 1
        self._answer(asked, body)

    def _answer(self, asked: Asked, body: bytes) -> None:
        envelope = asked.envelope
        frame = [
            NEWEST, self.me.worker, self.me.incarnation, envelope.incarnation, envelope.session or 1, msgspec.Raw(body),
        ]  # fmt: skip
        self.control.send(asked.worker, _encode(frame))

    def tell_registry(self, message: registry.ToRegistry) -> None:
        self.send(self.the("router"), registry.encode(message))

    def the(self, role: str) -> str:
        return next(name for name, each in self.errand.members.items() if each.role == role)

    def card(self, **changes: Any) -> dict[str, Any]:
        """How an honest member of this cluster would introduce itself, but for `changes`; fields by name."""
        honest = honest_card(self.errand.address)
        return {**{name: getattr(honest, name) for name in Card.__struct_fields__}, **changes}

    def stated(self, registration: registry.Registration) -> registry.Register:
        """A lie too is signed: it is the liar's own."""
        return registry.Register(*OwnStatements(self.keyring).of(registration))

    def register(self, registration: registry.Registration) -> None:
        """From now on pings keep it listed."""
        self.registration = registration
        self.tell_registry(self.stated(registration))
        self._ping_at = time.monotonic() + PING_S

    # --- hearing

    def rest(self, until: float) -> None:
        """Answer those who come, and keep what is heard."""
        while (left_s := until - time.monotonic()) > 0:
            self._take()
            self.control.wait(min(left_s, 0.05))
        self._take()

    def hear(self, kind: Any, until: float, match: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next message of that kind, in whatever session; None: none came in time."""
        while True:
            for number, (_, _, _, message) in enumerate(self._heard):
                if isinstance(message, kind) and match(message):
                    del self._heard[number]
                    return message
            if time.monotonic() >= until:
                return None
            self._take()
            self.control.wait(min(max(0.0, until - time.monotonic()), 0.05))
            self._take()

    def all_heard(self, kind: Any) -> list[Any]:
        """Everything of that kind that has come and was not asked for yet, but in sessions that are `entitled`."""
        found = [each for each in self._heard if isinstance(each[3], kind) and (each[0], each[1]) not in self.entitled]
        for each in found:
            self._heard.remove(each)
        return [message for _, _, _, message in found]

    def forget(self) -> None:
        """What came of earlier lies."""
        self._take()
        self._heard.clear()

    def _take(self) -> None:
        for worker, frame in self.control.receive():
            member = self.errand.members.get(worker)
            if member is None:
                continue
            if member.role == "router":
                self._from_registry(frame, worker)
            elif member.role == "store":
                told = tcp_backend.reply(frame)
                if told is not None:
                    self._heard.append((worker, 0, Incarnation(0), told))
            else:
                self._from_engine(worker, frame)
        if self.registration is not None and time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + PING_S
            ping = registry.Ping(self.me.incarnation, registry.SeenWorkers())
            self.control.send(WorkerId(self.the("router")), registry.encode(ping))

    def _from_registry(self, frame: bytes, worker: WorkerId) -> None:
        told: registry.FromRegistry | registry.ToOperator
        if b"drain_state" in frame[:64]:
            told = registry.decode_to_operator(frame)
        else:
            told = registry.decode_from_registry(frame)
        if isinstance(told, registry.Unknown) and self.registration is not None:
            self.control.send(worker, registry.encode(self.stated(self.registration)))
        if isinstance(told, registry.Directory):
            self.lives |= {str(entry.worker): entry.incarnation for entry in told.entries}
        else:
            self._heard.append((worker, 0, Incarnation(0), told))

    def _from_engine(self, worker: WorkerId, frame: bytes) -> None:
        try:
            envelope, message = decode(frame)
        except ProtocolError:
            return
        self.lives[worker] = envelope.incarnation
        if isinstance(message, ASKED):
            self.manner(Asked(worker, envelope, message))
        else:
            self._heard.append((worker, envelope.session, envelope.incarnation, message))

    # --- manners

    def refuse(self, asked: Asked) -> None:
        """As an honest member does that can do nothing for who asks."""
        message = asked.message
        if isinstance(message, m.Hello):
            self._answer(asked, said(m.HelloRefused, message.nonce, "busy", "not now"))
        elif isinstance(message, m.Claim):
            self._answer(asked, said(m.ClaimRefused, message.handoff, message.attempt, "busy", "not now"))
        elif isinstance(message, m.Revoke):
            self._answer(asked, said(m.Quiesced, message.reservation, None))

    # --- sessions

    def greet(self, to: str, until: float, card: Mapping[str, Any] | None = None) -> Greeted | None:
        """A session at a member, as its D; None: it refuses, or does not answer."""
        self._nonces += 1
        nonce = self._nonces
        body = said(m.Hello, nonce, list((card or self.card()).values()))
        self.say(to, body)
        until = min(until, time.monotonic() + ANSWER_S)
        while time.monotonic() < until:
            self._take()
            for worker, session, life, message in list(self._heard):
                if worker == to and getattr(message, "nonce", None) == nonce:
                    self._heard.remove((worker, session, life, message))
                    if isinstance(message, m.Welcome):
                        return Greeted(PeerId(worker, life), session, message)
                    return None
            self.control.wait(0.02)
        return None

    def join(self, to: str, greeted: Greeted, until: float, endpoints: list[bytes] | None = None) -> bool:
        """Confirm that session; whether the member says that the two are linked."""
        mine = [self.reach.endpoint_for(rank_peer(greeted.peer, n)) for n in range(len(greeted.welcome.endpoints))]
        self.say(to, said(m.Joined, mine if endpoints is None else endpoints), session=greeted.session)
        return self.hear(m.Linked, min(until, time.monotonic() + ANSWER_S)) is not None


def said(kind: type, *fields: Any) -> bytes:
    """A message with these fields, whatever they are."""
    return _encode([kind.__struct_config__.tag, *fields])  # type: ignore[attr-defined]


def honest_card(host: str) -> Card:
    """The card of a worker of a chaos run that has a transport over tcp alone."""
    geometry = KvGeometry(ModelConfig(), CacheConfig())
    features = int(ALL_FEATURES) | SPOKEN.bits
    key = compat_key(ModelConfig(), kvbaton.__version__)
    return Card(0, features, f"liar-{host}", key, engine_layout(geometry), ("tcp",))


def honest_registration(me: PeerId, guise: Guise, http: str, control: str) -> registry.Registration:
    """The registration of a worker that could be paired with any other."""
    return registry.Registration(
        worker=me.worker,
        incarnation=me.incarnation,
        role="prefill" if guise is Guise.PREFILL else "decode",
        http_address=http,
        control_endpoint=control,
        modes=("pull", "stream", "push"),
        transports=("tcp",),
        compat_digest=compat_digest(compat_key(ModelConfig(), kvbaton.__version__)),
        born=time.time(),
    )


def guessed(rng: random.Random) -> Iterator[int]:
    """Numbers that others may have been given: small ones, and some that nobody has."""
    yield from rng.sample(range(1, 400), 60)
    yield from (0, (1 << 31) - 1, (1 << 63) - 1)
