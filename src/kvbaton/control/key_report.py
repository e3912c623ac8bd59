"""What a key directory holds, as an operator may see it: names, fingerprints, ages and what is wrong. Never a secret.

Law: a report is made of whatever can be read; a file that cannot is a problem in it, not its end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbaton.control import key_files as files
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining import admission_files
from kvbaton.control.key_files import openings
from kvbaton.protocol.legality import Act, may

FINGERPRINT_CHARS = 16


class KeyIdentity(msgspec.Struct, frozen=True):
    """One name."""

    name: str
    fingerprint: str
    also: tuple[str, ...]  # fingerprints of keys that are let in as well, while it is rotated
    secret_here: bool
    may_drain: bool  # an operator
    role: str  # what its key is for: docs/security.md
    age_s: float  # since its public file was written


class TicketKeyView(msgspec.Struct, frozen=True):
    """One key of tickets.json."""

    fingerprint: str
    use: str  # signs, verifies, next


class JoinedView(msgspec.Struct, frozen=True):
    """One member that joined with a token."""

    name: str
    fingerprint: str
    role: str
    token: str
    left_s: float  # of its certificate, which is renewed while it lives
    removed: bool  # and its name not yet free


class TokenView(msgspec.Struct, frozen=True):
    """One join token; nothing of it that could be used."""

    id: str
    role: str
    state: str  # good, expired, used-up, revoked
    left_s: float
    uses: int
    uses_max: int  # 0: any number


class KeyReport(msgspec.Struct, frozen=True):
    """A key directory."""

    directory: str
    identities: tuple[KeyIdentity, ...]
    ticket_keys: tuple[TicketKeyView, ...]
    problems: tuple[str, ...]
    joined: tuple[JoinedView, ...] = ()
    tokens: tuple[TokenView, ...] = ()


def fingerprint(key: str | bytes) -> str:
    """Names a key without giving it away."""
    data = key.encode() if isinstance(key, str) else key
    return hashlib.blake2b(data, digest_size=FINGERPRINT_CHARS // 2, person=b"kvbaton-key").hexdigest()


def report(directory: str | Path, wall: Callable[[], float] = time.time) -> KeyReport:
    """All that can be told of it; ControlError only if there is none."""
    base = files.existing(directory)
    problems: list[str] = []
    identities = [found for path in _json(base / "public") if (found := _identity(base, path, wall(), problems))]
    _look_for_doubles(identities, problems)
    public = {path.name for path in _json(base / "public")}
    for path in _json(base / "secret"):
        if path.name not in public:
            problems.append(f"{path}: there is no public/{path.name}; remove it, or restore that file")
    ticket_keys = _ticket_keys(base, problems)
    said = {problem.partition(" ")[0] for problem in problems}  # of a mode that kept a file from being read
    problems += [f"{each.found}; {each.fix}" for each in openings(base) if str(each.path) not in said]
    joined = tuple(_joined(each, wall()) for each in admission_files.joined_files(base))
    return KeyReport(str(base), tuple(identities), ticket_keys, tuple(problems), joined, tokens(base, wall, problems))


def tokens(
    base: Path, wall: Callable[[], float] = time.time, problems: list[str] | None = None
) -> tuple[TokenView, ...]:
    """The join tokens of a directory."""
    try:
        found = admission_files.tokens(base)
    except ControlError as error:
        if problems is None:
            raise
        problems.append(str(error))
        return ()
    return tuple(_token(each, wall()) for each in found)


def _token(token: admission_files.TokenFile, now: float) -> TokenView:
    used_up = token.uses_max and token.uses >= token.uses_max
    state = "revoked" if token.revoked else "expired" if now > token.expires else "used-up" if used_up else "good"
    left_s = round(max(0.0, token.expires - now), 1)
    return TokenView(token.id, token.role.value, state, left_s, token.uses, token.uses_max)


def _joined(member: admission_files.JoinedFile, now: float) -> JoinedView:
    left_s = round(max(0.0, member.until - now), 1)
    return JoinedView(member.name, fingerprint(member.public), member.role.value, member.token, left_s, member.removed)


def _identity(base: Path, path: Path, now: float, problems: list[str]) -> KeyIdentity | None:
    secret = base / "secret" / path.name
    try:
        card = files.read(path, files.Public, private=False)
        if card.name != path.stem:
            raise ControlError(f"{path}: name: got {card.name[:80]!r}, expected {path.stem!r}; restore the file")
    except ControlError as error:
        problems.append(str(error))
        return None
    if secret.exists():
        try:
            public = files.public_of(files.read(secret, files.Secret, private=True).secret, secret)
            if public not in (card.public, *card.also):
                problems.append(f"{secret} does not belong to public/{path.name}; restore both")
            elif public != card.public:
                problems.append(f"{secret} is still the old one of a rotation; rotate {card.name} again")
        except ControlError as error:
            problems.append(str(error))
    try:
        if card.public not in files.signing(base, [card]):
            missing = base / "public" / f"{card.name}.signing"
            problems.append(
                f"{missing} does not say by which key {card.name} signs: others take it at a registry's word; start "
                "it, or rotate it, where its secret is, and copy public/ from there"
            )
    except ControlError as error:
        problems.append(str(error))
    also = tuple(fingerprint(key) for key in card.also)
    age_s = max(0.0, now - path.stat().st_mtime)
    drains = may(card.plays, Act.DRAIN)
    print_ = fingerprint(card.public)
    return KeyIdentity(card.name, print_, also, secret.exists(), drains, card.plays.value, round(age_s, 1))


def _look_for_doubles(identities: list[KeyIdentity], problems: list[str]) -> None:
    seen: dict[str, str] = {}
    for identity in identities:
        for key in (identity.fingerprint, *identity.also):
            if seen.setdefault(key, identity.name) != identity.name:
                problems.append(f"public/{identity.name}.json: {seen[key]} has this key too; mint one for each")


def _ticket_keys(base: Path, problems: list[str]) -> tuple[TicketKeyView, ...]:
    try:
        tickets = files.tickets(base)
    except ControlError as error:
        problems.append(str(error))
        return ()
    uses = ["signs", *["verifies"] * (len(tickets.keys) - 1), "next"]
    return tuple(TicketKeyView(fingerprint(key), use) for key, use in zip(tickets.all, uses, strict=False))


def _json(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*.json"))
