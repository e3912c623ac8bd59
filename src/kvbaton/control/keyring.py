"""Who is who in a cluster: one CurveZMQ key pair per name, and the keys that sign tickets. Files: `key_files`.

Laws: a public file exists only after its secret is complete, and nothing is overwritten here (`key_rotation` replaces
and removes). A process uses the secret that it was started with; whom it lets in, and which keys sign and verify
tickets, it may load again. No secret appears in a `repr`, a log line or an error. Members that joined by a certificate
(`joining`) are beside those that the directory names, and never take a name or a key of theirs.

Names of an engine's ranks: `p0.dp1` is data-parallel rank 1 of engine p0, `p0.1` is tensor-parallel rank 1 of it. Laws:
each data-parallel rank is a member of the cluster, with a key of its own. A tensor-parallel rank has a key of its own
only towards a store. A name is built and taken apart here and nowhere else.

A key directory that is looked at again and again: what changed in it is in force without a restart.

Laws: looking is cheap (a few `stat`s) and rare; files are read only when one of them changed. A directory that cannot
be read, or is wrong, changes nothing: the keys before stay in force, and the reason is said once. Whoever serves peers
does not look itself: a file system that is away would hold it up for as long.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvbaton.control import key_files as files
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining import admission_files
from kvbaton.control.joining.join_token import Membership
from kvbaton.control.key_files import (
    FILE_BYTES_MAX,
    IDENTITIES_MAX,
    REMOVED_MAX,
    TICKET_KEY_BYTES,
    TICKET_KEYS_MAX,
    is_public_key,
)
from kvbaton.control.signing import Signer
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Act, Role, may, role_by_name
from kvbaton.protocol.machines.context import mark_of

__all__ = [
    "FILE_BYTES_MAX", "IDENTITIES_MAX", "TICKET_KEYS_MAX", "TICKET_KEY_BYTES", "Keyring", "add", "are_related",
    "data_parallel_name", "engine_and_rank", "engine_of", "is_public_key", "load", "mint", "owners", "reload",
    "with_joined", "with_removed",
]  # fmt: skip

_RANK = re.compile(r"(?P<owner>.+)\.(?:dp)?[0-9]{1,5}")
_DATA_PARALLEL = re.compile(r"(?P<engine>.+)\.dp(?P<rank>0|[1-9][0-9]{0,4})")

_OWN_TAIL = re.compile(r"-[a-z]{6}\Z")
"""What a member whose name is `auto` puts behind it, so that no other has the name."""

ALWAYS = ("router", "operator")
"""Names that every cluster has keys for."""
READS_JOINED = frozenset({Role.ROUTER, Role.REGISTRY, Role.STORE})
"""Who learns of joined members from the directory's files; engines are told by registries."""


