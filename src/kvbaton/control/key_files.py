"""The files of a key directory: what they hold, how they are read, and how they are written.

    DIR/public/NAME.json   {"name": NAME, "public": z85}       copied to every host; while NAME's key is rotated also
                           "also": [z85], the key before, which is let in as well; "role" says what the key is for
                           (`protocol.legality`), and is told by the name where it is missing
    DIR/public/NAME.signing    {"name": NAME, "keys": {z85: hex}}  copied with it: by which key each of its keys signs
                           (`control.signing`). A file of its own, since earlier releases refuse fields that they do not
                           know; a process that has NAME's secret writes it where it is missing
    DIR/removed.json       {"names": [NAME, ...]}              copied with it: who was removed, also where the name was
                           given again; engines drop what they took from them
    DIR/secret/NAME.json   {"name": NAME, "secret": z85}       only where NAME runs; mode 0600
    DIR/tickets.json       {"keys": [hex, ...]}                everywhere; mode 0600; the first signs, all verify;
                           "next": hex only verifies, until everybody has it; "since" is when the first began to sign
    DIR/public-admission.json  {"admission": hex}              copied to every host: checks certificates of members that
                           joined with a token; these, and what only registries hold: `joining.admission_files`

Laws: a file is there with all of its content or not at all, and a reader never sees half of one. A secret that others
could have read is refused, not used. No secret appears in an error.

Checks that only its owner can read and change a key directory.

Law: who can write a public file lets himself in, and who can put another directory or file in a key's place does too;
so every folder from the one above on is looked at, and every file, whatever its name: copies and drafts hold secrets.
A secret is its user's alone; one that belongs to root may be read by the group that root chose, as Kubernetes mounts a
Secret for a process that is not root.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
from msgspec import Meta

from kvbaton.control.addressing import ControlError
from kvbaton.control.signing import SIGNING_KEY_BYTES, Signer
from kvbaton.protocol.ids import WorkerId, is_worker_id
from kvbaton.protocol.legality import Role, role_by_name

OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Opening(msgspec.Struct, frozen=True):
    """One path that is open to others, and the next step."""

    path: Path
    found: str  # begins with the path
    fix: str


def is_open(told: os.stat_result) -> bool:
    """Whether others than those who are meant may have a secret of this owner and mode."""
    from_root = told.st_uid == 0 and os.geteuid() != 0
    return bool(told.st_mode & (OTHERS & ~stat.S_IRGRP if from_root else OTHERS))


def openings(base: Path) -> list[Opening]:
    """All that can be seen of them; what cannot be looked at is left out."""
    with contextlib.suppress(OSError):
        if os.statvfs(base).f_flag & os.ST_RDONLY:  # nobody writes there, whatever the modes say
            return [*_read_by_others(base)]
    return [*_folders(base), *_files(base), *_read_by_others(base)]


def _folders(base: Path) -> Iterator[Opening]:
    above = base.absolute().parent
    with contextlib.suppress(OSError):
        told = above.stat()
        if (who := _writers(told)) and not told.st_mode & stat.S_ISVTX:
            said = f"{above} can be written by {who}: they could replace the directory {base.name}"
            yield Opening(above, said, f"chmod go-w {above}")
    for path, why in (
        (base, "they could put other files in place of these"),
        (base / "public", "writing a public file grants access"),
        (base / "secret", "they could put other files in place of these"),
        (base / "tokens", "who writes a token file can join"),
        (base / "joined", "they could remove and restore members"),
    ):
        with contextlib.suppress(OSError):
            if who := _writers(path.stat()):
                yield Opening(path, f"{path} can be written by {who}: {why}", f"chmod 700 {path}")


def _files(base: Path) -> Iterator[Opening]:
    """Files of other users, or that others may write. The directory's own user, and root, may have any."""
    with contextlib.suppress(OSError):
        owners = {0, os.stat(base).st_uid}
        for path in (base / "public", base / "secret", *_plain_files(base)):
            told = path.stat()
            if told.st_uid not in owners:
                said = f"{path} belongs to user {told.st_uid}, who can change it"
                yield Opening(path, said, f"chown it to user {min(owners - {0}, default=0)}")
            elif stat.S_ISREG(told.st_mode) and _is_for_all(path, base) and (who := _writers(told)):
                said = f"{path} can be written by {who}: they could get access by this name"
                yield Opening(path, said, f"chmod go-w {path}")


def _read_by_others(base: Path) -> Iterator[Opening]:
    for path in _plain_files(base):
        with contextlib.suppress(OSError):
            told = path.stat()
            if not _is_for_all(path, base) and is_open(told):
                said = f"{path} has mode {stat.S_IMODE(told.st_mode):04o}: others could read it"
                yield Opening(path, said, f"chmod 600 {path}")


