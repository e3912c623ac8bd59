"""Who is who in a cluster: one CurveZMQ key pair per name, and the keys that sign tickets.

    DIR/public/NAME.json   {"name": NAME, "public": z85}       copied to every host
    DIR/secret/NAME.json   {"name": NAME, "secret": z85}       only where NAME runs; mode 0600
    DIR/tickets.json       {"keys": [hex, ...]}                everywhere; mode 0600; the first signs, all verify

Laws: a public file exists only after its secret is complete, and nothing is ever overwritten. A secret that others
could have read is refused, not used. No secret appears in a `repr`, a log line or an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import zmq
from msgspec import Meta

from kvbaton.control.base import ControlError
from kvbaton.protocol.ids import WorkerId, is_worker_id

TICKET_KEY_BYTES = 32
TICKET_KEYS_MAX = 8
IDENTITIES_MAX = 4096
FILE_BYTES_MAX = 16 << 10

_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Key = Annotated[str, Meta(min_length=40, max_length=40)]
TicketKey = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * TICKET_KEY_BYTES}}}$")]


class _Public(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    public: Key


class _Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    secret: Key


class _Tickets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[TicketKey, ...], Meta(min_length=1, max_length=TICKET_KEYS_MAX)]


T = TypeVar("T", _Public, _Secret, _Tickets)


class Keyring(msgspec.Struct, frozen=True):
    """One identity's view of its cluster. `peers` holds every identity's public key, its own included."""

    name: WorkerId
    public: str
    secret: str
    peers: Mapping[WorkerId, str]
    ticket_keys: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"Keyring({self.name!r}, peers={len(self.peers)}, ticket_keys={len(self.ticket_keys)})"

    __str__ = __repr__

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("name", self.name), ("peers", len(self.peers)), ("ticket_keys", len(self.ticket_keys))]


def is_public_key(text: str) -> bool:
    """40 characters of Z85, the form in which public keys travel."""
    return _KEY.fullmatch(text) is not None


def mint(directory: str | Path, names: Iterable[str]) -> None:
    """Create the key directory of a new cluster, all of it or nothing; an existing one is refused."""
    target = Path(directory)
    wanted = [_checked(name) for name in names]
    if len(set(wanted)) != len(wanted):
        raise ControlError(f"names: {', '.join(sorted(wanted))} repeats one; give each identity its own name")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        for each in (draft, draft / "public", draft / "secret"):
            each.mkdir(mode=0o700)
        _write(draft / "tickets.json", _Tickets((secrets.token_hex(TICKET_KEY_BYTES),)))
        for name in wanted:
            _mint_identity(draft, name)
        os.rename(draft, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ControlError(f"{target} exists; add identities to it, or remove it to start a new cluster") from None
        raise ControlError(f"{target}: {error.strerror}; choose a directory that can be written") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def add(directory: str | Path, name: str) -> None:
    """Mint one further identity for an existing cluster; a name that exists is refused."""
    base, wanted = _existing(directory), _checked(name)
    with _locked(base):
        if (base / "public" / f"{wanted}.json").exists():
            raise ControlError(f"{base}: there is a {wanted} already; choose another name")
        if len(list((base / "public").iterdir())) >= IDENTITIES_MAX:
            raise ControlError(f"{base}: {IDENTITIES_MAX} identities are the most; remove those that are gone")
        try:
            _mint_identity(base, wanted)
        except OSError as error:
            raise ControlError(f"{base}: {error.strerror}; make the directory writable") from None


def load(directory: str | Path, name: str) -> Keyring:
    """The keyring of `name`; ControlError names the file or field at fault and the next step."""
    base, wanted = _existing(directory), _checked(name)
    peers = _peers(base)
    secret = _read(base / "secret" / f"{wanted}.json", _Secret, private=True).secret
    tickets = _read(base / "tickets.json", _Tickets, private=True)
    public = _public_of(secret, base / "secret" / f"{wanted}.json")
    if peers.get(wanted) != public:
        raise ControlError(f"{base}: public/{wanted}.json does not belong to its secret; restore both")
    return Keyring(wanted, public, secret, peers, tuple(bytes.fromhex(key) for key in tickets.keys))


def _peers(base: Path) -> dict[WorkerId, str]:
    found: dict[WorkerId, str] = {}
    for path in sorted((base / "public").glob("[!.]*.json")):
        card = _read(path, _Public, private=False)
        if card.name != path.stem or not is_worker_id(card.name):
            raise ControlError(f"{path}: name: got {card.name[:80]!r}, expected {path.stem!r}; restore the file")
        if not is_public_key(card.public):
            raise ControlError(f"{path}: public: not a Z85 key; restore the file")
        if card.public in found.values():
            raise ControlError(f"{path}: public: another identity has this key; mint one for each")
        if len(found) >= IDENTITIES_MAX:
            raise ControlError(f"{base}: more than {IDENTITIES_MAX} identities; remove those that are gone")
        found[WorkerId(card.name)] = card.public
    return found


def _mint_identity(base: Path, name: WorkerId) -> None:
    public, secret = zmq.curve_keypair()
    with contextlib.suppress(FileNotFoundError):  # of an earlier attempt that got no further than this
        (base / "secret" / f"{name}.json").unlink()
    _write(base / "secret" / f"{name}.json", _Secret(name, secret.decode()))
    _write(base / "public" / f"{name}.json", _Public(name, public.decode()))


def _write(path: Path, content: _Public | _Secret | _Tickets) -> None:
    """Create `path` with all of its content at once; it must not exist."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path, kind: type[T], *, private: bool) -> T:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if private and mode & _OTHERS:
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"{path}: {error}; restore the file") from None


def _public_of(secret: str, path: Path) -> str:
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError):
        raise ControlError(f"{path}: secret: not a Z85 key; restore the file") from None


def _existing(directory: str | Path) -> Path:
    base = Path(directory)
    if not (base / "public").is_dir():
        raise ControlError(f"{base}: no key directory; mint one for the cluster, or check the path")
    return base


def _checked(name: str) -> WorkerId:
    if not is_worker_id(name):
        raise ControlError(f"name: got {name[:80]!r}, expected letters, digits, '.', '_' and '-', at most 64")
    return WorkerId(name)


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """One writer at a time; the lock goes with the process."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