class Keyring(msgspec.Struct, frozen=True):
    """One identity's view of its cluster. `peers` holds every identity's public key, its own included."""

    name: WorkerId
    public: str
    secret: str
    peers: Mapping[WorkerId, str]
    ticket_keys: tuple[bytes, ...]  # the first signs, all verify
    also: Mapping[WorkerId, tuple[str, ...]] = {}  # further keys that are let in, while those identities are rotated
    directory: str = ""  # where it was loaded from, and is loaded again; "": nowhere
    roles: Mapping[WorkerId, Role] = {}  # of those whose file says one; others by their names
    admission: bytes = b""  # checks certificates of members that join; b"": none are let in
    joined: Mapping[WorkerId, Membership] = {}  # who of `peers` is there by a certificate
    certificate: bytes = b""  # its own, of an identity that joined
    signing: Mapping[str, bytes] = {}  # by CURVE key, the key by which its holder signs, of who has one
    removed: frozenset[str] = frozenset()  # keys of members that joined and were removed
    removed_names: frozenset[WorkerId] = frozenset()  # who was removed, minted or joined, as far as is known here

    def origin_of(self, name: WorkerId) -> str:
        """A member as an origin of KV: a name that was removed may be given again, to another key."""
        return f"{name} {self.peers.get(name, '')}"

    def is_gone(self, origin: str) -> bool:
        """Whether KV of that member is not to be used any more: it was removed, or is not one that grants. One that
        only left is not gone, nor one whose key was rotated; where its name had been removed once, it counts so."""
        if origin.startswith("#"):  # named by a value of the store; a name that was removed once stays bad there
            return mark_of(origin) in map(mark_of, self.removed_names)
        told, _, key = origin.partition(" ")
        name = WorkerId(told)
        if name in self.removed_names and key not in (self.peers.get(name), *self.also.get(name, ())):
            return True
        return name in self.peers and not may(self.role_of(name), Act.GRANT)

    @property
    def signer(self) -> Signer:
        """What this identity signs with."""
        return _signer(self.secret)

    def signing_keys(self, name: WorkerId) -> tuple[bytes, ...]:
        """By which keys that member signs now, minted or joined: two while it is rotated, none of one that is no member
        or whose key directory has none."""
        keys = (self.peers.get(name, ""), *self.also.get(name, ()))
        return tuple(self.signing[key] for key in keys if key in self.signing)

    def role_of(self, name: WorkerId) -> Role:
        """What that identity's key is for. The key of a rank (`NAME.dp0`, `NAME.1`) is for what its engine's is, unless
        that one joined: its certificate speaks for itself alone."""
        minted = (each for each in owners(name) if each not in self.joined)
        known = (self.roles.get(each) for each in (name, *minted))
        return next(filter(None, known), None) or role_by_name(name)

    def __repr__(self) -> str:
        return f"Keyring({self.name!r}, peers={len(self.peers)}, ticket_keys={len(self.ticket_keys)})"

    __str__ = __repr__

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("name", self.name), ("peers", len(self.peers)), ("ticket_keys", len(self.ticket_keys))]


def data_parallel_name(engine: str, rank: int) -> WorkerId:
    return WorkerId(f"{engine}.dp{rank}")


def engine_and_rank(name: str) -> tuple[str, int] | None:
    """The parts of a data-parallel rank's name; None for any other name."""
    found = _DATA_PARALLEL.fullmatch(name)
    return None if found is None else (found["engine"], int(found["rank"]))


def engine_of(name: str) -> str | None:
    """The engine of a data-parallel rank, also one that named itself (`pod.dp1-xkcdtr`); None for other names."""
    found = _DATA_PARALLEL.fullmatch(_OWN_TAIL.sub("", name))
    return None if found is None else found["engine"]


def are_related(one: str, other: str) -> bool:
    """Whether one may be a rank of the other, or both are data-parallel ranks of one engine."""
    engines = engine_of(one), engine_of(other)
    above = ({*owners(one), engines[0]}, {*owners(other), engines[1]})
    return other in above[0] or one in above[1] or (engines[0] is not None and engines[0] == engines[1])


def owners(name: str) -> Iterator[WorkerId]:
    """Whose rank this may be, the nearest first: `p0.dp1` and `p0` for `p0.dp1.2`."""
    while (found := _RANK.fullmatch(name)) is not None:
        name = found["owner"]
        yield WorkerId(name)


