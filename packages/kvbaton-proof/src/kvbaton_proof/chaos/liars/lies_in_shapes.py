"""Lies to an engine about what the liar is and how much of it there is: cards, endpoints, numbers, floods.

Law: each function returns by its instant, or soon after it where an answer is waited for.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.protocol.ids import TransferId, handoff_id, rank_peer
from kvbaton.protocol.wire import messages as m
from kvbaton.transports.tcp.tcp_transport import TcpEndpoint
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.liar_post import Post, said
from kvbaton_proof.chaos.liars.liar_reach import ANSWER_S
from kvbaton_proof.chaos.liars.lies_to_engines import Telling, judge, of_a_reader, session_at
from kvbaton_proof.lies.lie_fields import OF_TARGET

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
    "greetings": greetings,
    "odd-cards": odd_cards,
    "odd-endpoints": odd_endpoints,
    "odd-numbers": odd_numbers,
    "chatter": chatter,
}
