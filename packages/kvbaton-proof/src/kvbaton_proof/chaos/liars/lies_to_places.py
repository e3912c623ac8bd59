"""Lies to the router, at its registry and over HTTP, and to the store.

Law: what a member may do is not a lie: nothing complete is put into the store, and no drain is ordered by an operator.

Lies to a D that takes the liar for its P: the router sent it there, with a ticket.

Law: no handoff with the liar comes to its end. It never says Committed of a copy that can be complete, never says
Written with the digest of the prompt, and calls nothing proven; so what is wrong did not come from the liar's KV.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvbaton.api.tokens import is_loopback
from kvbaton.control.registry import registry_messages as registry
from kvbaton.engines.embedded.engine_config import CacheConfig
from kvbaton.protocol.ids import Incarnation, PeerId, TransferId, WorkerId, handoff_id, rank_peer
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.security import sealing
from kvbaton.store import tcp_backend
from kvbaton.store.tcp_connection import KEYS_MAX, Item, LineError, Op, StoreConnection, greet
from kvbaton.transports.core.transport import Direction
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.liar_post import Asked, Post, honest_registration, said
from kvbaton_proof.chaos.liars.liar_reach import ANSWER_S
from kvbaton_proof.chaos.liars.lies_to_engines import Telling, huge_layout, odd_places

REPORTS = 12
FLIGHTS = 256
INVITATIONS = 300
FETCHES = 4
HALVES = 24
LISTED_S = 0.4
"""How long a registration at an odd address is left to stand."""
OTHERS = 3


# --- over HTTP


def _answered(answer: str, post: Post, door: Door, _: str, until: float) -> None:
    before, door.answer = door.count, answer
    try:
        post.rest(until)
    finally:
        door.answer = "refuse"
        post.count.told += door.count - before


# --- the registry


def odd_addresses(post: Post, _: Door, to: str, until: float) -> None:
    honest = post.registration
    assert honest is not None
    others = [each.http for each in post.errand.members.values() if each.http]
    odd = [
        *others, "169.254.169.254:80", "127.0.0.1:1", "localhost:22", "[::1]:9", "255.255.255.255:9", "0.0.0.0:1",
        "a.invalid:80", f"{'a' * 250}:1", "x:99999", "x", "http://x:1", "user@x:1", "x:1/path", "\n:1", "",
    ]  # fmt: skip
    post.rng.shuffle(odd)
    try:
        for address in odd:
            if time.monotonic() + LISTED_S > until:
                return
            post.forget()
            post.register(msgspec.structs.replace(honest, http_address=address))
            told = post.hear((registry.RegistryRefused, registry.RegisteredReply), time.monotonic() + LISTED_S)
            if isinstance(told, registry.RegistryRefused):
                post.count.refused += 1
            elif told is not None and address in others and not is_loopback(post.errand.address):
                post.count.believe(f"the registry lists the liar at {address}, which is another's")
    finally:
        post.register(honest)


def other_lives(post: Post, _: Door, to: str, until: float) -> None:
    """Each lie has a life of its own, by which its answer is known."""
    names = [name for name, each in post.errand.members.items() if each.role in ("prefill", "decode")]
    for name in post.rng.sample(names, min(OTHERS, len(names))):
        if time.monotonic() > until:
            return
        life = Incarnation(1 + post.rng.getrandbits(62))
        registration = honest_registration(post.me, post.errand.guise, "127.0.0.1:9", "tcp://127.0.0.1:9")
        registration = msgspec.structs.replace(registration, worker=WorkerId(name), incarnation=life)
        post.forget()
        post.tell_registry(post.stated(registration))
        theirs = post.lives.get(name, Incarnation(1))
        for message in (
            registry.Ping(theirs, registry.SeenWorkers((1 << 63) - 1, (1 << 63) - 1), "x" * 256),
            registry.Deregister(theirs),
            registry.Ping(life, registry.SeenWorkers()),
        ):
            post.tell_registry(message)
        post.rest(time.monotonic() + ANSWER_S / 2)
        told = post.all_heard(
            (registry.RegistryRefused, registry.Unknown, registry.Superseded, registry.RegisteredReply)
        )
        for each in told:
            if not isinstance(each, registry.RegisteredReply):
                post.count.refused += 1
            elif each.incarnation in (life, theirs):
                post.count.believe(f"the registry listed the liar as {name}")


def drains(post: Post, _: Door, to: str, until: float) -> None:
    for name in post.errand.members:
        if time.monotonic() > until:
            return
        post.forget()
        post.tell_registry(
            registry.DrainWorker(WorkerId(name), post.rng.choice((0, post.lives.get(name, Incarnation(0)))))
        )
        answer = post.hear((registry.DrainState, registry.RegistryRefused), time.monotonic() + ANSWER_S / 4)
        if isinstance(answer, registry.DrainState):
            post.count.believe(f"{name} was to be drained by who is no operator")
        elif answer is not None:
            post.count.refused += 1


def odd_reports(post: Post, _: Door, to: str, until: float) -> None:
    names = list(post.errand.members)
    for number in range(REPORTS):
        if time.monotonic() > until:
            return
        data = secrets.token_bytes(registry.REPORT_BYTES_MAX) if number % 3 == 0 else _flights(post, names)
        post.tell_registry(registry.WorkerReport(post.me.incarnation, data[: registry.REPORT_BYTES_MAX]))
        post.rest(time.monotonic() + 0.1)
    post.count.refused += len(post.all_heard(registry.RegistryRefused))


def _flights(post: Post, names: list[str]) -> bytes:
    """Flights of others, at odd times, with odd words."""
    rng, odd = post.rng, (0.0, -1.0, 1e308, float("nan"), float("inf"), time.time())
    flights = [
        {
            "seat": rng.choice(("prefill", "decode", "router")), "worker": rng.choice(names), "incarnation": "f" * 16,
            "handoff": handoff_id(TransferId(secrets.token_hex(16))), "request": "\x1b[2J" * 8,
            "peers": [rng.choice(names)] * 8, "tokens": (1 << 63) - 1, "end": rng.choice(("delivered", "stale", "\n")),
            "moments": [[rng.choice(("begun", "x" * 128)), rng.choice(odd), "y" * 256] for _ in range(2)],
        }
        for _ in range(FLIGHTS)
    ]  # fmt: skip
    gauges = {"pins": rng.choice(odd), "x" * 100: 1.0}
    return msgspec.msgpack.encode(
        {"at": rng.choice(odd), "gauges": gauges, "flights": flights, "share": rng.choice(odd)}
    )


# --- the store


def hoard(post: Post, _: Door, to: str, until: float) -> None:
    frames = [tcp_backend.encode(tcp_backend.Dial(number)) for number in range(INVITATIONS)]
    frames += [tcp_backend.encode(tcp_backend.Dial(-1)), b"\xc1" * 64, secrets.token_bytes(1 << 16)]
    post.rng.shuffle(frames)
    for frame in frames:
        if time.monotonic() > until:
            break
        post.send(to, frame)
        post.rest(time.monotonic() + 0.002)
    post.rest(time.monotonic() + ANSWER_S / 4)
    host = urlsplit(post.errand.members[to].control).hostname or ""
    invited = iter(post.all_heard(tcp_backend.Invited))
    held: list[StoreConnection] = []
    for op, items in _odd_questions():
        try:
            held.append(_line(host, next(invited)))
            held[-1].ask(op, items)
            held[-1].send(bytes(4096))
            post.count.told += 1
        except (StopIteration, LineError, OSError):
            continue  # a lie that could not be told
    answered_by = time.monotonic() + ANSWER_S
    for line in held:
        line.until = answered_by
        try:
            line.read(1)
            post.count.believe(f"{to} answered a question that was odd or half asked")
        except (LineError, OSError):
            post.count.refused += 1
        line.close()


def _odd_questions() -> list[tuple[Op, list[Item]]]:
    return [
        *[(Op.GET, [(secrets.token_hex(16), 1 << 40)])] * FETCHES,
        (Op.EXISTS, [(secrets.token_hex(16), 0)] * (KEYS_MAX + 1)),
        (Op.PUT, [("../../x", 1)]),
        (Op.EXISTS, [("\n", -1)]),
        *[(Op.PUT, [(secrets.token_hex(16), 1 << 20)])] * HALVES,
    ]


def _line(host: str, invited: tcp_backend.Invited) -> StoreConnection:
    line = StoreConnection(socket.create_connection((host, invited.port), ANSWER_S))
    line.until = time.monotonic() + ANSWER_S
    try:
        greet(line, invited.number, invited.secret, sealing.is_required_on("auto", line.socket))
    except BaseException:
        line.close()
        raise
    return line


_HTTP = {
    "endless-comments": "comments",
    "endless-answer": "drip",
    "endless-events": "events",
    "no-answer": "hang-up",
    "huge-answer": "huge",
    "huge-parameters": "parameters",
    "odd-http": "odd",
}


TIMES = (1e-300, 5e-324, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e308)
TOKENS = 33
"""The length of a prompt that the door has not seen."""
LEASE = 77

Reply = Callable[["Source", Asked, Any], None]


class Source:
    """How the liar answers one who reads from it. What a lie does not change is as a P does it that is never done."""

    def __init__(self, post: Post, door: Door, replies: Mapping[type, Reply]) -> None:
        self.post = post
        self.door = door
        self.work = 0
        self.joined: dict[WorkerId, tuple[PeerId, tuple[bytes, ...]]] = {}  # who can be written to, and how
        self._replies = {**_HONEST, **replies}

    def __call__(self, asked: Asked) -> None:
        reply = self._replies.get(type(asked.message))
        if reply is not None:
            reply(self, asked, asked.message)

    def welcome(self, asked: Asked, hello: m.Hello, endpoints: Sequence[bytes] | None = None, **changes: Any) -> None:
        peer = asked.envelope.sender
        mine = [self.post.reach.endpoint_for(rank_peer(peer, n)) for n in range(len(hello.card.layout.ranks))]
        transport = changes.pop("transport", "tcp")
        card = list(self.post.card(**changes).values())
        self.post.answer(
            asked, said(m.Welcome, hello.nonce, card, transport, mine if endpoints is None else endpoints, 0)
        )

    def grant(self, asked: Asked, claim: m.Claim, ttl_s: float = 5.0, **changes: Any) -> None:
        self.post.answer(asked, self.granted(claim, ttl_s, **changes))

    def granted(self, claim: m.Claim, ttl_s: float = 5.0, **changes: Any) -> bytes:
        """A grant of blocks that nobody has computed; `changes` by name."""
        tokens = self.door.tokens.get(claim.handoff) or TOKENS
        count = -(-tokens // CacheConfig().block_tokens)
        told = {"tokens": tokens, "blocks": (pack_blocks(range(1, count + 1)),), "ready": ((0, 0, 0),), "final": False}
        told |= changes
        return said(m.Granted, claim.handoff, claim.attempt, LEASE, ttl_s, *told.values())

    def renew(self, asked: Asked, renew: m.Renew, ttl_s: float = 5.0) -> None:
        self.work += 1
        self.post.answer(asked, said(m.Renewed, renew.lease, renew.attempt, ttl_s, self.work))


def _joined(source: Source, asked: Asked, message: m.Joined) -> None:
    source.joined[asked.worker] = asked.envelope.sender, message.endpoints
    source.post.answer(asked, said(m.Linked))


_HONEST: Mapping[type, Reply] = {
    m.Hello: lambda source, asked, message: source.welcome(asked, message),
    m.Joined: _joined,
    m.Claim: lambda source, asked, message: source.grant(asked, message),
    m.Renew: lambda source, asked, message: source.renew(asked, message),
    m.Commit: lambda source, asked, message: source.post.answer(
        asked, said(m.Stale, message.lease, message.attempt, (), "stale")
    ),
    m.Offer: lambda source, asked, message: source.post.answer(asked, said(m.Accepted, message.reservation)),
    m.Revoke: lambda source, asked, message: source.post.answer(asked, said(m.Quiesced, message.reservation, None)),
}


def _serve(post: Post, door: Door, until: float, replies: Mapping[type, Reply]) -> Source:
    """Have the router send its requests here, and answer the D that come of them, until then."""
    source = Source(post, door, replies)
    with _posing(post, door, source):
        post.rest(until)
    return source


class _posing:
    """The liar looks like a P while the context lasts; afterwards it says goodbye to those who believed it."""

    def __init__(self, post: Post, door: Door, source: Source) -> None:
        self._post, self._door, self._source = post, door, source

    def __enter__(self) -> None:
        self._post.manner, self._door.answer = self._source, "come-to-me"

    def __exit__(self, *_: object) -> None:
        self._post.manner, self._door.answer = self._post.refuse, "refuse"
        for worker, (peer, _endpoints) in self._source.joined.items():
            self._post.say(worker, said(m.Goodbye), session=1, life=peer.incarnation)


# --- the lies


def odd_times(post: Post, door: Door, _: str, until: float) -> None:
    def some() -> float:
        return post.rng.choice(TIMES)

    _serve(post, door, until, {
        m.Claim: lambda source, asked, message: source.grant(asked, message, some()),
        m.Renew: lambda source, asked, message: source.renew(asked, message, some()),
    })  # fmt: skip


def no_such_blocks(post: Post, door: Door, _: str, until: float) -> None:
    """What is granted is whole and ready, but for what is said of its blocks."""

    def grant(source: Source, asked: Asked, claim: m.Claim) -> None:
        tokens = source.door.tokens.get(claim.handoff) or TOKENS
        ready = ((-(-tokens // CacheConfig().block_tokens), 0, 0),)
        body = post.fields.altered(
            msgspec.msgpack.decode(source.granted(claim, ready=ready, final=True)),
            post.rng.choice(("blocks", "blocks", "blocks", "progress", "tokens")),
        )
        post.answer(asked, said(m.Granted, *body[1:]))

    _serve(post, door, until, {m.Claim: grant})


def odd_welcomes(post: Post, door: Door, _: str, until: float) -> None:
    huge = huge_layout()

    def welcome(source: Source, asked: Asked, hello: m.Hello) -> None:
        odd: tuple[dict[str, Any], ...] = (
            {"layout": huge},
            {"layout": huge, "endpoints": [b"x"] * 250},
            {"layout": {"groups": [], "ranks": []}},
            {"compat": {}},
            {"transport": "cuda"},
            {"transport": "x" * 64},
            {"required": 1 << 40},
            *({"endpoints": endpoints} for endpoints in odd_places(post)),
        )
        source.welcome(asked, hello, **post.rng.choice(odd))

    _serve(post, door, until, {m.Hello: welcome})


def never_done(post: Post, door: Door, _: str, until: float) -> None:
    _serve(post, door, until, {})


def contradictions(post: Post, door: Door, _: str, until: float) -> None:
    def grant(source: Source, asked: Asked, claim: m.Claim) -> None:
        answers = (
            source.granted(claim),
            source.granted(claim, 1e-3),
            said(m.ClaimRefused, claim.handoff, claim.attempt, "busy", "no"),
            said(m.Committed, LEASE, claim.attempt),  # of a copy of which nothing is ready
            said(m.Stale, LEASE, claim.attempt, (), "stale"),
            said(m.SourceLost, LEASE, claim.attempt, "source_aborted"),
            said(m.RenewRefused, LEASE, claim.attempt, "lease_expired"),
            said(m.Linked),
            said(m.Reset, asked.envelope.to),
        )
        for answer in post.rng.sample(answers, 5):
            post.answer(asked, answer)

    _serve(post, door, until, {m.Claim: grant})


def wrong_digests(post: Post, door: Door, _: str, until: float) -> None:
    def offer(_: Source, asked: Asked, message: m.Offer) -> None:
        for reservation in (message.reservation + 1, message.reservation - 1, message.reservation):
            digest = secrets.token_bytes(16)
            post.answer(asked, said(m.Accepted, reservation))
            post.answer(asked, said(m.Written, message.lease, message.attempt, max(0, reservation), digest))
        post.answer(asked, said(m.Quiesced, message.reservation + 1, None))

    _serve(post, door, until, {m.Offer: offer})


def beyond_offer(post: Post, door: Door, _: str, until: float) -> None:
    """D has let its P into its data plane: to write into what it will offer, and nothing else."""
    source = Source(post, door, {})
    with _posing(post, door, source):
        tried: dict[WorkerId, int] = {}
        while time.monotonic() < until:
            post.rest(min(until, time.monotonic() + 0.05))
            for worker, (peer, endpoints) in list(source.joined.items()):
                tried[worker] = tried.get(worker, 0) + 1
                if tried[worker] <= 3:
                    for direction in (Direction.WRITE, Direction.READ):
                        post.reach.move_all(peer, endpoints, direction, until)


TELLINGS: Mapping[str, Telling] = {
    **{name: partial(_answered, answer) for name, answer in _HTTP.items()},
    "odd-addresses": odd_addresses,
    "other-lives": other_lives,
    "drains": drains,
    "odd-reports": odd_reports,
    "hoard": hoard,
    "odd-times": odd_times,
    "no-such-blocks": no_such_blocks,
    "odd-welcomes": odd_welcomes,
    "never-done": never_done,
    "contradictions": contradictions,
    "wrong-digests": wrong_digests,
    "beyond-offer": beyond_offer,
}
