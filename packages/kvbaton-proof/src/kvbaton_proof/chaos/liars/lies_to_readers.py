"""Lies to a D that takes the liar for its P: the router sent it there, with a ticket.

Law: no handoff with the liar comes to its end. It never says Committed of a copy that can be complete, never says
Written with the digest of the prompt, and calls nothing proven; so what is wrong did not come from the liar's KV.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.engines.embedded.engine_config import CacheConfig
from kvbaton.protocol.ids import PeerId, WorkerId, rank_peer
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.transports.core.transport import Direction
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.liar_post import Asked, Post, said
from kvbaton_proof.chaos.liars.lies_in_shapes import huge_layout, odd_places
from kvbaton_proof.chaos.liars.lies_to_engines import Telling

TIMES = (1e-300, 5e-324, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e308)
TOKENS = 33
"""Of a prompt that the door has not seen."""
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
        """Of blocks that nobody has computed; `changes` by name."""
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
    "odd-times": odd_times,
    "no-such-blocks": no_such_blocks,
    "odd-welcomes": odd_welcomes,
    "never-done": never_done,
    "contradictions": contradictions,
    "wrong-digests": wrong_digests,
    "beyond-offer": beyond_offer,
}