def _is_for_all(path: Path, base: Path) -> bool:
    """Whether others may read it."""
    return path.parent == base / "public" or path == base / "public-admission.json"


def _plain_files(base: Path) -> list[Path]:
    """Also those whose names begin with a dot, as drafts do; what links lead to, not where mounts keep it."""
    found: list[Path] = []
    for folder in (base, base / "public", base / "secret", base / "tokens", base / "joined"):
        with contextlib.suppress(OSError):
            found += sorted(path for path in folder.iterdir() if not path.name.startswith("..") and path.is_file())
    return found


def _writers(told: os.stat_result) -> str:
    """Who else may write; "" if nobody. A group that has its user alone in it is nobody else."""
    if told.st_mode & stat.S_IWOTH:
        return "everybody"
    return "its group" if told.st_mode & stat.S_IWGRP and not _is_own_group(told) else ""


def _is_own_group(told: os.stat_result) -> bool:
    try:
        user, group = pwd.getpwuid(told.st_uid), grp.getgrgid(told.st_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


TICKET_KEY_BYTES = 32
TICKET_KEYS_MAX = 8
IDENTITIES_MAX = 4096
FILE_BYTES_MAX = 16 << 10
REMOVED_MAX = 200
"""Names of removed identities that are remembered: as many of the longest as a file may hold."""

_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

Key = Annotated[str, Meta(min_length=40, max_length=40)]
TicketKey = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * TICKET_KEY_BYTES}}}$")]

SigningKey = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * SIGNING_KEY_BYTES}}}$")]


class Public(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    public: Key
    also: Annotated[tuple[Key, ...], Meta(max_length=1)] = ()
    role: Role | None = None

    @property
    def plays(self) -> Role:
        return self.role or role_by_name(self.name)


class Signing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signing keys of one identity, by its CURVE keys: two while it is rotated."""

    name: str
    keys: Annotated[dict[Key, SigningKey], Meta(max_length=2)]


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    secret: Key


class Tickets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    keys: Annotated[tuple[TicketKey, ...], Meta(min_length=1, max_length=TICKET_KEYS_MAX)]
    next: TicketKey = ""
    since: float = 0.0

    @property
    def all(self) -> tuple[bytes, ...]:
        """The one that signs, then those that only verify."""
        return tuple(bytes.fromhex(key) for key in (*self.keys, *filter(None, (self.next,))))


class PublicAdmission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    admission: TicketKey  # Ed25519, by which membership certificates are checked


class Removed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: Annotated[tuple[str, ...], Meta(max_length=REMOVED_MAX)]  # the last of them


T = TypeVar("T", bound=msgspec.Struct)
Stamp = tuple[tuple[str, int, int, int], ...]


def is_public_key(text: str) -> bool:
    """40 characters of Z85, the form in which public keys travel."""
    return _KEY.fullmatch(text) is not None


def cards(base: Path) -> list[Public]:
    """Every identity's public file; ControlError names the one that is wrong."""
    found: list[Public] = []
    known: set[str] = set()
    for path in sorted((base / "public").glob("[!.]*.json")):
        card = read(path, Public, private=False)
        if card.name != path.stem or not is_worker_id(card.name):
            raise ControlError(f"{path}: name: got {card.name[:80]!r}, expected {path.stem!r}; restore the file")
        for field, key in (("public", card.public), *(("also", key) for key in card.also)):
            if not is_public_key(key):
                raise ControlError(f"{path}: {field}: not a Z85 key; restore the file")
            if key in known:
                raise ControlError(f"{path}: {field}: another identity has this key; mint one for each")
            known.add(key)
        if len(found) >= IDENTITIES_MAX:
            raise ControlError(f"{base}: more than {IDENTITIES_MAX} identities; remove those that are gone")
        found.append(card)
    return found


def signing(base: Path, cards: Iterable[Public]) -> dict[str, bytes]:
    """The signing keys of these identities, by their CURVE keys; there is none where a file is missing."""
    found: dict[str, bytes] = {}
    for card in cards:
        known = _signing(base, card.name)
        keys = (card.public, *card.also)
        found |= {key: bytes.fromhex(known[key]) for key in keys if key in known}
    return found


def put_signing(base: Path, name: str, secrets_of: Iterable[str], also: Iterable[str] = ()) -> None:
    """Write down by which keys the holder of these secrets signs; of the CURVE keys `also`, what was known stays."""
    known = {key: told for key, told in _signing(base, name).items() if key in set(also)}
    path = base / "public" / f"{name}.signing"
    own = {public_of(secret, path): Signer.of(secret).public.hex() for secret in secrets_of}
    replace(path, Signing(name, known | own))


def _signing(base: Path, name: str) -> dict[str, str]:
    path = base / "public" / f"{name}.signing"
    if not path.exists():
        return {}
    found = read(path, Signing, private=False)
    if found.name != name:
        raise ControlError(f"{path}: name: got {found.name[:80]!r}, expected {name!r}; restore the file")
    return found.keys


def tickets(base: Path) -> Tickets:
    return read(base / "tickets.json", Tickets, private=True)


def admission(base: Path) -> bytes:
    """The key that checks certificates of members that joined; b"" where nobody can."""
    path = base / "public-admission.json"
    return bytes.fromhex(read(path, PublicAdmission, private=False).admission) if path.exists() else b""


def removed(base: Path) -> tuple[str, ...]:
    """Identities that were removed from this directory, the latest last."""
    path = base / "removed.json"
    return read(path, Removed, private=False).names if path.exists() else ()


def put_removed(base: Path, name: str) -> None:
    """Write down that an identity was removed. Under the directory's lock."""
    names = (*(each for each in removed(base) if each != name), name)
    replace(base / "removed.json", Removed(names[-REMOVED_MAX:]))


def stamp(base: Path) -> Stamp:
    """Differs whenever a file that makes up a keyring was changed, added or removed."""
    found = [*_stamps(base / "public", "public")]
    with contextlib.suppress(FileNotFoundError):
        found += _stamps(base / "joined", "joined")
    with contextlib.suppress(FileNotFoundError):
        found.append(_stamp("removed", os.stat(base / "removed.json")))
    with contextlib.suppress(FileNotFoundError):
        found.append(_stamp("admission", os.stat(base / "public-admission.json")))
    return (*sorted(found), _stamp("tickets", os.stat(base / "tickets.json")))


def _stamps(folder: Path, kind: str) -> Iterator[tuple[str, int, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".json", ".signing")) and not entry.name.startswith("."):
                yield _stamp(f"{kind}/{entry.name}", entry.stat())


def _stamp(name: str, told: os.stat_result) -> tuple[str, int, int, int]:
    return name, told.st_ino, told.st_mtime_ns, told.st_size


def public_of(secret: str, path: Path) -> str:
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError):
        raise ControlError(f"{path}: secret: not a Z85 key; restore the file") from None


