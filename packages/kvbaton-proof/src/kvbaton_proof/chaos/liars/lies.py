"""The lies of a malicious member: the list from which a plan draws, and the outcome of each.

A liar holds one valid key of the cluster and speaks every protocol as it should be spoken. It has a guise: a worker
that registered as prefill or as decode, or the key of a store or of an operator, whom nobody asks to move any KV.

Laws: no lie is about the KV or the text of a prompt that the liar was asked to compute: that is not defended
(docs/security.md). So a liar lets no such handoff come to its end, and whatever answer is wrong, promise 1 is broken.
No lie is what a member may do: a put under any key of the store, a drain by an operator. So a lie that is *believed*
(bytes of memory that was not leased are given or taken, the lease of another answers) breaks promise 5.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

LIAR = "liar"
OPERATORS_KEY = "operator-liar"
EACH = 8
"""Lies that a step tells besides `ALWAYS`."""


class Guise(enum.StrEnum):
    """What the liar's key says that it is."""

    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"
    OPERATOR = "operator"

    @property
    def is_worker(self) -> bool:
        """Whether it registers, so that the router and the engines come to it by themselves."""
        return self in (Guise.PREFILL, Guise.DECODE)


class Lie(msgspec.Struct, frozen=True):
    """`to`: roles of members that are told it; `guises`: as what it can be told."""

    name: str
    what: str
    to: tuple[str, ...]
    guises: tuple[Guise, ...] = tuple(Guise)


_ENGINES = ("prefill", "decode")
_AS_P, _AS_D, _AS_WORKER = (Guise.PREFILL,), (Guise.DECODE,), (Guise.PREFILL, Guise.DECODE)

LIES: tuple[Lie, ...] = (
    Lie("read-all", "a greeting, then READs of all registered memory", _ENGINES),
    Lie("write-all", "a greeting, then WRITEs of garbage over all registered memory", _ENGINES),
    Lie("map-all", "a greeting by shm, then all registered memory is mapped and read", _ENGINES),
    Lie("forged-tickets", "claims with tickets that are forged, of others, or of handoffs that never were", _ENGINES),
    Lie("others-leases", "renewals, commits, offers and revocations of leases that others hold", _ENGINES),
    Lie("others-sessions", "the same, goodbyes and resets in sessions of others and of earlier lives", _ENGINES),
    Lie("unasked-answers", "grants, writes and commits to who has asked for nothing", _ENGINES),
    Lie("greetings", "thousands of greetings, each with a nonce of its own", _ENGINES),
    Lie("odd-cards", "greetings with layouts of 750,000 places, empty ones, and features that there are not", _ENGINES),
    Lie("odd-endpoints", "a session whose data plane leads nowhere, to others, or is none", _ENGINES),
    Lie("odd-numbers", "numbers that are none, negative, or too large for what they count", _ENGINES),
    Lie("another-name", "messages under the names of other members", _ENGINES),
    Lie("chatter", "as many messages as the quota allows", _ENGINES),
    Lie("beyond-lease", "with a ticket of its own: READs and WRITEs of more than was leased, and claims again",
        ("prefill",), _AS_D),
    Lie("odd-times", "grants and renewals for 1e-300 s, for ever, and for no number of seconds", ("decode",), _AS_P),
    Lie("no-such-blocks", "grants of blocks that do not exist, or of more than there are", ("decode",), _AS_P),
    Lie("odd-welcomes", "welcomes with layouts of 750,000 places, or with endpoints of others", ("decode",), _AS_P),
    Lie("never-done", "a grant that is renewed and renewed, and of which nothing is ever ready", ("decode",), _AS_P),
    Lie("contradictions", "committed, stale, refused and lost, all of one claim", ("decode",), _AS_P),
    Lie("wrong-digests", "what was written is of another prompt, or in another's reservation", ("decode",), _AS_P),
    Lie("beyond-offer", "asked to write into some blocks: READs and WRITEs of all memory", ("decode",), _AS_P),
    Lie("endless-comments", "over HTTP: comments of an event stream without end", ("router",), _AS_WORKER),
    Lie("endless-events", "over HTTP: an answer that begins again and again, as fast as it can", ("router",), _AS_D),
    Lie("endless-answer", "over HTTP: an answer that comes a byte at a time", ("router",), _AS_WORKER),
    Lie("no-answer", "over HTTP: nothing at all, or a closed connection", ("router",), _AS_WORKER),
    Lie("huge-answer", "over HTTP: 64 MiB of an answer", ("router",), _AS_P),
    Lie("huge-parameters", "over HTTP: 10 MB of kv_transfer_params, and odd ones", ("router",), _AS_P),
    Lie("odd-http", "over HTTP: heads, lengths and chunks that are none", ("router",), _AS_P),
    Lie("odd-addresses", "a registration with addresses of others, unused or invalid ones", ("router",), _AS_WORKER),
    Lie("other-lives", "registrations, pings and farewells of other members and of other lives", ("router",)),
    Lie("drains", "orders to drain others", ("router",), (Guise.PREFILL, Guise.DECODE, Guise.STORE)),
    Lie("odd-reports", "half a MiB of reports, of flights that others made", ("router",)),
    Lie("hoard", "invitations by the thousand, values half sent, questions for 1 TiB", ("store",), (
        Guise.PREFILL, Guise.DECODE, Guise.OPERATOR)),
)  # fmt: skip

