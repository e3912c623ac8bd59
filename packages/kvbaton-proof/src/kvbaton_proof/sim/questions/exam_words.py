"""Names, tickets, versions, keys, settings, frames: what is just within a bound is taken, what is just beyond not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import random
import struct
from typing import Any

import msgspec

from kvbaton.protocol import compat, ids, privileges
from kvbaton.protocol.content import Content, digest
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.privileges import Act, Role, may, may_say, role_by_name
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import codec, messages
from kvbaton.protocol.wire.codec import FoldedHello, decode, encode, pack_blocks, read, unfolded, unpack_blocks
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, Ticket, seal, unseal
from kvbaton.protocol.wire.versions import Versions, settle, version_bit, versions_in
from kvbaton_proof.sim.questions.exam import Question, lowered, refused, same, taken
from kvbaton_proof.sim.world.sim_memory import Shape

_R = Reason
KEYS = (b"first key of this cluster, 32 by.", b"the key that it had before, 32 b")


def names(rng: random.Random) -> None:
    """Which texts are names."""
    hexes = f"{rng.getrandbits(128):032x}"
    for index in (0, 1, 9, 10, 4095):
        same("a handoff's name", handoff_id(TransferId(hexes), index), f"{hexes}.{index}")
        same(f"{index} names a prompt", ids.is_handoff_id(f"{hexes}.{index}"), True)
    for index in (-1, 4096):
        try:
            found: object = handoff_id(TransferId(hexes), index)
        except ValueError:
            found = None
        same(f"prompt {index} of a request", found, None)
    for text in ("", hexes, f"{hexes}.", f"{hexes}.4096", f"{hexes}.00", f"{hexes}.01", f"{hexes[1:]}.0", f"0{hexes}.0",
                 f"{hexes}.0 ", f"{hexes[:-1]}G.0", f"x{hexes}.0", f"{hexes}.-1"):  # fmt: skip
        same(f"{text!r} names a handoff", ids.is_handoff_id(text), False)
    for text in ("a", "A9", "w-1.x_y", "w" * 64):
        same(f"{text!r} names a worker", ids.is_worker_id(text), True)
    for text in ("", "-a", ".a", "_a", "w" * 65, "a b", "a#0", "ä", "a\n"):
        same(f"{text!r} names a worker", ids.is_worker_id(text), False)
    peer = PeerId(WorkerId("w-1"), Incarnation(rng.getrandbits(40)))
    for rank in (0, 3, 17):
        of_rank = ids.rank_peer(peer, rank)
        same("a rank's name", (of_rank.worker, of_rank.incarnation), (f"w-1#{rank}", peer.incarnation))
        same("whose rank it is", ids.owner_of(of_rank), peer)


def _sealed(content: list[Any], key: bytes = KEYS[0], version: int = 1) -> str:
    """A ticket as it is on the wire, made by hand."""
    body = msgspec.msgpack.encode((version, content))
    mac = hmac.new(key, b"kvbaton-ticket\0" + body, hashlib.sha256).digest()[:16]
    return base64.urlsafe_b64encode(mac + body).decode().rstrip("=")


def tickets(rng: random.Random) -> None:
    """Who can sign is believed, until the ticket is over; nobody else ever."""
    now = rng.uniform(1e9, 2e9)
    handoff = f"{rng.getrandbits(128):032x}.{rng.randrange(4096)}"
    life, lease = rng.getrandbits(60), rng.randrange(3)
    ticket = Ticket(
        HandoffId(handoff), WorkerId("p0"), now + 1.0, Incarnation(life), LeaseId(lease), WorkerId("d0"), b"digest", 2
    )
    whole = [handoff, "p0", now + 1.0, life, lease, "d0", b"digest", 2]
    same("a ticket as text", seal(ticket, KEYS[0]), _sealed(whole))
    for key in KEYS:
        same("a genuine ticket", taken("a genuine ticket", unseal, _sealed(whole, key), KEYS, now), ticket)
    text = _sealed(whole)
    taken("a ticket in its last second", unseal, text, KEYS, now + 0.999)
    refused("a ticket that is over", _R.TICKET_EXPIRED, unseal, text, KEYS, now + 1.001)
    flip = rng.randrange(len(text) - 1)
    other = text[:flip] + ("A" if text[flip] != "A" else "B") + text[flip + 1 :]
    forged = {
        "a character is another": other, "of another cluster": _sealed(whole, b"another cluster's key, 32 bytes."),
        "nothing": "", "cut": text[:-4], "longer": text + "AAAA", "not base64": text[:9] + "!" + text[10:],
        "not ASCII": text[:9] + "é" + text[10:], "no body": text[:22], "padding within": text[:8] + "=" + text[9:],
        "another source, old signature": text[:24] + _sealed([handoff, "p1", *whole[2:]])[24:],
        "malformed handoff": _sealed(["x", *whole[1:]]), "malformed source": _sealed([handoff, "p 0", *whole[2:]]),
        "no content": _sealed([]), "a negative life": _sealed([*whole[:3], -1, *whole[4:]]),
        "nobody reads": _sealed([*whole[:7], 0]), "not a time": _sealed([handoff, "p0", math.nan, *whole[3:]]),
    }  # fmt: skip
    for what, bad in forged.items():
        refused(f"a ticket: {what}", _R.TICKET_FORGED, unseal, bad, KEYS, now)
    fill = next(n for n in range(600, 2000) if len(_sealed([*whole[:6], bytes(n), 2])) > TICKET_CHARS_MAX)
    taken("the longest ticket", unseal, _sealed([*whole[:6], bytes(fill - 1), 2]), KEYS, now)
    refused("a ticket that is too long", _R.TICKET_FORGED, unseal, _sealed([*whole[:6], bytes(fill), 2]), KEYS, now)


def versions(rng: random.Random) -> None:
    """The newest that both speak; none, and it is refused by name."""
    for oldest in range(1, 4):
        for newest in range(oldest, 5):
            ours = Versions(oldest, newest)
            spoken = list(range(oldest, newest + 1))
            same(f"{ours}: what it speaks", [n for n in range(6) if n in ours], spoken)
            same(f"{ours}: not a number", "1" in ours, False)
            same(f"{ours}: its bits", versions_in(ours.bits), [n for n in spoken if n > 1])
            for greeted in range(1, 6):
                bits = rng.getrandbits(3) | sum(version_bit(n) for n in range(1, 17) if rng.random() < 0.3)
                theirs = {greeted, *(n for n in range(1, 17) if bits >> (45 + n) & 1)}
                common = [n for n in spoken if n in theirs]
                if common:
                    same(f"{ours} and {sorted(theirs)}", taken("versions", settle, ours, greeted, bits), common[-1])
                else:
                    refused(f"{ours} and {sorted(theirs)}", _R.WRONG_VERSION, settle, ours, greeted, bits)
    bits = 1 | 4 | 1 << 20 | version_bit(2)
    same("features by name", messages.feature_names(bits), "pull, push, version 2, bit 20")
    same("no features", messages.feature_names(0), "")


def keys(rng: random.Random) -> None:
    """Facts that must be equal: a difference is found wherever it is, and silence is one; what only tells is none."""
    facts = {f"fact{n}": str(rng.randrange(9)) for n in range(4)}
    ours = {**facts, "info.version": "1"}
    same("the same facts", compat.difference(ours, {**facts, "info.version": "2", "info.more": ""}), None)
    same("the same facts, in another order", compat.digest(ours), compat.digest(dict(reversed(facts.items()))))
    same("a digest's length", len(compat.digest(ours)), 32)
    for name in facts:
        rest = {key: value for key, value in facts.items() if key != name}
        for theirs in (rest, {**facts, name: "other"}, {**facts, f"more.{name}": "x"}):
            found = compat.difference(ours, theirs)
            same(f"{theirs} differs", found is not None and found.split(":")[0] in (name, f"more.{name}"), True)
            same("what differs has another digest", compat.digest(ours) == compat.digest(theirs), False)
    for good in ({}, {"n" * 256: "v" * 256}, {"n": ""}, {str(n): "" for n in range(64)}):
        same("a key within its bounds", taken("a key", compat.validate_key, good), good)
    for bad in (
        {"": "v"},
        {"n" * 257: "v"},
        {"n": "v" * 257},
        {"n\n": "v"},
        {"n": "v\0"},
        {str(n): "" for n in range(65)},
    ):
        refused("a key beyond its bounds", _R.BAD_MESSAGE, compat.validate_key, bad)


def contents(rng: random.Random) -> None:
    """Whatever shapes the KV is in the digest."""
    tokens = [rng.randrange(50_000) for _ in range(rng.randint(2, 6))]
    base = Content(tokens, len(tokens), "lora", ("image",), "salt", b"embeddings")
    others = [
        msgspec.structs.replace(base, **{name: value})
        for name, value in {
            "position": len(tokens) - 1,
            "lora": "",
            "multimodal": (),
            "salt": "",
            "embeddings": b"",
        }.items()
    ]
    others += [
        msgspec.structs.replace(base, tokens=each)
        for each in (
            tokens[:-1],
            [*tokens, 0],
            tokens[1:],
            [tokens[0] + 1, *tokens[1:]],
            [*tokens[:-1], tokens[-1] + 1],
        )
    ]
    found = {digest(each) for each in (base, *others)}
    same("contents that differ have digests that differ", len(found), 1 + len(others))
    same("the size of a digest", {len(each) for each in found}, {16})
    same("a digest of the same", digest(msgspec.structs.replace(base, tokens=tuple(tokens))), digest(base))


def _set(fields: dict[str, Any]) -> Settings:
    return Settings(**fields)


def settings(rng: random.Random) -> None:
    """Every number is above nothing and finite; seconds are as long as anybody can keep to, and a week at most."""
    fields = [field.name for field in msgspec.structs.fields(Settings)]
    for name in rng.sample(fields, 1):
        for value in (0, -1, math.nan, math.inf):
            refused(f"{name} = {value}", _R.BAD_MESSAGE, _set, {name: value})
    week = 7 * 86_400.0
    seconds = [name for name in fields if name.endswith(("_s", "_timeout"))]
    for name in (rng.choice(("lease_s", "max_hold_s")), rng.choice(seconds)):
        hold = {"max_hold_s": week} if name == "lease_s" else {"lease_s": 0.2} if name == "max_hold_s" else {}
        least = 0.15 if name == "lease_s" else 0.2 if name == "max_hold_s" else 0.05
        for value in (least, week):
            same(name, getattr(taken(f"{name} = {value}", _set, {**hold, name: value}), name), value)
        for value in (least * 0.99, week * 1.001):
            refused(f"{name} = {value}", _R.BAD_MESSAGE, _set, {**hold, name: value})
    for name in rng.sample(sorted(set(fields) - set(seconds)), 1):
        taken(f"{name} = 1", _set, {name: 1})


_SAID = {
    "hello": "Hello Joined", "claim": "Claim Renew Commit Abandon", "offer": "Offer Ack Revoke",
    "grant": "Welcome HelloRefused Linked Granted GrantedFrom ClaimRefused Renewed RenewRefused Ready Committed Stale "
             "SourceLost",
    "write": "Accepted Written Quiesced",
}  # fmt: skip
_DOES = {
    "prefill": "register keep report grant write", "decode": "register keep report hello claim offer read",
    "both": "register keep report grant write hello claim offer read", "operator": "drain", "router": "watch",
    "store": "", "registry": "",
}  # fmt: skip


def roles(rng: random.Random) -> None:
    """Who may do and say what (docs/security.md)."""
    for role in Role:
        does = _DOES[role.value].split()
        same(f"what {role} may do", sorted(act for act in Act if may(role, act)), sorted(does))
        says = {kind for act in does for kind in _SAID.get(act, "").split()}
        says |= {"Reset", "Goodbye"} if {"hello", "grant"} & set(does) else set()
        same(f"what {role} may say", {kind.__name__ for kind in privileges.SAYS if may_say(role, kind)}, says)
    expected = {
        "operator": "operator",
        "operator-1": "operator",
        "router-x": "router",
        "store": "store",
        "router": "router",
        "registry-b": "registry",
    }
    for name in (*expected, "operators", "w0", "xrouter", "stores-1", "my-store-1", ""):
        same(f"the role of {name!r}", role_by_name(name), expected.get(name, "both"))


def blocks(rng: random.Random) -> None:
    """Block ids on the wire: whole numbers, of which -1 alone stands for none."""
    listed = [rng.choice((-1, 0, 1, 255, (1 << 31) - 1, rng.getrandbits(30))) for _ in range(rng.randint(0, 6))]
    packed = struct.pack(f"<{len(listed)}i", *listed)
    same("block ids, packed", pack_blocks(listed), packed)
    same("block ids, unpacked", taken("block ids", unpack_blocks, packed), tuple(listed))
    for bad in (packed + b"\0", packed + b"\0\0\0", struct.pack("<2i", 3, -2), struct.pack("<i", -(1 << 31))):
        refused("block ids", _R.BAD_MESSAGE, unpack_blocks, bad)


def frames(rng: random.Random) -> None:
    """What is read is what was said, by whom and to whom; what is not a message is refused, by name."""
    me, to, session = PeerId(WorkerId("p0"), Incarnation(rng.getrandbits(60))), Incarnation(7), rng.randrange(99)
    said: list[messages.Message] = [
        messages.Stale(LeaseId(1), 2, (3,), "busy"), messages.Abandon(HandoffId("h"), 2, "aborted"),
        messages.Revoke(LeaseId(1), 2, ids.ReservationId(3), "busy"), messages.Linked(), messages.Goodbye(),
        messages.Commit(LeaseId(4), 5), messages.HelloRefused(9, "busy", "words"),
    ]  # fmt: skip
    for message in said:
        for version in (1, 2):
            envelope, found = taken("a frame", decode, encode(me, to, session, message, version))
            heard = msgspec.structs.replace(message, reason="") if version == 1 and _unsaid(message) else message
            same("a message", found, heard)
            same(
                "its envelope",
                (envelope.version, envelope.sender, envelope.to, envelope.session),
                (version, me, to, session),
            )
    frame = encode(me, to, session, said[0], 2)
    for bad in (b"", frame[:-1], frame + b"\0", b"\xc1", frame.replace(b"p0", b" 0"), b"\x91" * 2000):
        refused("what is no frame", _R.BAD_MESSAGE, read, bad)
    strange = encode(me, to, session, said[0], 3)
    refused("a version that is not spoken", _R.WRONG_VERSION, read, strange)
    refused(
        "a version that is not spoken here", _R.WRONG_VERSION, read, encode(me, to, session, said[0], 1), Versions(2, 2)
    )
    same("a refusal of any version", taken("a refusal", decode, encode(me, to, 0, said[-1], 9))[1], said[-1])
    refused("what is no card", _R.BAD_MESSAGE, unfolded, FoldedHello(1, msgspec.Raw(b"\x90")))
    for message, items in ((said[0], 4), (said[1], 3), (said[2], 4)):  # each with its tag
        for version in (1, 2):
            raw = msgspec.msgpack.decode(encode(me, to, session, message, version))[5]
            same(f"what version {version} says of {type(message).__name__}", len(raw), items + version - 1)
    refused("as others read it", _R.WRONG_VERSION, decode, encode(me, to, session, said[0], 1), Versions(2, 2))
    with lowered(codec, "FRAME_BYTES_MAX", len(frame)):
        taken("the largest frame", read, frame)
    with lowered(codec, "FRAME_BYTES_MAX", len(frame) - 1):
        refused("a frame that is too large", _R.BAD_MESSAGE, read, frame)


def greetings(rng: random.Random) -> None:
    """A card is read when it is asked for, and is what was sent."""
    me, to = PeerId(WorkerId("p0"), Incarnation(rng.getrandbits(60))), Incarnation(7)
    shape = Shape(ranks=rng.choice((1, 2)), group_layers=rng.choice(((2,), (1, 2))))
    card = messages.Card(
        rng.getrandbits(3), rng.getrandbits(50), "here", {"model": "m"}, shape.layout(), ("tcp", "shm")
    )
    hello = messages.Hello(rng.getrandbits(40), card)
    welcome = messages.Welcome(hello.nonce, card, "tcp", (b"one", b"two"), rng.randint(1, 99))
    size = len(msgspec.msgpack.encode(card))
    for greeting in (hello, welcome):
        for version in (1, 2):
            frame = encode(me, to, 3, greeting, version)
            _, folded = taken("a greeting", read, frame)
            same("a greeting comes folded", type(folded).__name__, f"Folded{type(greeting).__name__}")
            same("a greeting", taken("a greeting", decode, frame)[1], greeting)
            with lowered(codec, "CARD_BYTES_MAX", size):
                same("the largest card", taken("the largest card", unfolded, folded), greeting)
            with lowered(codec, "CARD_BYTES_MAX", size - 1):
                refused("a card that is too large", _R.BAD_MESSAGE, unfolded, folded)
    same("a greeting in a version to come", taken("a greeting", decode, encode(me, to, 3, hello, 7))[1], hello)
    refused("a welcome in a version to come", _R.WRONG_VERSION, read, encode(me, to, 3, welcome, 7))


def _unsaid(message: messages.Message) -> bool:
    """Version 1 did not say why."""
    return isinstance(message, messages.Stale | messages.Abandon | messages.Revoke)


BANK: list[Question] = [names, tickets, versions, keys, contents, settings, roles, blocks, frames, greetings]