def write(path: Path, content: msgspec.Struct) -> None:
    """Create `path` with all of its content at once; it must not exist."""
    with _draft(path, content) as draft:
        os.link(draft, path)
    _settle(path.parent)


def replace(path: Path, content: msgspec.Struct) -> None:
    """Put all of the new content in place of the old, at once."""
    with _draft(path, content) as draft:
        os.rename(draft, path)
    _settle(path.parent)


def read(path: Path, kind: type[T], *, private: bool) -> T:
    try:
        with open(path, "rb") as file:
            told = os.fstat(file.fileno())
            if private and is_open(told):
                mode = stat.S_IMODE(told.st_mode)
                raise ControlError(f"{path} has mode {mode:04o}: others could read it; chmod 600 it, or mint anew")
            text = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ControlError(f"{path} is missing; add that identity, or copy the file from where it was minted") from None
    except OSError as error:
        raise ControlError(f"{path}: {error.strerror}; make it readable for this user") from None
    if len(text) > FILE_BYTES_MAX:
        raise ControlError(f"{path}: more than {FILE_BYTES_MAX} bytes; restore the file")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"{path}: {error}; restore the file") from None


def existing(directory: str | Path) -> Path:
    base = Path(directory)
    if not (base / "public").is_dir():
        raise ControlError(f"{base}: no key directory; mint one with kvbaton keys new DIR NAME…, or check the path")
    return base


def checked(name: str) -> WorkerId:
    if not is_worker_id(name):
        raise ControlError(f"name: got {name[:80]!r}, expected letters, digits, '.', '_' and '-', at most 64")
    return WorkerId(name)


def named(text: str) -> tuple[WorkerId, Role | None]:
    """`NAME` or `NAME:ROLE`, as an operator gives whom to mint."""
    name, colon, role = text.partition(":")
    if colon and role not in set(Role):
        raise ControlError(f"role of {name[:80]}: got {role[:80]!r}, expected one of {', '.join(Role)}")
    return checked(name), Role(role) if colon else None


@contextlib.contextmanager
def locked(base: Path) -> Iterator[None]:
    """One writer at a time; the lock goes with the process."""
    try:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ControlError(f"{base}: {error.strerror}; make the directory writable") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise ControlError(f"{base}: {error.strerror}; make the directory writable") from None
    finally:
        os.close(fd)


def _settle(folder: Path) -> None:
    """What was put there under its name outlives a loss of power from now on."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _draft(path: Path, content: msgspec.Struct) -> Iterator[Path]:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
