"""A temporary directory for the keys of a cluster that lives as long as one process, as that of `kvbaton up`.

Laws: the keys go with the process that made the room, however it ends. A helper waits on a pipe that only that process
holds and removes them when it closes, so also after kill -9; what is left where the helper was killed too goes when the
next room is made. A room that is in use is known by a lock that its maker holds.

New keys for old, without a moment in which a good peer or a good ticket is refused.

Laws: a key verifies everywhere before it signs anywhere, and goes on verifying for as long as what it signed lives. An
identity that is rotated is let in under both of its keys until that is finished, since its process uses the secret it
was started with. Nothing is replaced but as a whole.

What a key directory holds, as an operator may see it: names, fingerprints, ages and what is wrong. Never a secret.

Law: a report is made of whatever can be read; a file that cannot is a problem in it, not its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from kvbaton.control import key_files as files
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining import admission_files
from kvbaton.control.key_files import openings
from kvbaton.protocol.ids import WorkerId
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


PREFIX = "kvbaton-room-"
KEYS = "keys"
"""What is in a room under this name is secret, and goes first."""
LOCK = "lock"
HELPER_S = 5.0
_REMOVE = 'read -r _; rm -rf -- "$1"'


@contextlib.contextmanager
def key_room() -> Iterator[Path]:
    """A directory of this user's alone; gone after the context, and its keys in any case."""
    sweep()
    made = Path(tempfile.mkdtemp(prefix=".kvbaton-"))  # under a name that nobody sweeps, until it is held
    guard = os.open(made / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        room = made.rename(made.with_name(made.name.replace(".kvbaton-", PREFIX, 1)))
        with _helped(room):
            try:
                yield room
            finally:
                shutil.rmtree(room, ignore_errors=True)
    finally:
        os.close(guard)


def sweep() -> int:
    """Remove the rooms whose makers are gone; returns how many there were."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):
                count += _swept(entry)
    return count


def _swept(room: Path) -> bool:
    told = room.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid():
        return False
    try:
        guard = os.open(room / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # of one that was being removed
        shutil.rmtree(room, ignore_errors=True)
        return True
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(room, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(guard)
    return True


@contextlib.contextmanager
def _helped(room: Path) -> Iterator[None]:
    """While it lasts, the end of this process is the end of the keys. Without a shell there is the next sweep."""
    try:
        helper = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", str(room / KEYS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is not for it
        )
    except OSError:
        yield
        return
    try:
        yield
    finally:
        assert helper.stdin is not None
        helper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(HELPER_S)


TICKETS_LIVE_S = 150.0
"""For how long tickets that a key signed may be about: their default life of 120 s, and what clocks differ."""


def prepare_tickets(directory: str | Path) -> bool:
    """Add a key that only verifies; False when there was one already."""
    base = files.existing(directory)
    with files.locked(base):
        now = files.tickets(base)
        if now.next:
            return False
        if len(now.keys) >= files.TICKET_KEYS_MAX:
            raise ControlError(f"{base}: tickets.json holds {len(now.keys)} keys, the most; finish the rotations first")
        _put(base, msgspec.structs.replace(now, next=secrets.token_hex(files.TICKET_KEY_BYTES)))
        return True


def tickets_age_s(directory: str | Path, wall: Callable[[], float] = time.time) -> float:
    """How long ago tickets.json was last changed here; a clock that was set back says 0."""
    return max(0.0, wall() - (files.existing(directory) / "tickets.json").stat().st_mtime)


def promote_tickets(directory: str | Path, wall: Callable[[], float] = time.time) -> None:
    """From now on the key that was prepared signs; the others go on verifying."""
    base = files.existing(directory)
    with files.locked(base):
        now = files.tickets(base)
        if not now.next:
            raise ControlError(f"{base}: tickets.json holds no key that was prepared; prepare one first")
        _put(base, files.Tickets((now.next, *now.keys), since=wall()))


def finish_tickets(directory: str | Path, live_s: float = TICKETS_LIVE_S, wall: Callable[[], float] = time.time) -> int:
    """Drop the keys that no longer sign; returns how many. Refused while what they signed may still be about."""
    base = files.existing(directory)
    with files.locked(base):
        now = files.tickets(base)
        left_s = now.since + live_s - wall()
        if len(now.keys) > 1 and left_s > 0:
            raise ControlError(
                f"{base}: tickets that the old keys signed may live for another {left_s:.0f} s; finish after that"
            )
        _put(base, msgspec.structs.replace(now, keys=now.keys[:1]))
        return len(now.keys) - 1


def rotate(directory: str | Path, name: str) -> None:
    """A new key pair for `name`; the old public key is let in as well, until `finish`."""
    base, wanted = files.existing(directory), files.checked(name)
    with files.locked(base):
        card = _card(base, wanted)
        path = base / "secret" / f"{wanted}.json"
        if not path.exists():
            raise ControlError(f"{base}: secret/{wanted}.json is not here; rotate {wanted} where its secret is kept")
        old = files.read(path, files.Secret, private=True).secret
        in_use = files.public_of(old, path)
        if card.also and in_use == card.public:
            raise ControlError(f"{base}: {wanted} is being rotated; restart it, then finish that rotation first")
        if in_use not in (card.public, *card.also):
            raise ControlError(f"{base}: public/{wanted}.json does not belong to its secret; restore both")
        public, secret = zmq.curve_keypair()
        files.put_signing(base, wanted, [old, secret.decode()])
        # Let in before it is used. Broken off between the two, the old secret is in use and still let in.
        files.replace(base / "public" / f"{wanted}.json", files.Public(wanted, public.decode(), (in_use,), card.role))
        files.replace(path, files.Secret(wanted, secret.decode()))


def finish(directory: str | Path, name: str) -> bool:
    """Let `name` in only under its new key; False when it was not being rotated."""
    base, wanted = files.existing(directory), files.checked(name)
    with files.locked(base):
        card = _card(base, wanted)
        if not card.also:
            return False
        path = base / "secret" / f"{wanted}.json"
        if path.exists():
            in_use = files.public_of(files.read(path, files.Secret, private=True).secret, path)
            if in_use != card.public:
                raise ControlError(f"{base}: secret/{wanted}.json is still the old one; rotate {wanted} again")
        files.replace(base / "public" / f"{wanted}.json", files.Public(wanted, card.public, role=card.role))
        files.put_signing(base, wanted, (), also=(card.public,))
        return True


def remove(directory: str | Path, name: str) -> None:
    """Forget an identity: processes that load the directory again no longer hear it. Also of one that joined."""
    base, wanted = files.existing(directory), files.checked(name)
    if not (base / "public" / f"{wanted}.json").exists() and admission_files.remove_joined(base, wanted):
        return
    with files.locked(base):
        _card(base, wanted)
        files.put_removed(base, wanted)  # before it is gone: broken off between the two, it is removed again
        (base / "public" / f"{wanted}.json").unlink()
        (base / "public" / f"{wanted}.signing").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # kept elsewhere
            (base / "secret" / f"{wanted}.json").unlink()


def _card(base: Path, name: WorkerId) -> files.Public:
    path = base / "public" / f"{name}.json"
    if not path.exists():
        raise ControlError(f"{base}: there is no {name}; see: kvbaton keys show {base}")
    return files.read(path, files.Public, private=False)


def _put(base: Path, tickets: files.Tickets) -> None:
    files.replace(base / "tickets.json", tickets)