BY_NAME: Mapping[str, Lie] = {lie.name: lie for lie in LIES}
ALWAYS = ("write-all", "read-all")
"""To whom the step is for, in every step: what other promises stand on."""


class Told(msgspec.Struct, frozen=True):
    """One lie of a plan, written name@member."""

    lie: Lie
    to: str


def parse(text: str) -> Told:
    """ValueError says what is wrong."""
    name, at, to = text.partition("@")
    if name not in BY_NAME or not at or not to:
        raise ValueError(f"lies: got {text!r}, expected NAME@MEMBER with one of {', '.join(BY_NAME)}")
    return Told(BY_NAME[name], to)


def guise_for(role: str, rng: random.Random) -> Guise:
    """To a D the liar is a P, which D asks; to a P it is a D, or somebody who has no business there."""
    if role == "decode":
        return Guise.PREFILL
    return rng.choice((Guise.DECODE, Guise.DECODE, Guise.STORE, Guise.OPERATOR))


def drawn(target: str, guise: Guise, members: Mapping[str, str], rng: random.Random) -> tuple[str, ...]:
    """What is told, to whom, in which order; `target` hears `ALWAYS` and most of the rest. `members`: roles by name."""
    able = [lie for lie in LIES if guise in lie.guises and lie.name not in ALWAYS]
    able = [lie for lie in able if set(lie.to) & set(members.values())]
    chosen = [*ALWAYS, *(lie.name for lie in rng.sample(able, min(EACH, len(able))))]
    rng.shuffle(chosen)
    return tuple(f"{name}@{_whom(BY_NAME[name], target, members, rng)}" for name in chosen)


def _whom(lie: Lie, target: str, members: Mapping[str, str], rng: random.Random) -> str:
    able = [name for name, role in members.items() if role in lie.to]
    return target if target in able else rng.choice(able)


# --- what came of it


@dataclass(slots=True)
class Count:
    """One lie, over all its tellings."""

    told: int = 0
    refused: int = 0  # in words, by a closed connection, or by silence where an answer was due
    believed: int = 0
    evidence: str = ""  # of the first that was believed

    def believe(self, evidence: str) -> None:
        self.believed += 1
        self.evidence = self.evidence or evidence


@dataclass(slots=True)
class Tally:
    """All lies of a step or of a run, by name."""

    counts: dict[str, Count] = field(default_factory=dict)
    stolen: int = 0  # prompts that reached a process to which no one should have sent them

    def of(self, name: str) -> Count:
        return self.counts.setdefault(name, Count())

    def add(self, other: Tally) -> None:
        self.stolen += other.stolen
        for name, count in other.counts.items():
            mine = self.of(name)
            mine.told += count.told
            mine.refused += count.refused
            mine.believed += count.believed
            mine.evidence = mine.evidence or count.evidence

    def problems(self) -> list[str]:
        """One line for each lie that was believed."""
        return [
            f"liar: {name} was believed {count.believed} of {count.told} times: {count.evidence}"
            for name, count in self.counts.items()
            if count.believed
        ]

    def words(self) -> str:
        """For a row of the report."""
        said = [f"{name} {count.refused}/{count.told}" for name, count in self.counts.items()]
        return f"refused of told: {', '.join(said)}"


def figures(tally: Tally) -> dict[str, dict[str, int]]:
    """As the outcome tells it."""
    return {
        name: {"told": count.told, "refused": count.refused, "believed": count.believed}
        for name, count in sorted(tally.counts.items())
    }


def encode(tally: Tally) -> bytes:
    return msgspec.json.encode(tally)


def decode(data: bytes) -> Tally:
    """ValueError for what is no tally."""
    return msgspec.json.decode(data, type=Tally)


def roles(names: Sequence[str]) -> dict[str, str]:
    """Roles by the names that members of a chaos run have."""
    kinds = {"p": "prefill", "d": "decode"}
    return {name: name if name in ("router", "store") else kinds[name[0]] for name in names}
