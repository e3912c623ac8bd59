"""Lies to the router, at its registry and over HTTP, and to the store.

Law: what a member may do is not a lie: nothing complete is put into the store, and no drain is ordered by an operator.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

import msgspec

from kvbaton.api.tokens import is_loopback
from kvbaton.control.registry import registry_messages as registry
from kvbaton.protocol.ids import Incarnation, TransferId, WorkerId, handoff_id
from kvbaton.security import sealing
from kvbaton.store import store_client
from kvbaton.store.tcp_connection import KEYS_MAX, Item, LineError, Op, StoreConnection, greet
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.liar_post import Post, honest_registration
from kvbaton_proof.chaos.liars.liar_reach import ANSWER_S
from kvbaton_proof.chaos.liars.lies_to_engines import Telling

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
    frames = [store_client.encode(store_client.Dial(number)) for number in range(INVITATIONS)]
    frames += [store_client.encode(store_client.Dial(-1)), b"\xc1" * 64, secrets.token_bytes(1 << 16)]
    post.rng.shuffle(frames)
    for frame in frames:
        if time.monotonic() > until:
            break
        post.send(to, frame)
        post.rest(time.monotonic() + 0.002)
    post.rest(time.monotonic() + ANSWER_S / 4)
    host = urlsplit(post.errand.members[to].control).hostname or ""
    invited = iter(post.all_heard(store_client.Invited))
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


def _line(host: str, invited: store_client.Invited) -> StoreConnection:
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

TELLINGS: Mapping[str, Telling] = {
    **{name: partial(_answered, answer) for name, answer in _HTTP.items()},
    "odd-addresses": odd_addresses,
    "other-lives": other_lives,
    "drains": drains,
    "odd-reports": odd_reports,
    "hoard": hoard,
}