def mint(directory: str | Path, names: Iterable[str]) -> None:
    """Create the key directory of a new cluster, all of it or nothing; an existing one is refused.

    Of `names` each is `NAME` or `NAME:ROLE`.
    """
    target = Path(directory)
    wanted = [files.named(name) for name in names]
    if len(dict(wanted)) != len(wanted):
        raise ControlError(
            f"names: {', '.join(sorted(name for name, _ in wanted))} repeats one; give each identity its own name"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        for each in (draft, draft / "public", draft / "secret"):
            each.mkdir(mode=0o700)
        files.write(draft / "tickets.json", files.Tickets((secrets.token_hex(TICKET_KEY_BYTES),)))
        for name, role in wanted:
            _mint_identity(draft, name, role)
        os.rename(draft, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ControlError(f"{target} exists; add identities to it, or remove it to start a new cluster") from None
        raise ControlError(f"{target}: {error.strerror}; choose a directory that can be written") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def add(directory: str | Path, name: str) -> None:
    """Mint one further identity (`NAME` or `NAME:ROLE`) for an existing cluster; a name that exists is refused."""
    base, (wanted, role) = files.existing(directory), files.named(name)
    with files.locked(base):
        if (base / "public" / f"{wanted}.json").exists():
            raise ControlError(f"{base}: there is a {wanted} already; choose another name")
        if len(list((base / "public").glob("[!.]*.json"))) >= IDENTITIES_MAX:
            raise ControlError(f"{base}: {IDENTITIES_MAX} identities are the most; remove those that are gone")
        _mint_identity(base, wanted, role)


def load(directory: str | Path, name: str) -> Keyring:
    """The keyring of `name`; ControlError names the file or field at fault and the next step."""
    base, wanted = files.existing(directory), files.checked(name)
    cards = files.cards(base)
    path = base / "secret" / f"{wanted}.json"
    secret = files.read(path, files.Secret, private=True).secret
    tickets = files.tickets(base)
    public = files.public_of(secret, path)
    if not _lists(cards, wanted, public):
        raise ControlError(f"{base}: public/{wanted}.json does not belong to its secret; restore both")
    signing = files.signing(base, cards)
    if signing.get(public) != _signer(secret).public:
        signing |= _sign_up(base, wanted, secret)
    found = Keyring(wanted, public, secret, *_peers(cards, tickets), str(base), _roles(cards), files.admission(base))
    removed = frozenset(map(WorkerId, files.removed(base)))
    return _with_files(msgspec.structs.replace(found, signing=signing, removed_names=removed), base)


def reload(keyring: Keyring) -> Keyring:
    """What the directory says now of everybody and of tickets, under the secret that is in use. ControlError if bad."""
    base = files.existing(keyring.directory)
    cards = files.cards(base)
    if not _lists(cards, keyring.name, keyring.public):  # emptied, half copied, or finished before the restart
        raise ControlError(
            f"{base}: public/{keyring.name}.json does not hold the key in use; restore it, or restart {keyring.name}"
        )
    peers, ticket_keys, also = _peers(cards, files.tickets(base))
    fresh = msgspec.structs.replace(
        keyring, peers=peers, ticket_keys=ticket_keys, also=also, roles=_roles(cards), admission=files.admission(base),
        joined={}, removed_names=_removed(keyring, cards, base),
        signing={**files.signing(base, cards), keyring.public: keyring.signer.public},
    )  # fmt: skip
    return _with_files(fresh, base)


def with_joined(keyring: Keyring, members: Mapping[WorkerId, Membership]) -> Keyring:
    """The same, and these members, in the roles that their certificates say; whoever is minted keeps name and key."""
    minted = {key for name, key in keyring.peers.items() for key in (key, *keyring.also.get(name, ()))}
    found = {
        name: member
        for name, member in members.items()
        if name not in keyring.peers and member.public not in minted | keyring.removed
    }
    if not found:
        return keyring
    return msgspec.structs.replace(
        keyring,
        peers={**keyring.peers, **{name: member.public for name, member in found.items()}},
        roles={**keyring.roles, **{name: member.role for name, member in found.items()}},
        joined={**keyring.joined, **found},
        signing={**keyring.signing, **{member.public: member.signing for member in found.values() if member.signing}},
    )


def with_removed(keyring: Keyring, names: Iterable[WorkerId], keys: Iterable[str]) -> Keyring:
    """The same, and that these members were removed; a minted one whose key is in the directory is a member still."""
    return msgspec.structs.replace(
        keyring, removed_names=keyring.removed_names.union(names), removed=keyring.removed.union(keys)
    )


def _with_files(keyring: Keyring, base: Path) -> Keyring:
    joined = list(admission_files.joined_files(base))
    names = keyring.removed_names | {WorkerId(each.name) for each in joined if each.removed}
    keyring = msgspec.structs.replace(keyring, removed_names=names)  # engines too, where a registry's files are theirs
    if keyring.role_of(keyring.name) not in READS_JOINED:
        return keyring
    removed = frozenset(each.public for each in joined if each.removed)
    keyring = msgspec.structs.replace(keyring, removed=removed)
    return with_joined(keyring, admission_files.members(joined, keyring.admission, time.time()))


def _sign_up(base: Path, name: WorkerId, secret: str) -> dict[str, bytes]:
    """An identity of an earlier release, or copied without its file: others need to know by which key it signs. Where
    the directory cannot be written they do not, and `key_report` says so."""
    signer = _signer(secret)
    public = files.public_of(secret, base / "secret" / f"{name}.json")
    with contextlib.suppress(ControlError), files.locked(base):
        path = base / "public" / f"{name}.json"
        card = files.read(path, files.Public, private=False)
        files.put_signing(base, name, [secret], also=(card.public, *card.also))
    return {public: signer.public}


@functools.lru_cache(maxsize=64)
def _signer(secret: str) -> Signer:
    return Signer.of(secret)


def _removed(before: Keyring, cards: Sequence[files.Public], base: Path) -> frozenset[WorkerId]:
    """As the directory says, and whose file was taken away, or replaced by one with another key, while we looked on."""
    now = {card.name: {card.public, *card.also} for card in cards}
    minted = (name for name in before.peers if name not in before.joined)
    missed = {name for name in minted if not {before.peers[name], *before.also.get(name, ())} & now.get(name, set())}
    told = frozenset(map(WorkerId, files.removed(base))) | missed
    return told | before.removed_names if len(before.removed_names) <= REMOVED_MAX else told


def _lists(cards: Iterable[files.Public], name: str, public: str) -> bool:
    return any(card.name == name and public in (card.public, *card.also) for card in cards)


def _peers(
    cards: Iterable[files.Public], tickets: files.Tickets
) -> tuple[dict[WorkerId, str], tuple[bytes, ...], dict[WorkerId, tuple[str, ...]]]:
    peers = {WorkerId(card.name): card.public for card in cards}
    return peers, tickets.all, {WorkerId(card.name): card.also for card in cards if card.also}


def _roles(cards: Iterable[files.Public]) -> dict[WorkerId, Role]:
    return {WorkerId(card.name): card.role for card in cards if card.role is not None}


def _mint_identity(base: Path, name: WorkerId, role: Role | None) -> None:
    public, secret = zmq.curve_keypair()
    with contextlib.suppress(FileNotFoundError):  # of an earlier attempt that got no further than this
        (base / "secret" / f"{name}.json").unlink()
    files.write(base / "secret" / f"{name}.json", files.Secret(name, secret.decode()))
    files.put_signing(base, name, [secret.decode()])
    files.write(base / "public" / f"{name}.json", files.Public(name, public.decode(), role=role))


log = logging.getLogger(__name__)

LOOK_S = 2.0


class Following:
    """One process's view of its key directory. Used by one thread, which either looks itself or has it done."""

    def __init__(self, keyring: Keyring, now: float) -> None:
        self.keyring = keyring
        self.next_look = now
        self._seen: files.Stamp | None = None  # unknown at first: it may have changed since it was loaded
        self._said = ""
        self._found: deque[Keyring] = deque(maxlen=1)
        self._looking = False
        self._again = False  # somebody wants a look that begins after now

    def look_soon(self, now: float) -> None:
        """Something has changed; from any thread, and whoever follows has to be woken."""
        self._again = True
        self.next_look = now

    def have_a_look(self, now: float, wake: Callable[[], None]) -> None:
        """Look on a thread of its own, unless one still does; `wake` is called there when `take` has something."""
        self.next_look = now + LOOK_S
        if self._looking:
            return
        self._looking = True
        try:
            threading.Thread(target=self._look, args=(now, wake), name="kvbaton-keys", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._looking = False
            self._complain(str(error))

    def take(self) -> Keyring | None:
        """What was found since it was last asked for, if it is another keyring than before."""
        return self._found.pop() if self._found else None

    def _look(self, now: float, wake: Callable[[], None]) -> None:
        try:
            while True:
                self._again = False
                fresh = self.look(now)
                if fresh is not None:
                    self._found.append(fresh)
                    wake()
                if not self._again:
                    break
        finally:
            self._looking = False

    def look(self, now: float) -> Keyring | None:
        """The keyring if it is another than before; asked when `next_look` has come."""
        self.next_look = now + LOOK_S
        try:
            seen = files.stamp(files.existing(self.keyring.directory))
            if seen == self._seen:
                return None
            fresh = reload(self.keyring)
        except (ControlError, OSError) as error:
            self._complain(str(error))
            return None
        self._seen, self._said = seen, ""
        before, self.keyring = self.keyring, fresh
        return None if before == fresh else fresh

    def _complain(self, why: str) -> None:
        if why != self._said:
            self._said = why
            log.error("[keys-unchanged] the keys of %s stay as they were: %s", self.keyring.name, why)
