"""Lies to an engine, P or D, from one who poses as its D: about memory, tickets, leases, sessions and names;
and about what the liar is and how much of it there is: cards, endpoints, numbers, floods.

Law: each function returns by its instant, or soon after it where an answer is waited for.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvbaton.engines.embedded import tokenizer
from kvbaton.protocol.content import Content, digest
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, TransferId, WorkerId, handoff_id, rank_peer
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import unpack_blocks
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal
from kvbaton.transports.core.shared_memory import boot_id
from kvbaton.transports.core.transport import Direction
from kvbaton.transports.tcp.tcp_transport import TcpEndpoint
from kvbaton_proof.chaos.liars.liar_http import Door, Question
from kvbaton_proof.chaos.liars.liar_post import Greeted, Post, guessed, said
from kvbaton_proof.chaos.liars.liar_reach import ANSWER_S
from kvbaton_proof.lies.lie_fields import OF_SOURCE, OF_TARGET

ROUNDS = 3
ROUND_S = 0.2
TICKETS = 40
TICKETS_USED_MAX = 3
BESIDE_BYTES = 64
OWN, AGAIN = 1 << 40, 1 << 41
"""Attempts of the one lease that it may hold; guesses are smaller."""
_REFUSALS = (m.HelloRefused, m.ClaimRefused, m.RenewRefused, m.Stale, m.Quiesced, m.Reset)
_BELIEFS = (m.Granted, m.Renewed, m.Committed, m.Accepted, m.Written, m.Ready)
"""What only a reader of its own lease is told."""

Telling = Callable[[Post, Door, str, float], None]


# --- memory


def _all_memory(post: Post, to: str, until: float, direction: Direction) -> None:
    for _ in range(ROUNDS):
        greeted = post.greet(to, until)
        if greeted is None:
            post.count.refused += 1
        else:
            post.reach.move_all(greeted.peer, greeted.welcome.endpoints, direction, until)
        if time.monotonic() + ROUND_S >= until:
            return
        post.rest(time.monotonic() + ROUND_S)


def read_all(post: Post, _: Door, to: str, until: float) -> None:
    _all_memory(post, to, until, Direction.READ)


def write_all(post: Post, _: Door, to: str, until: float) -> None:
    _all_memory(post, to, until, Direction.WRITE)


def map_all(post: Post, _: Door, to: str, until: float) -> None:
    """The memory of an engine on this host, without a ticket: what a greeting alone is given."""
    greeted = post.greet(to, until, post.card(host=boot_id(), transports=("shm",)))
    if greeted is None:
        post.count.refused += 1
    else:
        post.reach.map_all(post.me, greeted.peer, greeted.welcome, until)


def beyond_lease(post: Post, door: Door, to: str, until: float) -> None:
    """The router takes the liar for a D, and so gives it a ticket; what follows is more than the ticket says."""
    door.asked.clear()
    door.answer = "hold"
    used = 0
    try:
        while time.monotonic() < until and used < TICKETS_USED_MAX:
            question = next((each for each in reversed(list(door.asked)) if each.ticket), None)
            if question is None:
                post.rest(time.monotonic() + 0.02)
                continue
            door.asked.clear()
            used += 1
            _overuse(post, question, until)
    finally:
        door.answer = "refuse"


def _overuse(post: Post, question: Question, until: float) -> None:
    try:
        ticket = unseal(question.ticket, post.keyring.ticket_keys, time.time())
    except ProtocolError:
        return
    source = str(ticket.source)
    greeted = session_at(post, source, until)
    if greeted is None:
        post.count.refused += 1
        return
    tokens = tuple(tokenizer.encode(question.prompt))
    mine = digest(Content(tokens, len(tokens), salt=question.salt))
    post.entitled.add((source, greeted.session))
    claim = said(m.Claim, ticket.handoff, OWN, question.ticket, mine, True)
    post.say(source, claim, session=greeted.session)
    granted: m.Granted | None = post.hear(m.Granted, time.monotonic() + ANSWER_S, _of(ticket, OWN))
    for direction in (Direction.READ, Direction.WRITE):
        post.reach.move_all(greeted.peer, greeted.welcome.endpoints, direction, until)
    if granted is not None and granted.blocks and granted.blocks[0]:
        _beside(post, greeted, granted, until)
        for blocks in (b"\xff\xff\xff\x7f", b"\1\0\0\0" * 4096, b""):  # as if P had been asked to write
            offer = said(m.Offer, granted.lease, OWN, post.rng.randrange(1, 99), 0, (blocks,), secrets.token_bytes(16))
            post.say(source, offer, session=greeted.session)
    for name, member in post.errand.members.items():  # spent here, foreign elsewhere
        if member.role == "prefill" and time.monotonic() < until:
            session = greeted if name == source else session_at(post, name, until)
            if session is not None:
                again = said(m.Claim, ticket.handoff, AGAIN, question.ticket, mine, False)
                post.say(name, again, session=session.session)
                if post.hear(m.Granted, time.monotonic() + ANSWER_S / 4, _of(ticket, AGAIN)) is None:
                    post.count.refused += 1
                else:
                    post.count.believe(f"{name} granted a ticket that was spent or another's")
    lease = LeaseId(1) if granted is None else granted.lease
    for _ in range(2):
        post.say(source, said(m.Commit, lease, OWN), session=greeted.session)
    post.say(source, said(m.Abandon, ticket.handoff, OWN, "aborted"), session=greeted.session)


def _of(ticket: Ticket, attempt: int) -> Callable[[m.Granted], bool]:
    return lambda told: (told.handoff, told.attempt) == (ticket.handoff, attempt)


def _beside(post: Post, greeted: Greeted, granted: m.Granted, until: float) -> None:
    """Bytes of a leased block, which is leased for reading alone; of one that is not leased; and of both at once."""
    rank, share = rank_peer(greeted.peer, 0), greeted.welcome.card.layout.ranks[0].shares[0]
    place, leased = share.places[0], unpack_blocks(granted.blocks[0])
    other = next(block for block in range(1, share.block_count) if block not in leased)
    mine, others = ((place.offset + block * place.block_stride, BESIDE_BYTES) for block in (leased[0], other))
    for there, direction in (
        ((mine,), Direction.WRITE),
        ((others,), Direction.WRITE),
        ((others,), Direction.READ),
        ((mine, others), Direction.READ),
    ):
        post.reach.move(rank, place.region, there, direction, until)


# --- tickets, leases and sessions


def forged_tickets(post: Post, _: Door, to: str, until: float) -> None:
    greeted = session_at(post, to, until)
    if greeted is None:
        post.count.refused += 1
        return
    for attempt, (handoff, text) in enumerate(_tickets(post, to, greeted), 1):
        if time.monotonic() > until:
            return
        body = said(m.Claim, handoff, attempt, text, secrets.token_bytes(16), post.rng.random() < 0.5)
        post.say(to, body, session=greeted.session)
    judge(post, f"{to} granted a ticket that was forged")


def _tickets(post: Post, to: str, greeted: Greeted) -> Iterator[tuple[HandoffId, str]]:
    rng, others = post.rng, [name for name in post.errand.members if name != to]
    keys = (post.keyring.ticket_keys[0], secrets.token_bytes(32))  # a member's own, and one that is nobody's
    lives = (0, greeted.peer.incarnation, 1 + rng.getrandbits(62))
    ends = (time.time() + 60, time.time() - 60, math.inf, math.nan, 1e308, -1.0, 0.0)
    for _ in range(TICKETS):
        handoff = handoff_id(TransferId(secrets.token_hex(16)))
        ticket = Ticket(
            handoff,
            WorkerId(rng.choice((to, to, *others))),
            rng.choice(ends),
            Incarnation(rng.choice(lives)),
            LeaseId(rng.choice((0, 1, rng.randrange(400), (1 << 63) - 1))),
            WorkerId(rng.choice(("", post.me.worker, *others))),
            rng.choice((b"", secrets.token_bytes(16))),
            rng.choice((1, 0, -1, 1 << 40)),
        )
        text = seal(ticket, rng.choice(keys))
        yield handoff, rng.choice((text, text[:-3] + "AAA", "A" * rng.randrange(1100), "\u2603"))


def others_leases(post: Post, _: Door, to: str, until: float) -> None:
    greeted = session_at(post, to, until)
    if greeted is None:
        post.count.refused += 1
        return
    for number in guessed(post.rng):
        if time.monotonic() > until:
            break
        for body in of_a_reader(post, number):
            post.say(to, body, session=greeted.session)
    judge(post, f"{to} answered for the lease of another")


def of_a_reader(post: Post, number: int) -> list[bytes]:
    """What a D says of a lease that it reads."""
    known: dict[str, Any] = {
        "lease": number,
        "attempt": post.rng.randrange(1, 40),
        "reservation": post.rng.randrange(1, 40),
    }
    known |= {"handoff": handoff_id(TransferId(secrets.token_hex(16))), "blocks": (b"\1\0\0\0",)}
    return [said(kind, *post.fields.named(kind, known)[1:]) for kind in OF_TARGET]


def others_sessions(post: Post, _: Door, to: str, until: float) -> None:
    post.greet(to, until)  # so that its life is known
    for number in guessed(post.rng):
        if time.monotonic() > until:
            break
        life = post.rng.choice((None, None, 0, 1 + post.rng.getrandbits(62)))
        known = list(post.lives.values()) or [Incarnation(1)]
        for body in (said(m.Goodbye), said(m.Reset, post.rng.choice(known)), said(m.Joined, ()), said(m.Linked)):
            post.say(to, body, session=number, life=life)
        post.say(to, post.rng.choice(of_a_reader(post, number)), session=number, life=life)
    judge(post, f"{to} answered in the session of another")


def unasked_answers(post: Post, _: Door, to: str, until: float) -> None:
    """As its P, which it never was."""
    post.greet(to, until)
    card = list(post.card().values())
    for number in guessed(post.rng):
        if time.monotonic() > until:
            break
        known = {
            **dict.fromkeys(("nonce", "lease", "reservation"), number), "attempt": post.rng.randrange(1, 400),
            "handoff": handoff_id(TransferId(secrets.token_hex(16))), "card": card, "blocks": (b"\1\0\0\0",),
            "progress": ((1, 0, 0),), "final": True, "ttl_s": 5.0, "digest": secrets.token_bytes(16),
        }  # fmt: skip
        for kind in (m.Welcome, m.HelloRefused, *OF_SOURCE):
            body = said(kind, *post.fields.named(kind, known)[1:])
            post.say(to, body, session=post.rng.choice((number, 1)))
    judge(post, f"{to} took an answer that it had not asked for")


def another_name(post: Post, _: Door, to: str, until: float) -> None:
    post.greet(to, until)
    names = [name for name in post.errand.members if name != to]
    card = list(post.card().values())
    for number in guessed(post.rng):
        if time.monotonic() > until:
            break
        name = post.rng.choice(names)
        for body in (said(m.Hello, number, card), said(m.Goodbye), post.rng.choice(of_a_reader(post, number))):
            post.say(to, body, session=post.rng.randrange(60), name=name)
    judge(post, f"{to} took the liar for another")


def session_at(post: Post, to: str, until: float) -> Greeted | None:
    """One that both have confirmed."""
    greeted = post.greet(to, until)
    if greeted is None or not post.join(to, greeted, until):
        return None
    return greeted


def judge(post: Post, evidence: str) -> None:
    """What was answered to what was said just now."""
    post.rest(time.monotonic() + ANSWER_S / 4)
    post.count.refused += len(post.all_heard(_REFUSALS))
    for message in post.all_heard(_BELIEFS):
        post.count.believe(f"{evidence}: {type(message).__name__}")


GREETINGS_MAX = 2000
CHATTER_PER_S = 3000
CHATTER_MAX = 6000
ODD_OF_FIELD = 3
CARD_S = 0.4
"""What cannot be read is not answered."""


# --- how it introduces itself


def greetings(post: Post, _: Door, to: str, until: float) -> None:
    card = list(post.card().values())
    for _number in range(GREETINGS_MAX):
        if time.monotonic() > until:
            break
        post.say(to, said(m.Hello, post.rng.getrandbits(62), card))
    post.rest(min(until, time.monotonic() + ANSWER_S))
    post.count.refused += len(post.all_heard(m.HelloRefused))


def odd_cards(post: Post, _: Door, to: str, until: float) -> None:
    for card in _cards(post):
        if time.monotonic() > until:
            return
        if post.greet(to, min(until, time.monotonic() + CARD_S), card) is None:
            post.count.refused += 1
        else:
            post.count.believe(f"{to} welcomed one whose KV is of another shape")


def _cards(post: Post) -> list[dict[str, Any]]:
    honest = post.card()
    no_ranks = {"groups": honest["layout"].groups, "ranks": []}
    found = [
        post.card(layout=huge_layout()),
        post.card(layout={"groups": [], "ranks": []}),
        post.card(layout=no_ranks),
        post.card(layout=msgspec.structs.replace(honest["layout"], dcp=1 << 40)),
        post.card(compat={}),
        post.card(compat={str(n): "x" * 256 for n in range(64)}),
        post.card(required=1 << 40),
        post.card(required=-1),
        post.card(transports=("none",) * 16),
    ]
    post.rng.shuffle(found)
    return found


def huge_layout(ranks: int = 250, groups: int = 3, layers: int = 1000) -> dict[str, Any]:
    """Within every single bound, and 750,000 places altogether: nearly as much as a frame may hold."""
    cell = ["k", 1, "token"]
    names = [f"layer.{n}" for n in range(layers)]
    told = [
        {"name": f"g{n}", "kind": "full", "block_tokens": 1, "layers": names, "heads": 1, "cells": [cell], "dtype": "f"}
        for n in range(groups)
    ]
    places = [[n, n, 1] for n in range(layers)]
    share = {"head_start": 0, "head_count": 1, "block_count": 1, "places": places, "planes": [[0, 1, 1]]}
    shares = msgspec.Raw(msgspec.msgpack.encode([share] * groups))
    each = [{"pp": 0, "tp": n, "dcp": 0, "region_bytes": [1 << 20], "shares": shares} for n in range(ranks)]
    return {"groups": told, "ranks": each}


def odd_endpoints(post: Post, _: Door, to: str, until: float) -> None:
    for endpoints in odd_places(post):
        if time.monotonic() > until:
            return
        greeted = post.greet(to, until)
        if greeted is None or not post.join(to, greeted, until, endpoints):
            post.count.refused += 1
        else:
            post.say(to, said(m.Offer, 1, 1, 1, 0, (b"\1\0\0\0",), b""), session=greeted.session)


def odd_places(post: Post) -> list[list[bytes]]:
    """Endpoints of data planes that are none: of nobody, of others, and nothing at all."""
    secret, encode = secrets.token_bytes(32), msgspec.msgpack.encode
    member = post.rng.choice([each for each in post.errand.members.values() if each.http])
    host, _, port = member.http.rpartition(":")
    mine = rank_peer(post.me, 0)
    found = [
        [],
        [b""],
        [secrets.token_bytes(1024)],
        [b"x"] * 4096,
        [encode(TcpEndpoint(mine, "192.0.2.1", 9, secret, {0: 1 << 40}))],
        [encode(TcpEndpoint(mine, host, int(port), secret, {0: 1 << 22}))],
        [encode(TcpEndpoint(mine, post.errand.address, 1, secret, {}))],
        [encode(TcpEndpoint(rank_peer(post.me, 7), "::1", 65535, secret, dict.fromkeys(range(40), -1)))],
    ]
    post.rng.shuffle(found)
    return found


# --- numbers


def odd_numbers(post: Post, _: Door, to: str, until: float) -> None:
    greeted = session_at(post, to, until)
    odd: tuple[Any, ...] = (math.nan, math.inf, -math.inf, -1, 1 << 63, (1 << 64) - 1, 1.5, None, "1", [], True)
    bodies = [
        said(m.Offer, 1, 1, 1, 0, (bytes(4 << 20),), b""),
        said(m.Revoke, 1, 1, 1, "x" * 100_000),
        said(m.Abandon, "x" * 100_000, 1, ""),
    ]
    for kind in (m.Claim, *OF_TARGET):
        base = post.fields.named(kind, {"handoff": handoff_id(TransferId(secrets.token_hex(16)))})
        for field in kind.__struct_fields__:
            bodies += [said(kind, *post.fields.altered(base, field)[1:]) for _ in range(ODD_OF_FIELD)]
    bodies += [said(kind, *(value,) * 4) for kind in (m.Claim, m.Renew, m.Commit, m.Ack, m.Goodbye) for value in odd]
    post.rng.shuffle(bodies)
    for body in bodies:
        if time.monotonic() > until:
            break
        post.say(to, body, session=greeted.session if greeted is not None else post.rng.randrange(60))
    for frame in (b"", b"\xc1" * 64, b"\x96" + b"\x96" * 4096, secrets.token_bytes(65536)):
        post.send(to, frame or b"\0")
    judge(post, f"{to} acted on numbers that count nothing")


def chatter(post: Post, _: Door, to: str, until: float) -> None:
    greeted = session_at(post, to, until)
    session = greeted.session if greeted is not None else 1
    bodies = [body for number in range(1, 40) for body in of_a_reader(post, number)]
    begun = time.monotonic()
    for number in range(CHATTER_MAX):
        ahead_s = number / CHATTER_PER_S - (time.monotonic() - begun)
        if ahead_s > 0.01:
            post.rest(time.monotonic() + ahead_s)
        if time.monotonic() > until:
            break
        post.say(to, bodies[number % len(bodies)], session=session, paced=False)
    judge(post, f"{to} answered for the lease of another")


TELLINGS: Mapping[str, Telling] = {
    "read-all": read_all,
    "write-all": write_all,
    "map-all": map_all,
    "beyond-lease": beyond_lease,
    "forged-tickets": forged_tickets,
    "others-leases": others_leases,
    "others-sessions": others_sessions,
    "unasked-answers": unasked_answers,
    "another-name": another_name,
    "greetings": greetings,
    "odd-cards": odd_cards,
    "odd-endpoints": odd_endpoints,
    "odd-numbers": odd_numbers,
    "chatter": chatter,
}
